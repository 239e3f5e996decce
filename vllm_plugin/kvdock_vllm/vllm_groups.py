"""The KV-cache groups of a vLLM model. A group of an unsupported form is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvdock.types import GroupKind
from kvdock_vllm.engine.groups import GroupShape

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec


class UnsupportedModelError(ValueError):
    """The form of the model's KV cache is not supported. The message names the form."""


def offers_states() -> bool:
    """Whether this version of vLLM tells a connector which blocks hold a state."""
    from vllm.v1.core.sched.output import SchedulerOutput

    return "kv_connector_block_state" in SchedulerOutput.__dataclass_fields__


def group_specs(group: KVCacheGroupSpec) -> list[KVCacheSpec]:
    """The specs of a group's layers, or one spec if all layers have the same."""
    spec: Any = group.kv_cache_spec
    per_layer = getattr(spec, "kv_cache_specs", None)
    return list(per_layer.values()) if per_layer else [spec]


def group_shapes(kv_cache_config: KVCacheConfig, model: str) -> tuple[GroupShape, ...]:
    """The shapes of a model's groups. ``model`` is its name, for errors.

    Raises UnsupportedModelError if a prefix needs more of the cache than the blocks of its tokens.
    """
    groups = kv_cache_config.kv_cache_groups
    try:
        return tuple(
            _shape(group, index if len(groups) > 1 else None) for index, group in enumerate(groups)
        )
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"KVDock does not support the model {model}: {error}") from None


def _shape(group: KVCacheGroupSpec, group_idx: int | None) -> GroupShape:
    is_transferable = getattr(group, "enable_kv_transfer", True)
    if getattr(group, "host_resident", False) or not is_transferable:
        raise UnsupportedModelError("it has a group of KV caches that vLLM does not let out")
    if not group.layer_names:
        raise UnsupportedModelError(
            "a pipeline stage has no layer of one of its groups of KV caches; choose another "
            "pipeline_parallel_size"
        )
    found = {_kind_and_window(spec) for spec in group_specs(group)}
    if len(found) != 1:
        raise UnsupportedModelError(
            f"layers of different kinds or windows are in one group: {sorted(found)}"
        )
    ((kind, window_tokens),) = found
    return GroupShape(
        group_idx=group_idx,
        kind=kind,
        block_tokens=group.kv_cache_spec.block_size,
        layer_names=tuple(group.layer_names),
        window_tokens=window_tokens,
    )


def _kind_and_window(spec: KVCacheSpec) -> tuple[GroupKind, int]:
    """How much of the past a layer needs. Raises UnsupportedModelError."""
    from vllm.v1.kv_cache_interface import (
        ChunkedLocalAttentionSpec,
        FullAttentionSpec,
        MambaSpec,
        SlidingWindowSpec,
    )

    anything: Any = spec
    name = type(spec).__name__
    # These subclasses have rules of their own about which tokens a block holds.
    refused = ("RSWASpec", "HiddenStateCacheSpec")
    if name == "SinkFullAttentionSpec":
        # Since 0.32 vLLM may give the blocks of the sinks to requests.
        raise UnsupportedModelError(f"it keeps attention sinks in blocks of their own ({name})")
    if isinstance(spec, MambaSpec):
        if not offers_states():
            raise UnsupportedModelError(
                f"it has recurrent state ({name}), and this version of vLLM does not tell a "
                "connector where a state is; vLLM 0.32 and 0.33 do"
            )
        return GroupKind.RECURRENT_STATE, 0
    known = (FullAttentionSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec)
    if not isinstance(spec, known) or name in refused:
        raise UnsupportedModelError(f"it has a KV cache of kind {name}")
    if getattr(anything, "non_causal", False):
        # Then a token's keys depend on later tokens, to which its chunk's key does not commit.
        raise UnsupportedModelError("it attends non-causally")
    if getattr(anything, "bounded_replay", False):
        raise UnsupportedModelError(f"its {name} is not cached by vLLM, but computed anew")
    if isinstance(spec, SlidingWindowSpec):
        window = anything.sliding_window + getattr(anything, "extra_retained_tokens", 0)
        return GroupKind.SLIDING_WINDOW, window
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return GroupKind.CHUNKED_LOCAL_ATTENTION, spec.attention_chunk_size
    return GroupKind.FULL_ATTENTION, 0

"""Which KV-cache groups a model of vLLM has. One of a form that is not supported is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvdock.types import GroupKind
from kvdock_vllm.engine.groups import GroupShape

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec


class UnsupportedModelError(ValueError):
    """The model's KV cache has a form that is not supported; the message names it."""


def group_specs(group: KVCacheGroupSpec) -> list[KVCacheSpec]:
    """The specs of a group's layers; one stands for all where they are equal."""
    spec: Any = group.kv_cache_spec
    per_layer = getattr(spec, "kv_cache_specs", None)
    return list(per_layer.values()) if per_layer else [spec]


def group_shapes(kv_cache_config: KVCacheConfig, model: str) -> tuple[GroupShape, ...]:
    """The groups of a model, whose name is for errors.

    Raises UnsupportedModelError for a cache of which a prefix is more, or something else, than the
    blocks that its tokens fill.
    """
    groups = kv_cache_config.kv_cache_groups
    try:
        return tuple(
            _shape(group, index if len(groups) > 1 else None) for index, group in enumerate(groups)
        )
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"KVDock does not support the model {model}: {error}") from None


def _shape(group: KVCacheGroupSpec, group_idx: int | None) -> GroupShape:
    anything: Any = group
    if getattr(anything, "host_resident", False) or not getattr(
        anything, "enable_kv_transfer", True
    ):
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
    """What a layer needs of the past. Raises UnsupportedModelError."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

    anything: Any = spec
    name = type(spec).__name__
    # Subclasses with rules of their own about which blocks hold what.
    refused = ("RSWASpec", "SinkFullAttentionSpec", "HiddenStateCacheSpec")
    if not isinstance(spec, (FullAttentionSpec, SlidingWindowSpec)) or name in refused:
        raise UnsupportedModelError(f"it has a KV cache of kind {name}")
    if getattr(anything, "non_causal", False):
        # A token's keys then depend on tokens after it, which its chunk's key does not name.
        raise UnsupportedModelError("it attends non-causally")
    if getattr(anything, "bounded_replay", False):
        raise UnsupportedModelError(f"its {name} is not cached by vLLM, but computed anew")
    if isinstance(spec, SlidingWindowSpec):
        window = anything.sliding_window + getattr(anything, "extra_retained_tokens", 0)
        return GroupKind.SLIDING_WINDOW, window
    return GroupKind.FULL_ATTENTION, 0

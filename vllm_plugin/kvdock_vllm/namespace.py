"""The namespace: everything that must be equal for KV bytes to be interchangeable.

It is derived from what the engine runs, never typed by hand. In doubt a fact goes in. One too many
costs a cold start after some change. One too few leads to wrong answers, which nobody notices.
"""

from __future__ import annotations

import hashlib
import platform
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvdock.types import Group, Namespace
from kvdock_vllm import weights
from kvdock_vllm.drafts import has_kv_of_its_own
from kvdock_vllm.engine.groups import GroupShape
from kvdock_vllm.engine.layout import UnsupportedLayoutError
from kvdock_vllm.engine.parallel import ParallelStrategy
from kvdock_vllm.engine.specs import GroupPages
from kvdock_vllm.metadata import WorkerDescription

if TYPE_CHECKING:
    from vllm.config import VllmConfig


# What a model's configuration says of its origin, and not of the model.
_ORIGIN = ("_name_or_path", "transformers_version", "_commit_hash")

_MEDIA_SETTINGS = (
    "mm_processor_kwargs",
    "media_io_kwargs",
    "language_model_only",
    "video_pruning_rate",
    "video_pruning_method",
    "mm_device_do_normalize",
    "mm_encoder_attn_dtype",
)
"""The settings of vLLM's multimodal configuration that change what a model sees of an item."""


def derive_namespace(
    vllm_config: VllmConfig,
    model: Mapping[str, Any],
    strategy: ParallelStrategy,
    shapes: Sequence[GroupShape],
    workers: Mapping[int, WorkerDescription],
    chunk_tokens: int,
) -> Namespace:
    """The namespace of this engine's KV for chunks of ``chunk_tokens`` tokens.

    ``model`` are the model's facts (:func:`model_facts`) at the time when it was loaded: its files
    may be replaced while it runs. ``workers`` has a description of each worker of the engine, by
    worker_id. Raises UnsupportedLayoutError if workers that should hold the same shard describe it
    differently.
    """
    shards = _shards(strategy, workers)
    facts = {
        "model": model,
        "kv_dtype": kv_dtype(vllm_config),
        "pages": [[group.pages for group in shard] for shard in shards],
        "groups": [(shape.kind.name, shape.block_tokens, shape.window_tokens) for shape in shapes],
        "chunk_tokens": chunk_tokens,
        "kv_world_size": strategy.kv_world_size,
        "packing": _packing(vllm_config),
    }
    digest = hashlib.sha256(weights.canonical(facts)).hexdigest()
    config: Any = vllm_config.model_config
    # The model's name and path may change without its weights, so they are only a label.
    kind = re.sub(r"[^!-~]", "_", str(getattr(config.hf_config, "model_type", "")))[:64] or "model"
    source, *identity = model["weights"]
    commit = identity[1] if source == "repository" else ""
    return Namespace(
        name=f"{kind}@{digest[:32]}",
        chunk_tokens=chunk_tokens,
        kv_world_size=strategy.kv_world_size,
        groups=tuple(
            Group(
                kind=shape.kind,
                group_idx=shape.group_idx,
                window_tokens=shape.window_tokens if not shape.is_in_pieces else 0,
                attention_chunk_tokens=shape.window_tokens if shape.is_in_pieces else 0,
                shard_bytes=_shard_bytes(shape, [shard[index] for shard in shards], chunk_tokens),
            )
            for index, shape in enumerate(shapes)
        ),
        labels={
            "model": str(config.model)[-256:],
            "revision": commit,
            "kv_dtype": kv_dtype(vllm_config),
            "block_tokens": str(vllm_config.cache_config.block_size),
            "tensor_parallel": str(strategy.tensor_size),
            "pipeline_parallel": str(strategy.pipeline_size),
        },
    )


def _shards(
    strategy: ParallelStrategy, workers: Mapping[int, WorkerDescription]
) -> list[tuple[GroupPages, ...]]:
    """What each shard consists of, by kv_worker_id."""
    shards: list[tuple[GroupPages, ...]] = []
    for kv_worker_id in range(strategy.kv_world_size):
        first = kv_worker_id * strategy.readers_per_shard
        readers = [workers[first + reader] for reader in range(strategy.readers_per_shard)]
        if any(reader.groups != readers[0].groups for reader in readers):
            raise UnsupportedLayoutError(
                f"workers {first} to {first + len(readers) - 1} should hold the same KV cache and "
                f"lay it out differently"
            )
        shards.append(readers[0].groups)
    return shards


def _shard_bytes(
    shape: GroupShape, shards: Sequence[GroupPages], chunk_tokens: int
) -> tuple[int, ...]:
    """The bytes of each shard of a part, or one number if all are equal."""
    sizes = tuple(shard.block_bytes * shape.part_blocks(chunk_tokens) for shard in shards)
    return sizes[:1] if len(set(sizes)) == 1 else sizes


def model_facts(vllm_config: VllmConfig) -> dict[str, Any]:
    """The facts of the model on which a token's KV depends."""
    model: Any = vllm_config.model_config
    load: Any = vllm_config.load_config
    hf_config: Any = model.hf_config
    facts: dict[str, Any] = {
        "weights": weights.checkpoint(model, load),
        "loader": [load.load_format, getattr(load, "model_loader_extra_config", None)],
        # The user's overrides are in it.
        "config": {key: value for key, value in hf_config.to_dict().items() if key not in _ORIGIN},
        "dtype": str(model.dtype),
        "quantization": str(getattr(model, "quantization", None)),
        "quantization_config": repr(getattr(model, "quantization_config", None)),
    }
    if _depends_on_length(hf_config):
        facts["max_model_len"] = model.max_model_len
        # It may override whether vLLM's Llama 4 scales queries.
        facts["generation"] = getattr(model, "override_generation_config", None)
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        # The engine calibrates them while it runs, so they differ each time.
        facts["scales"] = weights.of_this_engine()
    if (lora := vllm_config.lora_config) is not None and (modules := lora.target_modules):
        # vLLM applies only these modules of an adapter.
        facts["adapted_modules"] = sorted(modules)
    multimodal: Any = getattr(model, "multimodal_config", None)
    if multimodal is not None:
        # An item's name commits to the settings of its request, but not to the engine's.
        facts["multimodal"] = {name: getattr(multimodal, name, None) for name in _MEDIA_SETTINGS}
    speculative: Any = getattr(vllm_config, "speculative_config", None)
    if speculative is not None and has_kv_of_its_own(speculative):
        # A draft model has layers, and so KV, of its own.
        draft: Any = getattr(speculative, "draft_model_config", None)
        facts["draft"] = [
            str(getattr(speculative, "method", None)),
            weights.checkpoint(draft, load) if draft is not None else None,
        ]
    return facts


def kv_dtype(vllm_config: VllmConfig) -> str:
    """The type of the KV cache's elements. "auto" stands for the model's."""
    wanted = str(vllm_config.cache_config.cache_dtype)
    resolved = str(vllm_config.model_config.dtype) if wanted == "auto" else wanted
    return resolved.removeprefix("torch.")


def _packing(vllm_config: VllmConfig) -> list[str]:
    """What decides how CPU kernels pack a page: vLLM's version and the machine's instructions."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return []
    import torch
    import vllm

    return [platform.machine(), torch.backends.cpu.get_cpu_capability(), vllm.__version__]


def _depends_on_length(hf_config: Any) -> bool:
    """Whether the longest allowed prompt changes a token's KV. Some models choose their rotary
    embedding by it, or how queries are scaled (Llama 4).
    """
    text = hf_config.get_text_config() if hasattr(hf_config, "get_text_config") else hf_config
    if str(getattr(text, "model_type", "")).startswith("llama4"):
        return True
    found = weights.canonical(
        [getattr(text, name, None) for name in ("rope_scaling", "rope_parameters")]
    )
    return any(kind in found for kind in (b"longrope", b'"su"', b"dynamic"))

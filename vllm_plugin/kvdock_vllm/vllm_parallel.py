"""The ranks of an engine, read from vLLM's configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvdock_vllm.engine.parallel import ParallelStrategy
from kvdock_vllm.vllm_groups import group_specs

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


def parallel_strategy(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, *, is_worker: bool
) -> ParallelStrategy:
    """The strategy of this process, which is a worker or the scheduler.

    Raises ValueError for a combination that is not supported.
    """
    parallel: Any = vllm_config.parallel_config
    strategy = ParallelStrategy(
        use_mla=_shared_by_tensor_ranks(kv_cache_config),
        tensor_size=parallel.tensor_parallel_size,
        pipeline_size=parallel.pipeline_parallel_size,
        prefill_context_size=getattr(parallel, "prefill_context_parallel_size", 1),
        decode_context_size=getattr(parallel, "decode_context_parallel_size", 1),
        data_size=getattr(parallel, "data_parallel_size", 1),
        # Only workers know their rank. Some launchers count it over all data-parallel engines,
        # which come first in vLLM's order of ranks.
        worker_id=parallel.rank % parallel.world_size if is_worker else 0,
    )
    if strategy.world_size != parallel.world_size:
        raise ValueError(
            f"vLLM runs {parallel.world_size} workers, which is not tensor_parallel_size="
            f"{strategy.tensor_size} times pipeline_parallel_size={strategy.pipeline_size}: "
            f"KVDock does not know which of them share a KV cache"
        )
    return strategy


def _shared_by_tensor_ranks(kv_cache_config: KVCacheConfig) -> bool:
    """Whether all layers are of MLA. One other layer makes every rank hold bytes of its own."""
    from vllm.v1 import kv_cache_interface

    mla: tuple[type, ...] = tuple(
        getattr(kv_cache_interface, name)
        for name in ("MLAAttentionSpec", "SlidingWindowMLASpec")
        # Some versions lack the second, which is no subclass of the first.
        if hasattr(kv_cache_interface, name)
    )
    specs = [spec for group in kv_cache_config.kv_cache_groups for spec in group_specs(group)]
    return bool(specs) and all(isinstance(spec, mla) for spec in specs)

"""The class that vLLM loads. It hands each hook to the half of its process.

If a hook raises, vLLM's engine fails. So no hook raises while the engine runs: the error is logged,
and the request goes on without cache. Unsupported settings, models and layouts are refused at the
start.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, cast

from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from kvdock_vllm import beside, offloading_alias, plugin
from kvdock_vllm.config import Config
from kvdock_vllm.engine.groups import loads_fail_whole
from kvdock_vllm.metadata import StepMetadata, WorkerDescription, WorkerReport
from kvdock_vllm.metrics import PromMetrics, Stats
from kvdock_vllm.scheduler import SchedulerHalf
from kvdock_vllm.vllm_groups import UnsupportedModelError, group_shapes
from kvdock_vllm.vllm_layout import layers_of_blocks
from kvdock_vllm.worker import WorkerHalf

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionBackend, AttentionMetadata
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

_log = logging.getLogger(__name__)

# Versions without this class cannot be told that a load failed as a whole.
_MAY_FAIL_WHOLE = hasattr(base, "KVConnectorTransferResults")

Hook = TypeVar("Hook", bound=Callable[..., Any])


def _never_raises(otherwise: Callable[[], object] = lambda: None) -> Callable[[Hook], Hook]:
    """Makes a hook log what it raises, and return ``otherwise()`` instead."""

    def decorate(hook: Hook) -> Hook:
        @functools.wraps(hook)
        def safe(*args: Any, **kwargs: Any) -> Any:
            try:
                return hook(*args, **kwargs)
            except Exception:
                _log.exception("KVDock failed in %s; the engine goes on", hook.__name__)
                return otherwise()

        return cast(Hook, safe)

    return decorate


class KVDockConnector(KVConnectorBase_V1):
    """A KV cache outside the engine, shared by all engines of a host."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        _tell_hit_source(self)
        config = Config.from_vllm(vllm_config)
        model = vllm_config.model_config.model
        if getattr(vllm_config.model_config, "is_diffusion", False):
            raise UnsupportedModelError(
                f"KVDock does not support the model {model}: it generates by diffusion, whose "
                "steps need not compute the KV of what they show"
            )
        shapes = group_shapes(kv_cache_config, model)
        if loads_fail_whole(shapes) and not _MAY_FAIL_WHOLE:
            raise UnsupportedModelError(
                f"KVDock cannot tell this version of vLLM of a load that failed in the model "
                f"{model}, whose KV cache has a sliding window or several groups: if these are "
                f"several, run it without --no-disable-hybrid-kv-cache-manager"
            )
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        if role is KVConnectorRole.SCHEDULER:
            offloading_alias.explain(vllm_config)
            others = beside.others()
            if others is not None:
                beside.warn(others)
            self._scheduler = SchedulerHalf(vllm_config, kv_cache_config, shapes, config, others)
        else:
            if beside.is_untold(vllm_config.kv_transfer_config):
                beside.warn_untold()
            self._worker = WorkerHalf(vllm_config, kv_cache_config, shapes, config)

    @property
    def requires_kv_delivery(self) -> bool:
        """False: what is not stored is only a miss later on."""
        return False

    @property
    def scheduler_half(self) -> SchedulerHalf:
        assert self._scheduler is not None, "a hook of the scheduler was called in a worker"
        return self._scheduler

    @property
    def worker_half(self) -> WorkerHalf:
        assert self._worker is not None, "a hook of the worker was called in the scheduler"
        return self._worker

    @property
    def _step(self) -> StepMetadata | None:
        metadata = self._connector_metadata
        return metadata if isinstance(metadata, StepMetadata) else None

    # -- worker ---------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.worker_half.register_kv_caches(kv_caches)

    @property
    def prefer_cross_layer_blocks(self) -> bool:
        """Asks vLLM's V1 runner, up to 0.26, for blocks of all layers: one piece copies fastest."""
        return _on_cuda()

    def register_cross_layers_kv_cache(
        self, kv_cache: torch.Tensor, attn_backend: type[AttentionBackend]
    ) -> None:
        """Called instead of :meth:`register_kv_caches` where vLLM lays blocks out as preferred."""
        self.worker_half.register_kv_caches(
            layers_of_blocks(kv_cache, attn_backend, self._kv_cache_config)
        )

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """Asks vLLM from 0.32 on for the same. vLLM takes it as a wish: ``VLLM_KV_CACHE_LAYOUT``
        comes first, and a layout that the attention kernels do not support is not used.

        Beside other connectors KVDock wishes nothing: two wishes that differ stop vLLM's start, and
        a connector that wishes nothing may count on vLLM's default.
        """
        if not _on_cuda() or beside.others() is not None:
            return None
        try:
            from vllm.v1.kv_cache_layout import KVCacheLayout
        except ImportError:
            return None  # earlier versions have other names, none for blocks with all layers
        from vllm.platforms import current_platform

        # Within a page vLLM would choose this order too: heads first for Blackwell.
        heads_first = bool(current_platform.is_device_capability_family(100))
        return (KVCacheLayout.BLHNC if heads_first else KVCacheLayout.BLNHC).name

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return self.worker_half.description

    @_never_raises()
    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        if isinstance(kv_connector_metadata, StepMetadata):
            self.worker_half.handle_preemptions(kv_connector_metadata)

    @_never_raises()
    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        if isinstance(connector_metadata, StepMetadata):
            self.worker_half.begin_step(connector_metadata)

    @_never_raises()
    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        if (step := self._step) is not None:
            self.worker_half.on_forward(step)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: loads end before vLLM schedules their request."""

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: AttentionMetadata,
        **kwargs: Any,
    ) -> None:
        """Nothing to do yet: a chunk is stored when all its layers are computed."""

    @_never_raises()
    def wait_for_save(self) -> None:
        self.worker_half.start_stores()

    @_never_raises(lambda: (None, None))
    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return None, self.worker_half.take_loaded(self._step)

    @_never_raises(lambda: base.KVConnectorTransferResults())
    def get_transfer_results(self, finished_req_ids: set[str]) -> base.KVConnectorTransferResults:
        """Called instead of :meth:`get_finished` by versions that may have several groups."""
        loaded = self.worker_half.take_loaded(self._step)
        failed = self.worker_half.take_failed_loads()
        return base.KVConnectorTransferResults(finished_recving=loaded, failed_recving=failed)

    @_never_raises(lambda: set[int]())
    def get_block_ids_with_load_errors(self) -> set[int]:
        return self.worker_half.take_failed_blocks()

    @_never_raises()
    def build_connector_worker_meta(self) -> WorkerReport | None:
        return self.worker_half.take_report()

    # -- scheduler ------------------------------------------------------------------------------

    def set_xfer_handshake_metadata(
        self, metadata: Mapping[Any, KVConnectorHandshakeMetadata]
    ) -> None:
        self.scheduler_half.describe_workers(
            description
            for description in metadata.values()
            if isinstance(description, WorkerDescription)
        )

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: Mapping[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        self.set_xfer_handshake_metadata(metadata)

    @_never_raises()
    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        self.scheduler_half.bind_block_pool(gpu_block_pool)

    @_never_raises()
    def on_new_request(self, request: Request) -> None:
        self.scheduler_half.on_new_request(request)

    @_never_raises(lambda: (0, False))
    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self.scheduler_half.get_num_new_matched_tokens(request, num_computed_tokens)

    @_never_raises()
    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        self.scheduler_half.update_state_after_alloc(request, blocks, num_external_tokens)

    @_never_raises(StepMetadata)
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return self.scheduler_half.build_connector_meta(scheduler_output)

    @_never_raises(lambda: False)
    def has_pending_push_work(self) -> bool:
        """Keeps an idle engine stepping until its workers have heard of a new session, and until no
        store is under way: an engine that sleeps gives its cache's memory back.
        """
        return self.scheduler_half.has_work_for_workers

    @_never_raises()
    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self.scheduler_half.update_connector_output(connector_output)

    @_never_raises(lambda: (False, None))
    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, self.scheduler_half.request_finished(request, (block_ids,))

    @_never_raises(lambda: (False, None))
    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Called instead of :meth:`request_finished` if the connector is a ``SupportsHMA``."""
        return False, self.scheduler_half.request_finished(request, block_ids)

    @_never_raises(lambda: list[Any]())
    def take_events(self) -> Iterable[KVCacheEvent]:
        return self.scheduler_half.take_events()

    @_never_raises(lambda: False)
    def reset_cache(self) -> bool | None:
        return self.scheduler_half.reset_cache()

    # -- both -----------------------------------------------------------------------------------

    @_never_raises()
    def get_kv_connector_stats(self) -> Stats | None:
        half = self._scheduler or self._worker
        return half.take_stats() if half is not None else None

    @_never_raises()
    def shutdown(self) -> None:
        for half in (self._scheduler, self._worker):
            if half is not None:
                half.shutdown()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Stats | None:
        return Stats(data=dict(data or {}))

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> PromMetrics:
        return PromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


# Where vLLM loads this module by its path, it may not have loaded the plugin. Its MultiConnector
# finds a connector's counters by the connector's name.
plugin.register()

# vLLM gives a hybrid model several groups only if its connector supports them (HMA).
if _MAY_FAIL_WHOLE:
    SupportsHMA.register(KVDockConnector)


def _on_cuda() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cuda())


def _tell_hit_source(connector: Any) -> None:
    """Labels our hits in vLLM's metrics as hits in host memory, in versions that have labels."""
    try:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource
    except ImportError:
        return
    connector._cache_hit_source = CacheHitSource.HOST

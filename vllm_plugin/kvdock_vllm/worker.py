"""The half of the connector in a worker. It moves bytes between the engine's blocks and the pool.

What may take time runs on background threads. Loads (load_jobs.py) and stores (store_jobs.py) have
their own threads, so a load never waits behind stores. The engine's thread only hands over work and
collects what is finished.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from kvdock.types import TransferMode
from kvdock_vllm.config import Config
from kvdock_vllm.engine.groups import GroupShape
from kvdock_vllm.engine.jobs import Outcomes
from kvdock_vllm.engine.layout import GroupLayout
from kvdock_vllm.engine.load_jobs import LoadJobs
from kvdock_vllm.engine.parallel import ParallelStrategy
from kvdock_vllm.engine.specs import GroupPages, StoreOutcome
from kvdock_vllm.engine.store_jobs import StoreJobs
from kvdock_vllm.engine.transfers.base import CountWorkers, Transfers
from kvdock_vllm.engine.transfers.shared import HostMover, SharedTransfers
from kvdock_vllm.engine.worker_link import WorkerLink
from kvdock_vllm.kernels import hits_change_answers
from kvdock_vllm.metadata import StepMetadata, WorkerDescription, WorkerReport
from kvdock_vllm.metrics import Stats, workers_gauge
from kvdock_vllm.vllm_layout import group_layout
from kvdock_vllm.vllm_parallel import parallel_strategy

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

# A lone engine that computes nothing waits for loads. It looks for new requests this often.
_IDLE_WAIT_SECONDS = 0.005
# vLLM acts on an ended load one step later. One of several workers may have reported the load a
# step before the last worker.
_NEWS_STEPS = 2


class WorkerHalf:
    """Used by the worker's thread."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        shapes: Sequence[GroupShape],
        config: Config,
    ) -> None:
        """Does not connect yet: see :meth:`register_kv_caches`.

        Raises ValueError for what is not supported.
        """
        transfer: Any = vllm_config.kv_transfer_config
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._strategy = parallel_strategy(vllm_config, kv_cache_config, is_worker=True)
        self._transfer_mode = config.transfer_mode
        self._does_nothing = hits_change_answers(vllm_config, self._strategy, config)
        self._kv_caches: Mapping[str, torch.Tensor] = {}
        self.description: WorkerDescription | None = None
        """For the scheduler's half. None before :meth:`register_kv_caches`."""
        self._has_told_description = False
        self.link = WorkerLink(str(transfer.engine_id), self._strategy, shapes, config.address)
        self.loads = LoadJobs(self.link)
        self.stores = StoreJobs(self.link)
        # A load waits for what is queued when it begins. Nothing that the step itself queues
        # touches the load's blocks, so it begins before the step's kernels are queued. But one
        # rank may load for all, and its own queue does not tell when the others have zeroed their
        # new blocks: only the all-reduces of the step do.
        self._zeroes_blocks = bool(getattr(kv_cache_config, "needs_kv_cache_zeroing", False))
        self._outcomes = Outcomes()
        self._mode_changes: SimpleQueue[tuple[TransferMode, int]] = SimpleQueue()
        self._idle_wait = _IDLE_WAIT_SECONDS if self._strategy.steps_alone else 0.0
        self._steps_with_news = 0
        """Steps until vLLM has acted on loads that have ended."""

    # -- start ----------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Takes the tensors and begins to connect.

        Raises UnsupportedLayoutError if a tensor is not what its spec says, ValueError for a wrong
        device.
        """
        self._kv_caches = kv_caches
        layouts = tuple(
            group_layout(group, kv_caches, self._kv_cache_config.num_blocks)
            for group in self._kv_cache_config.kv_cache_groups
        )
        self.link.layouts = layouts
        self.link.transfers = _choose_transfers(
            layouts,
            self.link.shapes,
            kv_caches,
            self._strategy,
            self._transfer_mode,
            lambda mode, change: self._mode_changes.put((mode, change)),
        )
        self.description = WorkerDescription(
            worker_id=self._strategy.worker_id,
            groups=tuple(
                GroupPages(layout.block_bytes, self._with_kernels(layout.pages))
                for layout in layouts
            ),
            use_mla=self._strategy.use_mla,
        )
        if not self._does_nothing:
            self.link.start()

    def _with_kernels(self, pages: Sequence[str]) -> tuple[str, ...]:
        """Adds the kernels of its layer to each page: they decide what is in the page."""
        layers: Mapping[str, Any] = self._vllm_config.compilation_config.static_forward_context
        return tuple(f"{page}:{_kernel(layers.get(page.split(':', 1)[0]))}" for page in pages)

    # -- steps ----------------------------------------------------------------------------------

    def handle_preemptions(self, metadata: StepMetadata) -> None:
        """Ends the stores that read blocks to which this step writes.

        vLLM calls this first in every step. So it also begins the stores of the step before that
        are not begun: with speculative decoding vLLM's V1 runner calls wait_for_save only in the
        last pipeline stage.
        """
        self.stores.begin()
        self.stores.make_way(metadata.overwritten)

    def begin_step(self, metadata: StepMetadata) -> None:
        """Notes the step's work, before any of it is done or asked for."""
        if metadata.news is not None:
            self.loads.expect(metadata.news)
        for spec in metadata.stores:
            if self._strategy.stores:
                self.stores.note(spec)
            else:
                self._outcomes.stores[spec.job_id] = StoreOutcome(workers=1, refused_from=None)
        self.stores.hold(metadata.finished)
        if not self._zeroes_blocks:
            self._start_loads(metadata)

    def on_forward(self, metadata: StepMetadata) -> None:
        """The step's kernels are queued, or there are none."""
        if self._zeroes_blocks:
            self._start_loads(metadata)

    def _start_loads(self, metadata: StepMetadata) -> None:
        for spec in metadata.loads:
            self.loads.begin(spec)

    def start_stores(self) -> None:
        """Hands the noted stores to the background. Their blocks must have been computed."""
        self.stores.begin()

    def get_finished(self, metadata: StepMetadata | None) -> tuple[set[str], set[str]]:
        """Requests whose stores have ended (of those whose blocks vLLM holds) and whose loads have,
        each once.

        :meth:`take_failed_blocks` and :meth:`take_failed_loads` must follow in the same step.
        """
        idle = metadata is not None and not metadata.has_forward
        if idle:
            # Some versions of vLLM skip wait_for_save in a step without computation.
            self.stores.begin()
        if metadata is not None and metadata.has_waiting:
            self.stores.free_held()
        may_wait = idle and self.loads.under_way and not self._steps_with_news
        something_ended = self.link.something_ended
        if may_wait and self._idle_wait:
            something_ended.wait(self._idle_wait)
        something_ended.clear()
        self.loads.report(self._outcomes)
        self.stores.report(self._outcomes)
        loaded, self._outcomes.loaded = self._outcomes.loaded, set()
        self._steps_with_news = _NEWS_STEPS if loaded else max(0, self._steps_with_news - 1)
        return self.stores.take_read(), loaded

    def take_failed_blocks(self) -> set[int]:
        """Blocks that a load did not fill, since the last call. Only for models of one group: of
        several, each may have a block of that id.
        """
        failed, self._outcomes.failed_blocks = self._outcomes.failed_blocks, set()
        return failed

    def take_failed_loads(self) -> set[str]:
        """Requests whose load failed as a whole, since the last call."""
        failed, self._outcomes.failed_loads = self._outcomes.failed_loads, set()
        return failed

    def take_report(self) -> WorkerReport | None:
        """What became of stores since the last call. The first report also describes the worker."""
        report = WorkerReport(self._outcomes.stores)
        if not self._has_told_description and self.description is not None:
            self._has_told_description = True
            report.descriptions = (self.description,)
        self._outcomes.stores = {}
        return report if report.stores or report.descriptions else None

    def take_stats(self) -> Stats | None:
        stats = Stats()
        for name, amount in self._outcomes.counts.items():
            stats.add(name, amount)
        self._outcomes.counts.clear()
        while not self._mode_changes.empty():
            mode, change = self._mode_changes.get()
            stats.add(workers_gauge(mode.name.lower()), change)
        return stats.take()

    def shutdown(self) -> None:
        """Lets stores finish that take a moment, gives up the others, and ends the session."""
        self.stores.close()
        self.loads.close()
        self.link.close()


def _choose_transfers(
    layouts: Sequence[GroupLayout],
    shapes: Sequence[GroupShape],
    kv_caches: Mapping[str, torch.Tensor],
    strategy: ParallelStrategy,
    wanted: TransferMode,
    count_workers: CountWorkers,
) -> Transfers:
    """How these tensors are copied. Raises ValueError if they cannot be."""
    devices = {tensor.device for tensor in kv_caches.values()}
    kinds = {device.type for device in devices}
    if kinds == {"cpu"}:
        if wanted is TransferMode.SERVER:
            raise ValueError(
                "kvdock.transfer_mode is server: only a GPU's memory can be handed to the server"
            )
        return SharedTransfers(HostMover(layouts), layouts, shapes, strategy, count_workers)
    if kinds == {"cuda"} and len(devices) == 1:
        from kvdock_vllm.engine.device.transfers import DeviceTransfers

        return DeviceTransfers(layouts, shapes, devices.pop(), strategy, wanted, count_workers)
    raise ValueError(f"KVDock does not support KV caches on {sorted(map(str, devices))}")


def _kernel(layer: Any) -> str:
    """Names the kernels that use a layer's pages, and on a CPU their instruction set."""
    backend = layer.get_attn_backend().get_name() if hasattr(layer, "get_attn_backend") else "?"
    return f"{backend},{getattr(layer, 'isa', '')}"

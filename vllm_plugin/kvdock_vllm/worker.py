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
from kvdock_vllm import ended_loads
from kvdock_vllm.config import Config
from kvdock_vllm.ended_loads import EndedLoads
from kvdock_vllm.engine.groups import GroupShape
from kvdock_vllm.engine.jobs import Outcomes
from kvdock_vllm.engine.layout import GroupLayout
from kvdock_vllm.engine.load_jobs import LoadJobs
from kvdock_vllm.engine.parallel import ParallelStrategy
from kvdock_vllm.engine.specs import GroupPages, StoreOutcome, StoreSpec
from kvdock_vllm.engine.store_jobs import StoreJobs
from kvdock_vllm.engine.transfers.base import CountWorkers, Transfers
from kvdock_vllm.engine.transfers.shared import HostMover, SharedTransfers
from kvdock_vllm.engine.worker_link import WorkerLink
from kvdock_vllm.kernels import hits_change_answers
from kvdock_vllm.metadata import StepMetadata, WorkerDescription, WorkerReport
from kvdock_vllm.metrics import Stats, workers_gauge
from kvdock_vllm.vllm_layout import group_layout
from kvdock_vllm.vllm_parallel import parallel_strategy
from kvdock_vllm.vllm_states import keeps_no_states

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

# A lone engine that computes nothing waits for loads. It looks for new requests this often.
_IDLE_WAIT_SECONDS = 0.005
# In the step that begins a load, where steps overlap: enough to ask for the bytes. vLLM acts on
# nothing before the next step, and pauses before it. So that step waits for the load's end.
_FIRST_WAIT_SECONDS = 0.001
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
        self._does_nothing = keeps_no_states(kv_cache_config) or hits_change_answers(
            vllm_config, self._strategy, config
        )
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
        self._ended_loads = EndedLoads(self._take_filled)
        if self._strategy.world_size == 1:
            ended_loads.offer(str(transfer.engine_id), self._ended_loads)
        self._steps_overlap = bool(vllm_config.scheduler_config.async_scheduling)
        self._steps_with_news = 0
        """Steps until vLLM has acted on loads that have ended."""
        self._in_doubt = 0
        """As in the step's metadata, until it is reported."""

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
        self._in_doubt = metadata.in_doubt
        if metadata.news is not None:
            self.loads.expect(metadata.news)
        # The blocks of finished requests are held until they are stored, and other requests may
        # wait for them. So these stores begin before the step's kernels are queued.
        self._note_stores(metadata.last_stores)
        self.stores.begin()
        self._note_stores(metadata.stores)
        self.stores.are_of_finished(metadata.of_finished)
        if not self._zeroes_blocks:
            self._start_loads(metadata)

    def _note_stores(self, specs: Sequence[StoreSpec]) -> None:
        for spec in specs:
            if self._strategy.stores:
                self.stores.note(spec)
            else:
                self._outcomes.stores[spec.job_id] = StoreOutcome(workers=1, refused_from=None)

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

    def take_loaded(self, metadata: StepMetadata | None) -> set[str]:
        """Requests whose loads have ended, each once.

        :meth:`take_failed_blocks` and :meth:`take_failed_loads` must follow in the same step.
        """
        idle = metadata is not None and not metadata.has_forward
        if idle:
            # Some versions of vLLM skip wait_for_save in a step without computation.
            self.stores.begin()
        if metadata is not None and metadata.has_waiting:
            # Where blocks are zeroed, a store may keep its blocks until it has ended (holds.py).
            self.stores.free_held(all_hold=self._zeroes_blocks)
        if metadata is not None and idle and self.loads.under_way:
            self._wait_for_loads(begins=bool(metadata.loads))
        self.link.something_ended.clear()
        self.loads.report(self._outcomes)
        self.stores.report(self._outcomes)
        loaded, self._outcomes.failed_to_load = self._outcomes.failed_to_load, set()
        if not self._ended_loads.has_reader:
            loaded |= self._outcomes.filled
            self._outcomes.filled = set()
        self._steps_with_news = _NEWS_STEPS if loaded else max(0, self._steps_with_news - 1)
        return loaded

    def _wait_for_loads(self, *, begins: bool) -> None:
        """In a step without computation, unless vLLM is about to act on a load. ``begins``: this
        step begins one.
        """
        if self._steps_with_news or self._outcomes.filled:
            return
        seconds = self._idle_wait
        if begins and self._steps_overlap and self._ended_loads.has_reader:
            seconds = min(seconds, _FIRST_WAIT_SECONDS)
        if seconds:
            self.link.something_ended.wait(seconds)

    def _take_filled(self) -> set[str]:
        """For the scheduler's half. Of loads that failed, :meth:`take_loaded` tells vLLM."""
        self.loads.report(self._outcomes)
        filled, self._outcomes.filled = self._outcomes.filled, set()
        return filled

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
        report = WorkerReport(self._outcomes.stores, in_doubt=self._in_doubt)
        self._in_doubt = 0
        if not self._has_told_description and self.description is not None:
            self._has_told_description = True
            report.descriptions = (self.description,)
        self._outcomes.stores = {}
        # Of a step without report vLLM may not tell the scheduler's half, which then takes nothing.
        is_awaited = self._ended_loads.has_reader and (
            self.loads.under_way or self._outcomes.filled
        )
        is_needed = report.stores or report.descriptions or report.in_doubt or is_awaited
        return report if is_needed else None

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

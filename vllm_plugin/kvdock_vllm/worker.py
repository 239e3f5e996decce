"""The half of the connector in a worker: moves bytes between the engine's blocks and the pool.

Everything that may take time runs on background threads, loads apart from stores, so that a load
never waits behind stores. The engine's thread only hands over work and collects what is finished.

What can go wrong is always the same: the server is gone, slow, or lacks what was asked for. A load
then ends with the blocks that were not filled, which vLLM computes instead. A store ends with the
first chunk that was not stored. Both always end, because the engine waits for them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

from kvdock import Client, Session
from kvdock.errors import DeadlineExceeded, KVDockError
from kvdock.types import ChunkStatus, GroupKind, SessionRole, TransferMode
from kvdock_vllm import affinity
from kvdock_vllm.breaker import Breaker
from kvdock_vllm.config import Config
from kvdock_vllm.copier import CopyStoppedError
from kvdock_vllm.groups import GroupShape, loads_fail_whole
from kvdock_vllm.kernels import hits_change_answers
from kvdock_vllm.layout import GroupLayout, group_layout
from kvdock_vllm.link import Link
from kvdock_vllm.metadata import (
    GroupPages,
    GroupStore,
    LoadSpec,
    StepMetadata,
    StoreOutcome,
    Target,
    WorkerDescription,
    WorkerReport,
)
from kvdock_vllm.metrics import Stats, workers_gauge
from kvdock_vllm.parallel import ParallelStrategy
from kvdock_vllm.store_jobs import StoreJob, StoreJobs
from kvdock_vllm.transfers import (
    CopyRequest,
    CountWorkers,
    HostMover,
    Mark,
    SharedTransfers,
    Transfers,
    UnansweredError,
    split_blocks,
)

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

_log = logging.getLogger(__name__)

_LOAD_THREADS = 2
# One, so that a chunk is always offered after the one it extends.
_STORE_THREADS = 1

# The scheduler's half found the server, so this one's session is only a moment behind.
_SESSION_SECONDS = 2.0
# A server that answers a heartbeat within this answers loads and stores as well.
_HEARTBEAT_SECONDS = 1.0
# How long stores of blocks that are given away may wait for their turn, how long these may be read
# to the end, and how long it takes at most until a copy that was told to stop has stopped.
_TURN_SECONDS = 0.25
_FLUSH_SECONDS = 2.0
_STOP_SECONDS = 5.0
_SHUTDOWN_SECONDS = 5.0
# In a step without computation an engine has nothing to do but to wait for loads, where nobody else
# waits for its steps. It looks for new requests so often.
_IDLE_WAIT_SECONDS = 0.005
# How often it is made sure that a session has registered on which loads wait for that.
_REGISTRATION_SECONDS = 1.0
# vLLM takes note of an ended load when one more step is done; of several workers one may have told
# of it a step before the last.
_NEWS_STEPS = 2

T = TypeVar("T")


@dataclass(slots=True)
class _Ended:
    """What a background thread reports of one load or store."""

    stats: Stats
    ready: Mark = field(default_factory=Mark)
    """What the engine had queued before."""
    load: LoadSpec | None = None
    failed_blocks: frozenset[int] = frozenset()
    store: StoreJob | None = None
    refused_from: int | None = None
    is_over: Callable[[], bool] | None = None
    """Of a load that failed, if the server may still write to its blocks: false that long."""


class WorkerHalf:
    """Used by the worker's thread; its background threads are its own."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        shapes: Sequence[GroupShape],
        config: Config,
    ) -> None:
        """Connects to nothing yet: see :meth:`register_kv_caches`.

        Raises ValueError for what is not supported.
        """
        transfer: Any = vllm_config.kv_transfer_config
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._engine_id = str(transfer.engine_id)
        self._strategy = ParallelStrategy.from_vllm(vllm_config, kv_cache_config, is_worker=True)
        self._transfer_mode = config.transfer_mode
        self._does_nothing = hits_change_answers(vllm_config, self._strategy, config)
        self._shapes = shapes
        self._layouts: tuple[GroupLayout, ...] = ()
        self._kv_caches: Mapping[str, torch.Tensor] = {}
        self._description: WorkerDescription | None = None
        self._transfers: Transfers
        self._link: Link[None] = Link(
            f"worker {self._strategy.worker_id}",
            config.address,
            self._open_session,
            self._prepare_session,
            before_close=lambda session: self._transfers.wait_for_end(session),
        )
        self._breaker = Breaker(self._link, _HEARTBEAT_SECONDS)
        self._unconnected_epoch = 0
        """Of the server that this worker was last said not to be connected to."""
        self._load_threads = _threads("kvdock-load", _LOAD_THREADS)
        self._store_threads = _threads("kvdock-store", _STORE_THREADS)
        self._closing = threading.Event()
        self._ended: SimpleQueue[_Ended] = SimpleQueue()
        self._store_jobs = StoreJobs()
        # Of the engine's thread:
        self._unsubmitted: list[StoreJob] = []
        self._open_stores: dict[str, set[StoreJob]] = defaultdict(set)
        self._idle_wait = _IDLE_WAIT_SECONDS if self._strategy.steps_alone else 0.0
        self._num_loads = 0
        """Under way."""
        self._unanswered: list[_Ended] = []
        """Loads that failed, and whose blocks the server may still write to."""
        self._next_registration = 0.0
        self._steps_with_news = 0
        """Still to be done before vLLM has taken note of loads that have ended."""
        self._held: set[str] = set()
        self._loaded: set[str] = set()
        self._failed_blocks: set[int] = set()
        self._failed_loads: set[str] = set()
        self._report = WorkerReport()
        self._has_reported = False
        self._stats = Stats()

    # -- start ----------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Takes the tensors and begins to connect.

        Raises UnsupportedLayoutError if they are not what the specs say, ValueError if they are on
        devices of a kind that is not supported.
        """
        self._kv_caches = kv_caches
        self._layouts = tuple(
            group_layout(group, kv_caches, self._kv_cache_config.num_blocks)
            for group in self._kv_cache_config.kv_cache_groups
        )
        self._transfers = _choose_transfers(
            self._layouts,
            self._shapes,
            kv_caches,
            self._strategy,
            self._transfer_mode,
            self._count_workers,
        )
        self._description = WorkerDescription(
            worker_id=self._strategy.worker_id,
            groups=tuple(
                GroupPages(layout.block_bytes, self._with_kernels(layout.pages))
                for layout in self._layouts
            ),
            use_mla=self._strategy.use_mla,
        )
        if not self._does_nothing:
            self._link.start()

    @property
    def description(self) -> WorkerDescription | None:
        """For the scheduler's half. None before :meth:`register_kv_caches`."""
        return self._description

    def _with_kernels(self, pages: Sequence[str]) -> tuple[str, ...]:
        """Adds who reads a layer's pages: kernels put different things into one shape."""
        layers: Mapping[str, Any] = self._vllm_config.compilation_config.static_forward_context
        return tuple(f"{page}:{_kernel(layers.get(page.split(':', 1)[0]))}" for page in pages)

    def _open_session(self, client: Client, on_lost: Callable[[str], None]) -> Session:
        return client.session(
            self._engine_id,
            role=SessionRole.WORKER,
            worker_id=self._strategy.worker_id,
            kv_worker_id=self._strategy.kv_worker_id,
            on_lost=on_lost,
        )

    # -- steps ----------------------------------------------------------------------------------

    def handle_preemptions(self, metadata: StepMetadata) -> None:
        """Ends the stores that read blocks into which others write in this step.

        What does not begin in a moment is given up. The rest may finish if that does not take long;
        else it is told to stop. A copy of which it cannot be said that it ended before is never
        committed. Only copies are waited for: where the server keeps a store waiting, all that do
        not copy are given up at once.

        Called in every step, first of all. So it also begins stores of the step before that nobody
        has begun: with speculative decoding vLLM's V1 runner calls wait_for_save in the last
        pipeline stage only.
        """
        self.start_stores()
        overwritten = set(metadata.overwritten)
        if not overwritten:
            return
        jobs = [
            job
            for open_jobs in self._open_stores.values()
            for job in open_jobs
            if job.spec.job_id in overwritten
        ]
        if self._store_jobs.wait(jobs, _TURN_SECONDS):
            return
        for job in jobs:
            self._withdraw(job)
        if self._store_jobs.wait(jobs, _FLUSH_SECONDS):
            return
        for job in jobs:
            self._give_up(job)
        if not self._store_jobs.wait(jobs, _STOP_SECONDS):
            _log.warning("a store of blocks given away goes on; what it copies is thrown away")

    def begin_step(self, metadata: StepMetadata) -> None:
        """Notes what there is to do, before anything of it is done or asked for."""
        if metadata.news is not None:
            self._load_threads.submit(self._expect, metadata.news)
        for spec in metadata.stores:
            if self._strategy.stores:
                job = StoreJob(spec)
                self._open_stores[spec.request_id].add(job)
                self._unsubmitted.append(job)
            else:
                self._report.stores[spec.job_id] = StoreOutcome(workers=1, refused_from=None)
        self._held.update(metadata.finished)

    def start_loads(self, metadata: StepMetadata) -> None:
        """Hands the step's loads to the background."""
        for spec in metadata.loads:
            ended = _Ended(Stats(), load=spec, failed_blocks=spec.block_ids)
            self._num_loads += 1
            self._begin(ended, self._load_threads, self._load)

    def start_stores(self) -> None:
        """Hands the stores noted so far to the background. Their blocks must have been computed."""
        for job in self._unsubmitted:
            ended = _Ended(Stats(), store=job, refused_from=job.spec.first_chunk)
            job.future = self._begin(ended, self._store_threads, self._store)
        self._unsubmitted.clear()

    def get_finished(self, metadata: StepMetadata | None) -> tuple[set[str], set[str]]:
        """Requests whose stores are done (of those that vLLM holds), and whose loads are.

        Each once. What a load could not fill is told by :meth:`take_failed_blocks` and
        :meth:`take_failed_loads`, which are asked after this, in the same step.
        """
        idle = metadata is not None and not metadata.has_forward
        if idle:
            # Some versions of vLLM do not call wait_for_save in a step without forward pass.
            self.start_stores()
        if metadata is not None and metadata.has_waiting:
            self._free_held()
        may_wait = idle and self._num_loads and not self._steps_with_news
        self._collect(self._idle_wait if may_wait else 0)
        stored = {
            name
            for name in self._held
            if all(job.has_let_go for job in self._open_stores.get(name, ()))
        }
        self._held -= stored
        loaded, self._loaded = self._loaded, set()
        self._steps_with_news = _NEWS_STEPS if loaded else max(0, self._steps_with_news - 1)
        return stored, loaded

    def take_failed_blocks(self) -> set[int]:
        """Blocks that were to be loaded and were not, since the last call.

        Of models with one group; several may have blocks of one id.
        """
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def take_failed_loads(self) -> set[str]:
        """Requests of models with several groups whose loads failed, since the last call."""
        failed, self._failed_loads = self._failed_loads, set()
        return failed

    def take_report(self) -> WorkerReport | None:
        """What became of stores, since the last call; and once, who this worker is."""
        if not self._has_reported and self._description is not None:
            self._has_reported = True
            self._report.descriptions = (self._description,)
        if not self._report.stores and not self._report.descriptions:
            return None
        report, self._report = self._report, WorkerReport()
        return report

    def take_stats(self) -> Stats | None:
        """Counters since the last call."""
        return self._stats.take()

    def shutdown(self) -> None:
        """Lets stores finish that take a moment, gives up the rest, and ends the session."""
        self.start_stores()
        jobs = [job for open_jobs in self._open_stores.values() for job in open_jobs]
        if not self._store_jobs.wait(jobs, _SHUTDOWN_SECONDS):
            _log.warning("not everything was stored before the engine ended")
        self._closing.set()
        for job in jobs:
            self._give_up(job)
        self._load_threads.shutdown(wait=False, cancel_futures=True)
        self._store_threads.shutdown(wait=False, cancel_futures=True)
        self._link.close()

    def _free_held(self) -> None:
        """Gives up what finished requests still store, if the server keeps it waiting."""
        if self._held and self._store_jobs.is_late:
            for name in self._held:
                for job in self._open_stores.get(name, ()):
                    self._give_up(job)

    def _collect(self, seconds: float) -> None:
        """Takes over what the background threads have finished, and waits so long for the first."""
        if self._unanswered:
            unanswered, self._unanswered = self._unanswered, []
            for ended in unanswered:
                self._take_over(ended)
            self._register_next_session()
        while True:
            try:
                ended = self._ended.get(timeout=seconds) if seconds else self._ended.get_nowait()
            except Empty:
                return
            seconds = 0.0
            self._take_over(ended)

    def _register_next_session(self) -> None:
        """The server lets go of what a lost session had asked for when the next one registers."""
        live = self._link.current
        if live is None or time.monotonic() < self._next_registration:
            return
        for target in [ended.load.target for ended in self._unanswered if ended.load is not None]:
            if target is not None and target.epoch == live.session.epoch:
                self._next_registration = time.monotonic() + _REGISTRATION_SECONDS
                self._load_threads.submit(self._expect, target)
                return

    def _take_over(self, ended: _Ended) -> None:
        if ended.is_over is not None and not ended.is_over():
            self._unanswered.append(ended)
            return
        self._stats.aggregate(ended.stats)
        if ended.load is not None:
            self._num_loads -= 1
            self._loaded.add(ended.load.request_id)
            if not loads_fail_whole(self._shapes):
                self._failed_blocks |= ended.failed_blocks
            elif ended.failed_blocks:
                self._failed_loads.add(ended.load.request_id)
        if ended.store is not None:
            spec = ended.store.spec
            self._report.stores[spec.job_id] = StoreOutcome(1, ended.refused_from)
            open_jobs = self._open_stores[spec.request_id]
            open_jobs.discard(ended.store)
            if not open_jobs:
                del self._open_stores[spec.request_id]

    def _begin(
        self, ended: _Ended, threads: ThreadPoolExecutor, work: Callable[[_Ended], None]
    ) -> Future[None] | None:
        """Hands ``work`` over. Where that fails it has ended: the engine waits for its end."""
        try:
            ended.ready = self._transfers.mark()
            return threads.submit(self._guarded, ended, work)
        except Exception:
            _log.exception("a load or store could not be begun")
            self._end(ended)
            return None

    def _give_up(self, job: StoreJob) -> None:
        self._store_jobs.give_up(job)
        self._withdraw(job)

    def _withdraw(self, job: StoreJob) -> None:
        """Ends a store that no thread has begun, and so none will report."""
        if not job.ended and job.future is not None and job.future.cancel():
            self._end(_Ended(Stats(), store=job, refused_from=job.spec.first_chunk))

    def _end(self, ended: _Ended) -> None:
        self._ended.put(ended)
        if ended.store is not None:
            self._store_jobs.end(ended.store)

    # -- background -----------------------------------------------------------------------------

    def _guarded(self, ended: _Ended, work: Callable[[_Ended], None]) -> None:
        """Runs ``work``, which fills in ``ended``, and reports it whatever happens."""
        if ended.load is not None:
            verb, name = "load", ended.load.request_id
        else:
            assert ended.store is not None
            verb, name = "store", ended.store.spec.request_id
            self._store_jobs.begin(ended.store)
        asked_at = time.monotonic()
        try:
            work(ended)
            self._breaker.succeeded()
        except CopyStoppedError:
            _log.debug("request %s: %s was given up", name, verb)
        except UnansweredError as error:
            ended.is_over = error.is_over
            self._breaker.failed(asked_at)
            _log.warning(
                "request %s: could not load: %s. The server may still write to its blocks, so the "
                "request waits until the server goes on or its process has ended",
                name,
                error.message,
            )
        except KVDockError as error:
            if isinstance(error, DeadlineExceeded) and self._breaker.failed(asked_at):
                _log.warning("the KVDock server is slow: %s", error.message)
            _log.info("request %s: could not %s: %s", name, verb, error.message)
        except Exception:
            _log.exception("request %s: could not %s", name, verb)
        finally:
            self._end(ended)

    def _session(self, target: Target | None) -> Session:
        """The session for ``target``. Raises CopyStoppedError if there is none in time."""
        if target is None or self._breaker.is_open or self._closing.is_set():
            raise CopyStoppedError
        live = self._link.wait(target.epoch, _SESSION_SECONDS)
        if live is None:
            if target.epoch != self._unconnected_epoch:
                self._unconnected_epoch = target.epoch
                _log.warning(
                    "worker %d is not connected to the server that the scheduler found: it loads "
                    "and stores nothing until it is",
                    self._strategy.worker_id,
                )
            raise CopyStoppedError
        return live.session

    def _load(self, ended: _Ended) -> None:
        spec = ended.load
        assert spec is not None
        began = time.monotonic()
        session = self._session(spec.target)
        assert spec.target is not None
        failed: set[int] = set()
        for group in spec.groups:
            good = self._transfers.load(
                CopyRequest(
                    session, spec.target, group, ended.ready, lambda: self._must_stop(session)
                )
            )
            in_part = self._shapes[group.position].part_blocks(spec.target.chunk_tokens)
            bad = {
                block
                for (_, ids), ok in zip(split_blocks(group, in_part), good, strict=True)
                if not ok
                for block in ids
            }
            if bad:
                _log.info(
                    "request %s: %d of %d chunks could not be loaded",
                    spec.request_id,
                    good.count(False),
                    len(good),
                )
            failed |= bad
            num_blocks = len(group.block_ids) - len(bad)
            ended.stats.add("loaded_chunks", good.count(True))
            ended.stats.add("loaded_bytes", num_blocks * self._layouts[group.position].block_bytes)
        if not failed or not spec.all_or_nothing:
            ended.failed_blocks = frozenset(failed)
        ended.stats.add("load_seconds", time.monotonic() - began)

    def _store(self, ended: _Ended) -> None:
        job = ended.store
        assert job is not None
        spec = job.spec
        began = time.monotonic()
        if job.given_up:
            raise CopyStoppedError
        session = self._session(spec.target)
        refused: list[int] = []
        seconds = 0.0
        for group in spec.groups:
            statuses = self._transfers.store(
                CopyRequest(
                    session,
                    spec.target,
                    group,
                    ended.ready,
                    lambda: job.given_up or self._must_stop(session),
                    lambda: self._store_jobs.reading(job),
                )
            )
            refused += _refused_from(group, self._shapes[group.position], statuses)
            stored = statuses.count(ChunkStatus.STORED)
            existing = statuses.count(ChunkStatus.EXISTS)
            in_part = len(group.block_ids) // len(group.keys)
            block_bytes = self._layouts[group.position].block_bytes
            ended.stats.add("stored_chunks", stored)
            ended.stats.add("stored_bytes", stored * in_part * block_bytes)
            ended.stats.add("existing_chunks", existing)
            ended.stats.add("refused_chunks", len(statuses) - stored - existing)
            if stored:
                seconds = time.monotonic() - began
        ended.refused_from = min(refused, default=None)
        ended.stats.add("store_seconds", seconds)

    def _expect(self, target: Target) -> None:
        """Does ahead of time what the first load or store would have to do otherwise."""
        live = self._link.wait(target.epoch, _SESSION_SECONDS)
        try:
            if live is not None:
                self._transfers.expect(live.session, target)
        except CopyStoppedError:
            _log.debug("nothing is copied of namespace %s", target.namespace)
        except KVDockError as error:
            _log.info("preparing for namespace %s failed: %s", target.namespace, error.message)
        except Exception:
            _log.exception("preparing for namespace %s failed", target.namespace)

    def _count_workers(self, mode: TransferMode, change: int) -> None:
        """On any thread."""
        stats = Stats()
        stats.add(workers_gauge(mode.name.lower()), change)
        self._ended.put(_Ended(stats))

    def _prepare_session(self, client: Client, session: Session) -> None:
        self._transfers.prepare(session)

    def _must_stop(self, session: Session) -> bool:
        return self._closing.is_set() or not session.alive


def _choose_transfers(
    layouts: Sequence[GroupLayout],
    shapes: Sequence[GroupShape],
    kv_caches: Mapping[str, torch.Tensor],
    strategy: ParallelStrategy,
    wanted: TransferMode,
    count_workers: CountWorkers,
) -> Transfers:
    """The way for the bytes of these tensors. Raises ValueError if there is none."""
    devices = {tensor.device for tensor in kv_caches.values()}
    kinds = {device.type for device in devices}
    if kinds == {"cpu"}:
        if wanted is TransferMode.SERVER:
            raise ValueError(
                "kvdock.transfer_mode is server: only a GPU's memory can be handed to the server"
            )
        return SharedTransfers(HostMover(layouts), layouts, shapes, strategy, count_workers)
    if kinds == {"cuda"} and len(devices) == 1:
        from kvdock_vllm.transfers.device import DeviceTransfers

        return DeviceTransfers(layouts, shapes, devices.pop(), strategy, wanted, count_workers)
    raise ValueError(f"KVDock does not support KV caches on {sorted(map(str, devices))}")


def _threads(name: str, count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, thread_name_prefix=name, initializer=affinity.restore)


def _kernel(layer: Any) -> str:
    """Which kernels, and on a CPU which instructions of it, use a layer's pages."""
    backend = layer.get_attn_backend().get_name() if hasattr(layer, "get_attn_backend") else "?"
    return f"{backend},{getattr(layer, 'isa', '')}"


def _refused_from(
    group: GroupStore, shape: GroupShape, statuses: Sequence[ChunkStatus]
) -> list[int]:
    """First chunk of the prompt that must be offered again, if any must."""
    there = (ChunkStatus.STORED, ChunkStatus.EXISTS)
    for index, status in enumerate(statuses):
        if status not in there:
            # A parent that was there is gone, and who knows what before it. What a window has left
            # behind cannot be offered again.
            lost_parent = (
                index == 0
                and status is ChunkStatus.PARENT_MISSING
                and shape.kind is GroupKind.FULL_ATTENTION
            )
            return [0 if lost_parent else group.first_chunk + index]
    return []

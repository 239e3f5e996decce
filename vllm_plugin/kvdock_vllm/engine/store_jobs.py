"""The stores of a worker. They read the engine's blocks on a background thread.

A failed store names the first chunk that was not stored. The scheduler offers that chunk again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence

from kvdock.types import ChunkStatus, GroupKind
from kvdock_vllm.engine.block_readers import BlockReader, BlockReaders
from kvdock_vllm.engine.copier import CopyStoppedError
from kvdock_vllm.engine.groups import GroupShape
from kvdock_vllm.engine.jobs import Job, Outcomes, background_threads
from kvdock_vllm.engine.specs import GroupStore, StoreOutcome, StoreSpec
from kvdock_vllm.engine.transfers.base import CopyRequest
from kvdock_vllm.engine.worker_link import WorkerLink

_log = logging.getLogger(__name__)

# One, so that a chunk is offered after the chunk that it extends.
_THREADS = 1

# When blocks are given away: how long their stores may wait for their turn, how long the rest may
# go on reading, and how long a copy that was told to stop may take to stop.
_TURN_SECONDS = 0.25
_FLUSH_SECONDS = 2.0
_STOP_SECONDS = 5.0
_SHUTDOWN_SECONDS = 5.0


class StoreJob(Job):
    """One store of a request."""

    verb = "store"

    def __init__(self, spec: StoreSpec, link: WorkerLink, readers: BlockReaders) -> None:
        super().__init__(spec.request_id, link)
        self.spec = spec
        self.reader = BlockReader()
        self._readers = readers
        self._refused_from: int | None = spec.first_chunk

    def run(self) -> None:
        self._readers.begin(self.reader)
        super().run()

    def end(self) -> None:
        super().end()
        self._readers.end(self.reader)

    def report(self, outcomes: Outcomes) -> None:
        refused_from: int | None = self.spec.first_chunk
        if self.ended:  # otherwise its thread still changes these
            outcomes.count(self._counts)
            refused_from = self._refused_from
        outcomes.stores[self.spec.job_id] = StoreOutcome(1, refused_from)

    def _work(self) -> None:
        began = time.monotonic()
        if self.reader.given_up:
            raise CopyStoppedError
        link = self._link
        session = link.session(self.spec.target)
        refused: list[int] = []
        seconds = 0.0
        for group in self.spec.groups:
            statuses = link.transfers.store(
                CopyRequest(
                    session,
                    self.spec.target,
                    group,
                    self._ready,
                    lambda: self.reader.given_up or link.must_stop(session),
                    lambda: self._readers.reading(self.reader),
                )
            )
            refused += _refused_from(group, link.shapes[group.position], statuses)
            stored = statuses.count(ChunkStatus.STORED)
            existing = statuses.count(ChunkStatus.EXISTS)
            in_part = len(group.block_ids) // len(group.keys)
            block_bytes = link.layouts[group.position].block_bytes
            self._counts["stored_chunks"] += stored
            self._counts["stored_bytes"] += stored * in_part * block_bytes
            self._counts["existing_chunks"] += existing
            self._counts["refused_chunks"] += len(statuses) - stored - existing
            if stored:
                seconds = time.monotonic() - began
        self._refused_from = min(refused, default=None)
        self._counts["store_seconds"] += seconds


class StoreJobs:
    """The stores of one worker. Used by the engine's thread."""

    def __init__(self, link: WorkerLink) -> None:
        self._link = link
        self._threads = background_threads("kvdock-store", _THREADS)
        self._readers = BlockReaders()
        self._noted: list[StoreJob] = []
        self.under_way: list[StoreJob] = []
        """Stores not reported yet."""
        self._of_finished: set[int] = set()
        """job_ids of those whose request has finished. Their blocks are held until they end."""

    def note(self, spec: StoreSpec) -> None:
        """Notes a store whose blocks are being computed."""
        job = StoreJob(spec, self._link, self._readers)
        self.under_way.append(job)
        self._noted.append(job)

    def begin(self) -> None:
        """Hands the noted stores to the background. Their blocks must have been computed."""
        for job in self._noted:
            job.begin(self._threads)
        self._noted.clear()

    def are_of_finished(self, job_ids: Iterable[int]) -> None:
        """The requests of these stores have finished."""
        under_way = {job.spec.job_id for job in self.under_way}
        self._of_finished.update(under_way.intersection(job_ids))

    def free_held(self, *, all_hold: bool) -> None:
        """Gives up the stores that keep the engine from giving out their blocks, if the server
        keeps them waiting. These are the stores of finished requests, or all if ``all_hold``.
        """
        if (self._of_finished or all_hold) and self._readers.is_late:
            for job in self.under_way:
                if all_hold or job.spec.job_id in self._of_finished:
                    self._give_up(job)

    def make_way(self, job_ids: Iterable[int]) -> None:
        """Ends the stores that read blocks to which others are about to write.

        A store that does not begin soon is given up. The others may finish if they are quick, else
        they are told to stop. A copy that may not have ended in time is never committed. Only
        copies are waited for: if the server keeps a store waiting, all stores that do not copy are
        given up at once.
        """
        overwritten = set(job_ids)
        if not overwritten:
            return
        jobs = [job for job in self.under_way if job.spec.job_id in overwritten]
        if self._wait(jobs, _TURN_SECONDS):
            return
        for job in jobs:
            job.withdraw()
        if self._wait(jobs, _FLUSH_SECONDS):
            return
        for job in jobs:
            self._give_up(job)
        if not self._wait(jobs, _STOP_SECONDS):
            _log.warning("a store of blocks given away goes on; what it copies is thrown away")

    def report(self, outcomes: Outcomes) -> None:
        for job in list(self.under_way):
            # A store that was given up may still wait for the server. Its blocks need not.
            if job.reader.has_let_go:
                job.report(outcomes)
                self.under_way.remove(job)
                self._of_finished.discard(job.spec.job_id)

    def close(self) -> None:
        """Lets stores finish that take a moment, and gives up the others."""
        self.begin()
        jobs = self.under_way
        if not self._wait(jobs, _SHUTDOWN_SECONDS):
            _log.warning("not everything was stored before the engine ended")
        self._link.stop_copies()
        for job in jobs:
            self._give_up(job)
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _wait(self, jobs: Sequence[StoreJob], seconds: float) -> bool:
        """Whether these stores have let go of their blocks within ``seconds``."""
        return self._readers.wait([job.reader for job in jobs], seconds)

    def _give_up(self, job: StoreJob) -> None:
        self._readers.give_up(job.reader)
        job.withdraw()


def _refused_from(
    group: GroupStore, shape: GroupShape, statuses: Sequence[ChunkStatus]
) -> list[int]:
    """The first chunk of the prompt that must be offered again, or none."""
    there = (ChunkStatus.STORED, ChunkStatus.EXISTS)
    for index, status in enumerate(statuses):
        if status not in there:
            # If the parent is gone, chunks before it may be gone too, so all are offered again. But
            # what a window has left behind cannot be offered again.
            lost_parent = (
                index == 0
                and status is ChunkStatus.PARENT_MISSING
                and shape.kind is GroupKind.FULL_ATTENTION
            )
            return [0 if lost_parent else group.first_chunk + index]
    return []

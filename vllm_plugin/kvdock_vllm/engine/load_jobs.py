"""Loads of a worker: they fill the engine's blocks on background threads.

A load that fails tells which blocks were not filled, and the engine computes these.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from kvdock.errors import KVDockError
from kvdock_vllm.engine.copier import CopyStoppedError
from kvdock_vllm.engine.groups import loads_fail_whole
from kvdock_vllm.engine.jobs import Job, Outcomes, background_threads
from kvdock_vllm.engine.specs import LoadSpec, Target
from kvdock_vllm.engine.transfers.base import CopyRequest, UnansweredError, split_blocks
from kvdock_vllm.engine.worker_link import WorkerLink

_log = logging.getLogger(__name__)

_THREADS = 2
# How often it is made sure that the next session registers, where loads wait for that.
_REGISTRATION_SECONDS = 1.0


class LoadJob(Job):
    """The load of one request."""

    verb = "load"

    def __init__(self, spec: LoadSpec, link: WorkerLink) -> None:
        super().__init__(spec.request_id, link)
        self.spec = spec
        self._failed_blocks = spec.block_ids
        self._server_is_done: Callable[[], bool] | None = None

    @property
    def is_over(self) -> bool:
        """It has ended, and nobody writes to its blocks any more."""
        return self.ended and (self._server_is_done is None or self._server_is_done())

    def report(self, outcomes: Outcomes) -> None:
        outcomes.count(self._counts)
        outcomes.loaded.add(self.request_id)
        if not loads_fail_whole(self._link.shapes):
            outcomes.failed_blocks |= self._failed_blocks
        elif self._failed_blocks:
            outcomes.failed_loads.add(self.request_id)

    def _work(self) -> None:
        began = time.monotonic()
        if self.spec.target is None:
            raise CopyStoppedError
        failed = self._load(self.spec.target)
        if not failed or not self.spec.all_or_nothing:
            self._failed_blocks = failed
        self._counts["load_seconds"] += time.monotonic() - began

    def _load(self, target: Target) -> frozenset[int]:
        """The blocks that could not be filled."""
        link = self._link
        session = link.session(target)
        failed: set[int] = set()
        for group in self.spec.groups:
            good = link.transfers.load(
                CopyRequest(session, target, group, self._ready, lambda: link.must_stop(session))
            )
            in_part = link.shapes[group.position].part_blocks(target.chunk_tokens)
            bad = {
                block
                for (_, ids), ok in zip(split_blocks(group, in_part), good, strict=True)
                if not ok
                for block in ids
            }
            if bad:
                _log.info(
                    "request %s: %d of %d chunks could not be loaded",
                    self.request_id,
                    good.count(False),
                    len(good),
                )
            failed |= bad
            num_blocks = len(group.block_ids) - len(bad)
            self._counts["loaded_chunks"] += good.count(True)
            self._counts["loaded_bytes"] += num_blocks * link.layouts[group.position].block_bytes
        return frozenset(failed)

    def _fail(self, error: KVDockError, asked_at: float) -> None:
        if not isinstance(error, UnansweredError):
            super()._fail(error, asked_at)
            return
        self._server_is_done = error.is_over
        self._link.breaker.failed(asked_at)
        _log.warning(
            "request %s: could not load: %s. The server may still write to its blocks, so the "
            "request waits until the server goes on or its process has ended",
            self.request_id,
            error.message,
        )


class LoadJobs:
    """The loads of one worker that are under way. Used by the engine's thread."""

    def __init__(self, link: WorkerLink) -> None:
        self._link = link
        self._threads = background_threads("kvdock-load", _THREADS)
        self._under_way: list[LoadJob] = []
        self._next_registration = 0.0

    @property
    def under_way(self) -> list[LoadJob]:
        """Loads that were not reported yet, in the order in which they began."""
        return list(self._under_way)

    @property
    def unanswered(self) -> list[LoadJob]:
        """Loads that failed, and whose blocks the server may still write to."""
        return [job for job in self._under_way if job.ended and not job.is_over]

    def expect(self, target: Target) -> None:
        """Loads of a namespace will follow."""
        self._threads.submit(self._link.expect, target)

    def begin(self, spec: LoadSpec) -> None:
        """Hands a load to the background."""
        job = LoadJob(spec, self._link)
        self._under_way.append(job)
        job.begin(self._threads)

    def report(self, outcomes: Outcomes) -> None:
        """Takes over what became of the loads that are over."""
        left = []
        for job in self._under_way:
            if job.is_over:
                job.report(outcomes)
            else:
                left.append(job)
        self._under_way = left
        self._register_next_session()

    def close(self) -> None:
        """Begins no more."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _register_next_session(self) -> None:
        """The server lets go of what a lost session had asked for when the next one registers."""
        live = self._link.current
        if live is None or time.monotonic() < self._next_registration:
            return
        for job in self.unanswered:
            target = job.spec.target
            if target is not None and target.epoch == live.session.epoch:
                self._next_registration = time.monotonic() + _REGISTRATION_SECONDS
                self.expect(target)
                return

"""The loads of a worker. They fill the engine's blocks on background threads.

A failed load names the blocks that were not filled. The engine computes these.
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
# How often the next session is asked to register its memory while loads wait for that.
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
        """The load has ended, and nobody writes to its blocks any more."""
        return self.ended and (self._server_is_done is None or self._server_is_done())

    def report(self, outcomes: Outcomes) -> None:
        outcomes.count(self._counts)
        ended = outcomes.failed_to_load if self._failed_blocks else outcomes.filled
        ended.add(self.request_id)
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
        """Fills the blocks, and returns those that could not be filled."""
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
    """The loads of one worker. Used by the engine's thread."""

    def __init__(self, link: WorkerLink) -> None:
        self._link = link
        self._threads = background_threads("kvdock-load", _THREADS)
        self.under_way: list[LoadJob] = []
        """Loads not reported yet, in the order in which they began."""
        self._next_registration = 0.0

    def expect(self, target: Target) -> None:
        """Prepares for the loads of a namespace. The first load prepares what this could not."""
        try:
            self._threads.submit(self._link.expect, target)
        except Exception:
            _log.exception("no thread could prepare for loads")

    def begin(self, spec: LoadSpec) -> None:
        job = LoadJob(spec, self._link)
        self.under_way.append(job)
        job.begin(self._threads)

    def report(self, outcomes: Outcomes) -> None:
        for job in list(self.under_way):
            if job.is_over:
                job.report(outcomes)
                self.under_way.remove(job)
        self._register_next_session()

    def close(self) -> None:
        """Begins no more loads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _register_next_session(self) -> None:
        """Registers the next session, for which the server ends unanswered loads of the last."""
        live = self._link.current
        if live is None or time.monotonic() < self._next_registration:
            return
        for job in self.under_way:
            target = job.spec.target
            if not job.ended or job.is_over or target is None:
                continue
            if target.epoch == live.session.epoch:
                self._next_registration = time.monotonic() + _REGISTRATION_SECONDS
                self.expect(target)
                return

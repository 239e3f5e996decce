"""What the loads and stores of a worker have in common."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import ClassVar

from kvdock.errors import DeadlineExceeded, KVDockError
from kvdock_vllm.engine import affinity
from kvdock_vllm.engine.copier import CopyStoppedError
from kvdock_vllm.engine.specs import StoreOutcome
from kvdock_vllm.engine.transfers.base import Mark
from kvdock_vllm.engine.worker_link import WorkerLink

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Outcomes:
    """What became of jobs, until the engine asks."""

    filled: set[str] = field(default_factory=set)
    """Requests whose load has filled all blocks."""
    failed_to_load: set[str] = field(default_factory=set)
    """Requests whose load has ended otherwise."""
    failed_blocks: set[int] = field(default_factory=set)
    failed_loads: set[str] = field(default_factory=set)
    stores: dict[int, StoreOutcome] = field(default_factory=dict)
    """By job_id."""
    counts: dict[str, float] = field(default_factory=lambda: defaultdict(int))

    def count(self, counts: Mapping[str, float]) -> None:
        for name, amount in counts.items():
            self.counts[name] += amount


class Job(ABC):
    """One load or one store. The engine's thread begins and reports it, a background thread runs
    it. It always ends, because the engine waits for its end.
    """

    verb: ClassVar[str]

    def __init__(self, request_id: str, link: WorkerLink) -> None:
        self.request_id = request_id
        self.ended = False
        self._link = link
        self._ready = Mark()
        """What the engine had queued before the job."""
        self._future: Future[None] | None = None
        self._counts: dict[str, float] = defaultdict(int)

    def begin(self, threads: ThreadPoolExecutor) -> None:
        """Has one of the threads run the job. If that fails, the job ends."""
        try:
            self._ready = self._link.transfers.mark()
            self._future = threads.submit(self.run)
        except Exception:
            _log.exception("a load or store could not be begun")
            self.end()

    def withdraw(self) -> None:
        """Ends the job if no thread has begun it."""
        if not self.ended and self._future is not None and self._future.cancel():
            self.end()

    def run(self) -> None:
        """Does the work. The job has ended afterwards, whatever happens."""
        asked_at = time.monotonic()
        try:
            self._work()
            self._link.breaker.succeeded()
        except CopyStoppedError:
            _log.debug("request %s: %s was given up", self.request_id, self.verb)
        except KVDockError as error:
            self._fail(error, asked_at)
        except Exception:
            _log.exception("request %s: could not %s", self.request_id, self.verb)
        finally:
            self.end()

    def end(self) -> None:
        """Marks the job as ended. On any thread."""
        self.ended = True
        self._link.something_ended.set()

    @abstractmethod
    def report(self, outcomes: Outcomes) -> None:
        """Adds the outcome of the job, which has ended or does nothing more to the engine."""

    @abstractmethod
    def _work(self) -> None:
        """Copies. Raises KVDockError or CopyStoppedError."""

    def _fail(self, error: KVDockError, asked_at: float) -> None:
        if isinstance(error, DeadlineExceeded) and self._link.breaker.failed(asked_at):
            _log.warning("the KVDock server is slow: %s", error.message)
        _log.info("request %s: could not %s: %s", self.request_id, self.verb, error.message)


def background_threads(name: str, count: int) -> ThreadPoolExecutor:
    """Makes threads for jobs, which may use processors that the engine's own threads do not."""
    return ThreadPoolExecutor(count, thread_name_prefix=name, initializer=affinity.restore)

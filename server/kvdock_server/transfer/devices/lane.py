"""A lane: one thread that copies in one direction for one device.

Each device has two lanes, so that loads never wait behind stores. A lane keeps a few pieces under
way, so that the link never waits for the thread. It takes the next piece in turn from the first job
and from the job with the least left. So a small load passes a large one, and the large one is not
held up for ever. Equal jobs end one after the other, the first as soon as it can. If they shared
the link, all of them would end late and together, and the link would be idle while their callers
ask for more.

A job starts when it is ready: when the engine's kernels before it are done. The lane queries the
event and does not queue a wait for it on its stream. Such a wait would stop every job behind it,
and could not be taken back when the engine hangs or is killed.

A cancelled job ends at the next piece. ``Job.settled`` is resolved only when none of its pieces is
under way any more, because until then its memory is in use.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

from kvdock_server.transfer.plans.pieces import (
    STAGING_BUFFERS,
    ForwardedBlocks,
    Piece,
    ScatteredBlocks,
)

logger = logging.getLogger(__name__)

_LEAST_UNDER_WAY = 2
"""So many pieces are under way however large they are: one is copied, the next one waits."""
_MOST_UNDER_WAY = 6
"""No more pieces are under way than this, however small they are."""
_FIRST_POLL_SECONDS = 50e-6
"""The first pause between two looks for a ready job. Each further pause is twice as long."""
_LAST_POLL_SECONDS = 500e-6
"""The longest pause between two looks."""


class TransferFailedError(Exception):
    """Bytes of a transfer did not arrive. The message has the cause."""


class Transfer(Protocol):
    """What a job does. All methods are called on the lane's thread only."""

    @property
    def total_bytes(self) -> int:
        """About how many bytes there are to copy."""

    def ready(self) -> bool:
        """True once copying may start. Not called again after True."""

    def pieces(self) -> Iterator[Piece]:
        """The work, in order. Called once, when ready."""

    def start(self, piece: Piece) -> int:
        """Start to copy a piece; its ticket for ``Streams.wait``."""

    def finish(self) -> None:
        """The job has ended, and no piece is under way any more. Called exactly once."""


class Streams(Protocol):
    """The streams on which a lane's pieces run. Called on the lane's thread only.

    ``open`` is called once, first, and ``close`` once, last.
    """

    def open(self) -> None: ...

    def close(self) -> None: ...

    def wait(self, ticket: int, *, more_under_way: bool) -> None:
        """Return when the ticket's piece is copied. Tickets come in the order of their making.

        ``more_under_way``: there is no hurry, since the link has other pieces to go on with.
        """


@dataclass(eq=False)
class Job:
    """One transfer in a lane. ``settled`` gets the error that ended the transfer, if any.

    No piece is started after ``deadline`` (time.monotonic), even if this process was suspended
    (SIGSTOP) meanwhile: the blocks may belong to others by then.
    """

    transfer: Transfer
    deadline: float = float("inf")
    settled: Future[None] = field(default_factory=Future)
    _cancelled: bool = False
    _error: Exception | None = None
    _pieces: Iterator[Piece] | None = None
    _exhausted: bool = False
    _under_way: int = 0
    bytes_left: int = 0
    """About how many bytes are still to be started."""

    def __post_init__(self) -> None:
        self.bytes_left = self.transfer.total_bytes
        self.settled.set_running_or_notify_cancel()  # so that a cancelled waiter cannot cancel it

    def cancel(self) -> None:
        """End the job at the next piece. Any thread."""
        self._cancelled = True

    # The lane calls the rest, on its thread.

    def is_ready(self) -> bool:
        """True if the job can be run, or has to be ended."""
        try:
            return self._cancelled or self._is_late() or self.transfer.ready()
        except Exception as error:
            self._error = error
            return True

    def start_next(self) -> tuple[Piece, int] | None:
        """Start the next piece; the piece and its ticket. None if the job starts no more pieces."""
        try:
            if self._cancelled:
                raise TransferFailedError("the transfer was cancelled")
            if self._is_late():
                raise TransferFailedError("the transfer did not end in time")
            if self._error is None:
                if self._pieces is None:
                    self._pieces = self.transfer.pieces()
                piece = next(self._pieces, None)
                if piece is not None:
                    ticket = self.transfer.start(piece)
                    self._under_way += 1
                    self.bytes_left -= piece.total_bytes
                    return piece, ticket
        except Exception as error:
            self._error = error
        self._exhausted = True
        self._settle_if_done()
        return None

    def _is_late(self) -> bool:
        return time.monotonic() > self.deadline

    def piece_ended(self, error: Exception | None) -> None:
        """A started piece is not under way any more. ``error``: why it failed, or None."""
        self._under_way -= 1
        self._error = self._error or error
        self._settle_if_done()

    def give_up(self, error: TransferFailedError) -> None:
        """End the job, which has no piece under way, with ``error``."""
        self._error = self._error or error
        self._exhausted = True
        self._settle_if_done()

    def _settle_if_done(self) -> None:
        if not self._exhausted or self._under_way:
            return
        try:
            self.transfer.finish()
        except Exception as error:
            self._error = self._error or error
        if self._error is None:
            self.settled.set_result(None)
        elif isinstance(self._error, TransferFailedError):
            self.settled.set_exception(self._error)
        else:
            failure = TransferFailedError(str(self._error))
            failure.__cause__ = self._error
            self.settled.set_exception(failure)


class Lane:
    """A thread, and the jobs that it carries out. See the top of this module."""

    def __init__(self, name: str, streams: Streams, full_bytes: int) -> None:
        """``name`` is the thread's.

        Between the least and the most pieces under way, another piece is started while those under
        way have fewer than ``full_bytes`` bytes. They keep the link busy when the thread is late,
        since it shares the interpreter with others. Forwarded blocks do not count, since they do
        not use the link to the host.
        """
        self._streams = streams
        self._full_bytes = full_bytes
        self._wake = threading.Condition()
        self._new: deque[Job] = deque()
        self._closed: TransferFailedError | None = None
        self._waiting: deque[Job] = deque()
        self._running: list[Job] = []
        """In the order in which they became ready."""
        self._is_turn_of_first = False
        self._under_way: deque[tuple[Job, Piece, int]] = deque()
        self._poll_seconds = _FIRST_POLL_SECONDS
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, transfer: Transfer, deadline: float = float("inf")) -> Job:
        """Queue a transfer. After ``close`` its job fails at once. Any thread."""
        job = Job(transfer, deadline)
        with self._wake:
            if self._closed is None:
                self._new.append(job)
                self._wake.notify()
                return job
        job.give_up(self._closed)
        return job

    def close(self) -> None:
        """Cancel all jobs, wait for the pieces under way, and end the thread. Any other thread."""
        self._refuse(TransferFailedError("the server closes this device"))
        self._thread.join()

    def _refuse(self, error: TransferFailedError) -> None:
        with self._wake:
            self._closed = self._closed or error
            self._wake.notify()

    def _run(self) -> None:
        try:
            self._streams.open()
        except Exception as error:
            logger.exception("a copy thread could not start")
            self._refuse(TransferFailedError(f"the copy thread could not start: {error}"))
        while self._take_new():
            self._admit()
            while self._running and self._has_room():
                job = self._next_job()
                started = job.start_next()
                if started is not None:
                    self._under_way.append((job, *started))
                else:
                    self._running.remove(job)
            if self._under_way:
                self._await_oldest()
        while self._under_way:
            self._await_oldest()
        assert self._closed is not None
        for job in (*self._waiting, *self._running):
            job.give_up(self._closed)
        self._streams.close()

    def _next_job(self) -> Job:
        self._is_turn_of_first = not self._is_turn_of_first
        if self._is_turn_of_first:
            return self._running[0]
        return min(self._running, key=lambda job: job.bytes_left)

    def _has_room(self) -> bool:
        count = len(self._under_way)
        if count < _LEAST_UNDER_WAY:
            return True
        staged = sum(isinstance(piece, ScatteredBlocks) for _, piece, _ in self._under_way)
        if staged >= STAGING_BUFFERS:
            return False  # one more would block the thread until a buffer is free
        nbytes = sum(
            piece.total_bytes
            for _, piece, _ in self._under_way
            if not isinstance(piece, ForwardedBlocks)
        )
        return count < _MOST_UNDER_WAY and nbytes < self._full_bytes

    def _take_new(self) -> bool:
        """Take over new jobs. Sleep while there are no jobs at all. False if the lane is closed."""
        with self._wake:
            if not (self._waiting or self._running or self._under_way):
                while not self._new and self._closed is None:
                    self._wake.wait()
            self._waiting.extend(self._new)
            self._new.clear()
            return self._closed is None

    def _admit(self) -> None:
        """Move ready jobs to the end of the running ones. Sleep a moment if jobs only wait."""
        for _ in range(len(self._waiting)):
            job = self._waiting.popleft()
            (self._running if job.is_ready() else self._waiting).append(job)
        if not self._waiting or self._running or self._under_way:
            self._poll_seconds = _FIRST_POLL_SECONDS
            return
        with self._wake:
            if not self._new and self._closed is None:
                self._wake.wait(self._poll_seconds)
        self._poll_seconds = min(2 * self._poll_seconds, _LAST_POLL_SECONDS)

    def _await_oldest(self) -> None:
        job, _, ticket = self._under_way.popleft()
        try:
            self._streams.wait(ticket, more_under_way=bool(self._under_way))
        except Exception as error:
            job.piece_ended(error)
        else:
            job.piece_ended(None)

"""What the modes of a worker's transfers have in common.

The worker's background threads make these calls. Each call ends within a time limit. Afterwards
nothing touches the blocks, because the engine gives them to others, with one exception
(:class:`UnansweredError`).
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvdock import Session
from kvdock.errors import DeadlineExceeded, KVDockError
from kvdock.types import ChunkStatus, TransferMode
from kvdock_vllm.engine.copier import Stop
from kvdock_vllm.engine.specs import GroupLoad, GroupStore, Target

_log = logging.getLogger(__name__)

T = TypeVar("T")
GroupSpec = TypeVar("GroupSpec", GroupLoad, GroupStore)
Reading = Callable[[], AbstractContextManager[None]]
"""Entered while a store reads the engine's blocks. Raises CopyStoppedError if it must not."""
CountWorkers = Callable[[TransferMode, int], None]
"""Told a mode and 1 when a session begins to use it, the mode and -1 when the session is over."""


class UnansweredError(KVDockError):
    """A load failed, and the server, which may stand still, may yet write to its blocks.

    The blocks must stay the load's until ``is_over()``. Any thread may call it; it never waits.
    """

    def __init__(self, message: str, is_over: Callable[[], bool]) -> None:
        super().__init__(message)
        self.is_over = is_over


@dataclass(frozen=True, slots=True)
class Mark:
    """What the engine had queued on its device at some moment. No copy may overtake that work."""

    is_done: Callable[[], bool] = lambda: True
    """True once all of it is computed. Never waits. On any thread."""
    event: bytes = b""
    """64-byte CUDA IPC handle of the event that marks its end, for the server."""


@dataclass(frozen=True, slots=True)
class CopyRequest(Generic[GroupSpec]):
    """What is to be copied of one group, in which session, and when."""

    session: Session
    target: Target
    group: GroupSpec
    ready: Mark
    """What the engine had queued before."""
    stop: Stop
    """The copy is given up when this returns true."""
    reading: Reading = nullcontext
    """A store reads the engine's blocks only within this."""


class ChunkTransfers(ABC):
    """Copies the chunks of loads and stores, one group at a time."""

    @abstractmethod
    def load(self, request: CopyRequest[GroupLoad]) -> list[bool]:
        """Fills blocks and frees the reader's locks. Tells for each chunk whether its blocks are
        filled.

        Raises KVDockError (also UnansweredError), or CopyStoppedError when it has to stop.
        """

    @abstractmethod
    def store(self, request: CopyRequest[GroupStore]) -> list[ChunkStatus]:
        """Stores chunks. Tells what became of each.

        Raises KVDockError, or CopyStoppedError when it has to stop. Nothing more becomes visible
        then.
        """


class Transfers(ChunkTransfers):
    """The transfers of all sessions of a worker."""

    @abstractmethod
    def prepare(self, session: Session) -> None:
        """A session was opened and will be used soon."""

    @abstractmethod
    def expect(self, session: Session, target: Target) -> None:
        """Prepares for loads and stores of a namespace. Raises what they raise."""

    @abstractmethod
    def mark(self) -> Mark:
        """Marks what the engine has queued so far, for ``ready``. Called on the engine's thread."""

    @abstractmethod
    def wait_for_end(self, session: Session) -> None:
        """Waits until nothing uses the memory of a session that is over."""


def split_blocks(group: GroupLoad, in_part: int) -> list[tuple[int, tuple[int, ...]]]:
    """For each part of ``in_part`` blocks: how many blocks to skip, and the blocks to fill."""
    parts = []
    taken, skip = 0, group.skip_blocks
    for _ in range(group.first_chunk, group.end_chunk):
        block_ids = group.block_ids[taken : taken + in_part - skip]
        parts.append((skip, block_ids))
        taken += len(block_ids)
        skip = 0
    return parts


def answer(future: Future[T], verb: str, seconds: float) -> T:
    """The answer to a submitted request. Raises DeadlineExceeded if it does not come in time."""
    try:
        return future.result(seconds)
    except TimeoutError:
        if not future.cancel():
            return future.result()
        raise DeadlineExceeded(f"the server did not answer {verb} within {seconds:g} s") from None


def warn_of_limit(group: GroupStore, statuses: Sequence[ChunkStatus], kept_chunks: int) -> None:
    """Warns if the server has chunks that it does not keep as the request wants. Only the first
    time, since the server counts them (kvdock_refused_keeps_total).
    """
    global _has_warned
    there = sum(
        status in (ChunkStatus.STORED, ChunkStatus.RESERVED, ChunkStatus.EXISTS)
        for status in statuses
    )
    if group.keep is not None and kept_chunks < there and not _has_warned:
        _has_warned = True
        _log.warning(
            "%d of %d chunks are stored, but not kept for pin %s: pins keep as much as they may "
            "(kvdock pins, kvdock unpin, kvdock serve --pin-share). Later ones are not logged",
            there - kept_chunks,
            there,
            group.keep.pin,
        )


_has_warned = False

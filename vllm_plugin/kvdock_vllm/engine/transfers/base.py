"""What every way for a worker's bytes to move has in common.

Used by the worker's background threads. Every call ends: it is bounded by a time. Nothing touches
the blocks any more then, because the engine gives them to others; the one exception says so
(:class:`UnansweredError`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvdock import Session
from kvdock.errors import DeadlineExceeded, KVDockError
from kvdock.types import ChunkStatus, TransferMode
from kvdock_vllm.engine.copier import Stop
from kvdock_vllm.engine.specs import GroupLoad, GroupStore, Target

T = TypeVar("T")
GroupSpec = TypeVar("GroupSpec", GroupLoad, GroupStore)
Reading = Callable[[], AbstractContextManager[None]]
"""Entered while a store reads the engine's blocks. Raises CopyStoppedError if it must not read."""
CountWorkers = Callable[[TransferMode, int], None]
"""Told a mode with 1 when a session begins to use it, and with -1 when that session is over."""


def _always() -> bool:
    return True


class UnansweredError(KVDockError):
    """A load failed, and the server may still write to its blocks: it stands still, perhaps.

    They must stay the load's until ``is_over()``, which any thread may ask and never waits.
    """

    def __init__(self, message: str, is_over: Callable[[], bool]) -> None:
        super().__init__(message)
        self.is_over = is_over


@dataclass(frozen=True, slots=True)
class Mark:
    """What the engine had queued on its device at some moment: no copy may overtake that."""

    is_done: Callable[[], bool] = _always
    """True once all of it has been computed. Never waits. On any thread."""
    event: bytes = b""
    """64-byte CUDA IPC handle of an event that says so, for the server."""


@dataclass(frozen=True, slots=True)
class CopyRequest(Generic[GroupSpec]):
    """What is to be copied of one group, in which session, and when."""

    session: Session
    target: Target
    group: GroupSpec
    ready: Mark
    """What the engine had queued before."""
    stop: Stop
    """The copy is to be given up when this answers true."""
    reading: Reading = nullcontext
    """A store reads the engine's blocks only within this."""


class ChunkTransfers(ABC):
    """Moves the chunks of loads and stores, of one group at a time."""

    @abstractmethod
    def load(self, request: CopyRequest[GroupLoad]) -> list[bool]:
        """Fills blocks; for each chunk whether its blocks are filled. Frees the reader's locks.

        Raises KVDockError, UnansweredError among them, or CopyStoppedError when it has to stop.
        """

    @abstractmethod
    def store(self, request: CopyRequest[GroupStore]) -> list[ChunkStatus]:
        """Stores chunks; what became of each.

        Raises KVDockError, or CopyStoppedError when it has to stop; then nothing of it becomes
        visible that was not copied before.
        """


class Transfers(ChunkTransfers):
    """Copies for the sessions of a worker."""

    @abstractmethod
    def prepare(self, session: Session) -> None:
        """A session was opened, and will be used soon."""

    @abstractmethod
    def expect(self, session: Session, target: Target) -> None:
        """Loads and stores of a namespace will follow. Raises as they do."""

    @abstractmethod
    def mark(self) -> Mark:
        """What the engine has queued so far, for ``ready``. Called on its thread."""

    @abstractmethod
    def wait_for_end(self, session: Session) -> None:
        """Waits until nothing uses the memory of a session that is over."""


def split_blocks(group: GroupLoad, in_part: int) -> list[tuple[int, tuple[int, ...]]]:
    """For each part, of ``in_part`` blocks: how many of them to skip, and the blocks to fill."""
    parts = []
    taken, skip = 0, group.skip_blocks
    for _ in range(group.first_chunk, group.end_chunk):
        block_ids = group.block_ids[taken : taken + in_part - skip]
        parts.append((skip, block_ids))
        taken += len(block_ids)
        skip = 0
    return parts


def answer(future: Future[T], verb: str, seconds: float) -> T:
    """The answer of a request that was submitted. Raises DeadlineExceeded if it does not come."""
    try:
        return future.result(seconds)
    except TimeoutError:
        if not future.cancel():
            return future.result()
        raise DeadlineExceeded(f"the server did not answer {verb} within {seconds:g} s") from None

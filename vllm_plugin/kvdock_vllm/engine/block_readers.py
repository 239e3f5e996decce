"""Which stores of a worker read the engine's blocks, and how others wait for the end of reading.

A store reserves memory on the server, copies, and commits. It reads blocks only while it copies. So
whoever gives a store's blocks away waits for its copy, and for the server only as long as the copy
might wait for its turn. A server that stands still holds nobody up.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from kvdock_vllm.engine.copier import CopyStoppedError

# If the server has not answered for this long, nobody waits for it.
_ANSWER_SECONDS = 0.25


@dataclass(eq=False, slots=True)
class BlockReader:
    """One store as a reader of blocks. Only :class:`BlockReaders` changes it."""

    reads: bool = False
    """It is copying its blocks."""
    given_up: bool = False
    """Its blocks are no longer its own. It must not begin to copy, nor commit what it copies."""
    ended: bool = False

    @property
    def has_let_go(self) -> bool:
        """It does not read its blocks, and never will again."""
        return self.ended or (self.given_up and not self.reads)


class BlockReaders:
    """The stores of one thread, of which it does one at a time. The thread tells what it does; the
    engine's thread waits and gives up.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._current: BlockReader | None = None
        self._since = 0.0
        """When the thread began the current store, or began or ended to copy."""

    def begin(self, reader: BlockReader) -> None:
        """The thread begins a store."""
        with self._changed:
            self._current = reader
            self._since = time.monotonic()
            self._changed.notify_all()

    @contextmanager
    def reading(self, reader: BlockReader) -> Iterator[None]:
        """While the thread, or the server for it, reads the store's blocks.

        Raises CopyStoppedError if the store was given up.
        """
        with self._changed:
            if reader.given_up:
                raise CopyStoppedError
            reader.reads = True
        try:
            yield
        finally:
            with self._changed:
                reader.reads = False
                self._since = time.monotonic()
                self._changed.notify_all()

    def end(self, reader: BlockReader) -> None:
        """The store has ended."""
        with self._changed:
            reader.ended = True
            if self._current is reader:
                self._current = None
            self._changed.notify_all()

    def give_up(self, reader: BlockReader) -> None:
        """The store may not begin to read. A copy under way must still be waited for."""
        with self._changed:
            reader.given_up = True

    @property
    def is_late(self) -> bool:
        """Whether the server has kept the thread waiting for too long."""
        with self._changed:
            return time.monotonic() >= self._late_at()

    def wait(self, readers: Sequence[BlockReader], seconds: float) -> bool:
        """Waits until all these stores have let go of their blocks.

        False if that takes longer than ``seconds``, or the server :attr:`is_late`.
        """
        deadline = time.monotonic() + seconds
        with self._changed:
            while not all(reader.has_let_go for reader in readers):
                left = min(deadline, self._late_at()) - time.monotonic()
                if left <= 0:
                    return False
                self._changed.wait(left)
        return True

    def _late_at(self) -> float:
        """When the server will be late if nothing happens. Called under the lock."""
        if self._current is None or self._current.reads:
            return math.inf
        return self._since + _ANSWER_SECONDS

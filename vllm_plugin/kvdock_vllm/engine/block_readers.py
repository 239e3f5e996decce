"""Which stores of a worker read the engine's blocks, and how who needs the blocks ends that.

A store asks the server for memory, copies, and has the server seal what was copied. It reads blocks
only while it copies. So who gives its blocks to others waits for its copy, and for the server no
longer than a copy would have to wait for its turn: one that stands still holds nobody up.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from kvdock_vllm.engine.copier import CopyStoppedError

# A server that has not answered for so long is not waited for.
_ANSWER_SECONDS = 0.25


@dataclass(eq=False, slots=True)
class BlockReader:
    """One store, as far as it reads blocks. What changes is changed by :class:`BlockReaders`."""

    reads: bool = False
    """It copies blocks now."""
    given_up: bool = False
    """Its blocks are not its own any more: it must begin no copy, and what it copies must not
    become visible."""
    ended: bool = False

    @property
    def has_let_go(self) -> bool:
        """It reads its blocks no more, and never will."""
        return self.ended or (self.given_up and not self.reads)


class BlockReaders:
    """The stores of one thread, which does one at a time, and those that wait for their turn.

    The thread tells what it does; another one waits and gives up.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._current: BlockReader | None = None
        self._since = 0.0
        """When the thread began with the current store, or began or ended to copy."""

    def begin(self, reader: BlockReader) -> None:
        """The thread is at this store now."""
        with self._changed:
            self._current = reader
            self._since = time.monotonic()
            self._changed.notify_all()

    @contextmanager
    def reading(self, reader: BlockReader) -> Iterator[None]:
        """While the thread, or the server for it, reads the store's blocks.

        Raises CopyStoppedError if the store was given up before.
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
        """Nothing more is done for this store."""
        with self._changed:
            reader.ended = True
            if self._current is reader:
                self._current = None
            self._changed.notify_all()

    def give_up(self, reader: BlockReader) -> None:
        """The store may read no more. What it reads just now is to be waited for."""
        with self._changed:
            reader.given_up = True

    @property
    def is_late(self) -> bool:
        """The server has kept the thread waiting for too long."""
        with self._changed:
            return time.monotonic() >= self._late_at()

    def wait(self, readers: Sequence[BlockReader], seconds: float) -> bool:
        """True as soon as all these stores have let go of their blocks.

        False after that time, or when the server :attr:`is_late`.
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
        """When the server is late, if nothing happens until then. Under the lock."""
        if self._current is None or self._current.reads:
            return math.inf
        return self._since + _ANSWER_SECONDS

"""Which part goes first when memory is wanted.

A policy only orders; the index decides what may go at all (never what is pinned or still being
written, never a prefix before what extends it) and tells the policy of each part that becomes
evictable. A part that ceases to be evictable is not taken out: that would cost every lookup. It is
found out when its turn comes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from heapq import heappop, heappush, heapreplace
from itertools import count
from typing import Final, TypeAlias

from kvdock_server.index.chunk import Part


class EvictionPolicy(ABC):
    """An order of parts whose slots have the same sizes."""

    @abstractmethod
    def __len__(self) -> int:
        """How many parts it knows."""

    @abstractmethod
    def add(self, part: Part) -> None:
        """Take in a part that may be evicted from now on. It may be known already."""

    @abstractmethod
    def discard(self, part: Part) -> None:
        """A part that was added has left the index."""

    @abstractmethod
    def settle(self, looks: int) -> bool:
        """Find out, with so many looks, which part is first; False if it takes more of them."""

    @abstractmethod
    def first(self) -> Part | None:
        """The part to evict first; None if none may be evicted. At once where it is settled."""


MakePolicy: TypeAlias = Callable[[Callable[[Part], bool]], EvictionPolicy]
"""Makes a policy, given what tells whether a part may be evicted."""

_Entry: TypeAlias = tuple[int, int, Part]

# What each change of the order does besides, so that nothing is left for when memory is wanted.
_LOOKS_A_CHANGE: Final = 2
_MOVES_A_CHANGE: Final = 4
_LOOKS_A_TURN: Final = 1_000


class LeastRecentlyUsed(EvictionPolicy):
    """The part whose last use lies furthest back goes first.

    A heap by ``Part.last_used`` as it was when the part was added; a part that was used since goes
    back in at its new place. ``Part.queued`` keeps each part in it at most once.

    When most of its parts have left the index, the others move to a new heap, a few with each
    change. They leave the old one from its end: what stays of a heap is a heap.
    """

    def __init__(self, evictable: Callable[[Part], bool]) -> None:
        self._evictable = evictable
        self._heap: list[_Entry] = []
        self._old: list[_Entry] = []
        self._gone = 0
        self._tie = count()

    def __len__(self) -> int:
        return len(self._heap) + len(self._old)

    def add(self, part: Part) -> None:
        if not part.queued:
            part.queued = True
            heappush(self._heap, (part.last_used, next(self._tie), part))
        self._keep_tidy()

    def discard(self, part: Part) -> None:
        self._gone += 1
        self._keep_tidy()

    def settle(self, looks: int) -> bool:
        while looks and not self._is_right(self._front()):
            looks -= 1
        return looks > 0

    def first(self) -> Part | None:
        while not self.settle(_LOOKS_A_TURN):
            pass
        front = self._front()
        return front[0][2] if front else None

    def _front(self) -> list[_Entry]:
        """The heap with the first entry."""
        if not self._old or (self._heap and self._heap[0] < self._old[0]):
            return self._heap
        return self._old

    def _is_right(self, heap: list[_Entry]) -> bool:
        """Whether a heap's first part may go first. If not it is put where it belongs."""
        if not heap:
            return True
        last_used, _, part = heap[0]
        if not self._evictable(part):
            self._forget(heappop(heap))
        elif last_used != part.last_used:
            heapreplace(heap, (part.last_used, next(self._tie), part))
        else:
            return True
        return False

    def _keep_tidy(self) -> None:
        # A leaf that was extended, or used, stays where it was in the heap. Found out as fast as
        # others come, such parts are never many when memory is wanted, which would wait for all.
        self.settle(_LOOKS_A_CHANGE)
        if not self._old and 2 * self._gone > len(self._heap):
            self._old, self._heap = self._heap, []
        for _ in range(min(_MOVES_A_CHANGE, len(self._old))):
            entry = self._old.pop()
            if entry[2].detached:
                self._forget(entry)
            else:
                heappush(self._heap, entry)

    def _forget(self, entry: _Entry) -> None:
        part = entry[2]
        part.queued = False
        self._gone -= part.detached

"""Which part goes first when memory is wanted.

A policy only orders; the index decides what may go at all (never what is pinned or still being
written, never a prefix before what extends it) and tells the policy of each part that becomes
evictable. A part that ceases to be evictable is not taken out: that would cost every lookup. It is
found out when its turn comes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush, heapreplace
from itertools import count

from kvdock_server.index.chunk import Part


class EvictionPolicy(ABC):
    """An order of parts whose slots have one size."""

    @abstractmethod
    def add(self, part: Part) -> None:
        """Take in a part that may be evicted from now on. It may be known already."""

    @abstractmethod
    def first(self) -> Part | None:
        """The part to evict first; None if none may be evicted."""

    @abstractmethod
    def in_order(self, looks: int) -> Iterator[Part]:
        """The parts that are known now, evictable or not any more, the first to go first; it ends
        after ``looks`` looks at them.

        What changes while this is used changes nothing about it.
        """

    @abstractmethod
    def purge(self) -> None:
        """Forget the parts that are detached."""


MakePolicy = Callable[[Callable[[Part], bool]], EvictionPolicy]
"""Makes the policy for one size of slots, given what tells whether a part may be evicted."""

_STALE_FOR_ONE = 2


class LeastRecentlyUsed(EvictionPolicy):
    """The part whose last use lies furthest back goes first.

    A heap by ``Part.last_used`` as it was when the part was added; a part that was used since goes
    back in at its new place. ``Part.queued`` keeps each part in it at most once, so the heap is
    never larger than the index.
    """

    def __init__(self, evictable: Callable[[Part], bool]) -> None:
        self._evictable = evictable
        self._heap: list[tuple[int, int, Part]] = []
        self._tie = count()

    def add(self, part: Part) -> None:
        if not part.queued:
            part.queued = True
            heappush(self._heap, (part.last_used, next(self._tie), part))
        # A leaf that was extended, or used, stays where it was in the heap. Found out as fast as
        # others come, such parts are never many when memory is wanted, which would wait for all.
        for _ in range(_STALE_FOR_ONE):
            if not self._heap or self._is_right(self._heap[0]):
                break

    def first(self) -> Part | None:
        while self._heap:
            if self._is_right(self._heap[0]):
                return self._heap[0][2]
        return None

    def _is_right(self, first: tuple[int, int, Part]) -> bool:
        """Whether the first one may go first. If not it is put where it belongs."""
        last_used, _, part = first
        if not self._evictable(part):
            heappop(self._heap)
            part.queued = False
        elif last_used != part.last_used:
            heapreplace(self._heap, (part.last_used, next(self._tie), part))
        else:
            return True
        return False

    def in_order(self, looks: int) -> Iterator[Part]:
        self.first()  # forgets those in front of it that are not evictable, once and for all
        heap = self._heap.copy()
        for _ in range(looks):
            if not heap:
                return
            last_used, tie, part = heap[0]
            if last_used == part.last_used:
                heappop(heap)
                yield part
            else:
                heapreplace(heap, (part.last_used, tie, part))

    def purge(self) -> None:
        self._heap = [entry for entry in self._heap if not entry[2].detached]
        heapify(self._heap)

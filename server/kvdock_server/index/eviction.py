"""Which part is evicted first when memory is wanted.

A policy only ranks parts. ``Part.is_evictable`` says which parts may be evicted at all. The index
tells a queue of each part that becomes evictable. It does not tell when a part ceases to be
evictable, since that would cost every lookup. The queue finds out when the part's turn comes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from heapq import heappop, heappush, heapreplace
from itertools import count
from typing import Final, TypeAlias

from kvdock_server.index.chunk import Part


class EvictionPolicy(ABC):
    """Ranks the parts of a pool, whatever their sizes: the lowest rank is evicted first."""

    def __init__(self, pool_bytes: int) -> None:
        self._pool_bytes = pool_bytes

    @abstractmethod
    def rank(self, part: Part) -> int:
        """No lower after a use than before."""

    @abstractmethod
    def latest_rank(self, use: int) -> int:
        """The highest rank of a part of normal priority that was last used at ``use``, which is
        counted as ``Part.last_used`` is.
        """

    def highest_rank(self, use: int) -> int:
        """The same of a part of any priority."""
        return self.latest_rank(use) + self._pool_bytes

    @abstractmethod
    def added(self, part: Part) -> None:
        """A part may be evicted from now on."""

    @abstractmethod
    def evicted(self, part: Part) -> None:
        """A part has left the index. It could have been evicted before."""


class LeastRecentlyUsed(EvictionPolicy):
    """The part whose last use lies furthest back goes first, ``Part.priority`` considered."""

    def rank(self, part: Part) -> int:
        # Mostly no part has another priority.
        if not part.chunk.space.priorities:
            return part.last_used
        return part.last_used + part.priority * self._pool_bytes

    def latest_rank(self, use: int) -> int:
        return use

    def added(self, part: Part) -> None:
        pass

    def evicted(self, part: Part) -> None:
        pass


_Entry: TypeAlias = tuple[int, int, Part]

# Each change of the order does this much tidying, so that none is left when memory is wanted.
_LOOKS_A_CHANGE: Final = 2
_MOVES_A_CHANGE: Final = 4
_LOOKS_A_TURN: Final = 1_000


class EvictionQueue:
    """Parts that may be evicted and whose slots have the same sizes, the lowest rank first.

    The parts are in a heap, by their ranks when they were added. A part whose rank has risen since,
    as it does with a use, gets its new place when it comes to the front. ``Part.queued`` keeps each
    part in the heap at most once.

    When most parts of the heap have left the index, the others move to a new heap, a few with each
    change. They are taken from the end of the old heap, since what remains of it is a heap then.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        self._heap: list[_Entry] = []
        self._old: list[_Entry] = []
        self._gone = 0
        self._tie = count()

    def __len__(self) -> int:
        """How many parts the queue has, those that have left the index included."""
        return len(self._heap) + len(self._old)

    def add(self, part: Part) -> None:
        """Take in a part that may be evicted from now on. The queue may have it already."""
        if not part.queued:
            part.queued = True
            self._policy.added(part)
            heappush(self._heap, (self._policy.rank(part), next(self._tie), part))
        self._keep_tidy()

    def discard(self, part: Part) -> None:
        """A part that was added has left the index."""
        self._policy.evicted(part)
        self._gone += 1
        self._keep_tidy()

    def settle(self, looks: int) -> bool:
        """Find out which part is first, with ``looks`` looks at parts; False if it takes more."""
        while looks and not self._is_right(self._front()):
            looks -= 1
        return looks > 0

    def first(self) -> Part | None:
        """The part to evict first; None if none may be evicted. Fast once ``settle`` was True."""
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
        """Whether a heap's first part may go first. If not, the part is put where it belongs."""
        if not heap:
            return True
        queued_rank, _, part = heap[0]
        if not part.is_evictable:
            self._forget(heappop(heap))
            return False
        rank = self._policy.rank(part)
        if rank > queued_rank:
            heapreplace(heap, (rank, next(self._tie), part))
            return False
        return True

    def _keep_tidy(self) -> None:
        # A part that was extended or used stays where it was in the heap until it is looked at.
        # Memory would have to wait until all such parts at the front were looked at, so they must
        # never become many.
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

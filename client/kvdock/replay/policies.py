"""Eviction policies for blocks of equal size, as they are written down elsewhere.

A prompt's blocks are used from its end to its beginning. So its end is evicted first: a block is of
no use without all blocks before it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Sequence
from typing import Final, Protocol


class Policy(Protocol):
    """A pool of some blocks under one policy."""

    def use(self, prompt: Sequence[int]) -> int:
        """A prompt comes: how many of its blocks, from the first on, are in the pool.

        Then those that are not are stored.
        """


def found(prompt: Sequence[int], pool: Container[int]) -> int:
    """How many blocks of a prompt, from the first on, are in a pool."""
    for place, block in enumerate(prompt):
        if block not in pool:
            return place
    return len(prompt)


class LeastRecentlyUsed:
    """The block whose last use lies furthest back goes first."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._pool: OrderedDict[int, None] = OrderedDict()

    def use(self, prompt: Sequence[int]) -> int:
        pool = self._pool
        hit = found(prompt, pool)
        for block in reversed(prompt):
            pool[block] = None
            pool.move_to_end(block)
        while len(pool) > self._size:
            pool.popitem(last=False)
        return hit


_SMALL_SHARE: Final = 0.1
_MOST_USES: Final = 3


class S3Fifo:
    """Two queues: a small one for new blocks, and the main one for those that were used again.

    What leaves the small queue unused is remembered for a while, and goes into the main queue when
    it comes back. A block of the main queue that was used since goes round once more.
    """

    def __init__(self, size: int) -> None:
        self._small_size = max(1, int(size * _SMALL_SHARE))
        self._size = size
        self._small: OrderedDict[int, None] = OrderedDict()
        self._main: OrderedDict[int, None] = OrderedDict()
        self._ghosts: OrderedDict[int, None] = OrderedDict()
        self._uses: dict[int, int] = {}

    def use(self, prompt: Sequence[int]) -> int:
        uses = self._uses  # of what is in the pool
        hit = found(prompt, uses)
        for block in reversed(prompt):
            if block in uses:
                uses[block] = min(uses[block] + 1, _MOST_USES)
                continue
            while len(uses) >= self._size:
                self._evict()
            uses[block] = 0
            if self._ghosts.pop(block, 0) is None:
                self._main[block] = None
            else:
                self._small[block] = None
        return hit

    def _evict(self) -> None:
        uses = self._uses
        if len(self._small) >= self._small_size or not self._main:
            block, _ = self._small.popitem(last=False)
            if uses[block] > 1:
                uses[block] = 0
                self._main[block] = None
                return
            del uses[block]
            self._ghosts[block] = None
            if len(self._ghosts) > self._size - self._small_size:
                self._ghosts.popitem(last=False)
            return
        block, _ = self._main.popitem(last=False)
        if uses[block]:
            uses[block] -= 1
            self._main[block] = None
        else:
            del uses[block]


class AdaptiveReplacement:
    """ARC: two LRU lists, of blocks used once and more often, whose shares adapt themselves.

    What leaves either list is remembered for a while. If it comes back, its list should have been
    longer.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._wanted = 0.0  # how long _once should be
        self._once: OrderedDict[int, None] = OrderedDict()
        self._often: OrderedDict[int, None] = OrderedDict()
        self._once_ghosts: OrderedDict[int, None] = OrderedDict()
        self._often_ghosts: OrderedDict[int, None] = OrderedDict()

    def use(self, prompt: Sequence[int]) -> int:
        hit = 0
        for block in prompt:
            if block not in self._once and block not in self._often:
                break
            hit += 1
        for block in reversed(prompt):
            self._use(block)
        return hit

    def _use(self, block: int) -> None:
        once, often = self._once, self._often
        if block in once:
            del once[block]
            often[block] = None
        elif block in often:
            often.move_to_end(block)
        elif block in self._once_ghosts:
            step = max(1.0, len(self._often_ghosts) / len(self._once_ghosts))
            self._wanted = min(float(self._size), self._wanted + step)
            self._make_room(was_often=False)
            del self._once_ghosts[block]
            often[block] = None
        elif block in self._often_ghosts:
            step = max(1.0, len(self._once_ghosts) / len(self._often_ghosts))
            self._wanted = max(0.0, self._wanted - step)
            self._make_room(was_often=True)
            del self._often_ghosts[block]
            often[block] = None
        else:
            self._make_room_for_new()
            once[block] = None

    def _make_room_for_new(self) -> None:
        if len(self._once) + len(self._once_ghosts) >= self._size:
            if self._once_ghosts:
                self._once_ghosts.popitem(last=False)
                self._make_room(was_often=False)
            else:
                self._once.popitem(last=False)
            return
        if self._held + len(self._once_ghosts) + len(self._often_ghosts) >= 2 * self._size:
            self._often_ghosts.popitem(last=False)
        self._make_room(was_often=False)

    def _make_room(self, *, was_often: bool) -> None:
        if self._held < self._size:
            return
        length = len(self._once)
        is_long = length > self._wanted or (was_often and length == self._wanted)
        if length and (is_long or not self._often):
            block, _ = self._once.popitem(last=False)
            self._once_ghosts[block] = None
        else:
            block, _ = self._often.popitem(last=False)
            self._often_ghosts[block] = None

    @property
    def _held(self) -> int:
        return len(self._once) + len(self._often)

"""What no policy can beat."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from typing import Final

from kvdock.replay.policies import found
from kvdock.replay.trace import NEVER, Trace

_STALE_ENTRIES: Final = 4
"""The heap is made anew when it has this many entries for each block of the pool."""


class Optimum:
    """Belady's policy, which knows the future: what is used again last goes first.

    What is not used again is not stored at all. A block is used again no later than those that
    extend it, so the pool never has a block without those before it.
    """

    def __init__(self, size: int, trace: Trace) -> None:
        self._size = size
        self._coming = iter(trace.next_uses)
        self._pool: dict[int, int] = {}  # the next use of each block
        self._heap: list[tuple[int, int, int]] = []  # -next use, -place in the prompt, block

    def use(self, prompt: Sequence[int]) -> int:
        pool, heap = self._pool, self._heap
        hit = found(prompt, pool)
        for place, (block, following) in enumerate(zip(prompt, next(self._coming), strict=True)):
            if following == NEVER:
                pool.pop(block, None)
            else:
                pool[block] = following
                heappush(heap, (-following, -place, block))
        while len(pool) > self._size:
            following, _, block = heappop(heap)
            if pool.get(block) == -following:
                del pool[block]
        if len(heap) > _STALE_ENTRIES * (self._size + len(prompt)):
            heap[:] = [entry for entry in heap if pool.get(entry[2]) == -entry[0]]
            heapify(heap)
        return hit

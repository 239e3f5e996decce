"""The server's policy ``lru-with-memory``, as the server does it."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush, heapreplace
from typing import Final

from kvdock.replay.policies import found
from kvdock.replay.trace import NO_BLOCK, Trace

HEAD_START: Final = 8
"""As in the server (index/remembered.py)."""


class LruWithMemory:
    """The block whose last use lies furthest back goes first, but what was used again has a start.

    A block was used again if it was found, or if it was evicted before. The start is longer, the
    more of what is evicted had been evicted before. Uses are dated by the blocks stored so far.
    Only a block that no other in the pool extends may be evicted.
    """

    def __init__(self, size: int, trace: Trace) -> None:
        self._size = size
        self._parents = trace.parents
        self._pool: dict[int, int] = {}  # how many blocks in the pool extend each
        self._last_used = [0] * trace.distinct
        self._used_again = bytearray(trace.distinct)
        self._evicted = bytearray(trace.distinct)
        self._share = 0.0  # of what was evicted lately: had been evicted before
        self._head_start = 0
        self._stored = 0
        self._heap: list[tuple[int, int, int]] = []  # rank, tie, block
        self._queued = bytearray(trace.distinct)
        self._ties = 0

    def use(self, prompt: Sequence[int]) -> int:
        hit = found(prompt, self._pool)
        if hit:
            # The blocks before it get this when it is evicted.
            self._last_used[prompt[hit - 1]] = self._stored
            self._used_again[prompt[hit - 1]] = True
        last = prompt[hit - 1] if hit else NO_BLOCK
        for block in prompt[hit:]:
            if last != NO_BLOCK:
                self._pool[last] += 1
            if len(self._pool) >= self._size and not self._evict():
                self._leave(last)
                break
            self._pool[block] = 0
            self._used_again[block] = False
            self._stored += 1
            last = block
        for block in prompt[hit:]:
            self._last_used[block] = self._stored
        self._offer(last)
        return hit

    def _evict(self) -> bool:
        """False if no block may be evicted."""
        heap = self._heap
        while heap:
            queued_rank, _, block = heap[0]
            if self._pool.get(block):
                heappop(heap)
                self._queued[block] = False
                continue
            rank = self._rank(block)
            if rank > queued_rank:
                self._ties += 1
                heapreplace(heap, (rank, self._ties, block))
                continue
            heappop(heap)
            self._queued[block] = False
            self._remember(block)
            del self._pool[block]
            parent = self._parents[block]
            if parent != NO_BLOCK:
                self._last_used[parent] = max(self._last_used[parent], self._last_used[block])
                self._used_again[parent] |= self._used_again[block]
                self._leave(parent)
            return True
        return False

    def _leave(self, parent: int) -> None:
        """A block that extended this one is not in the pool any more."""
        if parent != NO_BLOCK:
            self._pool[parent] -= 1
            self._offer(parent)

    def _remember(self, block: int) -> None:
        self._share += (self._evicted[block] - self._share) / self._size
        self._evicted[block] = True
        self._head_start = int(HEAD_START * self._share * self._size)

    def _offer(self, block: int) -> None:
        """The block may be evicted, if no other extends it."""
        if block != NO_BLOCK and not self._pool[block] and not self._queued[block]:
            self._queued[block] = True
            self._used_again[block] |= self._evicted[block]
            self._ties += 1
            heappush(self._heap, (self._rank(block), self._ties, block))

    def _rank(self, block: int) -> int:
        return self._last_used[block] + self._used_again[block] * self._head_start

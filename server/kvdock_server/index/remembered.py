"""An eviction policy that remembers what was evicted, for work in which prompts come back late."""

from __future__ import annotations

from typing import Final

from kvdock_server.index.chunk import Part
from kvdock_server.index.eviction import EvictionPolicy

_FEWEST_CELLS: Final = 1 << 20
_BYTES_A_CELL: Final = 1 << 16
"""Of the pool. So a chunk of 2 MiB or more has 32 cells, and hardly any is forgotten early."""

HEAD_START: Final = 8
"""How many fillings of the pool a part that was used again is ahead, if all comes back."""


class EvictedParts:
    """Remembers parts that were evicted.

    A part is remembered in one cell, until another part is evicted into the same cell. So what was
    evicted long ago is forgotten, and the memory never fills up. ``cells``, a power of two, have 4
    bytes each, taken at once: what is taken later holds up a call.
    """

    def __init__(self, cells: int) -> None:
        self._cells = memoryview(bytearray(4 * cells)).cast("I")
        self._mask = cells - 1

    def __contains__(self, part: Part) -> bool:
        cell, mark = self._place(part)
        return bool(self._cells[cell] == mark)

    def add(self, part: Part) -> bool:
        """The part was evicted. True if it was remembered already."""
        cell, mark = self._place(part)
        is_known = bool(self._cells[cell] == mark)
        self._cells[cell] = mark
        return is_known

    def _place(self, part: Part) -> tuple[int, int]:
        """The part's cell, and what it leaves there; an empty cell has 0."""
        chunk = part.chunk
        number = hash(chunk.key) ^ hash(chunk.space.namespace.name) + part.position
        return number & self._mask, number >> 32 & 0xFFFFFFFF or 1


class LruWithMemory(EvictionPolicy):
    """The part whose last use lies furthest back goes first, but what was used again has a start.

    A part was used again if a lookup has hit it, or if it was evicted before. It counts as used
    later than it was. The start is longer, the more of what is evicted had been evicted before: in
    a pool that holds nearly all that is used again, it is nothing.
    """

    def __init__(self, pool_bytes: int) -> None:
        super().__init__(pool_bytes)
        cells = 1 << ((pool_bytes - 1) // _BYTES_A_CELL).bit_length()
        self._evicted = EvictedParts(max(cells, _FEWEST_CELLS))
        self._share = 0.0  # of the last pool_bytes or so that were evicted: had been evicted before
        self._head_start = 0  # bytes stored, as Part.last_used

    def rank(self, part: Part) -> int:
        head_start = self._head_start if part.used_again else 0
        if not part.chunk.space.priorities:
            return part.last_used + head_start
        return part.last_used + head_start + part.priority * self._pool_bytes

    def latest_rank(self, use: int) -> int:
        return use + self._head_start

    def added(self, part: Part) -> None:
        if not part.used_again:
            part.used_again = part in self._evicted

    def evicted(self, part: Part) -> None:
        space = part.chunk.space
        if not space.is_cleared:
            weight = sum(space.namespace.groups[part.position].shard_bytes) / self._pool_bytes
            self._share += (self._evicted.add(part) - self._share) * min(1.0, weight)
            self._head_start = int(HEAD_START * self._share * self._pool_bytes)

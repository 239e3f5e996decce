"""Which bytes of the pool are in use. Pure: it hands out offsets and touches no memory.

The pool is cut into slabs of one size. A run is a slab, or a few in a row, and has slots of one
size only. When its last slot is given back, its slabs can serve slots of any size. So slots never
fragment, and memory moves between sizes in whole slabs. Slots are handed out in ascending order
where possible, so that chunks that are stored together lie together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

PAGE_BYTES = 4096
# A run may have this many slabs more than its first slot needs, to waste less at its end.
_EXTRA_SLABS = 7


@dataclass(frozen=True)
class SlotStats:
    """``used`` and ``free`` count slots by their size. ``free_slabs`` serve no size at the moment,
    ``longest_free`` of them lie in a row.
    """

    used: Mapping[int, int]
    free: Mapping[int, int]
    free_slabs: int
    longest_free: int


class _Run:
    """Slabs in a row, with slots of one size."""

    __slots__ = ("capacity", "first", "free", "slabs", "slot_bytes")

    def __init__(self, first: int, slabs: int, slab_bytes: int, slot_bytes: int) -> None:
        self.first = first
        self.slabs = slabs
        self.slot_bytes = slot_bytes
        self.capacity = slabs * slab_bytes // slot_bytes
        base = first * slab_bytes
        self.free = [base + index * slot_bytes for index in reversed(range(self.capacity))]


class SlotAllocator:
    """Hands out slots of any size up to the pool's.

    ``add`` makes memory available as it is faulted in. ``ready_bytes`` is how much of it there is,
    ``limit_bytes`` how much there will be in the end.
    """

    def __init__(self, limit_bytes: int, slab_bytes: int) -> None:
        self.slab_bytes = slab_bytes
        self.limit_bytes = limit_bytes // slab_bytes * slab_bytes
        self.ready_bytes = 0
        self._free_slabs = bytearray(limit_bytes // slab_bytes)
        self._runs: dict[int, _Run] = {}  # by each slab of the run
        self._partial: dict[int, dict[int, _Run]] = {}  # by slot size, then first slab

    @staticmethod
    def slot_bytes(size: int) -> int:
        """Bytes of the slot that holds ``size`` bytes."""
        return -(-size // PAGE_BYTES) * PAGE_BYTES

    def add(self, offset: int, nbytes: int) -> None:
        """``nbytes`` from ``offset`` on can be handed out. Both are multiples of a slab."""
        first = offset // self.slab_bytes
        count = nbytes // self.slab_bytes
        self._free_slabs[first : first + count] = b"\x01" * count
        self.ready_bytes += count * self.slab_bytes

    def fits(self, size: int) -> bool:
        """True if an empty pool could hold a slot of ``size`` bytes."""
        return self.slot_bytes(size) <= self.limit_bytes

    def allocate(self, size: int) -> int | None:
        """Offset of a slot, or None if no memory is free for it."""
        slot_bytes = self.slot_bytes(size)
        partial = self._partial.setdefault(slot_bytes, {})
        if not partial:
            run = self._start_run(slot_bytes)
            if run is None:
                return None
            partial[run.first] = run
        run = next(iter(partial.values()))
        offset = run.free.pop()
        if not run.free:
            del partial[run.first]
        return offset

    def free(self, offset: int) -> None:
        """Give a slot back."""
        run = self._runs[offset // self.slab_bytes]
        run.free.append(offset)
        partial = self._partial[run.slot_bytes]
        if len(run.free) == run.capacity:
            partial.pop(run.first, None)
            for slab in range(run.first, run.first + run.slabs):
                del self._runs[slab]
                self._free_slabs[slab] = 1
        else:
            partial[run.first] = run

    def same_run(self, offset: int) -> list[int]:
        """Offsets of all slots in use in the run of the slot at ``offset``, this one included."""
        run = self._runs[offset // self.slab_bytes]
        base = run.first * self.slab_bytes
        free = set(run.free)
        slots = range(base, base + run.capacity * run.slot_bytes, run.slot_bytes)
        return [slot for slot in slots if slot not in free]

    def stats(self) -> SlotStats:
        """What is in use at the moment. Takes time in proportion to the number of slabs."""
        used: Counter[int] = Counter()
        free: Counter[int] = Counter()
        for first, run in self._runs.items():
            if first == run.first:
                used[run.slot_bytes] += run.capacity - len(run.free)
                free[run.slot_bytes] += len(run.free)
        gaps = bytes(self._free_slabs).split(b"\x00")
        return SlotStats(used, free, self._free_slabs.count(1), max(map(len, gaps)))

    def _start_run(self, slot_bytes: int) -> _Run | None:
        shortest = -(-slot_bytes // self.slab_bytes)
        lengths = range(shortest, shortest + _EXTRA_SLABS + 1)
        least_waste_first = sorted(
            lengths, key=lambda slabs: (slabs * self.slab_bytes % slot_bytes / slabs, slabs)
        )
        for slabs in least_waste_first:
            first = self._free_slabs.find(b"\x01" * slabs)
            if first >= 0:
                run = _Run(first, slabs, self.slab_bytes, slot_bytes)
                for slab in range(first, first + slabs):
                    self._runs[slab] = run
                    self._free_slabs[slab] = 0
                return run
        return None

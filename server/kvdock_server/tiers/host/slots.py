"""Which bytes of the pool are in use. Pure: offsets only, no memory is touched.

The pool is cut into slabs of one size. A run is a slab, or a few in a row, and has slots of one
size only. When its last slot is given back, its slabs can serve slots of any size. So slots never
fragment, and memory moves between sizes in whole slabs. Slots are handed out in ascending order
where possible, so that chunks that are stored together lie together.

For each size of slots the pool is divided into windows. A window is a few slabs in a row, just so
many that little memory is left over behind their last slot. A run takes a window if one is free.
Then a size gets as much memory as in a fresh pool, whatever was there before. Otherwise the run is
makeshift: it takes whatever slabs are free.

On a host with several sockets each slab lies on one of them (see placement.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

PAGE_BYTES = 4096

_EXTRA_SLABS = 7
"""A run may have this many slabs more than one slot needs, to lose less at its end."""
_HARDLY_MORE = 1 / 128
"""Windows are made as short as costs the pool at most this share of its slots: a few slabs in a row
are found more easily than many."""


class Run:
    """Slabs in a row, from slab ``first`` on, with slots of one size.

    ``base`` is the offset of the first slot, and ``free`` has the offsets of the free slots.
    ``not_before`` is set by ``rebuild_around`` (index/windows.py) when it has looked at a makeshift
    run in vain, to the number of a use (``Part.last_used``). It looks at the run again only when
    that use, too, counts as long ago. ``partial`` are the allocator's runs with free slots, of the
    same size and socket. A run lies on the socket on which it begins.
    """

    def __init__(
        self, first: int, slabs: int, slab_bytes: int, slot_bytes: int, *, is_makeshift: bool
    ) -> None:
        self.first = first
        self.slabs = slabs
        self.slot_bytes = slot_bytes
        self.is_makeshift = is_makeshift
        self.not_before = 0
        self.partial: dict[int, Run] = {}
        self.capacity = slabs * slab_bytes // slot_bytes
        self.base = first * slab_bytes
        self.free = [self.base + index * slot_bytes for index in reversed(range(self.capacity))]

    def used(self) -> list[int]:
        """Offsets of the slots in use, ascending."""
        free = set(self.free)
        end = self.base + self.capacity * self.slot_bytes
        return [slot for slot in range(self.base, end, self.slot_bytes) if slot not in free]

    def all_slabs(self) -> range:
        """The numbers of the run's slabs."""
        return range(self.first, self.first + self.slabs)


class SlotAllocator:
    """Hands out slots of any size up to the pool's.

    ``add`` makes memory available as it is faulted in: ``ready_bytes`` so far, ``limit_bytes`` in
    the end. It lies on so many ``sockets``.
    """

    def __init__(self, limit_bytes: int, slab_bytes: int, sockets: int = 1) -> None:
        self.slab_bytes = slab_bytes
        self.slabs = limit_bytes // slab_bytes
        self.limit_bytes = self.slabs * slab_bytes
        self.sockets = range(sockets)
        self._ready_on = [0] * sockets  # bytes
        self._socket_of = bytearray(self.slabs)
        self._free_slabs = bytearray(self.slabs)
        # The same of each socket's slabs alone.
        self._free_on = [bytearray(self.slabs) for _ in self.sockets]
        self._claimed: set[int] = set()  # slabs that are being emptied for one size
        self._runs: dict[int, Run] = {}  # by each slab of the run
        # By slot size and socket, then first slab: runs that have free slots.
        self._partial: defaultdict[tuple[int, int], dict[int, Run]] = defaultdict(dict)
        self._window_slabs: dict[int, int] = {}  # by slot size

    @staticmethod
    def slot_bytes(size: int) -> int:
        """Bytes of the slot that holds ``size`` bytes."""
        return -(-size // PAGE_BYTES) * PAGE_BYTES

    def add(self, offset: int, nbytes: int, socket: int = 0) -> None:
        """``nbytes`` from ``offset`` on can be handed out. Both are multiples of a slab.

        They lie on ``socket``, an index.
        """
        first = offset // self.slab_bytes
        for slab in range(first, first + nbytes // self.slab_bytes):
            self._socket_of[slab] = socket
            self._set_free(slab, True)
            self._ready_on[socket] += self.slab_bytes

    @property
    def ready_bytes(self) -> int:
        """How much can be handed out so far, or is in use."""
        return sum(self._ready_on)

    def ready_and_free(self) -> list[tuple[int, int]]:
        """For each socket, its bytes of ``ready_bytes``, and how many of these are free."""
        free = [slabs.count(1) * self.slab_bytes for slabs in self._free_on]
        for (slot_bytes, socket), runs in self._partial.items():
            free[socket] += sum(len(run.free) for run in runs.values()) * slot_bytes
        return list(zip(self._ready_on, free, strict=True))

    def fits(self, size: int) -> bool:
        """True if an empty pool could hold a slot of ``size`` bytes."""
        return self.slot_bytes(size) <= self.limit_bytes

    def allocate(self, size: int, home: int | None = None) -> int | None:
        """Offset of a slot, in a run that has one or in a free window; None if there is neither.

        With a ``home``, an index of a socket, a slot there if there is one.
        """
        slot_bytes = self.slot_bytes(size)
        for sockets in (self.sockets,) if home is None else ((home,), self.sockets):
            for socket in sockets:
                partial = self._partial[slot_bytes, socket]
                if partial:
                    run = next(iter(partial.values()))
                    offset = run.free.pop()
                    if not run.free:
                        del partial[run.first]
                    return offset
            if 1 in self._free_slabs:
                slabs = self.window_slabs(slot_bytes)
                first = self._free_window(slabs, sockets)
                if first is not None:
                    return self.start_run(first, slabs, slot_bytes)
        return None

    def socket_of(self, offset: int) -> int:
        """On which socket a slot lies."""
        return self._socket_of[offset // self.slab_bytes]

    def allocate_anywhere(self, size: int) -> int | None:
        """Offset of a slot in a new, makeshift run: in the free slabs that lose least.

        None if no free slabs in a row could hold the slot.
        """
        if self._free_slabs.find(1) < 0:
            return None
        slot_bytes = self.slot_bytes(size)

        def loss(slabs: int) -> tuple[float, int]:
            return slabs * self.slab_bytes % slot_bytes / slabs, slabs

        for slabs in sorted(self._lengths(slot_bytes), key=loss):
            first = self._free_slabs.find(b"\x01" * slabs)
            if first >= 0:
                return self.start_run(first, slabs, slot_bytes, is_makeshift=True)
        return None

    def free(self, offset: int) -> None:
        """Give a slot back."""
        run = self.run_of(offset)
        run.free.append(offset)
        if len(run.free) == run.capacity:
            run.partial.pop(run.first, None)
            for slab in run.all_slabs():
                del self._runs[slab]
                self._set_free(slab, slab not in self._claimed)
        elif not self._is_claimed(run):
            run.partial[run.first] = run

    # Windows

    def window_slabs(self, slot_bytes: int) -> int:
        """How many slabs a window for slots of this size has."""
        slabs = self._window_slabs.get(slot_bytes)
        if slabs is None:
            slabs = self._window_slabs[slot_bytes] = self._best_length(slot_bytes)
        return slabs

    def shortest(self, slot_bytes: int) -> int:
        """The fewest slabs in a row that hold a slot of this size."""
        return -(-slot_bytes // self.slab_bytes)

    def window_of(self, offset: int, slot_bytes: int) -> int | None:
        """First slab of the window around an offset; None beyond the last window."""
        slabs = self.window_slabs(slot_bytes)
        first = offset // self.slab_bytes // slabs * slabs
        return first if first + slabs <= self.slabs else None

    def run_of(self, offset: int) -> Run:
        """The run that a slot in use belongs to."""
        return self._runs[offset // self.slab_bytes]

    def runs_in(self, first: int, slabs: int) -> list[Run] | None:
        """The runs that have any of the slabs [first, first + slabs).

        None if a run with all of these slabs cannot be made by emptying runs: because some slabs
        are not faulted in yet, or claimed.
        """
        runs: dict[int, Run] = {}
        for slab in range(first, first + slabs):
            run = self._runs.get(slab)
            if run is not None:
                runs[run.first] = run
            elif not self._free_slabs[slab]:
                return None
        if any(self._is_claimed(run) for run in runs.values()):
            return None
        return list(runs.values())

    def claim(self, first: int, slabs: int) -> None:
        """Keep slabs for one use: runs there give no slots any more. ``runs_in`` must allow it."""
        for slab in range(first, first + slabs):
            self._claimed.add(slab)
            self._set_free(slab, False)
            run = self._runs.get(slab)
            if run is not None:
                run.partial.pop(run.first, None)

    def is_empty(self, first: int, slabs: int) -> bool:
        """True if no run has one of the slabs."""
        return not any(slab in self._runs for slab in range(first, first + slabs))

    def release(self, first: int, slabs: int) -> None:
        """Give up a claim. Slabs in which a run was started are no part of it any more."""
        claimed = self._claimed.intersection(range(first, first + slabs))
        self._claimed -= claimed
        for slab in claimed:
            run = self._runs.get(slab)
            if run is None:
                self._set_free(slab, True)
            elif run.free and not self._is_claimed(run):
                run.partial[run.first] = run

    def start_run(
        self, first: int, slabs: int, slot_bytes: int, *, is_makeshift: bool = False
    ) -> int:
        """Let slabs serve slots of a size; the first slot. No run may have any of the slabs."""
        run = Run(first, slabs, self.slab_bytes, slot_bytes, is_makeshift=is_makeshift)
        run.partial = self._partial[slot_bytes, self._socket_of[first]]
        self._claimed.difference_update(run.all_slabs())
        for slab in run.all_slabs():
            self._runs[slab] = run
            self._set_free(slab, False)
        offset = run.free.pop()
        if run.free:
            run.partial[first] = run
        return offset

    def _is_claimed(self, run: Run) -> bool:
        return bool(self._claimed) and not self._claimed.isdisjoint(run.all_slabs())

    def _set_free(self, slab: int, is_free: bool) -> None:
        self._free_slabs[slab] = is_free
        self._free_on[self._socket_of[slab]][slab] = is_free

    def _free_window(self, slabs: int, sockets: Sequence[int]) -> int | None:
        """A free window on one of the sockets: on that with the most free slabs."""
        maps = [self._free_on[socket] for socket in sockets]
        if len(sockets) > 1:
            maps.sort(key=lambda free: -free.count(1))
            maps.append(self._free_slabs)  # a window may lie on two sockets
        wanted = b"\x01" * slabs
        for free in maps:
            first = free.find(wanted)
            while first >= 0 and first % slabs:
                first = free.find(wanted, first + slabs - first % slabs)
            if first >= 0:
                return first
        return None

    def _lengths(self, slot_bytes: int) -> range:
        """How many slabs a run for slots of this size may have."""
        shortest = self.shortest(slot_bytes)
        return range(shortest, min(shortest + _EXTRA_SLABS, self.slabs) + 1)

    def _best_length(self, slot_bytes: int) -> int:
        def slots_in_pool(slabs: int) -> int:
            runs, rest = divmod(self.slabs, slabs)
            return runs * (slabs * self.slab_bytes // slot_bytes) + (
                rest * self.slab_bytes // slot_bytes
            )

        most = max(map(slots_in_pool, self._lengths(slot_bytes)))
        enough = most - most * _HARDLY_MORE
        return next(n for n in self._lengths(slot_bytes) if slots_in_pool(n) >= enough)

"""Emptying slabs in a row, so that they can serve slots of another size (see tiers/host/slots.py).

All chunks that lie in these slabs are evicted, and all chunks that extend them. Such slabs are
called a place here.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heapify, heappop, heappush
from typing import Final, NamedTuple, Protocol

from kvdock_server.index.chunk import NO_SLOT, Chunk, Part, with_descendants
from kvdock_server.index.eviction import EvictionPolicy
from kvdock_server.steps import Steps
from kvdock_server.tiers.host.slots import Run, SlotAllocator

# Emptying a place also evicts all chunks that extend those in it. If the beginning of all prompts
# lies there, these are all chunks. So places are compared by how many chunks leave. A place from
# which no more chunks leave than it has slots in use is taken at once (_Contents.are_cheap).
_PLACES_TO_CHOOSE_FROM: Final = 16
"""If no place is taken at once, the cheapest of this many is."""
_CHUNKS_AT_ONCE: Final = 20_000
"""If more chunks would leave, a place is emptied only ``at_any_cost``, and only if there is no
cheaper one."""
_CHUNKS_FOR_A_SLOT: Final = 4
"""Only for ``rebuild_around``: as many chunks may leave for each slot of the new window."""

_LOOKS_A_STEP: Final = 128
"""How many chunks are counted between two yields."""
_MOST_KINDS: Final = 64
"""Of how many kinds of places the ranking is kept."""


class Evict(Protocol):
    """Evicts parts of a chunk."""

    def __call__(self, chunk: Chunk, *parts: Part | None) -> None: ...


class _Contents(NamedTuple):
    """What leaves if slots are emptied.

    ``roots`` are the chunks that lie in the slots. ``chunks`` counts them and all that extend them.
    ``newest`` is the highest rank, and ``last_used`` the latest use, of any of these.
    """

    roots: list[Chunk]
    chunks: int
    newest: int
    last_used: int

    @property
    def are_cheap(self) -> bool:
        """True if no more chunks leave than there are slots in use."""
        return self.chunks <= len(self.roots)


class _Kind(NamedTuple):
    """Places for slots of one size: its windows, or any slabs in a row that just hold a slot."""

    slot_bytes: int
    slabs: int
    are_windows: bool


class _Place(NamedTuple):
    """A place from slab ``-minus_first`` on, in the order in which places are looked into.

    ``newest`` is the highest rank of what was found there. Of places with the same rank the last
    one comes first: the slots of a prompt ascend, so its end lies there.
    """

    newest: int
    minus_first: int


class Windows:
    """Empties places. ``sealed`` has the part of each sealed slot, by the slot's offset."""

    def __init__(
        self,
        slots: SlotAllocator,
        sealed: dict[int, Part],
        evict: Evict,
        policy: EvictionPolicy,
    ) -> None:
        self._slots = slots
        self._sealed = sealed
        self._evict = evict
        self._policy = policy
        # Heaps. Since a place was ranked, what lies there may have been used again. Or the newest
        # of it has left: then the place is looked into later than it could be.
        self._places: dict[_Kind, list[_Place]] = {}

    def empty_window(
        self, slot_bytes: int, before: int, now: int, *, at_any_cost: bool = False
    ) -> Steps[int | None]:
        """A slot in a window of other sizes, in which all has a lower rank than ``before``.

        None if there is no such window. ``now``, at least ``before``, is the rank of what is used.
        """
        kind = _Kind(slot_bytes, self._slots.window_slabs(slot_bytes), are_windows=True)
        return (yield from self._empty_one(kind, before, now, at_any_cost))

    def empty_gap(
        self, slot_bytes: int, before: int, now: int, *, at_any_cost: bool = False
    ) -> Steps[int | None]:
        """Likewise a slot in a makeshift run: in slabs that need be no window."""
        shortest = self._slots.shortest(slot_bytes)
        if shortest == self._slots.window_slabs(slot_bytes) == 1:
            return None  # every slab is a window
        kind = _Kind(slot_bytes, shortest, are_windows=False)
        return (yield from self._empty_one(kind, before, now, at_any_cost))

    def rebuild_around(self, oldest: Part, slot_bytes: int, now: int) -> Steps[int | None]:
        """If part ``oldest`` lies in a makeshift run: empty the window around it; a slot there.

        None unless all that lies in the window is about as old as the part: chunks of its size at
        least half as old, chunks of other sizes older. Nor may more chunks lie in the window than
        it will have slots.
        """
        kind = _Kind(slot_bytes, self._slots.window_slabs(slot_bytes), are_windows=True)
        makeshift = self._makeshift_run(oldest, slot_bytes)
        rank = self._policy.rank(oldest)
        half_time = (rank + now) // 2
        if makeshift is None or makeshift.not_before >= half_time:
            return None
        first = self._slots.window_of(makeshift.base, slot_bytes)
        runs = self._slots.runs_in(first, kind.slabs) if first is not None else None
        makeshift.not_before = half_time
        if first is None or runs is None:
            return None
        slots = kind.slabs * self._slots.slab_bytes // slot_bytes
        most = _CHUNKS_FOR_A_SLOT * slots
        mine = yield from self._look_into([r for r in runs if r.slot_bytes == slot_bytes], most)
        others = yield from self._look_into([r for r in runs if r.slot_bytes != slot_bytes], most)
        if mine is None or others is None or max(mine.chunks, others.chunks) > most:
            return None
        contents = _Contents(
            mine.roots + others.roots,
            mine.chunks + others.chunks,
            max(mine.newest, others.newest),
            max(mine.last_used, others.last_used),
        )
        if mine.newest >= half_time or others.newest >= rank:
            makeshift.not_before = contents.newest
            return None
        if len(contents.roots) > slots:
            return None
        return (yield from self._empty(kind, first, contents))

    def _makeshift_run(self, oldest: Part, slot_bytes: int) -> Run | None:
        for offset in oldest.slots:
            run = self._slots.run_of(offset) if offset != NO_SLOT else None
            if run is not None and run.is_makeshift and run.slot_bytes == slot_bytes:
                return run
        return None

    # Choosing

    def _empty_one(
        self, kind: _Kind, before: int, now: int, at_any_cost: bool
    ) -> Steps[int | None]:
        while True:
            chosen = yield from self._choose(kind, before, now, at_any_cost)
            if chosen is None:
                return None
            offset = yield from self._empty(kind, *chosen)
            if offset is not None:
                return offset

    def _choose(
        self, kind: _Kind, before: int, now: int, at_any_cost: bool
    ) -> Steps[tuple[int, _Contents] | None]:
        """First slab and contents of a place to empty: a cheap one, or the cheapest of some.

        The oldest places are looked into first. Each is ranked anew by what is found there: ``now``
        if it cannot be emptied, ``before`` if that costs very much.
        """
        places = self._places.get(kind)
        if places is None:
            places = yield from self._rank_all(kind)
        best: tuple[int, _Contents] | None = None
        dear: int | None = None
        looked_into: list[_Place] = []
        candidates = 0
        try:
            while candidates < _PLACES_TO_CHOOSE_FROM and places and places[0].newest < before:
                place = heappop(places)
                looked_into.append(place._replace(newest=now))
                yield
                first = -place.minus_first
                most = best[1].chunks if best is not None else _CHUNKS_AT_ONCE
                contents = yield from self._contents(kind, first, most)
                if contents is None:
                    continue
                looked_into[-1] = place._replace(newest=contents.newest)
                if contents.newest >= before:
                    continue
                candidates += 1
                if contents.chunks <= most:
                    best = first, contents
                    is_oldest = not places or contents.newest <= places[0].newest
                    if contents.are_cheap and is_oldest:
                        return best
                elif best is None and not at_any_cost:
                    looked_into[-1] = place._replace(newest=before)
                elif dear is None:
                    dear = first
        finally:
            for place in looked_into:
                heappush(places, place)
        if best is None and dear is not None:
            contents = yield from self._contents(kind, dear, None)
            if contents is not None and contents.newest < before:
                best = dear, contents
        return best

    def _rank_all(self, kind: _Kind) -> Steps[list[_Place]]:
        """All places of a kind, each by the highest rank of the chunks that begin its runs."""
        places: list[_Place] = []
        step = kind.slabs if kind.are_windows else 1
        for first in range(0, self._slots.slabs - kind.slabs + 1, step):
            parts = [self._sealed.get(r.base) for r in self._slots.runs_in(first, kind.slabs) or ()]
            newest = max((self._rank(part.chunk) for part in parts if part is not None), default=0)
            places.append(_Place(newest, -first))
            yield
        heapify(places)
        if len(self._places) == _MOST_KINDS:
            del self._places[next(iter(self._places))]
        return self._places.setdefault(kind, places)

    def _contents(self, kind: _Kind, first: int, most: int | None) -> Steps[_Contents | None]:
        """What leaves if a place is emptied; None if it cannot be.

        A place cannot be emptied if somebody uses a chunk there, if it serves slots of the wanted
        size already, or if it is claimed.
        """
        runs = self._slots.runs_in(first, kind.slabs)
        if not runs or any(run.slot_bytes == kind.slot_bytes for run in runs):
            return None
        return (yield from self._look_into(runs, most))

    def _look_into(self, runs: Iterable[Run], most: int | None) -> Steps[_Contents | None]:
        """What leaves if runs are emptied; None if somebody uses any of it.

        Stops counting beyond ``most`` chunks.
        """
        roots: list[Chunk] = []
        for run in runs:
            for offset in run.used():
                part = self._sealed.get(offset)
                if part is None or part.is_gone:
                    return None  # the slot is being written, or its chunk was cleared and is read
                roots.append(part.chunk)
            yield
        chunks = newest = last_used = 0
        for chunk in with_descendants(roots):
            if chunk.in_use:
                return None
            chunks += 1
            newest = max(newest, self._rank(chunk))
            last_used = max(last_used, chunk.last_used)
            if most is not None and chunks > most:
                break
            if chunks % _LOOKS_A_STEP == 0:
                yield
        return _Contents(roots, chunks, newest, last_used)

    def _rank(self, chunk: Chunk) -> int:
        """The highest rank of any of its parts; 0 if it has none."""
        return max((self._policy.rank(part) for part in chunk.parts if part is not None), default=0)

    # Emptying

    def _empty(self, kind: _Kind, first: int, contents: _Contents) -> Steps[int | None]:
        """Empty a place; a slot there. None if some of it was used meanwhile."""
        if self._slots.runs_in(first, kind.slabs) is None:
            return None
        self._slots.claim(first, kind.slabs)
        try:
            for root in contents.roots:
                if not (yield from self._evict_all(root, contents.last_used)):
                    return None
            if not self._slots.is_empty(first, kind.slabs):
                return None
            if kind.are_windows:
                return self._slots.start_run(first, kind.slabs, kind.slot_bytes)
        finally:
            self._slots.release(first, kind.slabs)
        return self._slots.allocate_anywhere(kind.slot_bytes)

    def _evict_all(self, root: Chunk, last_used: int) -> Steps[bool]:
        """Evict a chunk and all that extends it, children first.

        False if one of them is in use, or was used after ``last_used``.
        """
        chunk = root
        while root.is_known:
            while chunk.first_child is not None:
                chunk = chunk.first_child
            if chunk.in_use or chunk.last_used > last_used:
                return False
            above = chunk.parent
            self._evict(chunk, *chunk.parts)
            yield
            if chunk is not root and above is not None:
                chunk = above
        return True

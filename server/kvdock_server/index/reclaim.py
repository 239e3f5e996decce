"""Making room: which chunks leave so that a shard of some size gets a slot.

The policies order what may be evicted, one for each size of slots. Where no chunk of the wanted
size may go, or chunks of other sizes are older, whole runs of slots are emptied, since only whole
slabs can serve another size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from heapq import merge
from typing import Protocol

from kvdock_server.index.chunk import NO_SLOT, Chunk, Part, with_descendants
from kvdock_server.index.eviction import EvictionPolicy, MakePolicy
from kvdock_server.pool.slots import SlotAllocator

# What extends the chunks in a run goes with them: everything, if the beginning of all prompts lies
# there. So a run that costs few chunks for each of its slots is taken at once, else the cheapest of
# a few.
_OTHERS_FOR_A_SLOT = 4
_RUNS_TO_CHOOSE_FROM = 8
_OTHERS_AT_ONCE = 20_000

# One reserve looks at about so many chunks and slots for such runs, which takes some 40 ms; and at
# so many, and only once in a while, where it could have a chunk of its own size go.
_LOOKS = 60_000
_LOOKS_FOR_OLDER = 10_000
_RESERVES_BETWEEN = 64


class Evict(Protocol):
    """Takes parts of a chunk out of the index."""

    def __call__(self, chunk: Chunk, *parts: Part | None) -> None: ...


class Reclaimer:
    """Finds memory in an allocator by evicting. ``sealed`` has the part of each sealed slot."""

    def __init__(self, slots: SlotAllocator, evict: Evict, make_policy: MakePolicy) -> None:
        self.sealed: dict[int, Part] = {}
        self._slots = slots
        self._evict = evict
        self._make_policy = make_policy
        self._policies: dict[int, EvictionPolicy] = {}  # by slot size
        self._none_older_until: dict[int, int] = {}  # by slot size

    def offer(self, chunk: Chunk) -> None:
        """Tell the policy which parts of a chunk may go."""
        for part in chunk.parts:
            if part is not None and part.is_evictable:
                size = self._slots.slot_bytes(chunk.space.shard_bytes(part.position, 0))
                policy = self._policies.get(size)
                if policy is None:
                    policy = self._policies[size] = self._make_policy(_is_evictable)
                policy.add(part)

    def purge(self) -> None:
        """Forget the parts that have left the index."""
        for policy in self._policies.values():
            policy.purge()

    def evict_next(self) -> bool:
        """Evict the part that is to go first; False if none may go."""
        victim = self._first_victim()
        if victim is None:
            return False
        self._evict(victim.chunk, victim)
        return True

    def make_room(self, size: int, runs: Iterator[list[Chunk]]) -> int | None:
        """Memory for a shard, made by evicting where need be; None if that cannot be.

        ``runs`` are those of ``runs_for``, which are used up from one shard to the next.
        """
        offset = self._slots.allocate(size)
        if offset is not None:
            return offset
        own = self._own_victim(size)
        if own is None or self._first_victim() is not own:
            offset = self._allocate_from_others(size, runs)
            if own is None or offset is not None:
                return offset
            # What is older goes all the same, one for one. In the end runs can be emptied.
            if (victim := self._first_victim()) is not None:
                self._evict(victim.chunk, victim)
                offset = self._slots.allocate(size)
                if offset is not None:
                    return offset
        self._evict(own.chunk, own)
        return self._slots.allocate(size)

    def runs_for(self, size: int, now: int) -> Iterator[list[Chunk]]:
        """The emptiable runs for slots of a size. Only older ones as long as one of that size could
        go; then there is none ([]) until none of that size is left.
        """
        slot_bytes = self._slots.slot_bytes(size)
        own = self._own_victim(size)
        if own is not None and now >= self._none_older_until.get(slot_bytes, 0):
            yield from self._emptiable_runs(_LOOKS_FOR_OLDER, own.last_used)
            self._none_older_until[slot_bytes] = now + _RESERVES_BETWEEN
        while self._own_victim(size) is not None:
            yield []
        yield from self._emptiable_runs(_LOOKS)

    def _allocate_from_others(self, size: int, runs: Iterator[list[Chunk]]) -> int | None:
        """Memory taken from chunks of other sizes: whole runs of slots, oldest victims first."""
        for roots in runs:
            if not roots:
                return None
            for root in roots:
                for chunk in reversed(list(with_descendants([root]))):
                    self._evict(chunk, *chunk.parts)
            offset = self._slots.allocate(size)
            if offset is not None:
                return offset
        return None

    def _emptiable_runs(self, looks: int, before: int | None = None) -> Iterator[list[Chunk]]:
        """The chunks in runs of slots of which all, and what extends them, may go at that time.

        With ``before`` all of that was used before then, too.
        """
        taken, found = False, True
        while found and looks > 0:  # what was taken may have made others cheaper
            found, tried = False, 0
            cheapest: list[Chunk] = []
            large: list[Chunk] = []
            least = _OTHERS_AT_ONCE
            for roots, looked in self._runs_by_age(looks, before):
                cost = _cost(roots, least, before)
                looks -= looked + cost
                tried += bool(roots)
                if cost > least:
                    large = large or roots
                elif cost:
                    cheapest, least = roots, cost
                is_cheap = least <= _OTHERS_FOR_A_SLOT * len(cheapest)
                if cheapest and (is_cheap or tried >= _RUNS_TO_CHOOSE_FROM):
                    found = taken = True
                    yield cheapest
                    tried, cheapest, least = 0, [], _OTHERS_AT_ONCE
                if looks <= 0:
                    break
            if before is None and not taken and not cheapest and _cost(large):
                cheapest = large  # much for little, but else a size could never get any room
            if cheapest:
                found = taken = True
                yield cheapest

    def _runs_by_age(self, looks: int, before: int | None) -> Iterator[tuple[list[Chunk], int]]:
        """The chunks in each run of slots that is full, the one with the oldest victim first, or []
        for a victim that leads to none; and what was looked at for that.
        """
        tried: set[int] = set()
        orders = [policy.in_order(looks) for policy in self._policies.values()]
        for victim in merge(*orders, key=lambda part: part.last_used):
            if before is not None and victim.last_used >= before:
                return
            offset = next((offset for offset in victim.slots if offset != NO_SLOT), None)
            if offset is None or offset in tried or not victim.is_evictable:
                yield [], 1
                continue
            run = self._slots.same_run(offset)
            tried.update(run)
            parts = [part for used in run if (part := self.sealed.get(used)) is not None]
            # Where one lacks somebody is writing. A pinned one may have been cleared since.
            can_go = len(parts) == len(run) and not any(part.pins for part in parts)
            yield [part.chunk for part in parts] if can_go else [], 1 + len(run)

    def _own_victim(self, size: int) -> Part | None:
        """The part to evict first of those whose slots have that size."""
        policy = self._policies.get(self._slots.slot_bytes(size))
        return policy.first() if policy is not None else None

    def _first_victim(self) -> Part | None:
        """The part to evict first, whatever its size."""
        victims = [victim for policy in self._policies.values() if (victim := policy.first())]
        return min(victims, key=lambda part: part.last_used, default=None)


def _is_evictable(part: Part) -> bool:
    return part.is_evictable


def _cost(roots: Iterable[Chunk], most: int | None = None, before: int | None = None) -> int:
    """How many chunks go with these, 0 if one is in use, or was used since ``before``; counts no
    further than beyond ``most``.
    """
    cost = 0
    for chunk in with_descendants(roots):
        if chunk.in_use or (before is not None and chunk.last_used >= before):
            return 0
        cost += 1
        if most is not None and cost > most:
            break
    return cost

"""Making room: which chunks are evicted so that a shard of some size gets a slot.

There is one eviction policy for each set of slot sizes. A part with a slot of the wanted size (the
own size) gives this slot as it is. Memory of other sizes comes as whole windows of slabs
(tiers/host/slots.py), which are emptied of all that lies in them. "First" is the part that its
policy would evict first. These ways are tried in this order:

1. A window of other sizes in which all was last used before the first of the own size. If none of
   the own size may be evicted: before half of the time since the first of all sizes was used.
2. Slabs that are free, but no window: a makeshift run.
3. Slabs of other sizes that are no window, unused for twice as long as the first of the own size.
4. If the first of the own size lies in a makeshift run: the window around this run, once all that
   lies there is about as old.
5. The first of the own size.
6. If none of the own size may be evicted: whatever is not in use, a window if there is one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvdock_server.index.chunk import Chunk, Part
from kvdock_server.index.eviction import EvictionPolicy, MakePolicy
from kvdock_server.index.windows import Evict, Windows
from kvdock_server.steps import Backlog, Steps
from kvdock_server.tiers.host.slots import SlotAllocator

_LOOKS_A_STEP: Final = 128


class Reclaimer:
    """Finds memory in an allocator by evicting.

    ``sealed`` has the part of each sealed slot, by the slot's offset.
    """

    def __init__(
        self, slots: SlotAllocator, backlog: Backlog, evict: Evict, make_policy: MakePolicy
    ) -> None:
        self.sealed: dict[int, Part] = {}
        self._slots = slots
        self._backlog = backlog
        self._evict = evict
        self._make_policy = make_policy
        self._policies: dict[frozenset[int], EvictionPolicy] = {}  # by the sizes of a part's slots
        self._policy_of: dict[tuple[int, ...], EvictionPolicy] = {}  # by shard_bytes
        self._windows = Windows(slots, self.sealed, evict)

    def offer(self, chunk: Chunk) -> None:
        """Tell the policies which parts of a chunk may be evicted."""
        for part in chunk.parts:
            if part is not None and part.is_evictable:
                self._policy(part).add(part)

    def discard(self, part: Part) -> None:
        """A part has left the index."""
        if part.queued:
            self._policy(part).discard(part)

    def first_victim(self) -> Steps[Part | None]:
        """The part to evict first; None if none may be evicted.

        What was cleared is freed before anything is evicted.
        """
        yield from self._backlog.all_steps()
        return (yield from self._first_of(list(self._policies.values())))

    def make_room(self, size: int, now: int) -> Steps[int | None]:
        """Offset of a slot for a shard of ``size`` bytes; evicts if need be.

        None if there is no such slot. ``now`` is the number of the use that wants it.
        """
        slot_bytes = self._slots.slot_bytes(size)
        while True:
            offset = self._slots.allocate(size)
            if offset is not None:
                return offset
            if self._backlog.step():
                yield
                continue
            policies = [each for sizes, each in self._policies.items() if slot_bytes in sizes]
            own = yield from self._first_of(policies)
            if own is None:
                return (yield from self._take_from_others(slot_bytes, now))
            offset = yield from self._take_from_older(own, slot_bytes, now)
            if offset is not None:
                return offset
            if own.is_evictable:  # others may have used it since
                self._evict(own.chunk, own)
            yield

    def _take_from_older(self, own: Part, slot_bytes: int, now: int) -> Steps[int | None]:
        """A slot by ways 1 to 4. ``own`` is the first of the own size."""
        offset = yield from self._windows.empty_window(slot_bytes, own.last_used, now)
        if offset is None:
            offset = self._slots.allocate_anywhere(slot_bytes)
        if offset is None:
            twice_as_old = own.last_used - (now - own.last_used)
            offset = yield from self._windows.empty_gap(slot_bytes, twice_as_old, now)
        if offset is None:
            offset = yield from self._windows.rebuild_around(own, slot_bytes, now)
        return offset

    def _take_from_others(self, slot_bytes: int, now: int) -> Steps[int | None]:
        """A slot by ways 1, 2 and 6: no part of the own size may be evicted."""
        first = yield from self._first_of(list(self._policies.values()))
        half_time = (first.last_used + now) // 2 if first is not None else 0
        offset = yield from self._windows.empty_window(slot_bytes, half_time, now)
        if offset is None:
            offset = self._slots.allocate_anywhere(slot_bytes)
        if offset is None:
            offset = yield from self._windows.empty_window(slot_bytes, now, now, at_any_cost=True)
        if offset is None:
            offset = yield from self._windows.empty_gap(slot_bytes, now, now, at_any_cost=True)
        return offset

    # The order of parts

    def _policy(self, part: Part) -> EvictionPolicy:
        shard_bytes = part.chunk.space.namespace.groups[part.position].shard_bytes
        policy = self._policy_of.get(shard_bytes)
        if policy is None:
            sizes = frozenset(map(self._slots.slot_bytes, shard_bytes))
            policy = self._policies.get(sizes)
            if policy is None:
                self._forget_empty_policies()
                policy = self._policies[sizes] = self._make_policy()
            self._policy_of[shard_bytes] = policy
        return policy

    def _forget_empty_policies(self) -> None:
        self._policies = {sizes: policy for sizes, policy in self._policies.items() if len(policy)}
        self._policy_of.clear()

    def _first_of(self, policies: Sequence[EvictionPolicy]) -> Steps[Part | None]:
        """The part to evict first, of those in any of the policies."""
        first = None
        for policy in policies:
            while not policy.settle(_LOOKS_A_STEP):
                yield
            part = policy.first()
            if part is not None and (first is None or part.last_used < first.last_used):
                first = part
        return first

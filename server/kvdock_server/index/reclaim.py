"""Making room: which chunks are evicted so that a shard gets a slot of its size.

A free slot is taken first, then the memory of what was cleared. If there is neither, something is
evicted. Memory of other sizes comes as slabs (tiers/host/slots.py): all chunks that lie in these
must go, and all chunks that extend those.

``oldest`` is the part that is evicted first, of all parts with slots of the wanted size. How old a
part is, its rank in the eviction policy tells. These ways are tried in this order:

1. Empty a window of slots of other sizes, if all in it is older than ``oldest``. What lies there is
   worth less than ``oldest``, and a window loses little memory.
2. Take free slabs that are no window, as a makeshift run. Nothing is evicted for it.
3. Empty slabs of other sizes that are no window, if all in them is twice as old as ``oldest``. More
   is asked than for a window, since a makeshift run may lose more memory.
4. If ``oldest`` lies in a makeshift run: empty the window around this run, if all in it is about as
   old. So makeshift runs give way to windows in time.
5. Evict ``oldest`` and take its slot. On a host with several sockets a slot on one of them may be
   wanted, the device's home. Then the oldest part there goes instead, if it is nearly as old.

There may be no part of the wanted size that may be evicted. Perhaps no chunk of this size has been
stored yet. Then these ways are tried:

1. Empty a window of slots of other sizes, if all in it is at least half as old as the oldest part
   of any size. So a new size does not take what was used lately.
2. Take free slabs that are no window.
3. Empty any window, or else any slabs, that nobody uses. Otherwise the shard could not be stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvdock_server.index.chunk import Chunk, Part
from kvdock_server.index.eviction import EvictionPolicy, EvictionQueue
from kvdock_server.index.windows import Evict, Windows
from kvdock_server.steps import Backlog, Steps
from kvdock_server.tiers.host.slots import SlotAllocator

_LOOKS_A_STEP: Final = 128
"""How many parts a queue looks at between two yields."""
_NEARLY_AS_OLD: Final = 7 / 8
"""The least age, as a share of the oldest part's, at which another part is evicted instead.

In simulations of a full pool, with the conversations of an engine on each of two sockets, this puts
.93 of the chunks of 600 conversations at home, and .59 of 60 long ones, where .50 is chance. Hits
change by less than half a percent. With 3/4 it is .98 and .71, and the long ones lose 2% of hits.
"""


class Reclaimer:
    """Finds memory in an allocator by evicting.

    ``sealed`` has the part of each sealed slot, by the slot's offset.
    """

    def __init__(
        self, slots: SlotAllocator, backlog: Backlog, evict: Evict, policy: EvictionPolicy
    ) -> None:
        self.sealed: dict[int, Part] = {}
        self._slots = slots
        self._backlog = backlog
        self._evict = evict
        self._policy = policy
        # The shards of a part may have slots of several sizes. Parts with the same sizes share one
        # queue, if their first shards lie on the same socket.
        self._queues: dict[tuple[frozenset[int], int], EvictionQueue] = {}
        # By socket, then shard_bytes.
        self._queue_of: list[dict[tuple[int, ...], EvictionQueue]] = [{} for _ in slots.sockets]
        self._windows = Windows(slots, self.sealed, evict, policy)

    def offer(self, chunk: Chunk) -> None:
        """Tell the queues which parts of a chunk may be evicted."""
        for part in chunk.parts:
            if part is not None and part.is_evictable:
                self._queue(part).add(part)

    def discard(self, part: Part) -> None:
        """A part has left the index."""
        if part.queued:
            self._queue(part).discard(part)

    def first_victim(self) -> Steps[Part | None]:
        """The part to evict first; None if none may be evicted.

        What was cleared is freed before anything is evicted.
        """
        yield from self._backlog.all_steps()
        return (yield from self._first_of(list(self._queues.values())))

    def make_room(self, size: int, use: int, home: int | None = None) -> Steps[int | None]:
        """Offset of a slot for a shard of ``size`` bytes; evicts if need be.

        None if there is no such slot. ``use`` is the index's use counter (no clock), as in
        ``Part.last_used``. The slot lies on the socket ``home`` where that costs little.
        """
        slot_bytes = self._slots.slot_bytes(size)
        while True:
            offset = self._slots.allocate(size, home)
            if offset is not None:
                return offset
            if self._backlog.step():
                yield
                continue
            oldest = yield from self._first_of(self._queues_with(slot_bytes))
            if oldest is None:
                return (yield from self._take_from_others(slot_bytes, use))
            now = self._policy.latest_rank(use)
            offset = yield from self._take_from_older(oldest, slot_bytes, now)
            if offset is not None:
                return offset
            if home is not None:
                oldest = yield from self._at_home(oldest, slot_bytes, now, home)
            if oldest.is_evictable:  # others may have used it since
                self._evict(oldest.chunk, oldest)
            yield

    def _queues_with(self, slot_bytes: int, home: int | None = None) -> list[EvictionQueue]:
        """The queues of parts with such slots: all, or those of one socket."""
        return [
            queue
            for (sizes, socket), queue in self._queues.items()
            if slot_bytes in sizes and (home is None or home == socket)
        ]

    def _at_home(self, oldest: Part, slot_bytes: int, now: int, home: int) -> Steps[Part]:
        """The oldest part on the socket ``home``, if it is nearly as old; else ``oldest``."""
        part = yield from self._first_of(self._queues_with(slot_bytes, home))
        rank = self._policy.rank
        if part is None or now - rank(part) < _NEARLY_AS_OLD * (now - rank(oldest)):
            return oldest
        return part

    def _take_from_older(self, oldest: Part, slot_bytes: int, now: int) -> Steps[int | None]:
        """A slot by ways 1 to 4, where there is an ``oldest``."""
        rank = self._policy.rank(oldest)
        offset = yield from self._windows.empty_window(slot_bytes, rank, now)
        if offset is None:
            offset = self._slots.allocate_anywhere(slot_bytes)
        if offset is None:
            twice_as_old = rank - max(0, now - rank)
            offset = yield from self._windows.empty_gap(slot_bytes, twice_as_old, now)
        if offset is None:
            offset = yield from self._windows.rebuild_around(oldest, slot_bytes, now)
        return offset

    def _take_from_others(self, slot_bytes: int, use: int) -> Steps[int | None]:
        """A slot where no part of the wanted size may be evicted."""
        now, end = self._policy.latest_rank(use), self._policy.highest_rank(use)
        first = yield from self._first_of(list(self._queues.values()))
        half_time = (self._policy.rank(first) + now) // 2 if first is not None else 0
        offset = yield from self._windows.empty_window(slot_bytes, half_time, end)
        if offset is None:
            offset = self._slots.allocate_anywhere(slot_bytes)
        if offset is None:
            offset = yield from self._windows.empty_window(slot_bytes, end, end, at_any_cost=True)
        if offset is None:
            offset = yield from self._windows.empty_gap(slot_bytes, end, end, at_any_cost=True)
        return offset

    # The order of parts

    def _queue(self, part: Part) -> EvictionQueue:
        shard_bytes = part.chunk.space.namespace.groups[part.position].shard_bytes
        socket = self._slots.socket_of(part.slots[0])  # it has one, since it is visible
        queue = self._queue_of[socket].get(shard_bytes)
        if queue is None:
            key = frozenset(map(self._slots.slot_bytes, shard_bytes)), socket
            queue = self._queues.get(key)
            if queue is None:
                self._forget_empty_queues()
                queue = self._queues[key] = EvictionQueue(self._policy)
            self._queue_of[socket][shard_bytes] = queue
        return queue

    def _forget_empty_queues(self) -> None:
        self._queues = {key: queue for key, queue in self._queues.items() if len(queue)}
        for queues in self._queue_of:
            queues.clear()

    def _first_of(self, queues: Sequence[EvictionQueue]) -> Steps[Part | None]:
        """The part to evict first, of those in any of the queues."""
        first = None
        rank = self._policy.rank
        for queue in queues:
            while not queue.settle(_LOOKS_A_STEP):
                yield
            part = queue.first()
            if part is not None and (first is None or rank(part) < rank(first)):
                first = part
        return first

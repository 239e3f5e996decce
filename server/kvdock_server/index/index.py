"""The index: which chunks are there, which may be evicted, and how a part comes and goes.

A part's life: ``reserve`` finds memory for a shard, and evicts if need be. A shard has one writer.
``seal`` completes a shard. With the last shard the part is visible. It leaves the index when it is
evicted or cleared, or given up because missing shards do not come. All calls are made on one
thread, and none waits. Other calls may come between the steps of a call.

Chunks of a namespace form trees: a chunk's parent is the chunk whose prompt it extends. A chunk
with children stays known even while it has no parts. So parts of a prefix that failed to arrive, or
that were evicted, can be stored again below the chunks that extend it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import islice, repeat, takewhile
from typing import NamedTuple, Protocol

from kvdock_server.errors import Reason, RequestError
from kvdock_server.index.chunk import NO_SLOT, Chunk, NamespaceIndex, Part
from kvdock_server.index.eviction import EvictionPolicy
from kvdock_server.index.hits import longest_hit
from kvdock_server.index.keeping import DEFAULT_PIN_SHARE, Keeping
from kvdock_server.index.namespace import GroupKind, Namespace
from kvdock_server.index.reclaim import Reclaimer
from kvdock_server.index.terms import Terms
from kvdock_server.steps import Backlog, Steps
from kvdock_server.tiers.host.slots import SlotAllocator


class ReserveStatus(Enum):
    """Why a shard was reserved or not."""

    RESERVED = auto()
    EXISTS = auto()
    NO_SPACE = auto()
    PARENT_MISSING = auto()


class Slot(NamedTuple):
    """Memory for one shard of a part, until it is sealed or aborted."""

    part: Part
    shard: int
    offset: int

    @property
    def nbytes(self) -> int:
        """Size of the shard."""
        return self.part.chunk.space.shard_bytes(self.part.position, self.shard)


class HitSpan(NamedTuple):
    """The parts of one group that a hit needs: chunks ``first`` to ``first + len(parts)``."""

    position: int
    first: int
    parts: list[Part]


class Watcher(Protocol):
    """The index calls a watcher whenever parts become visible, or leave."""

    def stored(self, part: Part) -> None:
        """The part became visible."""

    def removed(self, part: Part) -> None:
        """The part left the index, visible or not. Its namespace may have been cleared before."""

    def cleared(self, space: NamespaceIndex) -> None:
        """All parts of the namespace are invisible from now on, and leave the index one by one."""


@dataclass
class Totals:
    """Counters of the index since it was made."""

    evicted_parts: int = 0
    abandoned_parts: int = 0
    no_space: int = 0
    refused_keeps: int = 0


_MAX_NAMESPACES = 4_096
_OVERDUE_AT_ONCE = 10_000


class Index:
    """All namespaces of a server, over one allocator of memory.

    ``pin_share`` is the share of the pool that pins may keep.
    """

    def __init__(
        self,
        slots: SlotAllocator,
        backlog: Backlog,
        policy: EvictionPolicy,
        pin_share: float = DEFAULT_PIN_SHARE,
    ) -> None:
        self.totals = Totals()
        self.watchers: list[Watcher] = []
        self.sealed_bytes = 0
        self.reserved_bytes = 0
        self.pinned_parts = 0
        self._slots = slots
        self._backlog = backlog
        self._reclaimer = Reclaimer(slots, backlog, self._evict, policy)
        self.keeping = Keeping(slots, self._reclaimer.offer, int(pin_share * slots.limit_bytes))
        self._spaces: dict[str, NamespaceIndex] = {}
        self._pending: dict[Part, float] = {}
        self._use = 0  # counts uses and the bytes that were reserved; see Part.last_used

    # Namespaces

    @property
    def spaces(self) -> Sequence[NamespaceIndex]:
        """All namespaces, in the order of their registration."""
        return list(self._spaces.values())

    @property
    def pending_parts(self) -> int:
        """Parts of which some shards are missing."""
        return len(self._pending)

    def register(self, namespace: Namespace) -> bool:
        """Make a namespace known; True if it is new.

        RequestError if a field is out of its limits, if the namespace contradicts the one that is
        registered under its name, or if there are too many.
        """
        namespace.validate()
        space = self._spaces.get(namespace.name)
        if space is None:
            self._make_room_for_namespace()
            self._spaces[namespace.name] = NamespaceIndex(namespace)
            return True
        space.namespace = space.namespace.merged(namespace)
        return False

    def space(self, name: str) -> NamespaceIndex:
        """The namespace of that name; RequestError (UNKNOWN_NAMESPACE) if there is none."""
        try:
            return self._spaces[name]
        except KeyError:
            raise RequestError(
                Reason.UNKNOWN_NAMESPACE,
                f"namespace {name[:300]!r} is not registered here: call RegisterNamespace",
                namespace=name,
            ) from None

    # Looking up

    def find(self, space: NamespaceIndex, keys: Sequence[bytes]) -> list[HitSpan]:
        """The hit of a prompt with these chunks: a span for each group; empty on a miss."""
        hit, needed = longest_hit(space.namespace, space.visible, keys)
        if hit == 0:
            return []
        return [HitSpan(position, hit - len(parts), parts) for position, parts in enumerate(needed)]

    def touch(self, spans: Sequence[HitSpan]) -> None:
        """Note a use of parts.

        Of a full-attention span only the last part is touched. Such parts are evicted from the end
        of a prompt, and an evicted part hands its uses on to the chunk before it.
        """
        self._use += 1
        for span in spans:
            only_last = span.parts and span.parts[-1].is_full_attention
            for part in span.parts[-1:] if only_last else span.parts:
                part.last_used = self._use
                part.used_again = True

    def part(self, space: NamespaceIndex, position: int, key: bytes) -> Part | None:
        """A visible part, or None."""
        return space.visible[position].get(key)

    # Pins

    def pin(self, parts: Sequence[Part]) -> None:
        """Keep parts in memory until each is unpinned as often as it was pinned."""
        for part in parts:
            if not part.pins:
                self.pinned_parts += 1
            part.pins += 1

    def unpin(self, parts: Sequence[Part]) -> None:
        """Take one pin of each part of a group away. Without pins a part may be evicted."""
        needs_all = bool(parts) and parts[0].is_full_attention
        for part in parts:
            part.pins -= 1
            if part.pins:
                continue
            self.pinned_parts -= 1
            if part.detached:
                self._free_sealed(part)
            elif not needs_all or part.chunk.first_child is None:
                self._reclaimer.offer(part.chunk)

    # Storing

    def reserve(
        self,
        space: NamespaceIndex,
        position: int,
        shard: int,
        parent_key: bytes,
        keys: Sequence[bytes],
        deadline: float,
        home: int | None = None,
        terms: Terms | None = None,
    ) -> Steps[list[ReserveStatus | Slot]]:
        """Find memory for one shard of each of some consecutive chunks; a Slot where it is found.

        A part that still misses shards at ``deadline`` is given up. Slots are preferred that lie on
        the socket ``home``. ``terms`` are for the parts, also those that exist. Raises RequestError
        (CHUNK_TOO_LARGE) if the pool could never hold such a shard.
        """
        size = space.shard_bytes(position, shard)
        if not self._slots.fits(size):
            raise RequestError(
                Reason.CHUNK_TOO_LARGE,
                f"a shard of {size} bytes does not fit into this server's pool of "
                f"{self._slots.limit_bytes} bytes: start it with more --memory, or use smaller "
                "chunks",
                limit=self._slots.limit_bytes,
            )
        needs_parent_part = space.namespace.groups[position].kind is GroupKind.FULL_ATTENTION
        parent = space.chunks.get(parent_key) if parent_key else None
        if parent_key and (
            parent is None or (needs_parent_part and parent.parts[position] is None)
        ):
            return [ReserveStatus.PARENT_MISSING] * len(keys)
        return (
            yield from self._reserve(space, position, shard, parent, keys, deadline, home, terms)
        )

    def _reserve(
        self,
        space: NamespaceIndex,
        position: int,
        shard: int,
        parent: Chunk | None,
        keys: Sequence[bytes],
        deadline: float,
        home: int | None,
        terms: Terms | None,
    ) -> Steps[list[ReserveStatus | Slot]]:
        """``reserve``, after its arguments were checked."""
        self._use += 1
        use = self._use
        size = space.shard_bytes(position, shard)
        slot_bytes = self._slots.slot_bytes(size)
        statuses: list[ReserveStatus] = []
        parts: list[Part] = []
        offsets: list[int] = []
        slots: list[Slot] = []
        rest = ReserveStatus.NO_SPACE
        if terms is not None:
            yield from terms.begin(parent)
        try:
            for key in keys:
                # Another call may have cleared or evicted what was there before the last yield.
                if space.is_cleared or (parent is not None and not parent.is_known):
                    rest = ReserveStatus.PARENT_MISSING
                    break
                chunk = space.chunks.get(key)
                if chunk is None:
                    chunk = space.chunks[key] = Chunk(space, key, parent)
                parent = chunk
                part = chunk.parts[position]
                if part is not None and not part.lacks(shard):
                    part.last_used = use
                    statuses.append(ReserveStatus.EXISTS)
                    if terms is not None:
                        terms.apply(part)
                    yield
                    continue
                if part is None:
                    part = Part(chunk, position, space.namespace.kv_world_size)
                    chunk.parts[position] = part
                # From now on no part of the chunk is evicted, also not to make room for this one.
                part.writing |= 1 << shard
                parts.append(part)
                offset = yield from self._reclaimer.make_room(size, use, home)
                if offset is None:
                    self._stop_waiting(parts.pop(), shard)
                    break
                offsets.append(offset)
                statuses.append(ReserveStatus.RESERVED)
                self._use += slot_bytes
                self.reserved_bytes += slot_bytes
                if not part.is_gone:
                    self._pending.pop(part, None)  # keeps the dict in the order of deadlines
                    self._pending[part] = deadline
                    if terms is not None:
                        terms.apply(part)
                yield
            # Prompts are evicted from their ends, so memory comes in descending order. Ascending
            # slots are copied together.
            offsets.sort()
            for part, offset in zip(parts, offsets, strict=True):
                slots.append(Slot(part, shard, offset))
                yield
        except BaseException:
            if len(offsets) < len(parts):
                self._stop_waiting(parts.pop(), shard)
            self.abort_all(map(Slot, parts, repeat(shard), offsets))
            raise
        left = len(keys) - len(statuses)
        statuses += [rest] * left
        if rest is ReserveStatus.NO_SPACE:
            self.totals.no_space += left
        reserved = iter(slots)
        return [
            next(reserved) if status is ReserveStatus.RESERVED else status for status in statuses
        ]

    def seal(self, slot: Slot) -> bool:
        """A shard is complete. False if its part was removed meanwhile: its memory is freed."""
        part = slot.part
        if part.is_gone:
            self.free(slot)
            return False
        space = part.chunk.space
        nbytes = slot.nbytes
        part.writing &= ~(1 << slot.shard)
        part.slots[slot.shard] = slot.offset
        self._reclaimer.sealed[slot.offset] = part
        self.reserved_bytes -= self._slots.slot_bytes(nbytes)
        self.sealed_bytes += self._slots.slot_bytes(nbytes)
        space.usage.sealed_bytes += nbytes
        if part.sealed_shards == len(part.slots):
            part.visible = True
            part.last_used = self._use
            space.visible[part.position][part.chunk.key] = part
            del self._pending[part]
            for watcher in self.watchers:
                watcher.stored(part)
        self._reclaimer.offer(part.chunk)
        return True

    def abort(self, slot: Slot) -> None:
        """A shard will not come. Free its memory."""
        self.orphan(slot)
        self.free(slot)

    def abort_all(self, slots: Iterable[Slot]) -> None:
        """Abort many shards: some at once, the rest in the backlog."""

        def steps() -> Steps[None]:
            for slot in slots:
                self.abort(slot)
                yield

        self._backlog.add(steps())

    def orphan(self, slot: Slot) -> None:
        """A shard will not come. Another writer may store it, but its memory stays reserved."""
        self._stop_waiting(slot.part, slot.shard)

    def free(self, slot: Slot) -> None:
        """Free the memory of a slot that was orphaned."""
        self._slots.free(slot.offset)
        self.reserved_bytes -= self._slots.slot_bytes(slot.nbytes)

    def give_up_overdue(self, now: float) -> None:
        """Remove parts whose deadline has passed and whose missing shards nobody is writing."""
        overdue = takewhile(lambda part: self._pending[part] <= now, self._pending)
        self._backlog.add(self._give_up(list(islice(overdue, _OVERDUE_AT_ONCE))))

    def _give_up(self, parts: Sequence[Part]) -> Steps[None]:
        for part in parts:
            if part in self._pending and not part.writing:
                self.totals.abandoned_parts += 1
                self._remove(part)
                self._retire(part.chunk)
                yield

    # Removing

    def evict_in_steps(self, wanted_bytes: int) -> Steps[tuple[int, int]]:
        """Evict parts until ``wanted_bytes`` are free, or no more parts may be evicted.

        Returns how many parts and bytes were evicted.
        """
        parts = nbytes = 0
        while nbytes < wanted_bytes:
            victim = yield from self._reclaimer.first_victim()
            if victim is None:
                break
            parts_before, sealed_before = self.totals.evicted_parts, self.sealed_bytes
            self._evict(victim.chunk, victim)
            parts += self.totals.evicted_parts - parts_before
            nbytes += sealed_before - self.sealed_bytes
            yield
        return parts, nbytes

    def clear(self, *spaces: NamespaceIndex) -> int:
        """Make all parts of namespaces invisible; how many were visible.

        Empty namespaces take their places. The backlog frees the memory.
        """
        visible = 0
        for space in spaces:
            visible += space.visible_parts
            self.keeping.clear(space)
            for watcher in self.watchers:
                watcher.cleared(space)
            self._spaces[space.namespace.name] = space.clear()
        self._backlog.add(self._remove_all(spaces))
        return visible

    def _remove_all(self, cleared: Sequence[NamespaceIndex]) -> Steps[None]:
        for space in cleared:
            while space.chunks:
                _, chunk = space.chunks.popitem()
                for part in chunk.parts:
                    if part is not None:
                        self._remove(part)
                chunk.unlink()  # linked chunks are a cycle, and these are hardly ever collected
                yield

    def _make_room_for_namespace(self) -> None:
        """If there are as many namespaces as may be, forget one without chunks."""
        if len(self._spaces) < _MAX_NAMESPACES:
            return
        empty = next((name for name, space in self._spaces.items() if not space.chunks), None)
        if empty is None:
            raise RequestError(
                Reason.TOO_MANY_NAMESPACES,
                f"{_MAX_NAMESPACES} namespaces hold something: clear one first",
                limit=_MAX_NAMESPACES,
            )
        for watcher in self.watchers:
            watcher.cleared(self._spaces[empty])
        del self._spaces[empty]

    def _stop_waiting(self, part: Part, shard: int) -> None:
        part.writing &= ~(1 << shard)
        if part.is_gone:
            return
        if part.is_empty:
            self._remove(part)
            self._retire(part.chunk)
        self._reclaimer.offer(part.chunk)

    def _evict(self, chunk: Chunk, *parts: Part | None) -> None:
        """Evict parts of a chunk, or all of its parts if one of them is of a full-attention group.

        Without this one no hit reaches the chunk, so its other parts are of no use.
        """
        leaving = [part for part in parts if part is not None]
        if any(part.is_full_attention for part in leaving):
            leaving = [part for part in chunk.parts if part is not None]
        for part in leaving:
            self.totals.evicted_parts += part.visible
            self._remove(part)
        if chunk.parent is not None and leaving:
            chunk.parent.inherit_uses(leaving)
        self._retire(chunk)

    def _remove(self, part: Part) -> None:
        """Take a part out of the index. Pinned memory is freed with the last pin."""
        part.chunk.parts[part.position] = None
        part.detached = True
        if part.visible:
            part.visible = False
            del part.chunk.space.visible[part.position][part.chunk.key]
        self._pending.pop(part, None)
        self.keeping.forget(part)
        self._reclaimer.discard(part)
        for watcher in self.watchers:
            watcher.removed(part)
        if not part.pins:
            self._free_sealed(part)

    def _retire(self, chunk: Chunk | None) -> None:
        """Forget a chunk that has neither parts nor children, and then its parent likewise."""
        while chunk is not None and chunk.first_child is None and not any(chunk.parts):
            if not chunk.is_known:
                return  # cleared before
            del chunk.space.chunks[chunk.key]
            chunk.unlink()
            chunk = chunk.parent
            if chunk is not None and chunk.first_child is None:
                self._reclaimer.offer(chunk)

    def _free_sealed(self, part: Part) -> None:
        space = part.chunk.space
        for shard, offset in enumerate(part.slots):
            if offset != NO_SLOT:
                nbytes = space.shard_bytes(part.position, shard)
                self._slots.free(offset)
                del self._reclaimer.sealed[offset]
                self.sealed_bytes -= self._slots.slot_bytes(nbytes)
                space.usage.sealed_bytes -= nbytes
                part.slots[shard] = NO_SLOT

"""The index: which chunks are there, what may be evicted, and how a part comes and goes.

A part's life: reserve (memory is found, evicting if need be; one writer a shard) -> seal, shard by
shard (visible with the last one) -> evicted, cleared, or given up if the missing shards do not
come. All calls are made from one thread and none of them waits.

Chunks of a namespace form trees: a chunk's parent is the chunk whose prompt it extends. A chunk
with children stays known even while it has no parts, so that a prefix that failed to arrive, or
whose window parts went, can be stored again under what extends it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple, Protocol

from kvdock_server.errors import Reason, RequestError, invalid
from kvdock_server.index.chunk import NO_SLOT, Chunk, Part
from kvdock_server.index.eviction import EvictionPolicy
from kvdock_server.index.hits import longest_hit
from kvdock_server.index.namespace import GroupKind, Namespace
from kvdock_server.pool.slots import SlotAllocator


class Space:
    """A registered namespace and its chunks, in the order in which they were first reserved."""

    def __init__(self, namespace: Namespace) -> None:
        self.namespace = namespace
        self.chunks: dict[bytes, Chunk] = {}
        self.visible_parts = 0
        self.sealed_bytes = 0

    def shard_bytes(self, position: int, shard: int) -> int:
        """Size of one shard; RequestError if nobody has told it yet."""
        group = self.namespace.groups[position]
        size = group.shard_bytes[shard]
        if not size:
            raise invalid(
                f"namespace {self.namespace.name!r}: the size of shard {shard} of group "
                f"{group.group_idx} is not known: register the namespace with its shard_bytes"
            )
        return size


class ReserveStatus(Enum):
    """Why a shard was reserved or not."""

    RESERVED = auto()
    EXISTS = auto()
    NO_SPACE = auto()
    PARENT_MISSING = auto()


class Slot(NamedTuple):
    """Memory for one shard of a part, until it is sealed or given back."""

    part: Part
    shard: int
    offset: int


class HitSpan(NamedTuple):
    """The parts of one group that a hit needs: chunks ``first`` to ``first + len(parts)``."""

    position: int
    first: int
    parts: list[Part]


class Watcher(Protocol):
    """Is told what the index does, while it does it."""

    def stored(self, part: Part) -> None:
        """The part became visible."""

    def removed(self, part: Part) -> None:
        """The part left the index, visible or not."""

    def cleared(self, space: Space) -> None:
        """All parts of the namespace are about to leave the index."""


@dataclass
class Totals:
    """What the index counted since it was made."""

    evicted_parts: int = 0
    abandoned_parts: int = 0
    no_space: int = 0


class Index:
    """All namespaces of a server, over one allocator of memory."""

    def __init__(self, slots: SlotAllocator, policy: EvictionPolicy) -> None:
        self.totals = Totals()
        self.watcher: Watcher | None = None
        self.sealed_bytes = 0
        self.reserved_bytes = 0
        self.pinned_parts = 0
        self._slots = slots
        self._policy = policy
        self._spaces: dict[str, Space] = {}
        self._pending: dict[Part, float] = {}
        self._now = 0

    # Namespaces

    @property
    def spaces(self) -> Sequence[Space]:
        """All namespaces, in the order of their registration."""
        return list(self._spaces.values())

    @property
    def pending_parts(self) -> int:
        """Parts of which some shards are missing."""
        return len(self._pending)

    def register(self, namespace: Namespace) -> bool:
        """Make a namespace known; True if it was not. RequestError if it contradicts itself."""
        namespace.validate()
        space = self._spaces.get(namespace.name)
        if space is None:
            self._spaces[namespace.name] = Space(namespace)
            return True
        space.namespace = space.namespace.merged(namespace)
        return False

    def space(self, name: str) -> Space:
        """The namespace of that name; RequestError (UNKNOWN_NAMESPACE) if there is none."""
        try:
            return self._spaces[name]
        except KeyError:
            raise RequestError(
                Reason.UNKNOWN_NAMESPACE,
                f"namespace {name[:300]!r} is not registered here: call RegisterNamespace",
            ) from None

    # Looking up

    def find(self, space: Space, keys: Sequence[bytes]) -> list[HitSpan]:
        """What a prompt with these chunks can have, a span a group; empty on a miss."""
        known = []
        get = space.chunks.get
        for key in keys:
            chunk = get(key)
            if chunk is None:
                break
            known.append(chunk)
        hit = longest_hit(space.namespace, known)
        if hit == 0:
            return []
        spans = []
        for position, group in enumerate(space.namespace.groups):
            first = hit - group.needed_chunks(hit, space.namespace.chunk_tokens)
            # The hit rule has seen that none of them is None.
            parts = [chunk.parts[position] for chunk in known[first:hit]]
            spans.append(HitSpan(position, first, parts))  # type: ignore[arg-type]
        return spans

    def touch(self, spans: Sequence[HitSpan]) -> None:
        """Note a use. A prefix inherits the use of what extends it when that is evicted."""
        self._now += 1
        for span in spans:
            if span.parts:
                span.parts[-1].last_used = self._now

    def part(self, space: Space, position: int, key: bytes) -> Part | None:
        """A visible part, or None."""
        chunk = space.chunks.get(key)
        part = chunk.parts[position] if chunk else None
        return part if part is not None and part.visible else None

    # Pins

    def pin(self, parts: Sequence[Part], pins: int = 1) -> None:
        """Keep parts in memory until they are unpinned as often."""
        for part in parts:
            if not part.pins:
                self.pinned_parts += 1
            part.pins += pins

    def unpin(self, part: Part) -> None:
        """Take one pin away; with the last one the part may be evicted."""
        part.pins -= 1
        if part.pins:
            return
        self.pinned_parts -= 1
        if part.detached:
            self._free_sealed(part)
        else:
            self._offer(part)

    # Storing

    def reserve(
        self,
        space: Space,
        position: int,
        shard: int,
        parent_key: bytes,
        keys: Sequence[bytes],
        deadline: float,
    ) -> list[ReserveStatus | Slot]:
        """Find memory for one shard of consecutive chunks; a Slot for each one that gets it.

        ``deadline`` is when a part is given up if shards are still missing. Raises RequestError
        (CHUNK_TOO_LARGE) if the pool could never hold such a shard.
        """
        size = space.shard_bytes(position, shard)
        if not self._slots.fits(size):
            raise RequestError(
                Reason.CHUNK_TOO_LARGE,
                f"a shard of {size} bytes does not fit into this server's pool of "
                f"{self._slots.limit_bytes} bytes: start it with more --memory, or use smaller "
                "chunks",
            )
        needs_parent_part = space.namespace.groups[position].kind is GroupKind.FULL_ATTENTION
        parent = space.chunks.get(parent_key) if parent_key else None
        if parent_key and (
            parent is None or (needs_parent_part and parent.parts[position] is None)
        ):
            return [ReserveStatus.PARENT_MISSING] * len(keys)
        self._now += 1
        outcomes: list[ReserveStatus | Slot] = []
        for key in keys:
            chunk = space.chunks.get(key)
            if chunk is None:
                chunk = self._add_chunk(space, key, parent)
            part = chunk.parts[position]
            if part is not None and not part.lacks(shard):
                part.last_used = self._now
                outcomes.append(ReserveStatus.EXISTS)
            else:
                offset = self._allocate(size)
                if offset is None:
                    self._retire(chunk)
                    rest = len(keys) - len(outcomes)
                    self.totals.no_space += rest
                    outcomes.extend([ReserveStatus.NO_SPACE] * rest)
                    break
                if part is None:
                    part = Part(chunk, position, space.namespace.kv_world_size)
                    chunk.parts[position] = part
                part.writing |= 1 << shard
                self._pending[part] = deadline
                self.reserved_bytes += self._slots.slot_bytes(size)
                outcomes.append(Slot(part, shard, offset))
            parent = chunk
        return outcomes

    def seal(self, slot: Slot) -> bool:
        """A shard is complete. False if its part was removed meanwhile; its memory is free then."""
        part = slot.part
        if part.detached:
            self._release_reserved(slot)
            return False
        space = part.chunk.space
        size = self._slots.slot_bytes(space.shard_bytes(part.position, slot.shard))
        part.writing &= ~(1 << slot.shard)
        part.slots[slot.shard] = slot.offset
        self.reserved_bytes -= size
        self.sealed_bytes += size
        space.sealed_bytes += size
        if part.sealed_shards == len(part.slots):
            part.visible = True
            part.last_used = self._now
            space.visible_parts += 1
            del self._pending[part]
            self._offer(part)
            if self.watcher is not None:
                self.watcher.stored(part)
        return True

    def give_back(self, slot: Slot) -> None:
        """A shard will not come. Its memory is free again."""
        part = slot.part
        self._release_reserved(slot)
        part.writing &= ~(1 << slot.shard)
        if not part.detached and part.is_empty:
            self._remove(part)
            self._retire(part.chunk)

    def give_up_overdue(self, now: float) -> None:
        """Remove parts whose missing shards nobody is writing and whose deadline has passed."""
        overdue = [
            part for part, deadline in self._pending.items() if deadline <= now and not part.writing
        ]
        for part in overdue:
            self.totals.abandoned_parts += 1
            self._remove(part)
            self._retire(part.chunk)

    # Removing

    def evict(self, wanted_bytes: int | None) -> tuple[int, int]:
        """Drop unlocked parts until so many bytes are free, or all; (parts, bytes) dropped."""
        parts = self.totals.evicted_parts
        sealed = self.sealed_bytes
        while wanted_bytes is None or sealed - self.sealed_bytes < wanted_bytes:
            if not self._evict_next():
                break
        return self.totals.evicted_parts - parts, sealed - self.sealed_bytes

    def clear(self, space: Space) -> int:
        """Make all parts of a namespace invisible; how many were visible."""
        visible = space.visible_parts
        if self.watcher is not None:
            self.watcher.cleared(space)
        for chunk in space.chunks.values():
            for part in chunk.parts:
                if part is not None:
                    self._remove(part)
        space.chunks.clear()
        self._policy.purge()
        return visible

    def _add_chunk(self, space: Space, key: bytes, parent: Chunk | None) -> Chunk:
        chunk = Chunk(space, key, parent)
        if parent is not None:
            parent.children += 1
        space.chunks[key] = chunk
        return chunk

    def _allocate(self, size: int) -> int | None:
        offset = self._slots.allocate(size)
        while offset is None and self._evict_next():
            offset = self._slots.allocate(size)
        return offset

    def _evict_next(self) -> bool:
        while (part := self._policy.next()) is not None:
            if self._evictable(part):
                self._evict(part)
                return True
        return False

    def _evict(self, part: Part) -> None:
        chunk = part.chunk
        self.totals.evicted_parts += 1
        self._remove(part)
        if chunk.space.namespace.groups[part.position].kind is GroupKind.FULL_ATTENTION:
            # Without it no hit reaches this chunk, so nothing else of it is of use.
            for other in chunk.parts:
                if other is not None:
                    self.totals.evicted_parts += other.visible
                    self._remove(other)
            if chunk.parent is not None:
                for above in chunk.parent.parts:
                    if above is not None:
                        above.last_used = max(above.last_used, part.last_used)
        self._retire(chunk)

    def _evictable(self, part: Part) -> bool:
        if not part.visible or part.pins:
            return False
        kind = part.chunk.space.namespace.groups[part.position].kind
        return part.chunk.children == 0 or kind is not GroupKind.FULL_ATTENTION

    def _offer(self, part: Part) -> None:
        if self._evictable(part):
            self._policy.add(part)

    def _remove(self, part: Part) -> None:
        """Take a part out of the index; memory in use stays until its last user is done."""
        part.chunk.parts[part.position] = None
        part.detached = True
        if part.visible:
            part.visible = False
            part.chunk.space.visible_parts -= 1
        self._pending.pop(part, None)
        if self.watcher is not None:
            self.watcher.removed(part)
        if not part.pins:
            self._free_sealed(part)

    def _retire(self, chunk: Chunk | None) -> None:
        """Forget a chunk that has neither parts nor children, and so on upwards."""
        while chunk is not None and not chunk.children and not any(chunk.parts):
            if chunk.space.chunks.get(chunk.key) is not chunk:
                return  # cleared before
            del chunk.space.chunks[chunk.key]
            chunk = chunk.parent
            if chunk is not None:
                chunk.children -= 1
                if not chunk.children:
                    for part in chunk.parts:
                        if part is not None:
                            self._offer(part)

    def _free_sealed(self, part: Part) -> None:
        space = part.chunk.space
        for shard, offset in enumerate(part.slots):
            if offset != NO_SLOT:
                size = space.shard_bytes(part.position, shard)
                self._slots.free(offset)
                self.sealed_bytes -= self._slots.slot_bytes(size)
                space.sealed_bytes -= self._slots.slot_bytes(size)
                part.slots[shard] = NO_SLOT

    def _release_reserved(self, slot: Slot) -> None:
        size = slot.part.chunk.space.shard_bytes(slot.part.position, slot.shard)
        self._slots.free(slot.offset)
        self.reserved_bytes -= self._slots.slot_bytes(size)

"""The index: which chunks are there, what may be evicted, and how a part comes and goes.

A part's life: reserve (memory is found, evicting if need be; one writer a shard) -> seal, shard by
shard (visible with the last one) -> evicted, cleared, or given up if the missing shards do not
come. All calls are made from one thread and none of them waits.

Chunks of a namespace form trees: a chunk's parent is the chunk whose prompt it extends. A chunk
with children stays known even while it has no parts, so that a prefix that failed to arrive, or
whose window parts went, can be stored again under what extends it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from heapq import merge
from itertools import count
from typing import NamedTuple, Protocol

from kvdock_server.errors import Reason, RequestError
from kvdock_server.index.chunk import NO_SLOT, Chunk, Part
from kvdock_server.index.eviction import EvictionPolicy, LeastRecentlyUsed
from kvdock_server.index.hits import longest_hit
from kvdock_server.index.namespace import GroupKind, Namespace
from kvdock_server.index.namespace_index import NamespaceIndex
from kvdock_server.pool.slots import SlotAllocator


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

    def cleared(self, space: NamespaceIndex[Chunk]) -> None:
        """All parts of the namespace are about to leave the index."""


@dataclass
class Totals:
    """What the index counted since it was made."""

    evicted_parts: int = 0
    abandoned_parts: int = 0
    no_space: int = 0


MakePolicy = Callable[[Callable[[Part], bool]], EvictionPolicy]

# Where no chunk of the wanted size may go, or chunks of other sizes are older, whole runs of slots
# are emptied, and what extends the chunks there goes with them: everything, if the beginning of all
# prompts lies there. So a run that costs few chunks for each of its slots is taken at once, else
# the cheapest of a few.
_OTHERS_FOR_A_SLOT = 4
_RUNS_TO_CHOOSE_FROM = 8
_OTHERS_AT_ONCE = 20_000

# One reserve looks at about so many chunks and slots for such runs, which takes some 40 ms; and at
# so many, and only once in a while, where it could have a chunk of its own size go.
_LOOKS = 60_000
_LOOKS_FOR_OLDER = 10_000
_RESERVES_BETWEEN = 64

_MAX_NAMESPACES = 4_096


class Index:
    """All namespaces of a server, over one allocator of memory.

    ``make_policy`` makes the eviction policy for one size of slots, given what tells whether a part
    may be evicted.
    """

    def __init__(self, slots: SlotAllocator, make_policy: MakePolicy = LeastRecentlyUsed) -> None:
        self.totals = Totals()
        self.watchers: list[Watcher] = []
        self.sealed_bytes = 0
        self.reserved_bytes = 0
        self.pinned_parts = 0
        self._slots = slots
        self._make_policy = make_policy
        self._policies: dict[int, EvictionPolicy] = {}  # by slot size
        self._spaces: dict[str, NamespaceIndex[Chunk]] = {}
        self._sealed: dict[int, Part] = {}  # by offset
        self._pending: dict[Part, float] = {}
        self._none_older_until: dict[int, int] = {}  # by slot size
        self._now = 0

    # Namespaces

    @property
    def spaces(self) -> Sequence[NamespaceIndex[Chunk]]:
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
            self._make_room_for_namespace()
            self._spaces[namespace.name] = NamespaceIndex(namespace)
            return True
        space.namespace = space.namespace.merged(namespace)
        return False

    def space(self, name: str) -> NamespaceIndex[Chunk]:
        """The namespace of that name; RequestError (UNKNOWN_NAMESPACE) if there is none."""
        try:
            return self._spaces[name]
        except KeyError:
            raise RequestError(
                Reason.UNKNOWN_NAMESPACE,
                f"namespace {name[:300]!r} is not registered here: call RegisterNamespace",
            ) from None

    # Looking up

    def find(self, space: NamespaceIndex[Chunk], keys: Sequence[bytes]) -> list[HitSpan]:
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
        """Note a use. A prefix inherits the use of what extends it when that is evicted.

        Of full-attention parts the last is enough, then: they go from the end. Others go singly.
        """
        self._now += 1
        for span in spans:
            only_last = span.parts and _is_full_attention(span.parts[-1])
            for part in span.parts[-1:] if only_last else span.parts:
                part.last_used = self._now

    def part(self, space: NamespaceIndex[Chunk], position: int, key: bytes) -> Part | None:
        """A visible part, or None."""
        chunk = space.chunks.get(key)
        part = chunk.parts[position] if chunk else None
        return part if part is not None and part.visible else None

    # Pins

    def pin(self, parts: Sequence[Part]) -> None:
        """Keep parts in memory until they are unpinned as often."""
        for part in parts:
            if not part.pins:
                self.pinned_parts += 1
            part.pins += 1

    def unpin(self, part: Part) -> None:
        """Take one pin away; with the last one the part may be evicted."""
        part.pins -= 1
        if part.pins:
            return
        self.pinned_parts -= 1
        if part.detached:
            self._free_sealed(part)
        else:
            self._offer(part.chunk)

    # Storing

    def reserve(
        self,
        space: NamespaceIndex[Chunk],
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
        offsets: list[int] = []
        others = self._runs_for(size)
        for key in keys:
            chunk = space.chunks.get(key)
            if chunk is None:
                chunk = self._add_chunk(space, key, parent)
            part = chunk.parts[position]
            if part is not None and not part.lacks(shard):
                part.last_used = self._now
                outcomes.append(ReserveStatus.EXISTS)
            else:
                if part is None:
                    part = Part(chunk, position, space.namespace.kv_world_size)
                    chunk.parts[position] = part
                # From now on nothing of the chunk is evicted, for this part's sake least of all.
                part.writing |= 1 << shard
                offset = self._allocate(size, others)
                if offset is None:
                    self._stop_waiting(part, shard)
                    rest = len(keys) - len(outcomes)
                    self.totals.no_space += rest
                    outcomes.extend([ReserveStatus.NO_SPACE] * rest)
                    break
                self._pending[part] = deadline
                self.reserved_bytes += self._slots.slot_bytes(size)
                offsets.append(offset)
                outcomes.append(Slot(part, shard, offset))
            parent = chunk
        # Prompts are evicted from their ends, so memory comes in descending order. In ascending
        # order neighbours are copied together.
        offsets.sort(reverse=True)
        return [
            outcome._replace(offset=offsets.pop()) if isinstance(outcome, Slot) else outcome
            for outcome in outcomes
        ]

    def seal(self, slot: Slot) -> bool:
        """A shard is complete. False if its part was removed meanwhile; its memory is free then."""
        part = slot.part
        if part.detached:
            self.free(slot)
            return False
        space = part.chunk.space
        nbytes = space.shard_bytes(part.position, slot.shard)
        part.writing &= ~(1 << slot.shard)
        part.slots[slot.shard] = slot.offset
        self._sealed[slot.offset] = part
        self.reserved_bytes -= self._slots.slot_bytes(nbytes)
        self.sealed_bytes += self._slots.slot_bytes(nbytes)
        space.sealed_bytes += nbytes
        if part.sealed_shards == len(part.slots):
            part.visible = True
            part.last_used = self._now
            space.visible_parts += 1
            del self._pending[part]
            for watcher in self.watchers:
                watcher.stored(part)
        self._offer(part.chunk)
        return True

    def give_back(self, slot: Slot) -> None:
        """A shard will not come. Its memory is free again."""
        self.disown(slot)
        self.free(slot)

    def disown(self, slot: Slot) -> None:
        """A shard will not come, so another writer may store it; but its memory stays reserved."""
        if not slot.part.detached:
            self._stop_waiting(slot.part, slot.shard)

    def free(self, slot: Slot) -> None:
        """Free the memory of a slot that was disowned."""
        size = slot.part.chunk.space.shard_bytes(slot.part.position, slot.shard)
        self._slots.free(slot.offset)
        self.reserved_bytes -= self._slots.slot_bytes(size)

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

    def evict(self, wanted_bytes: int | None, *, turns: int | None = None) -> tuple[int, int]:
        """Drop unlocked parts until so many bytes are free, or all; (parts, bytes) dropped.

        With ``turns`` it evicts no more often than that.
        """
        parts = self.totals.evicted_parts
        sealed = self.sealed_bytes
        for _ in count() if turns is None else range(turns):
            if wanted_bytes is not None and sealed - self.sealed_bytes >= wanted_bytes:
                break
            if not self._evict_next():
                break
        return self.totals.evicted_parts - parts, sealed - self.sealed_bytes

    def clear(self, space: NamespaceIndex[Chunk]) -> int:
        """Make all parts of a namespace invisible; how many were visible."""
        visible = space.visible_parts
        for watcher in self.watchers:
            watcher.cleared(space)
        for chunk in space.chunks.values():
            for part in chunk.parts:
                if part is not None:
                    self._remove(part)
            chunk.unlink()  # else parents and children are cycles, which are hardly ever collected
        space.chunks.clear()
        for policy in self._policies.values():
            policy.purge()
        return visible

    def _make_room_for_namespace(self) -> None:
        """Keep the number of namespaces bounded by forgetting one that holds nothing."""
        if len(self._spaces) < _MAX_NAMESPACES:
            return
        empty = next((name for name, space in self._spaces.items() if not space.chunks), None)
        if empty is None:
            raise RequestError(
                Reason.TOO_MANY_NAMESPACES,
                f"{_MAX_NAMESPACES} namespaces hold something: clear one first",
            )
        for watcher in self.watchers:
            watcher.cleared(self._spaces[empty])
        del self._spaces[empty]

    def _add_chunk(self, space: NamespaceIndex[Chunk], key: bytes, parent: Chunk | None) -> Chunk:
        chunk = Chunk(space, key, parent)
        space.chunks[key] = chunk
        return chunk

    def _stop_waiting(self, part: Part, shard: int) -> None:
        part.writing &= ~(1 << shard)
        if part.is_empty:
            self._remove(part)
            self._retire(part.chunk)
        self._offer(part.chunk)

    # Making room

    def _allocate(self, size: int, others: Iterator[list[Chunk]]) -> int | None:
        """Memory for a shard, made by evicting where need be; None if that cannot be.

        ``others`` are the emptiable runs, which are used up from one shard to the next.
        """
        offset = self._slots.allocate(size)
        if offset is not None:
            return offset
        own = self._own_victim(size)
        if own is None or self._first_victim() is not own:
            offset = self._allocate_from_others(size, others)
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

    def _allocate_from_others(self, size: int, runs: Iterator[list[Chunk]]) -> int | None:
        """Memory taken from chunks of other sizes: whole runs of slots, oldest victims first."""
        for roots in runs:
            if not roots:
                return None
            for root in roots:
                for chunk in reversed(list(_with_descendants([root]))):
                    self._evict(chunk, *chunk.parts)
            offset = self._slots.allocate(size)
            if offset is not None:
                return offset
        return None

    def _runs_for(self, size: int) -> Iterator[list[Chunk]]:
        """The emptiable runs for slots of a size. Only older ones as long as one of that size could
        go; then there is none ([]) until none of that size is left.
        """
        slot_bytes = self._slots.slot_bytes(size)
        own = self._own_victim(size)
        if own is not None and self._now >= self._none_older_until.get(slot_bytes, 0):
            yield from self._emptiable_runs(_LOOKS_FOR_OLDER, own.last_used)
            self._none_older_until[slot_bytes] = self._now + _RESERVES_BETWEEN
        while self._own_victim(size) is not None:
            yield []
        yield from self._emptiable_runs(_LOOKS)

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
            if offset is None or offset in tried or not self._evictable(victim):
                yield [], 1
                continue
            run = self._slots.same_run(offset)
            tried.update(run)
            parts = [part for used in run if (part := self._sealed.get(used)) is not None]
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

    def _evict_next(self) -> bool:
        victim = self._first_victim()
        if victim is None:
            return False
        self._evict(victim.chunk, victim)
        return True

    def _evict(self, chunk: Chunk, *parts: Part | None) -> None:
        """Evict some parts of a chunk, or all if one is of a full-attention group.

        Without that one no hit reaches the chunk, so nothing else of it is of use.
        """
        leaving = [part for part in parts if part is not None]
        if any(map(_is_full_attention, leaving)):
            leaving = [part for part in chunk.parts if part is not None]
        for part in leaving:
            self.totals.evicted_parts += part.visible
            self._remove(part)
        if chunk.parent is not None and leaving:
            last_used = max(part.last_used for part in leaving)
            for above in chunk.parent.parts:
                if above is not None:
                    above.last_used = max(above.last_used, last_used)
        self._retire(chunk)

    def _evictable(self, part: Part) -> bool:
        if not part.visible or part.pins:
            return False
        if not _is_full_attention(part):
            return True
        return not part.chunk.has_children and not _in_use(part.chunk)

    def _offer(self, chunk: Chunk) -> None:
        """Tell the policy which parts of a chunk may go."""
        for part in chunk.parts:
            if part is not None and self._evictable(part):
                size = self._slots.slot_bytes(chunk.space.shard_bytes(part.position, 0))
                policy = self._policies.get(size)
                if policy is None:
                    policy = self._policies[size] = self._make_policy(self._evictable)
                policy.add(part)

    def _remove(self, part: Part) -> None:
        """Take a part out of the index; memory in use stays until its last user is done."""
        part.chunk.parts[part.position] = None
        part.detached = True
        if part.visible:
            part.visible = False
            part.chunk.space.visible_parts -= 1
        self._pending.pop(part, None)
        for watcher in self.watchers:
            watcher.removed(part)
        if not part.pins:
            self._free_sealed(part)

    def _retire(self, chunk: Chunk | None) -> None:
        """Forget a chunk that has neither parts nor children, and so on upwards."""
        while chunk is not None and not chunk.has_children and not any(chunk.parts):
            if chunk.space.chunks.get(chunk.key) is not chunk:
                return  # cleared before
            del chunk.space.chunks[chunk.key]
            chunk.unlink()
            chunk = chunk.parent
            if chunk is not None and not chunk.has_children:
                self._offer(chunk)

    def _free_sealed(self, part: Part) -> None:
        space = part.chunk.space
        for shard, offset in enumerate(part.slots):
            if offset != NO_SLOT:
                nbytes = space.shard_bytes(part.position, shard)
                self._slots.free(offset)
                del self._sealed[offset]
                self.sealed_bytes -= self._slots.slot_bytes(nbytes)
                space.sealed_bytes -= nbytes
                part.slots[shard] = NO_SLOT


def _in_use(chunk: Chunk) -> bool:
    """True if somebody reads or writes a part of it."""
    return any(part is not None and (part.pins or part.writing) for part in chunk.parts)


def _last_used(chunk: Chunk) -> int:
    return max((part.last_used for part in chunk.parts if part is not None), default=0)


def _is_full_attention(part: Part) -> bool:
    return part.chunk.space.namespace.groups[part.position].kind is GroupKind.FULL_ATTENTION


def _cost(roots: Iterable[Chunk], most: int | None = None, before: int | None = None) -> int:
    """How many chunks go with these, 0 if one is in use, or was used since ``before``; counts no
    further than beyond ``most``.
    """
    cost = 0
    for chunk in _with_descendants(roots):
        if _in_use(chunk) or (before is not None and _last_used(chunk) >= before):
            return 0
        cost += 1
        if most is not None and cost > most:
            break
    return cost


def _with_descendants(roots: Iterable[Chunk]) -> Iterator[Chunk]:
    """The chunks and all that extend them, each once; with one root, parents before children.

    It goes no further than it is asked to: a chunk may have all others of its namespace below it.
    """
    found: set[Chunk] = set()
    waiting = [iter(roots)]
    while waiting:
        chunk = next(waiting[-1], None)
        if chunk is None:
            waiting.pop()
        elif chunk not in found:
            found.add(chunk)
            yield chunk
            waiting.append(chunk.children())

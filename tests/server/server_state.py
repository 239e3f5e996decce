"""All that can be seen of a server at one moment, as one frozen value."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from kvdock.events import Index, PartId, Stored
from kvdock.events.messages import message_from_proto
from kvdock.types import GroupKind
from kvdock.v1 import events_pb2
from kvdock_server.core import Core
from kvdock_server.events import wire
from kvdock_server.events.publisher import Publisher
from kvdock_server.index.chunk import Part
from kvdock_server.tiers.host.slots import Run, SlotAllocator


@dataclass(frozen=True)
class ChunkState:
    """A chunk that the index knows. ``parent`` is empty for the first of a prompt."""

    namespace: str
    key: bytes
    parent: bytes


@dataclass(frozen=True)
class PartState:
    """A part that is in the index.

    ``slots`` has (shard, offset) of each sealed shard, ``writing`` each shard that is being
    written. ``pins`` counts the leases that lock it and the reads under way, ``keepers`` the pins
    that keep it.
    """

    namespace: str
    key: bytes
    position: int
    slots: frozenset[tuple[int, int]]
    writing: frozenset[int]
    pins: int
    keepers: int
    visible: bool


@dataclass(frozen=True)
class PinState:
    """A pin. ``kept`` has (key, position, until) of each part."""

    namespace: str
    name: str
    kept: frozenset[tuple[bytes, int, float]]
    nbytes: int


@dataclass(frozen=True)
class LockState:
    """One lock, and the memory that it keeps in place. ``chunk`` is an index into the lookup."""

    lease_id: int
    key: bytes
    position: int
    chunk: int
    reader: int
    slots: frozenset[tuple[int, int]]


@dataclass(frozen=True)
class LeaseState:
    """``copying`` has the readers that were told where the parts lie."""

    lease_id: int
    namespace: str
    engine: str | None
    readers: int
    copying: frozenset[int]


@dataclass(frozen=True)
class SessionState:
    """``reserved`` has (shard, offset) of each slot of its reservations."""

    engine: str
    role: str
    worker: int
    shard: int
    expired: bool
    reserved: frozenset[tuple[int, int]]


@dataclass(frozen=True)
class NamespaceState:
    """``sealed_bytes`` counts shards at their own size."""

    name: str
    visible_parts: int
    sealed_bytes: int


@dataclass(frozen=True)
class MemoryState:
    """Whose the pool is, at the size of slots. ``used`` has (slot size, slots in use)."""

    ready_bytes: int
    sealed_bytes: int
    reserved_bytes: int
    used: frozenset[tuple[int, int]]


@dataclass(frozen=True)
class AnnouncedState:
    """A part of which events have told, and what they told of it. ``kind`` is the protocol's."""

    namespace: str
    key: bytes
    group_idx: int | None
    parent: bytes
    kind: int
    window_tokens: int
    told: bytes


@dataclass(frozen=True)
class State:
    """Everything.

    ``sessions`` has (session, how many are alike), ``counters`` those that are not 0. ``announced``
    is empty without event log.
    """

    chunks: frozenset[ChunkState]
    parts: frozenset[PartState]
    pending_parts: int
    pinned_parts: int
    pins: frozenset[PinState]
    kept_parts: int
    kept_bytes: int
    locks: frozenset[LockState]
    leases: frozenset[LeaseState]
    sessions: frozenset[tuple[SessionState, int]]
    namespaces: frozenset[NamespaceState]
    memory: MemoryState
    announced: frozenset[AnnouncedState]
    counters: frozenset[tuple[str, int]]
    idle: bool


class EventReader:
    """Follows a server's events, as they are on the wire, and mirrors what they tell."""

    def __init__(self, publisher: Publisher) -> None:
        self._publisher = publisher
        self._told: dict[PartId, Stored] = {}
        self._index = Index()
        self.begin_anew()

    def begin_anew(self) -> None:
        """Start with a snapshot, as a reader that has fallen behind does."""
        publisher = self._publisher
        self._apply(
            wire.snapshot(publisher.epoch, publisher.log.last, publisher.snapshot(), last=True)
        )

    def catch_up(self) -> frozenset[AnnouncedState]:
        """Read on to the end; what is announced then."""
        publisher, log = self._publisher, self._publisher.log
        while self._place() < log.last:
            events = log.read(self._place(), 3, 1 << 20)
            if events is None:
                self._apply(wire.compacted(publisher.epoch, self._place(), log.oldest))
                self.begin_anew()
            else:
                end = events[-1]
                self._apply(wire.batch(publisher.epoch, end.number, end.unix_ms, events))
        return frozenset(
            AnnouncedState(
                part.namespace,
                part.key,
                part.group_idx,
                part.parent_key,
                part.kind,
                part.window_tokens,
                b"".join(part.data.block_hashes) if part.data else b"",
            )
            for part in self._index
        )

    def _place(self) -> int:
        assert self._index.cursor is not None
        return self._index.cursor.sequence

    def _apply(self, encoded: bytes) -> None:
        message = message_from_proto(events_pb2.StreamKVEventsResponse.FromString(encoded))
        for change in self._index.apply(message):
            if isinstance(change, Stored):
                self._told[change.id] = change
                assert self._parent(change) in (None, *self._told), "a parent is told first"
            else:
                told = self._told.pop(change.id)
                assert change.block_hashes == (tuple(told.data.block_hashes) if told.data else ())
                assert change.id not in map(self._parent, self._told.values())

    def _parent(self, part: Stored) -> PartId | None:
        """The part that nobody can do without who wants this one."""
        if not part.parent_key or part.kind != GroupKind.FULL_ATTENTION:
            return None
        return part.id._replace(key=part.parent_key)


def state_of(core: Core, slots: SlotAllocator, events: EventReader | None = None) -> State:
    """The state of a server."""
    index = core.index
    return State(
        chunks=frozenset(
            ChunkState(space.namespace.name, chunk.key, chunk.parent.key if chunk.parent else b"")
            for space in index.spaces
            for chunk in space.chunks.values()
        ),
        parts=parts_of(core),
        pending_parts=index.pending_parts,
        pinned_parts=index.pinned_parts,
        pins=frozenset(
            PinState(
                pin.space.namespace.name,
                pin.name,
                frozenset(
                    (part.chunk.key, part.position, until)
                    for until, parts in pin.due.items()
                    for part in parts
                ),
                pin.nbytes,
            )
            for pin in core.pins.named()
        ),
        kept_parts=index.keeping.parts,
        kept_bytes=index.keeping.nbytes,
        locks=frozenset(_locks(core)),
        leases=frozenset(
            LeaseState(
                lease.lease_id,
                lease.space.namespace.name,
                lease.engine_id,
                lease.readers,
                frozenset(lease.copying),
            )
            for lease in core.leases
        ),
        sessions=frozenset(Counter(_sessions(core)).items()),
        namespaces=frozenset(
            NamespaceState(space.namespace.name, space.visible_parts, space.sealed_bytes)
            for space in index.spaces
        ),
        memory=MemoryState(
            slots.ready_bytes,
            index.sealed_bytes,
            index.reserved_bytes,
            frozenset(
                Counter(run.slot_bytes for run in runs_of(slots) for _ in run.used()).items()
            ),
        ),
        announced=events.catch_up() if events else frozenset(),
        counters=frozenset((+Counter(vars(core.counters) | vars(index.totals))).items()),
        idle=core.is_idle,
    )


def runs_of(slots: SlotAllocator) -> list[Run]:
    """All runs of slots, while none is claimed."""
    runs = [run for slab in range(slots.slabs) for run in slots.runs_in(slab, 1) or ()]
    return list(dict.fromkeys(runs))


def parts_of(core: Core) -> frozenset[PartState]:
    """The parts that are in the index, as a lookup finds them."""
    return frozenset(
        _part(part)
        for space in core.index.spaces
        for chunk in space.chunks.values()
        for part in chunk.parts
        if part is not None
    )


def _part(part: Part) -> PartState:
    namespace = part.chunk.space.namespace
    return PartState(
        namespace.name,
        part.chunk.key,
        part.position,
        _slots(part),
        frozenset(shard for shard in range(namespace.kv_world_size) if part.writing >> shard & 1),
        part.pins,
        len(part.chunk.space.kept.get(part, ())),
        part.visible,
    )


def _slots(part: Part) -> frozenset[tuple[int, int]]:
    return frozenset((shard, offset) for shard, offset in enumerate(part.slots) if offset >= 0)


def _locks(core: Core) -> Iterator[LockState]:
    for lease in core.leases:
        for locked in lease.spans:
            for index, part in enumerate(locked.span.parts):
                for reader, held in enumerate(locked.held):
                    if held >> index & 1:
                        chunk = locked.span.first + index
                        yield LockState(
                            lease.lease_id,
                            part.chunk.key,
                            part.position,
                            chunk,
                            reader,
                            _slots(part),
                        )


def _sessions(core: Core) -> Iterator[SessionState]:
    for session in core.sessions:
        slots = [
            slot
            for reservation in session.reservations.values()
            for slot in (*reservation.open.values(), *reservation.orphaned)
        ]
        yield SessionState(
            session.engine_id,
            session.role.name,
            session.worker_id,
            session.kv_worker_id,
            session.expired,
            frozenset((slot.shard, slot.offset) for slot in slots),
        )

"""What a server holds after any calls, told in the simplest way there is.

The model follows the comments of the protocol and not the server's code: it keeps sets of small
objects, searches all of them, and derives whatever can be derived. It decides everything but what
is the server's to choose: ids, where memory lies, which parts an eviction takes and whether memory
could be made at all. Those it is told, and it refuses (AssertionError) what no policy may choose.

``Model.state()`` is to be equal to ``server_state.state_of`` of the server after every call. The
methods ``refuses_...`` say why a call must fail, and then it must change nothing; the method of the
verb itself is called only for calls that succeed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from server_state import (
    AnnouncedState,
    ChunkState,
    LeaseState,
    LockState,
    MemoryState,
    NamespaceState,
    PartState,
    PinState,
    SessionState,
    State,
)

from kvdock_server.core import LockRange, Role
from kvdock_server.errors import Reason
from kvdock_server.index.index import ReserveStatus
from kvdock_server.index.namespace import Group, GroupKind, Namespace

PAGE_BYTES = 4096
PIN_SHARE = 0.25
MAX_READERS = 256
SHARDS_MISSING_SECONDS = 60.0


def slot_bytes(nbytes: int) -> int:
    """A shard's memory: whole pages."""
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


class ChunkId(NamedTuple):
    """Names a chunk. The empty key stands for what comes before the first chunk of a prompt."""

    namespace: str
    key: bytes


@dataclass(eq=False)
class Part:
    """A part from when its first shard is reserved, also after it left the index.

    ``sealed`` has the offset of each complete shard; ``writing`` the shards that somebody will
    still seal. ``told`` is what events are to tell of it.
    """

    chunk: ChunkId
    position: int
    sealed: dict[int, int] = field(default_factory=dict)
    writing: set[int] = field(default_factory=set)
    deadline: float = 0.0
    told: bytes = b""


@dataclass(eq=False)
class Slot:
    """Memory for one shard that is not sealed yet, whoever may write there."""

    part: Part
    shard: int
    offset: int


@dataclass(eq=False)
class Session:
    """``mapped`` tells that its process lives and may write into the pool, also once it is closed.

    ``reservations`` has the open slots of each, by chunk.
    """

    engine: str
    role: Role
    worker: int
    shard: int
    ttl: float
    last_seen: float
    expired: bool = False
    closed: bool = False
    held_up: bool = False
    mapped: bool = True
    orphaned: bool = False
    reservations: dict[int, dict[int, Slot]] = field(default_factory=dict)


class Pin(NamedTuple):
    """A name in a namespace."""

    namespace: str
    name: str


class Lock(NamedTuple):
    """One reader's lock on one part. ``chunk`` is an index into the lookup."""

    part: Part
    chunk: int
    reader: int


@dataclass(eq=False)
class Lease:
    """``owner`` and ``engine`` are None for a lease by hand, which lives until ``expires_at``."""

    lease_id: int
    namespace: str
    owner: Session | None
    engine: str | None
    expires_at: float | None
    readers: int
    ends: dict[int, int]
    locks: set[Lock]
    copying: set[int] = field(default_factory=set)


class Model:
    """The reference. ``clock`` is the server's."""

    def __init__(
        self,
        clock: Callable[[], float],
        pool_bytes: int,
        *,
        has_events: bool,
    ) -> None:
        self.clock = clock
        self.has_events = has_events
        self.pool_bytes = pool_bytes
        self.ready_bytes = 0
        self.draining = False
        self.namespaces: dict[str, Namespace] = {}
        self.sessions: list[Session] = []
        self.parents: dict[ChunkId, ChunkId] = {}
        self.parts: dict[tuple[ChunkId, int], Part] = {}  # those in the index
        self.leases: dict[int, Lease] = {}
        self.readings: list[list[Part]] = []
        self.kept: dict[Pin, dict[Part, float]] = {}  # with the time at which each is let go
        self.slots: set[Slot] = set()
        self.counters: Counter[str] = Counter()

    # What is derived

    def group(self, part: Part) -> Group:
        """The group of a part."""
        return self.namespaces[part.chunk.namespace].groups[part.position]

    def shard_bytes(self, part: Part, shard: int) -> int:
        """Size of one shard; 0 if nobody has told it yet."""
        return self.group(part).shard_bytes[shard]

    def is_full_attention(self, part: Part) -> bool:
        """True if the part needs every part before it, and what extends it needs the part."""
        return self.group(part).kind is GroupKind.FULL_ATTENTION

    def in_index(self, part: Part) -> bool:
        """True if it was neither removed nor replaced."""
        return self.parts.get((part.chunk, part.position)) is part

    def is_visible(self, part: Part) -> bool:
        """True if a lookup can find it: all of its shards are sealed."""
        shards = self.namespaces[part.chunk.namespace].kv_world_size
        return self.in_index(part) and len(part.sealed) == shards

    def pins(self, part: Part) -> int:
        """How many leases lock it and how many reads are under way."""
        leases = sum(any(lock.part is part for lock in each.locks) for each in self.leases.values())
        return leases + sum(reading.count(part) for reading in self.readings)

    def pinned(self) -> set[Part]:
        """The parts whose memory must stay."""
        locked = {lock.part for lease in self.leases.values() for lock in lease.locks}
        return locked.union(*self.readings)

    def keepers(self, part: Part) -> int:
        """How many pins keep it."""
        return sum(part in kept for kept in self.kept.values())

    def kept_parts(self) -> set[Part]:
        """The parts that some pin keeps."""
        return {part for kept in self.kept.values() for part in kept}

    def part_bytes(self, part: Part) -> int:
        """What a kept part takes: all its slots, whether or not there is something in them."""
        return sum(map(slot_bytes, self.group(part).shard_bytes))

    def held(self) -> set[Part]:
        """The parts whose sealed shards take memory."""
        return set(self.parts.values()) | self.pinned()

    def memory(self) -> dict[int, int]:
        """The memory in use: the size of each slot by its offset."""
        used = [(slot.part, slot.shard, slot.offset) for slot in self.slots]
        for part in self.held():
            used += [(part, shard, offset) for shard, offset in part.sealed.items()]
        sizes = {offset: slot_bytes(self.shard_bytes(part, shard)) for part, shard, offset in used}
        assert len(sizes) == len(used), "two shards lie at one place"
        return sizes

    def children(self, chunk: ChunkId) -> list[ChunkId]:
        """The known chunks that extend a chunk."""
        return [child for child, parent in self.parents.items() if parent == chunk]

    def with_descendants(self, chunk: ChunkId) -> Iterator[ChunkId]:
        """The chunk and all known ones that extend it."""
        yield chunk
        for child in self.children(chunk):
            yield from self.with_descendants(child)

    def parts_of(self, chunk: ChunkId) -> list[Part]:
        """The parts of a chunk that are in the index."""
        return [part for (owner, _), part in self.parts.items() if owner == chunk]

    def may_go(self, part: Part) -> bool:
        """True if the part could be evicted by itself now."""
        if not self.is_visible(part) or self.pins(part) or self.keepers(part):
            return False
        if not self.is_full_attention(part):
            return True
        in_use = any(
            other.writing or self.pins(other) or self.keepers(other)
            for other in self.parts_of(part.chunk)
        )
        return not in_use and not self.children(part.chunk)

    def is_announced(self, part: Part | None) -> bool:
        """True if events have told of it: a part of a full-attention group waits for all before."""
        if part is None or not self.is_visible(part):
            return False
        parent = self.parents[part.chunk]
        if not parent.key or not self.is_full_attention(part):
            return True
        return self.is_announced(self.parts.get((parent, part.position)))

    def state(self) -> State:
        """Everything, to be compared with the server's."""
        pinned = self.pinned()
        memory = self.memory()
        reserved = sum(memory[slot.offset] for slot in self.slots)
        visible = {part for part in self.parts.values() if self.is_visible(part)}
        visible_of = Counter(part.chunk.namespace for part in visible)
        bytes_of: Counter[str] = Counter()
        for part in self.held():
            for shard in part.sealed:
                bytes_of[part.chunk.namespace] += self.shard_bytes(part, shard)
        announced = {part for part in visible if self.has_events and self.is_announced(part)}
        return State(
            chunks=frozenset(
                ChunkState(*chunk, parent.key) for chunk, parent in self.parents.items()
            ),
            parts=frozenset(
                PartState(
                    *part.chunk,
                    part.position,
                    frozenset(part.sealed.items()),
                    frozenset(part.writing),
                    self.pins(part) if part in pinned else 0,
                    self.keepers(part),
                    part in visible,
                )
                for part in self.parts.values()
            ),
            pending_parts=len(self.parts) - len(visible),
            pinned_parts=len(pinned),
            pins=frozenset(
                PinState(
                    *pin,
                    frozenset((part.chunk.key, part.position, end) for part, end in kept.items()),
                    sum(map(self.part_bytes, kept)),
                )
                for pin, kept in self.kept.items()
            ),
            kept_parts=len(self.kept_parts()),
            kept_bytes=sum(map(self.part_bytes, self.kept_parts())),
            locks=frozenset(
                LockState(
                    lease.lease_id,
                    part.chunk.key,
                    part.position,
                    chunk,
                    reader,
                    frozenset(part.sealed.items()),
                )
                for lease in self.leases.values()
                for part, chunk, reader in lease.locks
            ),
            leases=frozenset(
                LeaseState(
                    lease.lease_id,
                    lease.namespace,
                    lease.engine,
                    lease.readers,
                    frozenset(lease.copying),
                )
                for lease in self.leases.values()
            ),
            sessions=frozenset(Counter(map(_session_state, self.open_sessions())).items()),
            namespaces=frozenset(
                NamespaceState(name, visible_of[name], bytes_of[name]) for name in self.namespaces
            ),
            memory=MemoryState(
                self.ready_bytes,
                sum(memory.values()) - reserved,
                reserved,
                frozenset(Counter(memory.values()).items()),
            ),
            announced=frozenset(
                AnnouncedState(
                    *part.chunk,
                    self.group(part).group_idx,
                    self.parents[part.chunk].key,
                    self.group(part).kind.value,
                    self.group(part).window_tokens,
                    part.told,
                )
                for part in announced
            ),
            counters=frozenset((+self.counters).items()),
            idle=not self.slots
            and not self.readings
            and not any(lease.copying for lease in self.leases.values()),
        )

    # Namespaces

    def refuses_namespace(self, namespace: Namespace) -> Reason | None:
        """Why a namespace is not registered: it is known with other sizes."""
        known = self.namespaces.get(namespace.name, namespace)
        agree = all(
            size == other or not size or not other
            for size, other in zip(_sizes(known), _sizes(namespace), strict=True)
        )
        return None if agree else Reason.NAMESPACE_CONFLICT

    def register(self, namespace: Namespace) -> None:
        """A namespace is known, or more of its sizes are."""
        known = self.namespaces.get(namespace.name, namespace)
        groups = [
            replace(group, shard_bytes=tuple(map(max, group.shard_bytes, other.shard_bytes)))
            for group, other in zip(known.groups, namespace.groups, strict=True)
        ]
        self.namespaces[namespace.name] = replace(known, groups=tuple(groups))

    # Sessions and time

    def open_sessions(self) -> list[Session]:
        """Those whose stream has not ended."""
        return [session for session in self.sessions if not session.closed]

    def refuses_session(self, session: Session) -> Reason | None:
        """Why the session can make no call."""
        if session.closed:
            return Reason.UNKNOWN_SESSION
        return Reason.SESSION_EXPIRED if session.expired else None

    def refuses_new_work(self) -> Reason | None:
        """Why nothing new may begin."""
        return Reason.DRAINING if self.draining else None

    def open(self, engine: str, role: Role, worker: int, shard: int, ttl: float) -> Session:
        """A session is there from now on."""
        session = Session(engine, role, worker, shard, ttl, self.clock())
        self.sessions.append(session)
        return session

    def close(self, session: Session, *, mapped: bool) -> None:
        """A session's stream ended, and its process may still be there or not."""
        session.closed = True
        session.mapped = mapped
        self._let_go(session)
        self._free_unmapped()

    def sweep(self) -> None:
        """What time alone brings about, in the server's order."""
        now = self.clock()
        self._free_unmapped()
        for lease in list(self.leases.values()):
            if lease.expires_at is not None and lease.expires_at <= now:
                self._release(lease, lease.locks)
        for pin, kept in list(self.kept.items()):
            self._keep_only(pin, {part for part, end in kept.items() if end > now})
        for part in list(self.parts.values()):
            late = part.deadline <= now and not part.writing and not self.is_visible(part)
            if late:
                self.counters["abandoned_parts"] += 1
                self._remove(part)
        self._forget_chunks()
        for session in self.open_sessions():
            silent = now - session.last_seen > session.ttl and not session.held_up
            if silent and not session.expired:
                session.expired = True
                self._let_go(session)

    def excuse_silence(self, seconds: float) -> None:
        """The server was stopped for so long."""
        for session in self.open_sessions():
            session.last_seen += seconds

    def _let_go(self, session: Session) -> None:
        """Its locks end, and others may store what it was storing; but its memory stays."""
        successors = [
            other
            for other in self.open_sessions()
            if other is not session and not other.expired and other.role is Role.WORKER
            if (other.engine, other.worker) == (session.engine, session.worker)
        ]
        for lease in list(self.leases.values()):
            if lease.owner is session:
                self._release(lease, lease.locks)
            elif session.role is Role.WORKER and lease.engine == session.engine and not successors:
                self._release(
                    lease, (lock for lock in lease.locks if lock.reader == session.worker)
                )
        if not session.orphaned:
            session.orphaned = True
            for slots in session.reservations.values():
                for slot in slots.values():
                    self._stop_waiting(slot)

    def _free_unmapped(self) -> None:
        for session in self.sessions:
            if session.closed and not session.mapped:
                for slots in session.reservations.values():
                    self.slots.difference_update(slots.values())
                session.reservations.clear()

    # Looking up and locking

    def refuses_lookup(
        self, session: Session | None, namespace: str, readers: int, probe: bool, ttl_ms: int
    ) -> Reason | None:
        """Why a lookup fails."""
        if self.draining and not probe:
            return Reason.DRAINING
        if readers > MAX_READERS or (session is not None and ttl_ms):
            return Reason.INVALID_ARGUMENT_VALUE
        return None if namespace in self.namespaces else Reason.UNKNOWN_NAMESPACE

    def hit(self, namespace: str, keys: Sequence[bytes]) -> tuple[int, list[range]]:
        """The longest hit, and which chunks of each group it needs; (0, []) on a miss."""
        groups = self.namespaces[namespace].groups
        for hit in range(len(keys), 0, -1):
            needed = [self._needed(namespace, group, hit) for group in groups]
            if any(needed) and all(
                self._is_there(namespace, keys[chunk], position)
                for position, chunks in enumerate(needed)
                for chunk in chunks
            ):
                return hit, needed
        return 0, []

    def _needed(self, namespace: str, group: Group, hit: int) -> range:
        """The chunks that a group needs for the token after a hit."""
        if group.kind is GroupKind.FULL_ATTENTION:
            return range(hit)
        if group.kind is GroupKind.RECURRENT_STATE:
            return range(hit - 1, hit)
        chunk_tokens = self.namespaces[namespace].chunk_tokens
        if group.kind is GroupKind.CHUNKED_LOCAL_ATTENTION:
            own_piece = [
                token
                for token in range(hit * chunk_tokens)
                if token // group.attention_chunk_tokens
                == hit * chunk_tokens // group.attention_chunk_tokens
            ]
            return range(own_piece[0] // chunk_tokens, hit) if own_piece else range(hit, hit)
        first_token = max(0, hit * chunk_tokens - (group.window_tokens - 1))
        return range(min(first_token // chunk_tokens, hit - 1), hit)

    def _is_there(self, namespace: str, key: bytes, position: int) -> bool:
        part = self.parts.get((ChunkId(namespace, key), position))
        return part is not None and self.is_visible(part)

    def lookup(self, namespace: str, keys: Sequence[bytes]) -> tuple[int, list[range]]:
        """The answer to a lookup."""
        hit, needed = self.hit(namespace, keys)
        self.counters["lookups"] += 1
        self.counters["lookup_chunks"] += len(keys)
        self.counters["hit_chunks"] += hit
        return hit, needed

    def grant(
        self,
        lease_id: int,
        session: Session | None,
        namespace: str,
        keys: Sequence[bytes],
        readers: int,
        ttl: float,
    ) -> None:
        """The lookup's hit is locked, for each reader."""
        _, needed = self.hit(namespace, keys)
        assert lease_id not in (0, *self.leases)
        self.leases[lease_id] = Lease(
            lease_id,
            namespace,
            session,
            session.engine if session else None,
            None if session else self.clock() + ttl,
            readers,
            {position: chunks.stop for position, chunks in enumerate(needed)},
            {
                Lock(self.parts[ChunkId(namespace, keys[chunk]), position], chunk, reader)
                for position, chunks in enumerate(needed)
                for chunk in chunks
                for reader in range(readers)
            },
        )

    def refuses_lease(self, session: Session | None, lease_id: int) -> Reason | None:
        """Why a call may not touch the lease; a lease that ended is no reason."""
        lease = self.leases.get(lease_id)
        if lease is None or lease.engine is None:
            return None
        is_own = session is not None and session.engine == lease.engine
        return None if is_own else Reason.FOREIGN_LEASE

    def refuses_free(self, session: Session | None, ranges: Sequence[LockRange]) -> Reason | None:
        """Why nothing of these is freed."""
        for each in ranges:
            if reason := self.refuses_lease(session, each.lease_id):
                return reason
        for each in ranges:
            lease = self.leases.get(each.lease_id)
            if lease and each.group_idx is not None:
                groups = self.namespaces[lease.namespace].groups
                if each.group_idx not in [group.group_idx for group in groups]:
                    return Reason.INVALID_ARGUMENT_VALUE
        return None

    def free(self, session: Session | None, ranges: Sequence[LockRange]) -> list[int]:
        """Free locks; how many were held for each range."""
        freed = []
        for lease_id, first, end, reader, group_idx in ranges:
            lease = self.leases.get(lease_id)
            if lease is None:
                freed.append(0)
                continue
            if session is not None and session.role is Role.WORKER:
                reader = session.worker
            locks = [
                lock
                for lock in lease.locks
                if first <= lock.chunk and (end is None or lock.chunk < end)
                if reader is None or lock.reader == reader
                if group_idx is None or self.group(lock.part).group_idx == group_idx
            ]
            freed.append(self._release(lease, locks))
        return freed

    def end_retrieve(
        self, lease_id: int, position: int, first: int, end: int, readers: Collection[int]
    ) -> None:
        """A retrieve for these readers is over."""
        if lease_id in self.leases:
            lease = self.leases[lease_id]
            chunks = range(first, end)
            self._release(
                lease,
                [
                    lock
                    for lock in lease.locks
                    if lock.part.position == position
                    if lock.chunk in chunks and lock.reader in readers
                ],
            )

    def refuses_locate(
        self,
        session: Session | None,
        lease_id: int,
        position: int,
        first: int,
        end: int | None,
        shard: int,
        reader: int,
    ) -> Reason | None:
        """Why a reader is not told where its shards lie."""
        if reason := self.refuses_lease(session, lease_id):
            return reason
        lease = self.leases.get(lease_id)
        if lease is None:
            return Reason.UNKNOWN_LEASE
        is_worker = session is not None and session.role is Role.WORKER
        wrong_worker = is_worker and (session.shard, session.worker) != (shard, reader)  # type: ignore[union-attr]
        wrong_shard = shard >= self.namespaces[lease.namespace].kv_world_size
        if wrong_worker or wrong_shard or reader >= lease.readers:
            return Reason.INVALID_ARGUMENT_VALUE
        return None

    def locate(
        self, lease_id: int, position: int, first: int, end: int | None, shard: int, reader: int
    ) -> list[int | None]:
        """Where the shards lie that the reader has locked, None for each other chunk."""
        lease = self.leases[lease_id]
        offsets = {
            lock.chunk: lock.part.sealed[shard]
            for lock in lease.locks
            if lock.part.position == position and lock.reader == reader
        }
        end = lease.ends[position] if end is None else end
        located = [offsets.get(chunk) for chunk in range(first, end)]
        if any(offset is not None for offset in located):
            lease.copying.add(reader)
        return located

    def _release(self, lease: Lease, locks: Iterable[Lock]) -> int:
        before = len(lease.locks)
        lease.locks = lease.locks.difference(list(locks))
        lease.copying &= {lock.reader for lock in lease.locks}
        if not lease.locks:
            del self.leases[lease.lease_id]
        return before - len(lease.locks)

    # Reading without a lease

    def refuses_read(self, namespace: str, position: int, shard: int) -> Reason | None:
        """Why nothing is read."""
        known = self.namespaces[namespace]
        is_known = shard < known.kv_world_size and known.groups[position].shard_bytes[shard]
        return None if is_known else Reason.INVALID_ARGUMENT_VALUE

    def begin_reading(self, namespace: str, position: int, keys: Sequence[bytes]) -> list[Part]:
        """The parts of the first keys that are all there. They stay until ``finish_reading``."""
        parts = []
        for key in keys:
            if not self._is_there(namespace, key, position):
                break
            parts.append(self.parts[ChunkId(namespace, key), position])
        self.readings.append(parts)
        return parts

    def finish_reading(self, reading: list[Part]) -> None:
        """A read is over."""
        self.readings = [other for other in self.readings if other is not reading]

    # Keeping

    def refuses_pin(self, pin: Pin, keys: Sequence[bytes], end: float) -> Reason | None:
        """Why a prompt is not pinned."""
        if self.draining:
            return Reason.DRAINING
        if pin.namespace not in self.namespaces:
            return Reason.UNKNOWN_NAMESPACE
        wanted = self.kept_parts()
        for part in self.hit_parts(pin.namespace, keys):
            wanted.update(self.with_prefix(pin, part, end))
        return None if self.may_be_kept(wanted) else Reason.PIN_LIMIT

    def may_be_kept(self, parts: Collection[Part]) -> bool:
        """True if pins may keep all these."""
        return sum(map(self.part_bytes, parts)) <= PIN_SHARE * self.pool_bytes

    def hit_parts(self, namespace: str, keys: Sequence[bytes]) -> list[Part]:
        """What a lookup would lock."""
        _, needed = self.hit(namespace, keys)
        return [
            self.parts[ChunkId(namespace, keys[chunk]), position]
            for position, chunks in enumerate(needed)
            for chunk in chunks
        ]

    def full_attention(self, pin: Pin, chunk: ChunkId, end: float) -> Iterator[Part]:
        """The full attention of a chunk and of those before it, the last first, up to a chunk that
        the pin keeps already. (Before that one a part may have come late.)
        """
        kept = self.kept.get(pin, {})
        while chunk.key:
            full = [part for part in self.parts_of(chunk) if self.is_full_attention(part)]
            if full and all(kept.get(part, 0.0) >= end for part in full):
                return
            yield from full
            chunk = self.parents[chunk]

    def with_prefix(self, pin: Pin, part: Part, end: float) -> list[Part]:
        """A part, after all of full attention that it cannot do without."""
        return [*reversed(list(self.full_attention(pin, part.chunk, end))), part]

    def pin(self, pin: Pin, keys: Sequence[bytes], end: float) -> int:
        """What is cached of a prompt is kept; how many chunks that is."""
        for part in self.hit_parts(pin.namespace, keys):
            for each in self.with_prefix(pin, part, end):
                self._keep(pin, each, end)
        return self.hit(pin.namespace, keys)[0]

    def keep(self, pin: Pin, before: ChunkId, parts: Iterable[Part | None], end: float) -> int:
        """Keep a chunk and then parts that were stored, as long as pins may keep more; how many of
        the parts are kept. None stands for a part that is gone, since it could not be kept.
        """
        count = 0
        needed: list[list[Part]] = [list(self.full_attention(pin, before, end))[::-1]]
        needed += [self.with_prefix(pin, part, end) if part else [] for part in parts]
        for index, wanted in enumerate(needed):
            for each in wanted:
                if not self.may_be_kept(self.kept_parts() | {each}) or not all(
                    self.group(each).shard_bytes
                ):
                    return count
                self._keep(pin, each, end)
            if index and not wanted:
                return count
            count = index
        return count

    def unpin(self, namespace: str | None, name: str | None) -> tuple[int, int, int]:
        """End pins; how many, and how many parts and bytes are not kept any more."""
        before = self.kept_parts()
        pins = [
            pin
            for pin in self.kept
            if namespace in (None, pin.namespace) and name in (None, pin.name)
        ]
        for pin in pins:
            del self.kept[pin]
        gone = before - self.kept_parts()
        return len(pins), len(gone), sum(map(self.part_bytes, gone))

    def _keep(self, pin: Pin, part: Part, end: float) -> None:
        kept = self.kept.setdefault(pin, {})
        kept[part] = max(end, kept.get(part, end))

    def _keep_only(self, pin: Pin, parts: Collection[Part]) -> None:
        self.kept[pin] = {part: end for part, end in self.kept[pin].items() if part in parts}
        if not self.kept[pin]:
            del self.kept[pin]

    # Storing

    def refuses_reserve(
        self, session: Session | None, namespace: str, group_idx: int | None, shard: int
    ) -> Reason | None:
        """Why nothing is reserved."""
        if self.draining:
            return Reason.DRAINING
        if namespace not in self.namespaces:
            return Reason.UNKNOWN_NAMESPACE
        known = self.namespaces[namespace]
        is_worker = session is not None and session.role is Role.WORKER
        if shard >= known.kv_world_size or (is_worker and shard != session.shard):  # type: ignore[union-attr]
            return Reason.INVALID_ARGUMENT_VALUE
        sizes = [group.shard_bytes[shard] for group in known.groups if group.group_idx == group_idx]
        if sizes in ([], [0]):
            return Reason.INVALID_ARGUMENT_VALUE
        return Reason.CHUNK_TOO_LARGE if sizes[0] > self.pool_bytes else None

    def reserve(
        self,
        namespace: str,
        position: int,
        shard: int,
        parent: bytes,
        keys: Sequence[bytes],
        told: Sequence[bytes],
        answers: Sequence[ReserveStatus | int],
        left: Collection[PartState],
        keep: tuple[str, float] | None = None,
    ) -> tuple[dict[int, Slot], int]:
        """Memory for one shard of consecutive chunks; the new slots by chunk, and how many of the
        chunks are kept.

        ``keep`` is the name of a pin, and until when it keeps them. ``answers`` are the server's,
        an offset for each chunk that got memory, and ``left`` is what its index has now.
        """
        chunks = [ChunkId(namespace, parent), *(ChunkId(namespace, key) for key in keys)]
        if parent and not self._can_be_extended(chunks[0], position):
            assert set(answers) == {ReserveStatus.PARENT_MISSING}
            return {}, 0
        there = [self._has(chunk, position, shard) for chunk in chunks[1:]]
        self._evict(self.missing(left))
        slots: dict[int, Slot] = {}
        for index, answer in enumerate(answers):
            if answer is ReserveStatus.EXISTS:
                assert there[index]
            elif isinstance(answer, int):
                assert ReserveStatus.NO_SPACE not in answers[:index], "nobody could ever hit it"
                assert not self._has(chunks[index + 1], position, shard)
                slots[index] = self._reserve(
                    chunks[index], chunks[index + 1], position, shard, answer
                )
                part = slots[index].part
                part.told = part.told or (told[index] if told else b"")
            else:
                assert answer is ReserveStatus.NO_SPACE
                self.counters["no_space"] += 1
        if ReserveStatus.NO_SPACE in answers:
            size = self.namespaces[namespace].groups[position].shard_bytes[shard]
            assert all(part.chunk in chunks for part in self.may_go_for(size))
        self._forget_chunks()
        if keep is None:
            return slots, 0
        # Of these a part that could not be kept may have been evicted for the next ones.
        there = [
            self.parts.get((chunk, position))
            for chunk, answer in zip(chunks[1:], answers, strict=True)
            if answer is ReserveStatus.EXISTS or isinstance(answer, int)
        ]
        kept = self.keep(Pin(namespace, keep[0]), chunks[0], there, keep[1])
        self.counters["refused_keeps"] += len(there) - kept
        return slots, kept

    def _can_be_extended(self, chunk: ChunkId, position: int) -> bool:
        """True if a hit could ever reach what extends the chunk."""
        kind = self.namespaces[chunk.namespace].groups[position].kind
        if kind is GroupKind.FULL_ATTENTION:
            return (chunk, position) in self.parts
        return chunk in self.parents

    def _has(self, chunk: ChunkId, position: int, shard: int) -> bool:
        """True if the shard is sealed or being written."""
        part = self.parts.get((chunk, position))
        return part is not None and (shard in part.sealed or shard in part.writing)

    def _reserve(
        self, parent: ChunkId, chunk: ChunkId, position: int, shard: int, offset: int
    ) -> Slot:
        self.parents.setdefault(chunk, parent)
        part = self.parts.setdefault((chunk, position), Part(chunk, position))
        part.writing.add(shard)
        part.deadline = self.clock() + SHARDS_MISSING_SECONDS
        end = offset + slot_bytes(self.shard_bytes(part, shard))
        assert 0 <= offset < end <= self.pool_bytes
        assert all(
            end <= other or other + nbytes <= offset for other, nbytes in self.memory().items()
        ), "memory that is in use was given away"
        slot = Slot(part, shard, offset)
        self.slots.add(slot)
        return slot

    def seal(self, slot: Slot) -> bool:
        """A shard is complete. False if its part is gone, and then its memory is free."""
        self.slots.remove(slot)
        part = slot.part
        if not self.in_index(part):
            return False
        part.writing.remove(slot.shard)
        part.sealed[slot.shard] = slot.offset
        self.counters["stored_shards"] += 1
        self.counters["stored_bytes"] += self.shard_bytes(part, slot.shard)
        return True

    def abort_slot(self, slot: Slot) -> None:
        """A shard will not come, and nobody writes it any more."""
        self._stop_waiting(slot)
        self.slots.remove(slot)

    def open_reservation(
        self, session: Session, reservation_id: int, slots: Mapping[int, Slot]
    ) -> None:
        """A session writes to these slots by itself."""
        session.reservations[reservation_id] = dict(slots)

    def refuses_reservation(self, session: Session, reservation_id: int) -> Reason | None:
        """Why the session may neither commit nor abort it; one that ended is no reason."""
        owners = [other for other in self.sessions if reservation_id in other.reservations]
        return None if owners in ([], [session]) else Reason.FOREIGN_RESERVATION

    def refuses_commit(
        self, session: Session, reservation_id: int, chunks: Sequence[int]
    ) -> Reason | None:
        """Why nothing is committed."""
        if reason := self.refuses_reservation(session, reservation_id):
            return reason
        if reservation_id not in session.reservations:
            return Reason.UNKNOWN_RESERVATION
        still_open = list(session.reservations[reservation_id])
        each_once = all(chunks.count(chunk) <= still_open.count(chunk) for chunk in chunks)
        return None if each_once else Reason.INVALID_ARGUMENT_VALUE

    def commit(self, session: Session, reservation_id: int, chunks: Sequence[int]) -> list[bool]:
        """Seal some chunks of a reservation, or all."""
        slots = session.reservations[reservation_id]
        sealed = [self.seal(slots.pop(chunk)) for chunk in chunks or list(slots)]
        if not slots:
            del session.reservations[reservation_id]
        return sealed

    def abort(self, session: Session, reservation_id: int) -> int:
        """Give back the rest of a reservation; how many chunks that is."""
        slots = session.reservations.pop(reservation_id, {})
        for slot in slots.values():
            self.abort_slot(slot)
        return len(slots)

    def _stop_waiting(self, slot: Slot) -> None:
        part = slot.part
        if self.in_index(part):
            part.writing.remove(slot.shard)
            if not part.sealed and not part.writing:
                self._remove(part)
                self._forget_chunks()

    # Removing

    def missing(self, left: Collection[PartState]) -> set[Part]:
        """The parts of the index that are not among those left, or anew."""
        slots = {(ChunkId(part.namespace, part.key), part.position): part.slots for part in left}
        return {
            part
            for identity, part in self.parts.items()
            if not part.sealed.items() <= slots.get(identity, frozenset()) or identity not in slots
        }

    def evict(self, gone: AbstractSet[Part]) -> tuple[int, int]:
        """The server chose to evict these; how many were visible, and how many bytes are free."""
        before = sum(self.memory().values())
        visible = self._evict(gone)
        self._forget_chunks()
        return visible, before - sum(self.memory().values())

    def _evict(self, gone: AbstractSet[Part]) -> int:
        """That is right if nobody used them, and nothing is left that needs them."""
        for part in gone:
            assert not part.writing, "a part was evicted while it was being written"
            assert not self.pins(part), "a part was evicted while somebody held it"
            assert not self.keepers(part), "a part was evicted while a pin kept it"
            if self.is_full_attention(part):
                for chunk in self.with_descendants(part.chunk):
                    assert gone >= set(self.parts_of(chunk)), "what needs it was left"
        visible = sum(map(self.is_visible, gone))
        self.counters["evicted_parts"] += visible
        for part in gone:
            self._remove(part)
        return visible

    def may_go_for(self, nbytes: int) -> list[Part]:
        """The parts by whose eviction a shard of that size certainly finds memory.

        (The index knows a part by the size of its first shard only.)
        """
        return [
            part
            for part in self.parts.values()
            if self.may_go(part)
            if slot_bytes(self.shard_bytes(part, 0)) == slot_bytes(nbytes)
        ]

    def refuses_clear(self, namespace: str | None) -> Reason | None:
        """Why nothing is cleared."""
        return None if namespace in (None, *self.namespaces) else Reason.UNKNOWN_NAMESPACE

    def clear(self, namespace: str | None) -> int:
        """Nothing in the namespace, or in all for None, is visible from now on; how many parts
        were.
        """
        gone = [part for part in self.parts.values() if namespace in (None, part.chunk.namespace)]
        visible = sum(map(self.is_visible, gone))
        for part in gone:
            self._remove(part)
        self._forget_chunks()
        return visible

    def _remove(self, part: Part) -> None:
        for pin, kept in list(self.kept.items()):
            self._keep_only(pin, kept.keys() - {part})
        del self.parts[part.chunk, part.position]
        part.writing.clear()

    def _forget_chunks(self) -> None:
        """A chunk is known while it has parts, or while a known chunk extends it."""
        known: dict[ChunkId, ChunkId] = {}
        for chunk, _ in self.parts:
            while chunk.key and chunk not in known:
                known[chunk] = self.parents[chunk]
                chunk = known[chunk]
        self.parents = known


def _sizes(namespace: Namespace) -> list[int]:
    return [size for group in namespace.groups for size in group.shard_bytes]


def _session_state(session: Session) -> SessionState:
    return SessionState(
        session.engine,
        session.role.name,
        session.worker,
        session.shard,
        session.expired,
        frozenset(
            (slot.shard, slot.offset)
            for slots in session.reservations.values()
            for slot in slots.values()
        ),
    )

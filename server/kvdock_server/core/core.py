"""The verbs of the server over its index, leases, pool and sessions. It knows no gRPC.

Everything here runs on the event loop and waits for nothing. A call happens as a whole, unless it
is written in steps (``..._in_steps``): others may be called between those. Names follow the
protocol, whose comments say what each verb promises.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from kvdock_server.core.leases import Lease, LeaseTable
from kvdock_server.core.listing import ListedPart, list_parts
from kvdock_server.core.ranges import LeaseRange, LockRange
from kvdock_server.core.reading import MAX_KEYS, LocatedShard, LockedShards, locate, pinned
from kvdock_server.core.reservations import ReservationTable
from kvdock_server.core.sessions import Mode, Role, Session, SessionTable
from kvdock_server.core.writing import Writing
from kvdock_server.errors import Reason, RequestError, invalid
from kvdock_server.events.log import Limits, Log
from kvdock_server.events.publisher import Publisher
from kvdock_server.ids import new_id
from kvdock_server.index.index import Index, ReserveStatus, Slot
from kvdock_server.index.namespace import Namespace
from kvdock_server.steps import Backlog, Steps, at_once
from kvdock_server.tiers.host.slots import SlotAllocator

KEY_BYTES = 32
# What the recipe of keys calls the parent of a prompt's first chunk; no parent means the same.
_ROOT = bytes(KEY_BYTES)
MAX_READERS = 256
MAX_LOCK_RANGES = 256
DEFAULT_LEASE_TTL_MS = 30_000
MAX_LEASE_TTL_MS = 600_000

# A part whose missing shards have no writer for so long is given up.
_SHARDS_MISSING_SECONDS = 60.0


class HitRange(NamedTuple):
    """The chunks [first_chunk, end_chunk) of one group that a hit needs."""

    group_idx: int | None
    first_chunk: int
    end_chunk: int


class Hit(NamedTuple):
    """Answer to a lookup. ``ranges`` is empty on a miss, ``lease`` None on a miss or a probe."""

    chunks: int
    ranges: Sequence[HitRange]
    lease: Lease | None


@dataclass
class Counters:
    """Totals since the start, beside those of the index."""

    lookups: int = 0
    lookup_chunks: int = 0
    hit_chunks: int = 0
    stored_shards: int = 0
    stored_bytes: int = 0
    retrieved_shards: int = 0
    retrieved_bytes: int = 0
    host_to_device_bytes: int = 0
    device_to_host_bytes: int = 0
    device_to_device_bytes: int = 0


class Core:
    """One server's state.

    ``still_mapped`` tells whether the process of a session whose stream ended may still be writing
    into the pool.
    """

    def __init__(
        self,
        slots: SlotAllocator,
        *,
        still_mapped: Callable[[Session], bool] = lambda session: False,
        event_log: Limits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.epoch = new_id()
        self.backlog = Backlog()
        self.index = Index(slots, self.backlog)
        self.events: Publisher | None = None
        if event_log is not None:
            self.events = Publisher(self.epoch, Log(event_log), self.backlog)
            self.index.watchers.append(self.events)
        self.leases = LeaseTable(self.index)
        self.sessions = SessionTable()
        self.counters = Counters()
        self.draining = False
        self.clock = clock
        self._reservations = ReservationTable(self.index, self.seal, still_mapped)
        self._readings = 0

    # Sessions

    def open_session(
        self,
        *,
        engine_id: str,
        role: Role,
        worker_id: int = 0,
        kv_worker_id: int = 0,
        ttl_ms: int = 0,
        client: str = "",
    ) -> Session:
        """Open a session; RequestError where a field is out of its limits."""
        self._refuse_when_draining()
        return self.sessions.open(
            self.clock(),
            engine_id=engine_id,
            role=role,
            worker_id=worker_id,
            kv_worker_id=kv_worker_id,
            ttl_ms=ttl_ms,
            client=client,
        )

    def close_session(self, session: Session) -> None:
        """The session's stream ended: release all that it held.

        Memory that its process may still be writing to is released when it cannot any more.
        """
        session.orphaned = True
        self.sessions.close(session)
        self.backlog.add(self._end(session))

    def sweep(self) -> None:
        """Carry out what time alone brings about. Call it about once a second."""
        now = self.clock()
        self.backlog.add(self._reservations.reclaim_unmapped())
        self.backlog.add(self.leases.expire(now))
        self.index.give_up_overdue(now)
        if self.events is not None:
            self.events.subscribers.drop_hopeless()
        for session in self.sessions:
            silent = now - session.last_seen > session.ttl and not session.is_held_up
            if silent and not session.expired:
                session.expired = session.orphaned = True
                self.backlog.add(self._let_go(session))

    def excuse_silence(self, seconds: float) -> None:
        """The server itself was stopped for so long: nobody's silence counts."""
        for session in self.sessions:
            session.last_seen += seconds

    # Looking up and locking

    def lookup(
        self,
        session: Session | None,
        namespace: str,
        keys: Sequence[bytes],
        *,
        readers: int = 0,
        probe: bool = False,
        ttl_ms: int = 0,
    ) -> Hit:
        """How much of a prompt is cached, and a lease on it."""
        if not probe:
            self._refuse_when_draining()
        check_keys(keys)
        if readers > MAX_READERS:
            raise invalid(f"readers {readers}: at most {MAX_READERS}, 0 means 1")
        if session is not None and ttl_ms:
            raise invalid(f"ttl_ms {ttl_ms} with a session: the lease lives as long as that")
        if ttl_ms > MAX_LEASE_TTL_MS:
            raise invalid(f"ttl_ms {ttl_ms}: at most {MAX_LEASE_TTL_MS}, 0 means 30,000")
        space = self.index.space(namespace)
        spans = self.index.find(space, keys)
        groups = space.namespace.groups
        ranges = [
            HitRange(groups[span.position].group_idx, span.first, span.first + len(span.parts))
            for span in spans
        ]
        chunks = ranges[0].end_chunk if ranges else 0
        self.counters.lookups += 1
        self.counters.lookup_chunks += len(keys)
        self.counters.hit_chunks += chunks
        if probe or not spans:
            return Hit(chunks, ranges, None)
        self.index.touch(spans)
        if session is not None:
            lease = self.leases.grant(
                space,
                spans,
                readers or 1,
                owner=session.session_id,
                engine_id=session.engine_id,
            )
        else:
            expires_at = self.clock() + (ttl_ms or DEFAULT_LEASE_TTL_MS) / 1000
            lease = self.leases.grant(space, spans, readers or 1, expires_at=expires_at)
        return Hit(chunks, ranges, lease)

    def free_locks(self, session: Session | None, ranges: Sequence[LockRange]) -> list[int]:
        """Free locks, those of the caller only if it is a worker; how many were held of each."""
        return at_once(self.free_locks_in_steps(session, ranges))

    def free_locks_in_steps(
        self, session: Session | None, ranges: Sequence[LockRange]
    ) -> Steps[list[int]]:
        """Likewise."""
        if len(ranges) > MAX_LOCK_RANGES:
            raise invalid(f"{len(ranges)} lock ranges: at most {MAX_LOCK_RANGES}")
        # All is looked at before anything is freed: a call that fails changes nothing.
        leases = [self._lease(session, wanted.lease_id) for wanted in ranges]
        positions = [
            lease.space.namespace.position(wanted.group_idx)
            if lease is not None and wanted.group_idx is not None
            else None
            for lease, wanted in zip(leases, ranges, strict=True)
        ]
        released = []
        for wanted, lease, position in zip(ranges, leases, positions, strict=True):
            reader = wanted.reader
            if session is not None and session.role is Role.WORKER:
                reader = session.worker_id
            freed = 0
            if lease is not None:
                freed = yield from self.leases.release_in_steps(
                    lease,
                    wanted.first_chunk,
                    wanted.end_chunk or None,
                    readers=None if reader is None else [reader],
                    position=position,
                )
            released.append(freed)
        return released

    def locate(
        self, session: Session | None, chunks: LeaseRange, *, shard: int, reader: int
    ) -> LockedShards:
        """Where the locked shards of a range lie."""
        return at_once(self.locate_in_steps(session, chunks, shard=shard, reader=reader))

    def locate_in_steps(
        self, session: Session | None, chunks: LeaseRange, *, shard: int, reader: int
    ) -> Steps[LockedShards]:
        """Likewise, by the locks that are held at the first step."""
        lease = self._lease(session, chunks.lease_id)
        if lease is None:
            raise RequestError(
                Reason.UNKNOWN_LEASE,
                f"lease {chunks.lease_id} ended or is of an earlier epoch: look up again",
            )
        worker = session if session is not None and session.role is Role.WORKER else None
        if worker and (shard, reader) != (worker.kv_worker_id, worker.worker_id):
            raise invalid(
                f"shard {shard} and reader {reader}: this session may retrieve shard "
                f"{worker.kv_worker_id} as reader {worker.worker_id} only"
            )
        return locate(self.leases, lease, chunks, shard=shard, reader=reader)

    def lease_namespace(self, session: Session | None, lease_id: int) -> str:
        """Name of the namespace that a lease is about; empty if the lease ended."""
        lease = self._lease(session, lease_id)
        return lease.space.namespace.name if lease else ""

    def count_retrieved(self, shards: Sequence[LocatedShard]) -> None:
        """Count shards that were delivered."""
        self.counters.retrieved_shards += len(shards)
        self.counters.retrieved_bytes += sum(shard.nbytes for shard in shards)

    # Storing

    def reserve_in_steps(
        self,
        session: Session | None,
        namespace: str,
        group_idx: int | None,
        shard: int,
        parent_key: bytes,
        keys: Sequence[bytes],
        event_data: Sequence[bytes] = (),
    ) -> Steps[list[ReserveStatus | Slot]]:
        """Find memory for one shard of consecutive chunks of a prompt.

        ``event_data`` is what events are to tell about them, encoded, one for each or none. The
        caller owns the slots, and seals or aborts each of them. Closed before its end, it aborts
        what it has reserved.
        """
        self._refuse_when_draining()
        check_keys(keys)
        if len(parent_key) not in (0, KEY_BYTES):
            raise invalid(f"parent_key of {len(parent_key)} bytes: {KEY_BYTES}, or none")
        if parent_key == _ROOT:
            parent_key = b""
        space = self.index.space(namespace)
        if shard >= space.namespace.kv_world_size:
            raise invalid(
                f"kv_worker_id {shard}: namespace {namespace!r} has "
                f"{space.namespace.kv_world_size} shards"
            )
        if session is not None and session.role is Role.WORKER and shard != session.kv_worker_id:
            raise invalid(f"kv_worker_id {shard}: this session stores {session.kv_worker_id} only")
        position = space.namespace.position(group_idx)
        deadline = self.clock() + _SHARDS_MISSING_SECONDS
        outcomes = yield from self.index.reserve(space, position, shard, parent_key, keys, deadline)
        if self.events is not None and event_data:
            self.events.describe(outcomes, event_data)
        return outcomes

    def seal(self, slot: Slot) -> bool:
        """The bytes of a slot are complete. False if the chunk was cleared meanwhile."""
        if not self.index.seal(slot):
            return False
        self.counters.stored_shards += 1
        self.counters.stored_bytes += slot.nbytes
        return True

    def writing(self, outcomes: Sequence[ReserveStatus | Slot]) -> Writing:
        """The slots that a reserve got, for whoever fills them."""
        return Writing(self.index, self.seal, outcomes)

    def open_reservation(self, session: Session, writing: Writing) -> int:
        """Hand slots over to a client that fills them by itself; 0 if there are none.

        RequestError if the session has ended meanwhile.
        """
        if not writing.open:
            return 0
        if session.orphaned:
            self.sessions.with_token(session.token)
        slots, writing.open = writing.open, {}
        return self._reservations.open(session, slots).reservation_id

    def commit_in_steps(
        self, session: Session, reservation_id: int, chunks: Sequence[int]
    ) -> Steps[list[bool]]:
        """Seal chunks of a reservation, or all open ones.

        False for each that was cleared, or meanwhile aborted, or lost by the session.
        """
        return self._reservations.commit(session, reservation_id, chunks)

    def abort_in_steps(self, session: Session, reservation_id: int) -> Steps[int]:
        """Give back what a reservation still holds; how many chunks that were."""
        return self._reservations.abort(session, reservation_id)

    # Copies made by the server

    @contextmanager
    def reading(
        self, namespace: str, group_idx: int | None, shard: int, keys: Sequence[bytes]
    ) -> Iterator[list[LocatedShard]]:
        """The shards of the first keys that are all there. They stay until the block ends."""
        check_keys(keys)
        space = self.index.space(namespace)
        if shard >= space.namespace.kv_world_size:
            raise invalid(f"kv_worker_id {shard}: below {space.namespace.kv_world_size}")
        position = space.namespace.position(group_idx)
        nbytes = space.shard_bytes(position, shard)
        shards = []
        for key in keys:
            part = self.index.part(space, position, key)
            if part is None:
                break
            shards.append(LocatedShard(part, part.slots[shard], nbytes))
        self._readings += 1
        try:
            with pinned(self.index, shards):
                yield shards
        finally:
            self._readings -= 1

    # Namespaces

    def register_namespace(self, namespace: Namespace) -> bool:
        """Make a namespace known; True if it was not. RequestError if it contradicts itself."""
        return self.index.register(namespace)

    def check_namespace(self, name: str) -> None:
        """RequestError (UNKNOWN_NAMESPACE) if there is no namespace of that name."""
        self.index.space(name)

    def shard_bytes(self, namespace: str, group_idx: int | None, shard: int) -> int:
        """Size of one shard of a group; RequestError if there is none, or it is not known."""
        space = self.index.space(namespace)
        return space.shard_bytes(space.namespace.position(group_idx), shard)

    def list_parts(self, namespace: str) -> Generator[list[ListedPart] | None, None, None]:
        """As in ``listing``."""
        return list_parts(self.index.space(namespace))

    def clear(self, namespace: str) -> int:
        """Make everything in a namespace invisible, or in all if the name is empty."""
        spaces = [self.index.space(namespace)] if namespace else self.index.spaces
        return self.index.clear(*spaces)

    def evict_in_steps(self, nbytes: int) -> Steps[tuple[int, int]]:
        """Evict so many bytes, or all if 0; the parts and bytes that were."""
        # All is a number, too, so that it ends though others store meanwhile.
        return self.index.evict_in_steps(nbytes or self.index.sealed_bytes)

    @property
    def is_idle(self) -> bool:
        """True if nobody may be copying out of the pool or into it."""
        return (
            not self.index.reserved_bytes
            and not self._readings
            and not any(lease.copying for lease in self.leases)
        )

    def _refuse_when_draining(self) -> None:
        if self.draining:
            raise RequestError(
                Reason.DRAINING, "the server is stopping: go on without it and connect again later"
            )

    def _lease(self, session: Session | None, lease_id: int) -> Lease | None:
        return self.leases.get(lease_id, session.engine_id if session else None)

    def _end(self, session: Session) -> Steps[None]:
        yield from self._let_go(session)
        yield from self._reservations.end(session)

    def _let_go(self, session: Session) -> Steps[None]:
        """Free a session's locks, and let others store what it was storing."""
        for lease in self.leases.of_owner(session.session_id):
            yield from self.leases.release_in_steps(lease)
        if session.role is Role.WORKER:
            for lease in self.leases.of_engine(session.engine_id):
                if self._has_successor(session):
                    break
                yield from self.leases.release_in_steps(lease, readers=[session.worker_id])
        yield from self._reservations.orphan(session)

    def _has_successor(self, session: Session) -> bool:
        """True if the same worker has connected anew, and holds its locks by that session."""
        return any(
            other is not session
            and not other.expired
            and other.role is Role.WORKER
            and (other.engine_id, other.worker_id) == (session.engine_id, session.worker_id)
            for other in self.sessions
        )


def check_keys(keys: Sequence[bytes]) -> None:
    """Raise RequestError unless there are 1 to 16,384 keys of 32 bytes."""
    if not 1 <= len(keys) <= MAX_KEYS:
        raise invalid(f"{len(keys)} keys: from 1 to {MAX_KEYS}; split longer prompts")
    if set(map(len, keys)) != {KEY_BYTES}:
        index, key = next((i, key) for i, key in enumerate(keys) if len(key) != KEY_BYTES)
        raise invalid(
            f"key {index} has {len(key)} bytes: each has {KEY_BYTES} (see docs/keys.md for the "
            "recipe)"
        )


def check_session(session: Session | None, mode: Mode) -> Session:
    """The session if it is there and of that mode; RequestError otherwise."""
    if session is None:
        raise RequestError(Reason.SESSION_REQUIRED, "this call needs a session: open one")
    if session.mode is not mode:
        raise RequestError(
            Reason.WRONG_MODE,
            f"this call is for {mode.name} mode, and the session's is {session.mode.name} "
            f"({session.mode_reason})",
        )
    return session

"""The verbs of the server over its index, leases, pool and sessions. This module knows no gRPC.

Everything here runs on the event loop and waits for nothing. A call happens as a whole, unless it
is written in steps (``..._in_steps``): other calls may come between two steps. Names follow the
protocol, whose comments say what each verb promises.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from kvdock_server.core.counters import Counters
from kvdock_server.core.keys import KEY_BYTES, check_keys, check_number, check_sizes
from kvdock_server.core.leases import Lease, LeaseTable
from kvdock_server.core.pins import Pins
from kvdock_server.core.ranges import LeaseRange, LockRange
from kvdock_server.core.reading import (
    LocatedShard,
    LockedShards,
    locate_in_steps,
    pinned,
)
from kvdock_server.core.reservations import ReservationTable
from kvdock_server.core.sessions import Mode, Role, Session, SessionTable
from kvdock_server.core.writing import Writing
from kvdock_server.errors import Reason, RequestError, invalid
from kvdock_server.events.log import Limits, Log
from kvdock_server.events.publisher import Publisher
from kvdock_server.ids import new_id
from kvdock_server.index.eviction import EvictionPolicy, LeastRecentlyUsed
from kvdock_server.index.index import Index, ReserveStatus, Slot
from kvdock_server.index.keeping import DEFAULT_PIN_SHARE, Keep
from kvdock_server.index.terms import Priority, Terms
from kvdock_server.steps import Backlog, Steps
from kvdock_server.tiers.host.slots import SlotAllocator

# In the recipe of keys this is the parent of a prompt's first chunk. No parent means the same.
_ROOT = bytes(KEY_BYTES)
MAX_READERS = 256
MAX_LOCK_RANGES = 256
DEFAULT_LEASE_TTL_MS = 30_000
MAX_LEASE_TTL_MS = 600_000

# After this time without a writer for its missing shards, a part is given up.
_SHARDS_MISSING_SECONDS = 60.0


class HitRange(NamedTuple):
    """The chunks [first_chunk, end_chunk) of one group that a hit needs."""

    group_idx: int | None
    first_chunk: int
    end_chunk: int


class Hit(NamedTuple):
    """Answer to a lookup.

    ``ranges`` has one range for each group, and none on a miss. ``lease`` is None on a miss or a
    probe.
    """

    chunks: int
    ranges: Sequence[HitRange]
    lease: Lease | None


class Core:
    """One server's state.

    ``still_mapped`` is asked about a session whose stream ended: True if the session's process may
    still be writing into the pool.
    """

    def __init__(
        self,
        slots: SlotAllocator,
        *,
        still_mapped: Callable[[Session], bool] = lambda session: False,
        event_log: Limits | None = None,
        policy: EvictionPolicy | None = None,
        pin_share: float = DEFAULT_PIN_SHARE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.epoch = new_id()
        self.backlog = Backlog()
        self.index = Index(
            slots, self.backlog, policy or LeastRecentlyUsed(slots.limit_bytes), pin_share
        )
        self.events: Publisher | None = None
        if event_log is not None:
            self.events = Publisher(self.epoch, Log(event_log), self.backlog)
            self.index.watchers.append(self.events)
        self.leases = LeaseTable(self.index)
        self.sessions = SessionTable()
        self.counters = Counters()
        self.draining = False
        self.clock = clock
        self.pins = Pins(self.index, clock)
        self.reservations = ReservationTable(self.index, self.seal, still_mapped)
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
        self.refuse_when_draining()
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
        """The session's stream ended: free its locks and slots. Its GPU memory was closed before.

        Slots that the session's process may still be writing to are freed later, when the process
        cannot write any more.
        """
        session.orphaned = True
        self.sessions.close(session)
        self.backlog.add(self._end(session))

    def sweep(self) -> None:
        """End what is too old: leases, pins, unfinished parts, sessions that were silent.

        Call it about once a second.
        """
        now = self.clock()
        self.backlog.add(self.reservations.free_unmapped())
        self.backlog.add(self.leases.expire(now))
        self.backlog.add(self.index.keeping.expire(now))
        self.index.give_up_overdue(now)
        if self.events is not None:
            self.events.subscribers.drop_hopeless()
        for session in self.sessions:
            silent = now - session.last_seen > session.ttl and not session.is_held_up
            if silent and not session.expired:
                session.expired = session.orphaned = True
                self.backlog.add(self._let_go(session))

    def excuse_silence(self, seconds: float) -> None:
        """The server itself stood still for ``seconds``, which count as nobody's silence."""
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
        """How much of a prompt is cached, and a lease on what is.

        ``ttl_ms`` is for a lease without session. 0 means DEFAULT_LEASE_TTL_MS.
        """
        if not probe:
            self.refuse_when_draining()
        check_number(keys)
        if readers > MAX_READERS:
            raise invalid(
                f"readers {readers}: at most {MAX_READERS}, 0 means 1", "readers", MAX_READERS
            )
        if session is not None and ttl_ms:
            raise invalid(
                f"ttl_ms {ttl_ms} with a session: the lease lives as long as that", "ttl_ms"
            )
        if ttl_ms > MAX_LEASE_TTL_MS:
            raise invalid(
                f"ttl_ms {ttl_ms}: at most {MAX_LEASE_TTL_MS}, 0 means 30,000",
                "ttl_ms",
                MAX_LEASE_TTL_MS,
            )
        space = self.index.space(namespace)
        spans = self.index.find(space, keys)
        # What the index has is a key.
        check_sizes(keys, len(spans[0].parts) + spans[0].first if spans else 0)
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
        expires_at = None
        if session is None:
            expires_at = self.clock() + (ttl_ms or DEFAULT_LEASE_TTL_MS) / 1000
        return Hit(
            chunks, ranges, self.leases.grant(space, spans, readers or 1, session, expires_at)
        )

    def free_locks_in_steps(
        self, session: Session | None, ranges: Sequence[LockRange]
    ) -> Steps[list[int]]:
        """Free the locks of each range; how many of them were held.

        A worker's session frees the locks of its own reader only, whichever reader is named.
        """
        if len(ranges) > MAX_LOCK_RANGES:
            raise invalid(
                f"{len(ranges)} lock ranges: at most {MAX_LOCK_RANGES}", "locks", MAX_LOCK_RANGES
            )
        # All ranges are checked before any lock is freed: a call that fails changes nothing.
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
                    wanted.end_chunk,
                    readers=None if reader is None else [reader],
                    position=position,
                )
            released.append(freed)
        return released

    def locate_in_steps(
        self, session: Session | None, chunks: LeaseRange, *, shard: int, reader: int
    ) -> Steps[LockedShards]:
        """Where the shards of a range lie whose locks the reader holds at the first step."""
        lease = self._lease(session, chunks.lease_id)
        if lease is None:
            raise RequestError(
                Reason.UNKNOWN_LEASE,
                f"lease {chunks.lease_id} ended or is of an earlier epoch: look up again",
                lease_id=chunks.lease_id,
            )
        worker = session if session is not None and session.role is Role.WORKER else None
        if worker and (shard, reader) != (worker.kv_worker_id, worker.worker_id):
            raise invalid(
                f"shard {shard} and reader {reader}: this session may retrieve shard "
                f"{worker.kv_worker_id} as reader {worker.worker_id} only"
            )
        return locate_in_steps(self.leases, lease, chunks, shard=shard, reader=reader)

    def lease_namespace(self, session: Session | None, lease_id: int) -> str:
        """Name of a lease's namespace; empty if the lease ended."""
        lease = self._lease(session, lease_id)
        return lease.space.namespace.name if lease else ""

    def count_retrieved(self, shards: Sequence[LocatedShard]) -> None:
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
        keep: Keep | None = None,
        priority: Priority = Priority.NORMAL,
    ) -> Steps[list[ReserveStatus | Slot]]:
        """Find memory for one shard of consecutive chunks of a prompt, keep them as ``keep`` says,
        and evict them as ``priority`` says.

        ``event_data`` is what events are to tell about the chunks: one encoded message for each, or
        none at all. The caller owns the slots, and seals or aborts each of them. Steps that are
        closed before their end abort what they have reserved.
        """
        self.refuse_when_draining()
        check_keys(keys)
        if len(parent_key) not in (0, KEY_BYTES):
            raise invalid(
                f"parent_key of {len(parent_key)} bytes: {KEY_BYTES}, or none",
                "parent_key",
                KEY_BYTES,
            )
        if parent_key == _ROOT:
            parent_key = b""
        if _ROOT in keys:
            raise invalid(
                f"key {list(keys).index(_ROOT)} is 32 zero bytes: nothing could follow a chunk of "
                "this key, which as a parent says that a prompt begins",
                "keys",
            )
        space = self.index.space(namespace)
        if session is not None and session.role is Role.WORKER and shard != session.kv_worker_id:
            raise invalid(
                f"kv_worker_id {shard}: this session stores {session.kv_worker_id} only",
                "kv_worker_id",
                session.kv_worker_id,
            )
        position = space.namespace.position(group_idx)
        deadline = self.clock() + _SHARDS_MISSING_SECONDS
        home = session.home if session is not None else None
        keeper = self.pins.keeper(space, keep)
        # A plain store raises the priority of what exists.
        has_terms = keeper is not None or priority is not Priority.NORMAL or space.priorities
        terms = Terms(space, priority, keeper) if has_terms else None
        try:
            outcomes = yield from self.index.reserve(
                space, position, shard, parent_key, keys, deadline, home, terms
            )
        finally:
            self.pins.end(keeper)
        if keep is not None and keeper is not None:
            self.pins.tell(keep, keeper, outcomes)
        if self.events is not None and event_data:
            self.events.describe(outcomes, event_data)
        return outcomes

    def seal(self, slot: Slot) -> bool:
        """Make a slot, whose bytes are complete, part of the cache.

        False if the slot's chunk was cleared meanwhile.
        """
        if not self.index.seal(slot):
            return False
        self.counters.stored_shards += 1
        self.counters.stored_bytes += slot.nbytes
        return True

    @contextmanager
    def writing(self, outcomes: Sequence[ReserveStatus | Slot]) -> Iterator[Writing]:
        """The slots among the outcomes of ``reserve_in_steps``, for the caller that fills them.

        However the block ends, the slots that are still open are aborted then.
        """
        slots = {i: outcome for i, outcome in enumerate(outcomes) if isinstance(outcome, Slot)}
        writing = Writing(self.seal, slots)
        try:
            yield writing
        finally:
            left, writing.open = writing.open, {}
            self.index.abort_all(left.values())

    def open_reservation(self, session: Session, writing: Writing) -> int:
        """Hand slots over to a client that fills them by itself; 0 if there are none.

        RequestError if the session has ended meanwhile.
        """
        if not writing.open:
            return 0
        if session.orphaned:
            self.sessions.with_token(session.token)  # raises
        slots, writing.open = writing.open, {}
        return self.reservations.open(session, slots).reservation_id

    # Copies made by the server

    @contextmanager
    def reading(
        self, namespace: str, group_idx: int | None, shard: int, keys: Sequence[bytes]
    ) -> Iterator[list[LocatedShard]]:
        """The shards of the first keys, up to the first key that is not cached.

        They stay where they are until the block ends.
        """
        check_keys(keys)
        space = self.index.space(namespace)
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

    def shard_bytes(self, namespace: str, group_idx: int | None, shard: int) -> int:
        """Size of one shard of a group; RequestError if there is none, or it is not known."""
        space = self.index.space(namespace)
        return space.shard_bytes(space.namespace.position(group_idx), shard)

    def clear(self, namespace: str) -> int:
        """Make everything in a namespace invisible; how many parts were visible."""
        return self.index.clear(self.index.space(namespace))

    def clear_all(self) -> int:
        """Make everything in every namespace invisible; how many parts were visible."""
        return self.index.clear(*self.index.spaces)

    def evict_in_steps(self, nbytes: int) -> Steps[tuple[int, int]]:
        """Evict ``nbytes``; how many parts and bytes were evicted."""
        return self.index.evict_in_steps(nbytes)

    def evict_all_in_steps(self) -> Steps[tuple[int, int]]:
        """Evict all that may be evicted; how many parts and bytes were evicted."""
        # All is a number of bytes, too, so that evicting ends though others store meanwhile.
        return self.index.evict_in_steps(self.index.sealed_bytes)

    @property
    def is_idle(self) -> bool:
        """True if nobody may be copying out of the pool or into it."""
        return not self.index.reserved_bytes and not self._readings and not self.leases.is_copying

    def refuse_when_draining(self) -> None:
        """Raise RequestError (DRAINING) if the server is stopping."""
        if self.draining:
            raise RequestError(
                Reason.DRAINING, "the server is stopping: go on without it and connect again later"
            )

    def _lease(self, session: Session | None, lease_id: int) -> Lease | None:
        return self.leases.get(lease_id, session.engine_id if session else None)

    def _end(self, session: Session) -> Steps[None]:
        yield from self._let_go(session)
        yield from self.reservations.end(session)

    def _let_go(self, session: Session) -> Steps[None]:
        """Free a session's locks, and let others store what it was storing."""
        for lease in self.leases.of_owner(session.session_id):
            yield from self.leases.release_in_steps(lease)
        if session.role is Role.WORKER:
            for lease in self.leases.of_engine(session.engine_id):
                if self._has_successor(session):
                    break
                yield from self.leases.release_in_steps(lease, readers=[session.worker_id])
        yield from self.reservations.orphan(session)

    def _has_successor(self, session: Session) -> bool:
        """True if the same worker has connected anew: its locks belong to the new session."""
        return any(
            other is not session
            and not other.expired
            and other.role is Role.WORKER
            and (other.engine_id, other.worker_id) == (session.engine_id, session.worker_id)
            for other in self.sessions
        )


def check_session(session: Session | None, mode: Mode) -> Session:
    """The session; RequestError if there is none, or if its mode is another."""
    if session is None:
        raise RequestError(Reason.SESSION_REQUIRED, "this call needs a session: open one")
    if session.mode is not mode:
        raise RequestError(
            Reason.WRONG_MODE,
            f"this call is for {mode.name} mode, and the session's is {session.mode.name} "
            f"({session.mode_reason})",
            session_id=session.session_id,
        )
    return session

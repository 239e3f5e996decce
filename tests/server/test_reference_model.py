"""The server's whole state against the reference model, after each of many random calls.

Sessions of several engines look up, lock, store, read, fall silent and end; somebody clears and
evicts; time passes; the pool grows. After each call all that can be seen of the server must equal
what the model says, so a call that was refused has changed nothing. At the end of each run the
server drains, and nothing may be left.

``KVDOCK_MODEL_RUNS=N`` makes N runs instead of the few of the normal suite.
"""

from __future__ import annotations

import hashlib
import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import pytest
import reference_model
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)
from reference_model import Model
from server_state import EventReader, parts_of, runs_of, state_of

from kvdock.v1 import types_pb2
from kvdock_server.core import (
    Core,
    Keep,
    LeaseRange,
    LockedShards,
    LockRange,
    Priority,
    Role,
    Session,
)
from kvdock_server.errors import Reason, RequestError
from kvdock_server.events.log import Limits
from kvdock_server.index.index import ReserveStatus, Slot
from kvdock_server.index.namespace import Group, GroupKind, Namespace
from kvdock_server.index.policies import POLICIES
from kvdock_server.steps import at_once
from kvdock_server.tiers.host.slots import PAGE_BYTES, SlotAllocator

RUNS = int(os.environ.get("KVDOCK_MODEL_RUNS", "60"))

SLAB = 4 * PAGE_BYTES
SLABS = 16
UNKNOWN_GROUP_IDX = 7


def group(kind: GroupKind, *sizes: int, group_idx: int | None = None, window: int = 0) -> Group:
    return Group(group_idx, kind, window, sizes)


# One group; shards of two sizes, of which one may be told late; several groups; and chunks that no
# pool of this size could hold.
NAMESPACES = {
    "plain": Namespace("plain", 16, 1, (group(GroupKind.FULL_ATTENTION, PAGE_BYTES),)),
    "sharded": Namespace("sharded", 16, 2, (group(GroupKind.FULL_ATTENTION, 5_000, 9_000),)),
    "sharded, one told": Namespace("sharded", 16, 2, (group(GroupKind.FULL_ATTENTION, 5_000, 0),)),
    "sharded, other": Namespace("sharded", 16, 2, (group(GroupKind.FULL_ATTENTION, 5_001, 0),)),
    "hybrid": Namespace(
        "hybrid",
        16,
        1,
        (
            group(GroupKind.FULL_ATTENTION, PAGE_BYTES, group_idx=0),
            group(GroupKind.SLIDING_WINDOW, 3 * PAGE_BYTES, group_idx=1, window=18),
            group(GroupKind.RECURRENT_STATE, 5 * PAGE_BYTES, group_idx=3),
        ),
    ),
    "local": Namespace(
        "local",
        16,
        1,
        (
            Group(0, GroupKind.CHUNKED_LOCAL_ATTENTION, 0, (2 * PAGE_BYTES,), 40),
            group(GroupKind.FULL_ATTENTION, PAGE_BYTES, group_idx=1),
        ),
    ),
    "large": Namespace("large", 16, 1, (group(GroupKind.FULL_ATTENTION, 2 * SLABS * SLAB),)),
}


class Clock:
    """Time that only a rule moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass(eq=False)
class Caller:
    """A session: the server's, and the model's of it."""

    session: Session
    model: reference_model.Session


class Granted(NamedTuple):
    """A lease and who got it, None for one by hand."""

    lease_id: int
    namespace: str
    owner: Caller | None


@dataclass(eq=False)
class Writing:
    """A slot that is being written: the server's, and the model's of it."""

    slot: Slot
    model: reference_model.Slot


@dataclass(eq=False)
class Reading:
    """A read without lease: the server's, and the model's of it."""

    end: ExitStack
    model: list[reference_model.Part]


def prompt(path: Sequence[int]) -> list[bytes]:
    """Keys of a prompt whose chunks are told apart by these numbers."""
    return [hashlib.sha256(bytes(path[:length])).digest() for length in range(1, len(path) + 1)]


def event_data(told: bytes) -> bytes:
    return types_pb2.ChunkEventData(block_hashes=[told]).SerializeToString()


# Few prompts, so that they share beginnings and are met again.
paths = st.sampled_from(
    [(0,), (0, 0), (0, 0, 0, 0, 0), (0, 0, 1, 0), (0, 1, 0), (1, 0, 0, 0), (2,)]
)
namespaces = st.sampled_from(["plain", "sharded", "hybrid"])
# Mostly what can succeed, now and then what cannot.
any_namespace = st.sampled_from(["plain", "sharded", "hybrid"] * 4 + ["large", "unknown"])
# The one who got it, or anybody.
OWNER: Final = "owner"
numbers = st.integers(0, 2)
chunks = st.integers(0, 5)
skips = st.sampled_from([0, 0, 0, 1, 2, 4])
# The name of a pin, and for how many milliseconds it keeps what is stored.
wishes = st.sampled_from([None, None, None, ("one", 0), ("one", 30_000), ("", 4_000), ("two", 0)])


# For what would otherwise leave too little of what others did.
seldom = precondition(lambda self: self.steps % 4 == 0)


class ServerMachine(RuleBasedStateMachine):
    """A server without its rpc layer, and the model of it."""

    callers = Bundle("callers")
    leases = Bundle("leases")
    reservations = Bundle("reservations")
    writings = Bundle("writings")
    readings = Bundle("readings")

    anybody = st.none() | callers | callers | callers
    mostly_owner = st.just(OWNER) | st.just(OWNER) | st.none() | callers

    @initialize(
        target=callers,
        events=st.sampled_from([10_000, 8, 0]),
        sharded=st.sampled_from(["sharded", "sharded, one told"]),
        slabs=st.sampled_from([SLABS, SLABS // 2]),
        sockets=st.sampled_from([1, 2]),
        policy=st.sampled_from(list(POLICIES)),
    )
    def start(self, events: int, sharded: str, slabs: int, sockets: int, policy: str) -> Any:
        self.steps = 0
        self.clock = Clock()
        self.slots = SlotAllocator(SLABS * SLAB, SLAB, sockets)
        self.mapped: dict[int, bool] = {}  # by the session's guard
        self.core = Core(
            self.slots,
            clock=self.clock,
            still_mapped=lambda session: self.mapped[session.guard],
            event_log=Limits(1 << 20, events) if events else None,
            policy=POLICIES[policy](SLABS * SLAB),
        )
        self.events = EventReader(self.core.events) if self.core.events else None
        self.model = Model(self.clock, SLABS * SLAB, has_events=bool(events))
        self.all_callers: list[Caller] = []
        self.all_writings: list[Writing] = []
        self.all_readings: list[Reading] = []
        for name in ("plain", sharded, "hybrid", "large"):
            self.register(name)
        self.grow(slabs)
        return multiple(
            self.opened("one", Role.SCHEDULER, 0, 0, 30_000),
            self.opened("one", Role.WORKER, 0, 0, 30_000),
            self.opened("one", Role.WORKER, 1, 1, 30_000),
            self.opened("two", Role.TOOL, 0, 0, 30_000),
        )

    @invariant()
    def all_is_as_the_model_says(self) -> None:
        self.steps += 1
        at_once(self.core.backlog.all_steps())
        assert state_of(self.core, self.slots, self.events) == self.model.state()

    def teardown(self) -> None:
        """The server drains: what was under way ends, and nothing is left."""
        if not hasattr(self, "core") or sys.exc_info()[0] is not None:
            return
        self.core.draining = self.model.draining = True
        for caller in self.all_callers:
            self.close(caller, may_still_write=False)
            self.process_ends(caller)
        for writing in list(self.all_writings):
            self.finish_writing(writing, complete=False)
        for reading in list(self.all_readings):
            self.finish_reading(reading)
        self.wait(reference_model.SHARDS_MISSING_SECONDS, None, False)
        self.all_is_as_the_model_says()
        assert self.core.is_idle
        assert not len(self.core.sessions)
        assert not len(self.core.leases)
        self.unpin(None, None)
        self.evict(None)
        self.all_is_as_the_model_says()
        assert not self.model.state().chunks
        assert not self.model.state().kept_bytes
        assert not runs_of(self.slots)

    # What the rules have in common

    def attempt(
        self, reason: Reason | None, call: Callable[..., Any], *args: Any, **kw: Any
    ) -> Any:
        """The server's answer, None if it refuses: for the model's reason, and for no other."""
        try:
            answer = call(*args, **kw)
            if isinstance(answer, Generator):
                answer = at_once(answer)
        except RequestError as error:
            assert error.reason is reason
            return None
        assert reason is None
        return answer

    def is_heard(self, caller: Caller | None) -> bool:
        """Whether the caller may call at all. As in the rpc layer, a call is a sign of life."""
        if caller is None:
            return True
        reason = self.model.refuses_session(caller.model)
        session = self.attempt(reason, self.core.sessions.with_token, caller.session.token)
        if session is None:
            return False
        session.last_seen = caller.model.last_seen = self.clock()
        return True

    def wish(self, wanted: tuple[str, int] | None) -> Keep | None:
        """The server's form of a wish."""
        if wanted is None:
            return None
        name, ttl_ms = wanted
        wish = self.core.pins.wish(name, ttl_ms)
        assert wish.pin == (name or "default")
        if ttl_ms:
            late = wish.until - self.clock() - ttl_ms / 1000
            assert 0 <= late <= ttl_ms / 16_000 + 1
        else:
            assert wish.until == math.inf
        return wish

    def group_of(self, namespace: str, number: int) -> tuple[int, int | None]:
        """One of the namespace's groups: its position and its index."""
        known = self.model.namespaces.get(namespace, NAMESPACES["plain"])
        position = number % len(known.groups)
        return position, known.groups[position].group_idx

    def reserved(
        self,
        caller: Caller | None,
        namespace: str,
        number: int,
        shard: int,
        path: Sequence[int],
        skip: int = 0,
        wanted: tuple[str, int] | None = None,
    ) -> dict[int, Writing] | None:
        """Reserve the chunks of a prompt but for the first ones; the slots by chunk, None if that
        is refused. They are kept as ``wanted``.
        """
        session, model = (caller.session, caller.model) if caller else (None, None)
        position, group_idx = self.group_of(namespace, number)
        keys = prompt(path)
        skip = min(skip, len(keys) - 1)
        parent = keys[skip - 1] if skip else b""
        keys = keys[skip:]
        is_telling = self.steps % 4  # events of it; each call tells something else
        told = [b"%d, %d" % (self.steps, shard) + key for key in keys] if is_telling else []
        free_before = Counter[int]()
        for run in runs_of(self.slots):
            free_before[run.slot_bytes] += len(run.free)
        keep = self.wish(wanted)
        evicted_before = self.model.counters["evicted_parts"]
        outcomes = self.attempt(
            self.model.refuses_reserve(model, namespace, group_idx, shard),
            self.core.reserve_in_steps,
            session,
            namespace,
            group_idx,
            shard,
            parent,
            keys,
            [event_data(one) for one in told],
            keep,
            Priority(self.steps % 3 - 1),
        )
        if outcomes is None:
            return None
        slots = {index: outcome for index, outcome in enumerate(outcomes) if type(outcome) is Slot}
        answers = [getattr(outcome, "offset", outcome) for outcome in outcomes]
        modelled, kept = self.model.reserve(
            namespace,
            position,
            shard,
            parent,
            keys,
            told,
            answers,
            parts_of(self.core),
            (keep.pin, keep.until) if keep else None,
        )
        assert kept == (keep.kept if keep else 0)
        assert slots.keys() == modelled.keys()
        if self.model.counters["evicted_parts"] > evicted_before:
            nbytes = NAMESPACES[namespace].groups[position].shard_bytes[shard]
            free = free_before[reference_model.slot_bytes(nbytes)]
            assert len(slots) + answers.count(ReserveStatus.NO_SPACE) > free, "there was room"
        return {index: Writing(slot, modelled[index]) for index, slot in slots.items()}

    # Sessions and time

    @seldom
    @rule(
        target=callers,
        engine=st.sampled_from(["one", "two"]),
        role=st.sampled_from([Role.SCHEDULER, Role.WORKER, Role.WORKER, Role.TOOL]),
        worker=st.integers(0, 1),
        shard=st.integers(0, 1),
        ttl_ms=st.sampled_from([1_000, 30_000, 90_000, 600_000]),
    )
    def open(self, engine: str, role: Role, worker: int, shard: int, ttl_ms: int) -> Any:
        return self.opened(engine, role, worker, shard, ttl_ms) or multiple()

    def opened(
        self, engine: str, role: Role, worker: int, shard: int, ttl_ms: int
    ) -> Caller | None:
        if role is not Role.WORKER:
            worker = shard = 0
        session = self.attempt(
            self.model.refuses_new_work(),
            self.core.open_session,
            engine_id=engine,
            role=role,
            worker_id=worker,
            kv_worker_id=shard,
            ttl_ms=ttl_ms,
        )
        if session is None:
            return None
        self.mapped[session.guard] = True
        if role is Role.WORKER and len(self.slots.sockets) > 1:
            session.home = worker % 2
        caller = Caller(session, self.model.open(engine, role, worker, shard, ttl_ms / 1000))
        self.all_callers.append(caller)
        return caller

    @seldom
    @rule(caller=callers, may_still_write=st.booleans())
    def close(self, caller: Caller, may_still_write: bool) -> None:
        if not caller.model.closed:
            self.mapped[caller.session.guard] = may_still_write
            self.core.close_session(caller.session)
            self.model.close(caller.model, mapped=may_still_write)

    @seldom
    @rule(target=callers, caller=callers)
    def reconnect(self, caller: Caller) -> Any:
        """The same process opens another session before the server knows that the first ended."""
        old = caller.model
        new = self.opened(old.engine, old.role, old.worker, old.shard, 30_000)
        self.close(caller, may_still_write=True)
        return new or multiple()

    @seldom
    @rule(caller=callers)
    def process_ends(self, caller: Caller) -> None:
        if caller.model.closed:
            self.mapped[caller.session.guard] = caller.model.mapped = False

    @rule(
        seconds=st.sampled_from([0.5, 5.0, 20.0, 40.0, 61.0]),
        silent=st.none() | callers,
        held_up=st.booleans(),
    )
    def wait(self, seconds: float, silent: Caller | None, held_up: bool) -> None:
        """All sessions but one give signs of life, and that one's may be waiting in its stream."""
        self.clock.now += seconds
        for caller in self.all_callers:
            is_silent = caller is silent
            caller.session.is_held_up = caller.model.held_up = is_silent and held_up
            if not is_silent and not caller.model.closed:
                self.is_heard(caller)
        self.core.sweep()
        self.model.sweep()

    @seldom
    @rule(seconds=st.sampled_from([5.0, 40.0]))
    def stand_still(self, seconds: float) -> None:
        self.clock.now += seconds
        self.core.excuse_silence(seconds)
        self.model.excuse_silence(seconds)

    @seldom
    @rule(path=paths)
    def try_while_draining(self, path: Sequence[int]) -> None:
        """What is refused, and what is not."""
        self.core.draining = self.model.draining = True
        self.opened("one", Role.SCHEDULER, 0, 0, 30_000)
        self.reserved(None, "plain", 0, 0, path)
        self.pin("plain", path, 0, ("one", 0))
        self.lookup(None, "plain", path, 1, False, 0)
        self.lookup(None, "plain", path, 1, True, 0)
        self.core.draining = self.model.draining = False

    # Namespaces and the pool

    @seldom
    @rule(name=st.sampled_from(sorted(NAMESPACES)))
    def register(self, name: str) -> None:
        namespace = NAMESPACES[name]
        is_new = namespace.name not in self.model.namespaces
        reason = self.model.refuses_namespace(namespace)
        created = self.attempt(reason, self.core.index.register, namespace)
        if created is not None:
            assert created == is_new
            self.model.register(namespace)

    @seldom
    @rule(slabs=st.integers(1, 3))
    def grow(self, slabs: int) -> None:
        """More of the pool's memory is there."""
        slabs = min(slabs, SLABS - self.slots.ready_bytes // SLAB)
        for slab in range(self.slots.ready_bytes // SLAB, SLABS)[:slabs]:
            self.slots.add(slab * SLAB, SLAB, slab % len(self.slots.sockets))
        self.model.ready_bytes += slabs * SLAB

    @seldom
    @rule(nbytes=st.sampled_from([None, 0, 1, 2 * PAGE_BYTES, 8 * PAGE_BYTES]))
    def evict(self, nbytes: int | None) -> None:
        steps = (
            self.core.evict_all_in_steps() if nbytes is None else self.core.evict_in_steps(nbytes)
        )
        dropped = at_once(steps)
        assert dropped == self.model.evict(self.model.missing(parts_of(self.core)))
        assert nbytes != 0 or dropped == (0, 0)
        if nbytes is None or dropped[1] < nbytes:
            assert not any(map(self.model.may_go, self.model.parts.values()))

    @seldom
    @rule(namespace=st.sampled_from(["plain", "sharded", "hybrid", None, "", "unknown"]))
    def clear(self, namespace: str | None) -> None:
        reason = self.model.refuses_clear(namespace)
        if namespace is None:
            cleared = self.attempt(reason, self.core.clear_all)
        else:
            cleared = self.attempt(reason, self.core.clear, namespace)
        if cleared is not None:
            assert cleared == self.model.clear(namespace)

    # Looking up and locking

    @rule(
        target=leases,
        caller=anybody,
        namespace=any_namespace,
        path=paths,
        readers=st.sampled_from([0, 1, 2, 2, 3, 257]),
        probe=st.sampled_from([False, False, False, True]),
        ttl_ms=st.sampled_from([0, 0, 0, 4_000]),
    )
    def lookup(
        self,
        caller: Caller | None,
        namespace: str,
        path: Sequence[int],
        readers: int,
        probe: bool,
        ttl_ms: int,
    ) -> Any:
        if not self.is_heard(caller):
            return multiple()
        session, model = (caller.session, caller.model) if caller else (None, None)
        keys = prompt(path)
        hit = self.attempt(
            self.model.refuses_lookup(model, namespace, readers, probe, ttl_ms),
            self.core.lookup,
            session,
            namespace,
            keys,
            readers=readers,
            probe=probe,
            ttl_ms=ttl_ms,
        )
        if hit is None:
            return multiple()
        spans = [range(first, end) for _, first, end in hit.ranges]
        assert (hit.chunks, spans) == self.model.lookup(namespace, keys)
        assert (hit.lease is not None) == (hit.chunks > 0 and not probe)
        if hit.lease is None:
            return multiple()
        ttl = (ttl_ms or 30_000) / 1000
        self.model.grant(hit.lease.lease_id, model, namespace, keys, readers or 1, ttl)
        return Granted(hit.lease.lease_id, namespace, caller)

    @rule(
        who=mostly_owner,
        ranges=st.lists(
            st.tuples(
                leases,
                chunks,
                st.none() | chunks,
                st.none() | numbers,
                st.none() | st.integers(0, 3),
            ),
            min_size=1,
            max_size=3,
        ),
    )
    def free_locks(self, who: Any, ranges: list[Any]) -> None:
        caller = ranges[0][0].owner if who is OWNER else who
        if not self.is_heard(caller):
            return
        session, model = (caller.session, caller.model) if caller else (None, None)
        wanted = []
        for lease, first, end, reader, number in ranges:
            group_idx = UNKNOWN_GROUP_IDX if number == 3 else None
            if number is not None and number < 3:
                _, group_idx = self.group_of(lease.namespace, number)
            wanted.append(LockRange(lease.lease_id, first, end, reader, group_idx))
        reason = self.model.refuses_free(model, wanted)
        freed = self.attempt(reason, self.core.free_locks_in_steps, session, wanted)
        if freed is not None:
            assert freed == self.model.free(model, wanted)

    @rule(who=mostly_owner, lease=leases, reader=st.none() | numbers)
    def free_all_locks(self, who: Any, lease: Granted, reader: int | None) -> None:
        self.free_locks(who, [(lease, 0, None, reader, None)])

    @rule(
        who=mostly_owner,
        lease=leases,
        number=numbers,
        first=st.sampled_from([0, 0, 0, 1, 4]),
        end=st.sampled_from([None, None, None, 0, 2, 5]),
        shard=st.sampled_from([0, 0, 0, 1, 2]),
        reader=numbers,
    )
    def locate(
        self,
        who: Any,
        lease: Granted,
        number: int,
        first: int,
        end: int | None,
        shard: int,
        reader: int,
    ) -> None:
        """Retrieve in shared mode."""
        self.locked(who, lease, number, first, end, shard, reader)

    def locked(
        self,
        who: Any,
        lease: Granted,
        number: int,
        first: int,
        end: int | None,
        shard: int,
        reader: int,
    ) -> LockedShards | None:
        caller = lease.owner if who is OWNER else who
        if not self.is_heard(caller):
            return None
        session, model = (caller.session, caller.model) if caller else (None, None)
        if model is not None and model.role is Role.WORKER and reader:
            shard, reader = model.shard, model.worker  # now and then what it may not
        position, group_idx = self.group_of(lease.namespace, number)
        locked: LockedShards | None = self.attempt(
            self.model.refuses_locate(model, lease.lease_id, position, first, end, shard, reader),
            self.core.locate_in_steps,
            session,
            LeaseRange(lease.lease_id, group_idx, first, end),
            shard=shard,
            reader=reader,
        )
        if locked is not None:
            offsets = [found.offset if found else None for found in locked.shards]
            assert offsets == self.model.locate(lease.lease_id, position, first, end, shard, reader)
        return locked

    @rule(
        who=mostly_owner,
        lease=leases,
        number=numbers,
        first=st.sampled_from([0, 0, 0, 1, 4]),
        end=st.sampled_from([None, None, None, 0, 2, 5]),
        readers=st.sets(numbers, min_size=1),
    )
    def load(
        self, who: Any, lease: Granted, number: int, first: int, end: int | None, readers: set[int]
    ) -> None:
        """Retrieve in server mode: read, and then free the locks of some readers."""
        locked = self.locked(who, lease, number, first, end, 0, min(readers))
        if locked is None:
            return
        with locked.reading(list(readers)):
            pass
        position, _ = self.group_of(lease.namespace, number)
        chunks = locked.range
        self.model.end_retrieve(
            lease.lease_id, position, chunks.first_chunk, chunks.end_chunk, readers
        )

    # Keeping

    @rule(
        namespace=any_namespace,
        path=paths,
        skip=skips,
        wanted=wishes.filter(bool),
    )
    def pin(self, namespace: str, path: Sequence[int], skip: int, wanted: tuple[str, int]) -> None:
        keys = prompt(path)[min(skip, len(path) - 1) :]
        keep = self.wish(wanted)
        assert keep is not None
        pin = reference_model.Pin(namespace, keep.pin)
        reason = self.model.refuses_pin(pin, keys, keep.until)
        try:
            self.core.refuse_when_draining()
            at_once(self.core.pins.pin_in_steps(namespace, keys, keep))
        except RequestError as error:
            assert error.reason is reason
            return
        assert reason is None
        assert keep.kept == self.model.pin(pin, keys, keep.until)

    @seldom
    @rule(
        namespace=st.sampled_from([None, None, "plain", "hybrid", "unknown"]),
        name=st.sampled_from(["one", "two", "default", "other", None]),
    )
    def unpin(self, namespace: str | None, name: str | None) -> None:
        pins = self.core.pins.named(namespace, name)
        parts, nbytes = at_once(self.core.pins.unpin_in_steps(pins))
        assert (len(pins), parts, nbytes) == self.model.unpin(namespace, name)

    # Storing

    @rule(
        target=leases,
        caller=anybody,
        namespace=namespaces,
        path=paths,
        readers=st.integers(1, 3),
        backwards=st.booleans(),
        retrieve=st.booleans(),
        wanted=wishes,
    )
    def store_and_lookup(
        self,
        caller: Caller | None,
        namespace: str,
        path: Sequence[int],
        readers: int,
        backwards: bool,
        retrieve: bool,
        wanted: tuple[str, int] | None,
    ) -> Any:
        """A whole prompt at once, so that lookups hit."""
        for number in range(len(self.model.namespaces[namespace].groups)):
            for shard in range(self.model.namespaces[namespace].kv_world_size):
                slots = self.reserved(None, namespace, number, shard, path, 0, wanted)
                new = list((slots or {}).values())
                self.all_writings.extend(new)
                for writing in reversed(new) if backwards else new:
                    self.finish_writing(writing, complete=True)
        granted = self.lookup(caller, namespace, path, readers, False, 0)
        if retrieve and isinstance(granted, Granted):
            self.locate(OWNER, granted, 0, 0, None, 0, readers - 1)
        return granted

    @rule(
        target=writings,
        namespace=any_namespace,
        number=numbers,
        shard=st.sampled_from([0, 0, 0, 1, 1, 2]),
        path=paths,
        skip=skips,
        wanted=wishes,
    )
    def begin_writing(
        self,
        namespace: str,
        number: int,
        shard: int,
        path: Sequence[int],
        skip: int,
        wanted: tuple[str, int] | None,
    ) -> Any:
        """Store in server mode, and Put."""
        new = self.reserved(None, namespace, number, shard, path, skip, wanted) or {}
        self.all_writings.extend(new.values())
        return multiple(*new.values())

    @rule(writing=consumes(writings), complete=st.sampled_from([True, True, False]))
    def finish_writing(self, writing: Writing, complete: bool) -> None:
        self.all_writings.remove(writing)
        if complete:
            assert self.core.seal(writing.slot) == self.model.seal(writing.model)
        else:
            self.core.index.abort(writing.slot)
            self.model.abort_slot(writing.model)

    @rule(
        target=reservations,
        caller=callers,
        namespace=any_namespace,
        number=numbers,
        other_shard=st.sampled_from([0, 0, 0, 0, 1]),
        path=paths,
        skip=skips,
    )
    def reserve(
        self,
        caller: Caller,
        namespace: str,
        number: int,
        other_shard: int,
        path: Sequence[int],
        skip: int,
    ) -> Any:
        """In shared mode: the caller's process writes."""
        if not self.is_heard(caller):
            return multiple()
        shard = caller.model.shard + other_shard
        new = self.reserved(caller, namespace, number, shard, path, skip)
        if new is None:
            return multiple()
        outcomes = [
            new[index].slot if index in new else ReserveStatus.EXISTS for index in range(len(path))
        ]
        with self.core.writing(outcomes) as writing:
            reservation_id = self.core.open_reservation(caller.session, writing)
        assert bool(reservation_id) == bool(new)
        if not reservation_id:
            return multiple()
        modelled = {index: each.model for index, each in new.items()}
        self.model.open_reservation(caller.model, reservation_id, modelled)
        return reservation_id, caller

    @rule(
        reservation=reservations,
        who=st.just(OWNER) | st.just(OWNER) | callers,
        chosen=st.sampled_from([[], [], [], [0], [1, 0], [0, 0], [7]]),
    )
    def commit(self, reservation: tuple[int, Caller], who: Any, chosen: list[int]) -> None:
        reservation_id, owner = reservation
        caller = owner if who is OWNER else who
        if not self.is_heard(caller):
            return
        reason = self.model.refuses_commit(caller.model, reservation_id, chosen)
        sealed = self.attempt(
            reason, self.core.reservations.commit_in_steps, caller.session, reservation_id, chosen
        )
        if sealed is not None:
            assert sealed == self.model.commit(caller.model, reservation_id, chosen)

    @rule(reservation=reservations, who=st.just(OWNER) | callers)
    def abort(self, reservation: tuple[int, Caller], who: Any) -> None:
        reservation_id, owner = reservation
        caller = owner if who is OWNER else who
        if not self.is_heard(caller):
            return
        reason = self.model.refuses_reservation(caller.model, reservation_id)
        aborted = self.attempt(
            reason, self.core.reservations.abort_in_steps, caller.session, reservation_id
        )
        if aborted is not None:
            assert aborted == self.model.abort(caller.model, reservation_id)

    # Reading without a lease

    @rule(
        target=readings,
        namespace=namespaces,
        number=numbers,
        shard=st.sampled_from([0, 0, 0, 1, 2]),
        path=paths,
    )
    def begin_reading(self, namespace: str, number: int, shard: int, path: Sequence[int]) -> Any:
        """Get."""
        position, group_idx = self.group_of(namespace, number)
        keys = prompt(path)
        end = ExitStack()
        shards = self.attempt(
            self.model.refuses_read(namespace, position, shard),
            lambda: end.enter_context(self.core.reading(namespace, group_idx, shard, keys)),
        )
        if shards is None:
            return multiple()
        reading = Reading(end, self.model.begin_reading(namespace, position, keys))
        assert [one.offset for one in shards] == [part.sealed[shard] for part in reading.model]
        self.all_readings.append(reading)
        return reading

    @rule(reading=consumes(readings))
    def finish_reading(self, reading: Reading) -> None:
        self.all_readings.remove(reading)
        reading.end.close()
        self.model.finish_reading(reading.model)

    @seldom
    @rule()
    def read_events_anew(self) -> None:
        if self.events is not None:
            self.events.begin_anew()


# A run that fails is made as short as it can be, which takes its time.
TestServerMachine = pytest.mark.timeout(900)(ServerMachine.TestCase)
TestServerMachine.settings = settings(
    max_examples=RUNS,
    stateful_step_count=100,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)

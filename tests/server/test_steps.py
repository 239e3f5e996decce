"""Calls in steps: what others do in between, ends before the end, and how long a step takes."""

from __future__ import annotations

import asyncio
import gc
import random
import time
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest

from kvdock.v1 import cache_pb2 as pb
from kvdock_server.core import Core
from kvdock_server.core.sessions import Role, Session
from kvdock_server.errors import Reason, RequestError
from kvdock_server.events.log import Limits
from kvdock_server.index.chunk import all_chunks
from kvdock_server.index.index import ReserveStatus, Slot
from kvdock_server.index.namespace import Group, GroupKind, Namespace
from kvdock_server.rpc import verbs
from kvdock_server.rpc.conversions import retrieve_call, retrieved
from kvdock_server.service.retrieve import locate
from kvdock_server.service.turns import in_turns
from kvdock_server.steps import Backlog, Steps, at_once
from kvdock_server.tiers.host.slots import PAGE_BYTES, SlotAllocator

SLAB = 4 * PAGE_BYTES
# More than what is done of a call at once.
MANY = 200


class Clock:
    """Time that only a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def make_core(slots: int, *, slab: int = SLAB) -> Core:
    nbytes = -(-slots * PAGE_BYTES // slab) * slab
    allocator = SlotAllocator(nbytes, slab)
    allocator.add(0, allocator.limit_bytes)
    core = Core(allocator, clock=Clock(), event_log=Limits(1 << 30, 1 << 20))
    for name, sizes in (("n", (PAGE_BYTES,)), ("large", (3 * PAGE_BYTES,))):
        group = Group(None, GroupKind.FULL_ATTENTION, 0, sizes)
        core.index.register(Namespace(name, 16, 1, (group,)))
    return core


def keys_of(prompt: int, chunks: int) -> list[bytes]:
    return [b"%016d%016d" % (prompt, chunk) for chunk in range(chunks)]


def store(core: Core, keys: list[bytes], namespace: str = "n") -> None:
    for outcome in at_once(core.reserve_in_steps(None, namespace, None, 0, b"", keys)):
        assert isinstance(outcome, Slot)
        assert core.seal(outcome)


def worker(core: Core) -> Session:
    return core.open_session(engine_id="e", role=Role.WORKER)


def reserve(core: Core, session: Session, keys: list[bytes]) -> Steps[pb.ReserveResponse]:
    request = pb.ReserveRequest(namespace="n", keys=keys)
    return verbs.reserve(core, session, request)


def retrieve(core: Core, session: Session, lease_id: int) -> Steps[pb.RetrieveResponse]:
    call = retrieve_call(pb.RetrieveRequest(lease_id=lease_id))
    chunks = yield from locate(core, session, call)
    return (yield from retrieved(core, chunks))


def go(steps: Steps[Any], number: int) -> None:
    for _ in range(number):
        next(steps)


def assert_all_is_free(core: Core) -> None:
    """Nothing is left: no memory is taken, nothing is counted, and all slabs serve any size."""
    at_once(core.backlog.all_steps())
    index = core.index
    assert (index.sealed_bytes, index.reserved_bytes) == (0, 0)
    assert (index.pinned_parts, index.pending_parts) == (0, 0)
    assert (len(core.leases), core.leases.locks) == (0, 0)
    for space in index.spaces:
        assert (space.chunks, space.first_child) == ({}, None)
        assert (space.visible_parts, space.sealed_bytes, space.cursors) == (0, 0, [])
    slots = index._slots
    assert not slots._claimed
    assert not slots._runs
    assert slots.allocate(slots.limit_bytes) == 0
    slots.free(0)


# A call that is ended, or overtaken, before its end


@pytest.mark.parametrize("steps", [1, 20, MANY, 2 * MANY + 3, 3 * MANY - 1])
def test_a_reserve_that_is_cancelled_gives_all_its_memory_back(steps: int) -> None:
    core = make_core(MANY)
    store(core, keys_of(1, MANY))
    reserving = reserve(core, worker(core), keys_of(2, MANY))
    go(reserving, steps)
    assert core.index.reserved_bytes or steps < MANY
    reserving.close()
    at_once(core.backlog.all_steps())
    assert core.index.reserved_bytes == 0
    core.clear_all()
    assert_all_is_free(core)


@pytest.mark.parametrize("steps", [1, 7, MANY, 2 * MANY + 3, 3 * MANY - 1])
@pytest.mark.parametrize("how", ["closed", "expired"])
def test_a_session_that_ends_during_reserve_leaves_no_memory_behind(steps: int, how: str) -> None:
    core = make_core(MANY)
    store(core, keys_of(1, MANY))
    session = worker(core)
    reserving = reserve(core, session, keys_of(2, MANY))
    go(reserving, steps)
    if how == "closed":
        core.close_session(session)
    else:
        core.clock.now += 60  # type: ignore[attr-defined]
        core.sweep()
    at_once(core.backlog.all_steps())
    with pytest.raises(RequestError) as caught:
        at_once(reserving)
    lost = Reason.UNKNOWN_SESSION if how == "closed" else Reason.SESSION_EXPIRED
    assert caught.value.reason is lost
    at_once(core.backlog.all_steps())
    assert core.index.reserved_bytes == 0
    core.clear_all()
    assert_all_is_free(core)


def test_what_is_cleared_during_reserve_is_not_stored() -> None:
    core = make_core(2 * MANY)
    reserving = core.reserve_in_steps(None, "n", None, 0, b"", keys_of(1, MANY))
    go(reserving, 10)
    core.clear("n")
    outcomes = at_once(reserving)
    slots = [outcome for outcome in outcomes if isinstance(outcome, Slot)]
    assert 0 < len(slots) <= 11
    assert outcomes[len(slots) :] == [ReserveStatus.PARENT_MISSING] * (MANY - len(slots))
    sealed = [core.seal(slot) for slot in slots]
    assert not any(sealed)
    assert_all_is_free(core)


def test_a_parent_that_is_evicted_during_reserve_gets_no_child() -> None:
    core = make_core(2 * MANY)
    store(core, keys_of(1, MANY))
    longer = keys_of(1, MANY + 1)
    reserving = core.reserve_in_steps(None, "n", None, 0, b"", longer)
    go(reserving, MANY)  # all that is there was seen
    at_once(core.evict_all_in_steps())
    assert at_once(reserving) == [ReserveStatus.EXISTS] * MANY + [ReserveStatus.PARENT_MISSING]
    assert_all_is_free(core)


def test_a_commit_seals_nothing_of_a_session_that_ended_meanwhile() -> None:
    core = make_core(MANY)
    session = worker(core)
    reservation = at_once(reserve(core, session, keys_of(1, MANY))).reservation_id
    committing = core.reservations.commit_in_steps(session, reservation, [])
    go(committing, 10)
    core.close_session(session)
    assert at_once(committing) == [True] * 10 + [False] * (MANY - 10)
    assert core.lookup(None, "n", keys_of(1, MANY), probe=True).chunks == 10
    core.clear("n")
    assert_all_is_free(core)


def test_a_commit_and_an_abort_at_once_share_the_chunks() -> None:
    core = make_core(MANY)
    session = worker(core)
    reservation = at_once(reserve(core, session, keys_of(1, MANY))).reservation_id
    committing = core.reservations.commit_in_steps(session, reservation, [])
    aborting = core.reservations.abort_in_steps(session, reservation)
    go(committing, 10)
    aborted = at_once(aborting)
    assert at_once(committing) == [True] * 10 + [False] * aborted
    assert aborted == MANY - 10
    assert not session.reservations
    core.clear("n")
    assert_all_is_free(core)


def test_locks_of_an_ended_session_are_freed_while_a_clear_goes_on() -> None:
    core = make_core(100 * MANY)
    for prompt in range(99):
        store(core, keys_of(prompt, MANY))
    store(core, keys_of(0, MANY // 3), "large")
    session = core.open_session(engine_id="e", role=Role.SCHEDULER)
    for _ in range(MANY):
        assert core.lookup(session, "large", keys_of(0, MANY // 3)).lease
    core.clear("n")
    core.close_session(session)
    for _ in range(8 * MANY):
        core.backlog.step()
    assert len(core.leases) == 0
    assert core.index.sealed_bytes > 50 * MANY * PAGE_BYTES
    core.clear_all()
    assert_all_is_free(core)


def test_memory_that_was_cleared_is_had_before_anything_is_evicted() -> None:
    core = make_core(2 * MANY)
    store(core, keys_of(0, MANY // 3), "large")
    store(core, keys_of(1, MANY - 20))
    core.clear("n")
    assert core.index.sealed_bytes > MANY * PAGE_BYTES
    store(core, keys_of(2, MANY - 20))
    assert core.lookup(None, "large", keys_of(0, MANY // 3), probe=True).chunks == MANY // 3


def test_chunks_are_listed_while_others_come_and_go() -> None:
    core = make_core(2 * MANY)
    for prompt in range(4):
        store(core, keys_of(prompt, MANY // 4))
    space = core.index.space("n")
    listed = []
    walk = all_chunks(space)
    for number, chunk in enumerate(walk):
        listed.append(chunk.key)
        if number % 10 == 0:
            at_once(core.evict_in_steps(PAGE_BYTES))
            store(core, keys_of(100 + number, 1))
    assert len(set(listed)) == len(listed)
    assert set(listed) >= set(space.chunks) - {keys_of(100 + n, 1)[0] for n in range(MANY)}
    assert not space.cursors
    walk = all_chunks(space)
    next(walk)
    core.clear("n")
    at_once(core.backlog.all_steps())
    walk.close()
    assert_all_is_free(core)


def test_what_is_left_goes_on_in_turn_and_a_fault_ends_only_its_own() -> None:
    backlog = Backlog()
    has_come = []
    backlog.has_come = lambda: has_come.append(len(backlog))
    done: list[str] = []

    def work(name: str, steps: int, *, fails: bool = False) -> Steps[None]:
        for number in range(steps):
            if fails and number == steps - 1:
                raise ValueError(name)
            yield
        done.append(name)

    backlog.add(work("short", 3))
    assert (done, has_come) == (["short"], [])
    backlog.add(work("long", 500))
    backlog.add(work("shorter", 100))
    backlog.add(work("faulty", 90, fails=True))
    assert has_come == [1, 2, 3]
    with pytest.raises(ValueError, match="faulty"):
        at_once(backlog.all_steps())
    at_once(backlog.all_steps())
    assert done == ["short", "shorter", "long"]


# Anything in between anything


class Crowd:
    """Many calls under way at once on one core, carried out a few steps each in random order."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.core = make_core(64)
        self.clock: Any = self.core.clock
        self.sessions: list[Session] = []
        self.under_way: list[Steps[None]] = []
        self.taken: dict[int, tuple[int, Slot]] = {}
        self.numbers = count()

    def run(self, rounds: int) -> None:
        begin: list[tuple[int, Callable[[], None]]] = [
            (20, self.begin_store),
            (10, self.begin_session_store),
            (10, self.lookup),
            (5, self.free_some),
            (2, self.begin_evict),
            (1, self.clear),
            (1, self.end_session),
            (1, self.wait),
            (2, self.cancel_one),
        ]
        weights, verbs_ = zip(*begin, strict=True)
        for _ in range(rounds):
            if len(self.under_way) < 8:
                self.random.choices(verbs_, weights)[0]()
            for _ in range(self.random.randrange(20)):
                self.go_on()
            if self.random.random() < 0.5:
                self.core.backlog.step()
            self.check()
        while self.under_way:
            self.go_on()
        for lease in self.core.leases:
            at_once(self.core.leases.release_in_steps(lease))
        for session in self.sessions:
            self.core.close_session(session)
        self.core.clear_all()
        assert_all_is_free(self.core)

    def go_on(self) -> None:
        if self.under_way:
            call = self.random.choice(self.under_way)
            if next(call, "ended") == "ended":
                self.under_way.remove(call)

    def prompt(self) -> tuple[str, list[bytes]]:
        namespace = self.random.choice(["n", "n", "large"])
        return namespace, keys_of(self.random.randrange(8), self.random.randrange(1, 12))

    def begin_store(self) -> None:
        self.under_way.append(self.store())

    def store(self) -> Steps[None]:
        namespace, keys = self.prompt()
        outcomes = yield from self.core.reserve_in_steps(None, namespace, None, 0, b"", keys)
        slots = [outcome for outcome in outcomes if isinstance(outcome, Slot)]
        number = next(self.numbers)
        for slot in slots:
            assert slot.offset not in self.taken, "two write there"
            self.taken[slot.offset] = number, slot
        with self.core.writing(slots) as writing:
            try:
                yield
                for slot in slots:
                    del self.taken[slot.offset]
                if self.random.random() < 0.8:
                    yield from writing.seal_all()
            finally:
                for slot in slots:
                    if self.taken.get(slot.offset) == (number, slot):
                        del self.taken[slot.offset]

    def begin_session_store(self) -> None:
        if len(self.sessions) < 3:
            self.sessions.append(worker(self.core))
        self.under_way.append(self.session_store(self.random.choice(self.sessions)))

    def session_store(self, session: Session) -> Steps[None]:
        _, keys = self.prompt()
        try:
            reserved = yield from reserve(self.core, session, keys)
            if not reserved.reservation_id:
                return
            if self.random.random() < 0.3:
                yield from self.core.reservations.abort_in_steps(session, reserved.reservation_id)
            else:
                yield from self.core.reservations.commit_in_steps(
                    session, reserved.reservation_id, []
                )
        except RequestError as error:
            assert session.orphaned
            assert error.reason in (
                Reason.UNKNOWN_SESSION,
                Reason.SESSION_EXPIRED,
                Reason.UNKNOWN_RESERVATION,
            )

    def lookup(self) -> None:
        namespace, keys = self.prompt()
        self.core.lookup(None, namespace, keys, ttl_ms=self.random.choice([1_000, 60_000]))

    def free_some(self) -> None:
        for lease in list(self.core.leases)[:2]:
            at_once(self.core.leases.release_in_steps(lease, 0, self.random.randrange(1, 12)))

    def begin_evict(self) -> None:
        self.under_way.append(self.evict(self.random.randrange(1, 16) * PAGE_BYTES))

    def evict(self, nbytes: int) -> Steps[None]:
        yield from self.core.evict_in_steps(nbytes)

    def clear(self) -> None:
        name = self.random.choice(["n", "large", None])
        if name is None:
            self.core.clear_all()
        else:
            self.core.clear(name)

    def end_session(self) -> None:
        if self.sessions:
            self.core.close_session(self.sessions.pop())

    def wait(self) -> None:
        self.clock.now += self.random.choice([2.0, 40.0])
        self.core.sweep()

    def cancel_one(self) -> None:
        if self.under_way:
            call = self.random.choice(self.under_way)
            call.close()
            self.under_way.remove(call)

    def check(self) -> None:
        """What is locked stays, and no memory serves two: not that, nor what is being written."""
        places: dict[int, object] = {offset: slot.part for offset, (_, slot) in self.taken.items()}
        for lease in self.core.leases:
            for locked in lease.spans:
                for index, part in enumerate(locked.span.parts):
                    if locked.held_by_any() >> index & 1:
                        assert part.pins
                        assert not part.detached or lease.space.is_cleared, "it was evicted"
                        (offset,) = part.slots
                        assert places.setdefault(offset, part) is part
        for session in self.sessions:
            for reservation in session.reservations.values():
                for slot in (*reservation.open.values(), *reservation.orphaned):
                    assert places.setdefault(slot.offset, slot.part) is slot.part


@pytest.mark.parametrize("seed", range(30))
def test_anything_in_between_anything_loses_no_memory_and_gives_none_twice(seed: int) -> None:
    Crowd(seed).run(300)


# How long a step takes


@pytest.fixture
def without_collections() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def longest_step(steps: Steps[Any], before: float = 0.0) -> tuple[float, Any]:
    """The longest step's share of the CPU time of all, and what the steps gave.

    ``before`` is what was spent on it before as one step.
    """
    longest = total = before
    ended = False
    answer = None
    while not ended:
        began = time.thread_time()
        try:
            next(steps)
        except StopIteration as end:
            ended, answer = True, end.value
        took = time.thread_time() - began
        longest = max(longest, took)
        total += took
    return longest / total, answer


def longest_of_the_rest(core: Core, call: Callable[[], object]) -> float:
    """Likewise for a call that leaves most of its work to the backlog."""
    began = time.thread_time()
    call()
    return longest_step(core.backlog.all_steps(), time.thread_time() - began)[0]


def longest_steps_of_calls(most: int) -> dict[str, float]:
    """The longest step's share of each call about so many chunks."""
    core = make_core(most, slab=1 << 20)
    store(core, keys_of(1, most))
    session = worker(core)
    share: dict[str, float] = {}
    share["reserve"], reserved = longest_step(reserve(core, session, keys_of(2, most)))
    commit = pb.CommitRequest(reservation_id=reserved.reservation_id)
    share["commit"], _ = longest_step(verbs.commit(core, session, commit))
    assert core.index.space("n").visible_parts == most
    share["reserve what exists"], _ = longest_step(reserve(core, session, keys_of(2, most)))
    _, reserved = longest_step(reserve(core, session, keys_of(3, most)))
    abort = pb.AbortRequest(reservation_id=reserved.reservation_id)
    share["abort"], _ = longest_step(verbs.abort(core, session, abort))
    store(core, keys_of(4, most))
    owner = core.open_session(engine_id="e", role=Role.SCHEDULER)
    for _ in range(4):
        lease = core.lookup(owner, "n", keys_of(4, most), readers=8).lease
        assert lease is not None
    share["retrieve"], _ = longest_step(retrieve(core, owner, lease.lease_id))
    share["end of a session"] = longest_of_the_rest(core, lambda: core.close_session(owner))
    share["evict"], _ = longest_step(core.index.evict_in_steps(most // 2 * PAGE_BYTES))
    share["clear"] = longest_of_the_rest(core, lambda: core.clear("n"))
    assert_all_is_free(core)
    return share


@pytest.mark.usefixtures("without_collections")
def test_no_step_is_a_large_part_of_a_call_about_8192_chunks() -> None:
    # An interrupt may lengthen any step of one run, but hardly the same one of three.
    runs = [longest_steps_of_calls(8_192) for _ in range(3)]
    smallest = {what: min(run[what] for run in runs) for what in runs[0]}
    assert {what: part for what, part in smallest.items() if part > 0.1} == {}


async def test_turns_end_when_their_time_is_over_and_others_come_in_between() -> None:
    turns: list[int] = []

    def work() -> Steps[str]:
        for _ in range(2_000):
            spent = time.perf_counter() + 20e-6
            while time.perf_counter() < spent:
                pass
            yield
        return "done"

    async def count_turns() -> None:
        while True:
            turns.append(0)
            await asyncio.sleep(0)

    counting = asyncio.create_task(count_turns())
    assert await in_turns(work()) == "done"
    counting.cancel()
    # 40 ms of work in turns of 2 ms, or more of them where the machine was busy.
    assert len(turns) >= 15


async def test_steps_that_are_cancelled_undo_what_they_did() -> None:
    undone = []

    def work() -> Steps[None]:
        try:
            while True:
                yield
        finally:
            undone.append(True)

    task = asyncio.create_task(in_turns(work()))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert undone == [True]

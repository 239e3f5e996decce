"""The core (index, leases, reservations) against a model, and its corners one by one."""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Iterator
from itertools import count

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)

from kvdock_server.core import Core, LeaseRange, LockRange
from kvdock_server.core.sessions import Role, Session
from kvdock_server.errors import Reason, RequestError
from kvdock_server.index.chunk import Chunk, Part
from kvdock_server.index.index import ReserveStatus, Slot
from kvdock_server.index.namespace import Group, GroupKind, Namespace
from kvdock_server.steps import at_once
from kvdock_server.tiers.host.slots import PAGE_BYTES, SlotAllocator

SLAB = 4 * PAGE_BYTES


class Clock:
    """Time that only a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def key(*path: int) -> bytes:
    return hashlib.sha256(bytes(path)).digest()


def prompt(*path: int) -> list[bytes]:
    """Keys of a prompt whose chunks are told apart by these numbers."""
    return [key(*path[: length + 1]) for length in range(len(path))]


def full(*sizes: int, group_idx: int | None = None) -> Group:
    return Group(group_idx, GroupKind.FULL_ATTENTION, 0, sizes)


def window(tokens: int, *sizes: int, group_idx: int | None = None) -> Group:
    return Group(group_idx, GroupKind.SLIDING_WINDOW, tokens, sizes)


def make_core(slots: int, *groups: Group, world: int = 1, clock: Clock | None = None) -> Core:
    allocator = SlotAllocator(-(-slots // 4) * SLAB, SLAB)
    allocator.add(0, allocator.limit_bytes)
    core = Core(allocator, clock=clock or Clock())
    groups = groups or (full(*[PAGE_BYTES] * world),)
    core.index.register(Namespace("n", 16, world, groups))
    return core


def store(core: Core, keys: list[bytes], parent: bytes = b"", **where: int) -> list[ReserveStatus]:
    outcomes = at_once(
        core.reserve_in_steps(
            None, "n", where.get("group_idx"), where.get("shard", 0), parent, keys
        )
    )
    for outcome in outcomes:
        if isinstance(outcome, Slot):
            assert core.seal(outcome)
    return [
        ReserveStatus.RESERVED if isinstance(outcome, Slot) else outcome for outcome in outcomes
    ]


def other_size(core: Core, chunks: int = 1) -> list[ReserveStatus | Slot]:
    """What reserving chunks of twice the size in another namespace gives."""
    core.index.register(Namespace("other", 16, 1, (full(2 * PAGE_BYTES),)))
    keys = [key(200, number >> 8, number & 255) for number in range(chunks)]
    return at_once(core.reserve_in_steps(None, "other", None, 0, b"", keys))


def hit(core: Core, keys: list[bytes]) -> int:
    return core.lookup(None, "n", keys, probe=True).chunks


def scheduler(core: Core, engine: str = "e") -> Session:
    return core.open_session(engine_id=engine, role=Role.SCHEDULER)


def worker(core: Core, worker_id: int = 0, engine: str = "e", shard: int = 0) -> Session:
    return core.open_session(
        engine_id=engine, role=Role.WORKER, worker_id=worker_id, kv_worker_id=shard
    )


def test_a_hit_ends_at_the_first_chunk_that_is_not_there() -> None:
    core = make_core(8)
    store(core, prompt(1, 2, 3))
    assert hit(core, prompt(1, 2, 3, 4)) == 3
    assert hit(core, prompt(1, 2, 9)) == 2
    assert hit(core, prompt(9)) == 0


def test_a_part_is_visible_only_with_all_its_shards() -> None:
    core = make_core(8, world=2)
    store(core, prompt(1, 2), shard=0)
    assert hit(core, prompt(1, 2)) == 0
    store(core, prompt(1), shard=1)
    assert hit(core, prompt(1, 2)) == 1


def test_shards_that_do_not_come_are_given_up_and_their_memory_returns() -> None:
    clock = Clock()
    core = make_core(8, world=2, clock=clock)
    store(core, prompt(1, 2), shard=0)
    clock.now += 61
    core.sweep()
    assert core.index.sealed_bytes == 0
    assert core.index.totals.abandoned_parts == 2
    assert store(core, prompt(1), shard=1) == [ReserveStatus.RESERVED]


def test_two_writers_of_one_key_both_succeed_and_one_writes() -> None:
    core = make_core(8)
    first = at_once(core.reserve_in_steps(None, "n", None, 0, b"", prompt(1)))
    second = at_once(core.reserve_in_steps(None, "n", None, 0, b"", prompt(1)))
    assert second == [ReserveStatus.EXISTS]
    assert isinstance(first[0], Slot)
    core.seal(first[0])
    assert core.counters.stored_shards == 1
    assert hit(core, prompt(1)) == 1


def test_eviction_takes_what_was_used_longest_ago_and_never_a_prefix_first() -> None:
    core = make_core(4)
    store(core, prompt(1, 2))
    store(core, prompt(3, 4))
    at_once(
        core.free_locks_in_steps(
            None, [LockRange(core.lookup(None, "n", prompt(1, 2)).lease.lease_id)]
        )
    )
    store(core, prompt(5))
    assert hit(core, prompt(3, 4)) == 1  # its end went, not its beginning
    assert hit(core, prompt(1, 2)) == 2
    store(core, prompt(6))
    assert hit(core, prompt(3, 4)) == 0
    assert hit(core, prompt(1, 2)) == 2


def test_chunks_stored_together_lie_in_order_also_in_memory_that_was_evicted() -> None:
    core = make_core(4)
    store(core, prompt(1, 1, 1, 1))
    for number in (2, 3):
        outcomes = at_once(core.reserve_in_steps(None, "n", None, 0, b"", prompt(number, 1, 1, 1)))
        slots = [outcome for outcome in outcomes if isinstance(outcome, Slot)]
        assert [slot.offset for slot in slots] == [index * PAGE_BYTES for index in range(4)]
        for slot in slots:
            assert core.seal(slot)
        assert hit(core, prompt(number, 1, 1, 1)) == 4


def test_a_prefix_inherits_the_use_of_what_extended_it() -> None:
    core = make_core(4)
    store(core, prompt(1, 2))
    store(core, prompt(3))
    lease = core.lookup(None, "n", prompt(1, 2)).lease
    at_once(core.free_locks_in_steps(None, [LockRange(lease.lease_id)]))
    store(core, prompt(4))
    store(core, prompt(5))  # 3 goes, the only one not used since
    store(core, prompt(6))  # then the end of 1-2
    assert [hit(core, prompt(1, 2)), hit(core, prompt(3))] == [1, 0]


def test_all_parts_of_a_window_that_is_used_outlive_those_that_are_not() -> None:
    core = make_core(
        32, full(PAGE_BYTES, group_idx=0), window(49, PAGE_BYTES, group_idx=1)
    )  # a window is 3 chunks
    for number in range(1, 12):
        for group_idx in (0, 1):
            store(core, prompt(number, 1, 1, 1), group_idx=group_idx)
        lease = core.lookup(None, "n", prompt(1, 1, 1, 1)).lease
        assert lease is not None
        assert at_once(core.leases.release_in_steps(lease)) == 4 + 3


def test_what_is_locked_is_never_evicted() -> None:
    core = make_core(4)
    store(core, prompt(1, 2, 3, 4))
    lease = core.lookup(None, "n", prompt(1, 2, 3, 4)).lease
    assert store(core, prompt(9)) == [ReserveStatus.NO_SPACE]
    at_once(core.free_locks_in_steps(None, [LockRange(lease.lease_id, 3)]))
    assert store(core, prompt(9)) == [ReserveStatus.RESERVED]
    assert hit(core, prompt(1, 2, 3, 4)) == 3


def test_no_more_is_evicted_than_is_asked_for() -> None:
    core = make_core(8)
    store(core, prompt(1, 2, 3, 4, 5))
    assert at_once(core.evict_in_steps(2 * PAGE_BYTES + 1)) == (3, 3 * PAGE_BYTES)
    assert at_once(core.evict_in_steps(PAGE_BYTES)) == (1, PAGE_BYTES)
    assert at_once(core.evict_in_steps(3 * PAGE_BYTES)) == (1, PAGE_BYTES)


def test_an_idle_size_makes_room_for_a_busy_one_and_little_is_lost_on_the_way() -> None:
    """Its prompts grew side by side, so that no run of slots is of one prompt."""
    slots = 2048
    core = make_core(slots)
    core.index.register(Namespace("busy", 16, 1, (full(2 * PAGE_BYTES),)))
    busy: list[bytes] = []

    def store_busy(number: int) -> None:
        for known in busy:
            lease = core.lookup(None, "busy", [known], readers=1, ttl_ms=1).lease
            assert lease is not None, "what is in use stays"
            at_once(core.leases.release_in_steps(lease))
        (slot,) = at_once(core.reserve_in_steps(None, "busy", None, 0, b"", [key(200, number)]))
        assert isinstance(slot, Slot)
        core.seal(slot)
        busy.append(key(200, number))

    for number in range(64):
        store_busy(number)
    idle = slots - 2 * len(busy)
    talks = [[talk] for talk in range(64)]
    for number in range(idle):
        talk = talks[7 * number % 64]
        store(core, [key(*talk)], key(*talk[:-1]) if len(talk) > 1 else b"")
        talk.append(0)
    assert core.index.space("n").visible_parts == idle
    for number in range(64, 192):
        store_busy(number)
    lost = idle - core.index.space("n").visible_parts
    assert lost < 4 * 2 * 128


def test_a_size_whose_own_chunks_run_out_goes_on_with_those_of_others() -> None:
    core = make_core(64)
    store(core, prompt(0))  # older than those, but alone
    for slot in other_size(core, 2):
        assert isinstance(slot, Slot)
        core.seal(slot)
    for number in range(1, 60):
        assert store(core, prompt(number)) == [ReserveStatus.RESERVED]
    outcomes = at_once(
        core.reserve_in_steps(None, "other", None, 0, b"", [key(201, n) for n in range(16)])
    )
    assert all(isinstance(outcome, Slot) for outcome in outcomes)


def test_parts_that_were_used_are_in_their_order_too() -> None:
    core = make_core(40)
    for number in range(40):
        store(core, prompt(number))
    for number in reversed(range(1, 40)):
        (span,) = core.index.find(core.index.space("n"), prompt(number))
        core.index.touch([span])
    (queue,) = core.index._reclaimer._queues.values()
    order = []
    while (part := queue.first()) is not None:
        order.append(part.chunk.key)
        at_once(core.evict_in_steps(1))
    assert order == [key(number) for number in (0, *reversed(range(1, 40)))]


def test_finding_out_what_goes_first_takes_no_more_looks_than_it_is_given() -> None:
    core = make_core(40)
    for number in range(40):
        store(core, prompt(number))
    (queue,) = core.index._reclaimer._queues.values()
    assert queue.settle(1)
    for number in range(40):
        (span,) = core.index.find(core.index.space("n"), prompt(number))
        core.index.touch([span])
    assert not queue.settle(7)
    assert not queue.settle(30)
    assert queue.settle(7)


def test_what_grew_is_not_all_found_out_when_memory_is_wanted() -> None:
    core = make_core(64 * 40)
    for turn in range(40):
        for talk in range(64):
            path = (talk, *range(turn))
            parent = prompt(*path)[-2] if turn else b""
            assert store(core, [key(*path)], parent) == [ReserveStatus.RESERVED]
    (queue,) = core.index._reclaimer._queues.values()
    assert len(queue._heap) < 3 * 64
    assert at_once(core.evict_all_in_steps()) == (64 * 40, 64 * 40 * PAGE_BYTES)


def test_locks_of_readers_are_apart_and_freeing_twice_frees_once() -> None:
    core = make_core(4)
    store(core, prompt(1, 2))
    owner, first, second = scheduler(core), worker(core, 0), worker(core, 1)
    lease = core.lookup(owner, "n", prompt(1, 2), readers=2).lease
    assert lease.locks == 4
    everything = [LockRange(lease.lease_id)]
    assert at_once(core.free_locks_in_steps(first, everything)) == [2]
    assert at_once(core.free_locks_in_steps(first, everything)) == [0]
    assert lease.locks == 2
    # The other reader's locks keep the memory in place.
    assert core.index.pinned_parts == 2
    assert at_once(core.evict_all_in_steps()) == (0, 0)
    assert at_once(core.free_locks_in_steps(second, everything)) == [2]
    assert at_once(core.free_locks_in_steps(owner, everything)) == [0]
    assert core.index.pinned_parts == 0


def test_nobody_frees_the_locks_of_another_engine() -> None:
    core = make_core(4)
    store(core, prompt(1))
    lease = core.lookup(scheduler(core, "mine"), "n", prompt(1)).lease
    for stranger in (None, scheduler(core, "other"), worker(core, 0, "other")):
        with pytest.raises(RequestError) as caught:
            at_once(core.free_locks_in_steps(stranger, [LockRange(lease.lease_id)]))
        assert caught.value.reason is Reason.FOREIGN_LEASE
    assert lease.locks == 1


def test_a_lease_goes_with_its_schedulers_session() -> None:
    core = make_core(4)
    store(core, prompt(1, 2))
    owner = scheduler(core)
    lease = core.lookup(owner, "n", prompt(1, 2), readers=3).lease
    core.close_session(owner)
    assert len(core.leases) == 0
    assert core.index.pinned_parts == 0
    with pytest.raises(RequestError) as caught:
        at_once(core.locate_in_steps(None, LeaseRange(lease.lease_id), shard=0, reader=0))
    assert caught.value.reason is Reason.UNKNOWN_LEASE


def test_a_workers_locks_go_with_its_session_and_nobody_elses() -> None:
    core = make_core(4)
    store(core, prompt(1, 2))
    owner, first = scheduler(core), worker(core, 0)
    lease = core.lookup(owner, "n", prompt(1, 2), readers=2).lease
    core.close_session(first)
    assert lease.locks == 2
    assert all(
        shard is not None
        for shard in at_once(
            core.locate_in_steps(owner, LeaseRange(lease.lease_id), shard=0, reader=1)
        ).shards
    )


def reserve(core: Core, session: Session, keys: list[bytes]) -> int:
    outcomes = at_once(core.reserve_in_steps(session, "n", None, 0, b"", keys))
    with core.writing(outcomes) as writing:
        return core.open_reservation(session, writing)


def test_a_silent_session_loses_its_locks_but_its_memory_stays_out_of_use() -> None:
    clock = Clock()
    core = make_core(4, clock=clock)
    store(core, prompt(1))
    owner, writer = scheduler(core), worker(core)
    core.lookup(owner, "n", prompt(1))
    reservation = reserve(core, writer, prompt(2))
    clock.now += 31
    core.sweep()
    assert core.index.pinned_parts == 0
    assert core.index.reserved_bytes == PAGE_BYTES
    with pytest.raises(RequestError) as caught:
        core.sessions.with_token(writer.token)
    assert caught.value.reason is Reason.SESSION_EXPIRED
    assert reservation is not None
    core.close_session(writer)
    assert core.index.reserved_bytes == 0
    assert hit(core, prompt(2)) == 0


def test_a_lease_by_hand_ends_with_its_ttl() -> None:
    clock = Clock()
    core = make_core(4, clock=clock)
    store(core, prompt(1))
    core.lookup(None, "n", prompt(1), ttl_ms=5_000)
    clock.now += 4
    core.sweep()
    assert core.index.pinned_parts == 1
    clock.now += 2
    core.sweep()
    assert core.index.pinned_parts == 0


def test_a_chunk_whose_parent_is_not_there_is_not_stored() -> None:
    core = make_core(4)
    assert store(core, [key(1, 2)], parent=key(1)) == [ReserveStatus.PARENT_MISSING]
    assert core.index.sealed_bytes == 0
    store(core, prompt(1))
    assert store(core, [key(1, 2)], parent=key(1)) == [ReserveStatus.RESERVED]


def test_a_prefix_that_failed_can_be_stored_again_under_what_extends_it() -> None:
    core = make_core(4)
    first, second = at_once(core.reserve_in_steps(None, "n", None, 0, b"", prompt(1, 2)))
    assert isinstance(first, Slot)
    assert isinstance(second, Slot)
    core.seal(second)
    core.index.abort(first)
    assert hit(core, prompt(1, 2)) == 0
    assert store(core, prompt(1)) == [ReserveStatus.RESERVED]
    assert hit(core, prompt(1, 2)) == 2


def test_clear_hides_at_once_and_frees_when_the_last_user_is_done() -> None:
    core = make_core(8)
    store(core, prompt(1, 2))
    lease = core.lookup(None, "n", prompt(1, 2)).lease
    (writing,) = at_once(core.reserve_in_steps(None, "n", None, 0, key(1, 2), [key(1, 2, 3)]))
    assert core.clear("n") == 2
    assert hit(core, prompt(1, 2)) == 0
    assert core.index.sealed_bytes == 2 * PAGE_BYTES
    # The reader goes on, and the same prompt can be stored anew beside it.
    assert (
        None
        not in at_once(
            core.locate_in_steps(None, LeaseRange(lease.lease_id), shard=0, reader=0)
        ).shards
    )
    assert store(core, prompt(1, 2)) == [ReserveStatus.RESERVED] * 2
    at_once(core.free_locks_in_steps(None, [LockRange(lease.lease_id)]))
    assert core.index.sealed_bytes == 2 * PAGE_BYTES
    assert isinstance(writing, Slot)
    assert not core.seal(writing)
    assert core.index.reserved_bytes == 0
    assert hit(core, prompt(1, 2)) == 2


@pytest.mark.parametrize("way", ["evicted", "given up", "given back", "cleared", "for others"])
def test_chunks_that_leave_are_not_kept_in_memory_by_cycles(way: str) -> None:
    clock = Clock()
    core = make_core(16, world=2, clock=clock)
    gc.collect()
    gc.disable()
    try:
        for shard in (0,) if way == "given up" else (0, 1):
            for last in range(3):
                store(core, prompt(1, 1, last), shard=shard)
        found = core.lookup(None, "n", prompt(1, 1))
        writing = at_once(core.reserve_in_steps(None, "n", None, 0, key(1, 1), [key(9), key(10)]))
        if way == "cleared":
            core.clear("n")
        for slot in writing:
            assert isinstance(slot, Slot)
            core.index.abort(slot)
        if found.lease is not None:
            at_once(core.leases.release_in_steps(found.lease))
        if way == "for others":
            assert all(isinstance(outcome, Slot) for outcome in other_size(core, 8))
        clock.now += 61
        core.sweep()
        at_once(core.evict_all_in_steps())
        del found, writing, slot
        space = core.index.space("n")
        alive = [thing for thing in gc.get_objects() if type(thing) is Chunk]
        assert not [chunk for chunk in alive if chunk.space is space]
    finally:
        gc.enable()


def test_a_commit_is_once_and_by_its_own_session() -> None:
    core = make_core(4)
    mine, other = worker(core), worker(core, 1)
    reservation = reserve(core, mine, prompt(1, 2))
    assert reservation
    with pytest.raises(RequestError) as caught:
        at_once(core.reservations.commit_in_steps(other, reservation, []))
    assert caught.value.reason is Reason.FOREIGN_RESERVATION
    assert at_once(core.reservations.commit_in_steps(mine, reservation, [0])) == [True]
    with pytest.raises(RequestError):
        at_once(core.reservations.commit_in_steps(mine, reservation, [0]))
    assert at_once(core.reservations.commit_in_steps(mine, reservation, [])) == [True]
    with pytest.raises(RequestError) as caught:
        at_once(core.reservations.commit_in_steps(mine, reservation, []))
    assert caught.value.reason is Reason.UNKNOWN_RESERVATION
    assert at_once(core.reservations.abort_in_steps(mine, reservation)) == 0


def test_a_window_group_needs_only_its_window() -> None:
    core = make_core(32, full(PAGE_BYTES, group_idx=0), window(17, PAGE_BYTES, group_idx=1))
    keys = prompt(1, 2, 3, 4)
    store(core, keys, group_idx=0)
    assert hit(core, keys) == 0
    # 17 tokens: the current one and one chunk of 16 before it.
    store(core, [keys[2]], parent=keys[1], group_idx=1)
    found = core.lookup(None, "n", keys, probe=True)
    assert found.chunks == 3
    assert [each[1:] for each in found.ranges] == [(0, 3), (2, 3)]


def test_evicting_a_full_attention_part_takes_the_window_part_with_it() -> None:
    core = make_core(4, full(PAGE_BYTES, group_idx=0), window(17, PAGE_BYTES, group_idx=1))
    store(core, prompt(1, 2), group_idx=0)
    store(core, prompt(1, 2), group_idx=1)
    at_once(core.evict_all_in_steps())
    assert core.index.sealed_bytes == 0
    assert not core.index.space("n").chunks


def test_a_shard_larger_than_the_pool_is_refused() -> None:
    core = make_core(4, full(5 * PAGE_BYTES))
    with pytest.raises(RequestError) as caught:
        store(core, prompt(1))
    assert caught.value.reason is Reason.CHUNK_TOO_LARGE
    assert not core.index.space("n").chunks


def store_tree(core: Core, leaves: int) -> list[bytes]:
    """A chunk and others that all extend it; the keys of the latter."""
    store(core, [key(1)])
    keys = [key(1, number >> 8, number & 255) for number in range(leaves)]
    for leaf in keys:
        assert store(core, [leaf], parent=key(1)) == [ReserveStatus.RESERVED]
    return keys


def test_room_for_another_size_is_not_made_where_the_prefix_of_all_lies() -> None:
    core = make_core(256)
    store_tree(core, 255)
    (slot,) = other_size(core)
    assert isinstance(slot, Slot)
    assert core.index.totals.evicted_parts == 4  # one slab
    assert hit(core, prompt(1)) == 1


def test_what_costs_more_chunks_goes_where_nothing_cheaper_may() -> None:
    core = make_core(160)
    parent = b""
    for number in range(40):  # each slab has one chunk of a long prompt and three short prompts
        store(core, [key(1, number)], parent=parent)
        parent = key(1, number)
        for short in range(3):
            store(core, [key(2, number, short)])
    # Without a lock there, the slabs with the end of the long prompt would be the cheapest.
    locked = range(25, 40)
    for number in locked:
        assert core.lookup(None, "n", [key(2, number, 0)]).lease
    (slot,) = other_size(core)
    assert isinstance(slot, Slot)
    assert core.index.totals.evicted_parts <= 4 * 16
    assert all(hit(core, [key(2, number, 0)]) for number in locked)


def test_a_search_in_vain_for_room_looks_at_few_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    core = make_core(2048)
    leaves = store_tree(core, 2047)
    for leaf in leaves[2::4]:
        assert core.lookup(None, "n", [key(1), leaf]).lease
    looked = count()
    children = Chunk.children

    def counted(chunk: Chunk) -> Iterator[Chunk]:
        next(looked)
        return children(chunk)

    monkeypatch.setattr(Chunk, "children", counted)
    assert other_size(core, 10) == [ReserveStatus.NO_SPACE] * 10
    assert core.index.totals.evicted_parts == 0
    assert next(looked) < 2048


def test_a_search_for_room_goes_on_where_it_was_for_the_chunk_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked = count()
    evictable = Part.is_evictable.fget
    assert evictable is not None

    def counted(part: Part) -> bool:
        next(looked)
        return bool(evictable(part))

    monkeypatch.setattr(Part, "is_evictable", property(counted))
    core = make_core(2048)
    for number in range(2048):
        store(core, [key(3, number >> 8, number & 255)])
    before = next(looked)
    assert all(isinstance(outcome, Slot) for outcome in other_size(core, 200))
    assert core.index.totals.evicted_parts == 400
    assert next(looked) - before < 2048


def test_what_was_cleared_while_locked_does_not_make_a_search_for_room_evict() -> None:
    core = make_core(64)
    for number in range(64):
        store(core, prompt(number))
    for number in range(0, 64, 4):
        core.lookup(None, "n", prompt(number))
    core.clear("n")
    for number in range(64, 64 + 48):
        store(core, prompt(number))
    # In each slab somebody reads what was cleared, so evicting the rest would gain nothing.
    assert other_size(core) == [ReserveStatus.NO_SPACE]
    assert core.index.totals.evicted_parts == 0


class CoreMachine(RuleBasedStateMachine):
    """Random use of two namespace shapes; after each step the books must balance."""

    leases = Bundle("leases")
    slots = Bundle("slots")

    @initialize(shape=st.sampled_from(["one", "sharded", "hybrid"]))
    def setup(self, shape: str) -> None:
        self.world = 2 if shape == "sharded" else 1
        groups = [full(*[PAGE_BYTES] * self.world)]
        if shape == "hybrid":
            groups = [
                full(PAGE_BYTES, group_idx=0),
                window(20, 2 * PAGE_BYTES, group_idx=1),
            ]
        self.clock = Clock()
        self.core = make_core(16, *groups, world=self.world, clock=self.clock)
        self.group_ids = [group.group_idx for group in groups]
        self.written: dict[int, bytes] = {}  # by offset: whose bytes lie there
        self.open: set[Slot] = set()

    paths = st.lists(st.integers(0, 2), min_size=1, max_size=5)

    @rule(target=slots, path=paths, skip=st.integers(0, 3), where=st.integers(0, 3))
    def reserve(self, path: list[int], skip: int, where: int) -> object:
        keys = prompt(*path)
        skip = min(skip, len(keys) - 1)
        parent = keys[skip - 1] if skip else b""
        outcomes = at_once(
            self.core.reserve_in_steps(
                None,
                "n",
                self.group_ids[where % len(self.group_ids)],
                where % self.world,
                parent,
                keys[skip:],
            )
        )
        new = [outcome for outcome in outcomes if isinstance(outcome, Slot)]
        self.open.update(new)
        return multiple(*new)

    @rule(path=paths)
    def store(self, path: list[int]) -> None:
        """Whole prompts, so that many lookups hit."""
        for group_idx in self.group_ids:
            for shard in range(self.world):
                for slot in at_once(
                    self.core.reserve_in_steps(None, "n", group_idx, shard, b"", prompt(*path))
                ):
                    if isinstance(slot, Slot):
                        self.written[slot.offset] = slot.part.chunk.key
                        assert self.core.seal(slot)

    @rule(slot=consumes(slots))
    def seal(self, slot: Slot) -> None:
        self.open.discard(slot)
        self.written[slot.offset] = slot.part.chunk.key
        self.core.seal(slot)

    @rule(slot=consumes(slots))
    def abort(self, slot: Slot) -> None:
        self.open.discard(slot)
        self.core.index.abort(slot)

    @rule(target=leases, path=paths, readers=st.integers(1, 2))
    def lookup(self, path: list[int], readers: int) -> object:
        found = self.core.lookup(None, "n", prompt(*path), readers=readers)
        if found.lease is None:
            assert found.chunks == 0
            return multiple()
        return found.lease

    @rule(lease=leases, first=st.integers(0, 5), end=st.integers(0, 5), reader=st.integers(0, 1))
    def free(self, lease: object, first: int, end: int, reader: int) -> None:
        before = lease.locks  # type: ignore[attr-defined]
        request = [LockRange(lease.lease_id, first, end, reader)]  # type: ignore[attr-defined]
        (released,) = at_once(self.core.free_locks_in_steps(None, request))
        assert lease.locks == before - released  # type: ignore[attr-defined]

    @rule(lease=consumes(leases))
    def free_all(self, lease: object) -> None:
        request = [LockRange(lease.lease_id)]  # type: ignore[attr-defined]
        at_once(self.core.free_locks_in_steps(None, request))
        assert at_once(self.core.free_locks_in_steps(None, request)) == [0]

    @rule(nbytes=st.integers(1, 4 * PAGE_BYTES))
    def evict(self, nbytes: int) -> None:
        at_once(self.core.evict_in_steps(nbytes))

    @rule()
    def clear(self) -> None:
        self.core.clear("n")
        at_once(self.core.backlog.all_steps())

    @rule(seconds=st.sampled_from([1.0, 20.0, 61.0]))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds
        self.core.sweep()
        at_once(self.core.backlog.all_steps())

    @invariant()
    def locked_bytes_are_never_reused(self) -> None:
        if not hasattr(self, "core"):
            return
        for lease in self.core.leases:
            for locked in lease.spans:
                for index, part in enumerate(locked.span.parts):
                    if any(bits >> index & 1 for bits in locked.held):
                        for offset in part.slots:
                            assert self.written[offset] == part.chunk.key

    @invariant()
    def pins_are_the_locks(self) -> None:
        if not hasattr(self, "core"):
            return
        pins: dict[int, int] = {}
        for lease in self.core.leases:
            assert lease.locks > 0
            for locked in lease.spans:
                for index, part in enumerate(locked.span.parts):
                    held = sum(bits >> index & 1 for bits in locked.held)
                    pins[id(part)] = pins.get(id(part), 0) + held
                    if held:
                        assert part.pins >= 1
        assert self.core.index.pinned_parts == sum(count > 0 for count in pins.values())

    @invariant()
    def memory_is_accounted_for(self) -> None:
        if not hasattr(self, "core"):
            return
        index = self.core.index
        offsets = [slot.offset for slot in self.open]
        for part in self._parts():
            offsets.extend(offset for offset in part.slots if offset >= 0)
        assert len(offsets) == len(set(offsets))
        sizes = [index._slots._runs[offset // SLAB].slot_bytes for offset in offsets]
        assert index.sealed_bytes + index.reserved_bytes == sum(sizes)

    @invariant()
    def every_visible_part_can_be_reached(self) -> None:
        """Each chunk's parent is known, and each chunk has a part or a chunk that extends it."""
        if not hasattr(self, "core"):
            return
        space = self.core.index.space("n")
        for chunk in space.chunks.values():
            children = [other for other in space.chunks.values() if other.parent is chunk]
            assert set(chunk.children()) == set(children)
            assert chunk.parent is None or space.chunks[chunk.parent.key] is chunk.parent
            assert children or any(chunk.parts)

    def _parts(self) -> list[object]:
        parts = {
            id(part): part
            for chunk in self.core.index.space("n").chunks.values()
            for part in chunk.parts
            if part is not None
        }
        for lease in self.core.leases:
            for locked in lease.spans:
                for index, part in enumerate(locked.span.parts):
                    if any(bits >> index & 1 for bits in locked.held):
                        parts[id(part)] = part
        return list(parts.values())


CoreMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)
TestCoreMachine = CoreMachine.TestCase

"""Retrieve for several readers: locks, order, refusals and ends, with devices of host memory."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvdock.v1 import cache_pb2 as pb
from kvdock.v1 import session_pb2
from kvdock.v1 import types_pb2 as types
from kvdock_server.core import LockRange
from kvdock_server.core.sessions import Role
from kvdock_server.errors import Reason, RequestError
from kvdock_server.index.namespace import Group, GroupKind, Namespace
from kvdock_server.rpc import verbs
from kvdock_server.service import fills, memory
from kvdock_server.steps import at_once

sys.path.insert(0, str(Path(__file__).parent))
from one_engine import BLOCKS, CHUNK, KEYS, PAGE, PER_CHUNK, TARGET, Engine, uuid

EVENT = b"e" * 64
RETRIEVED, FAILED, NOT_LOCKED = (
    types.CHUNK_STATUS_RETRIEVED,
    types.CHUNK_STATUS_FAILED,
    types.CHUNK_STATUS_NOT_LOCKED,
)


async def test_one_call_serves_all_readers_in_any_order(engine: Engine) -> None:
    lease = engine.lookup()
    early = asyncio.create_task(engine.ask(1, lease))
    await asyncio.sleep(0.01)
    assert await engine.lead(lease) == [RETRIEVED] * 4
    assert await early == [RETRIEVED] * 4
    assert len(engine.core.leases) == 0  # everybody's locks ended with the leader's call
    assert await engine.ask(2, lease) == [RETRIEVED] * 4
    assert [engine.is_filled(reader) for reader in range(3)] == [True] * 3
    counters = engine.core.counters
    nbytes = len(KEYS) * CHUNK
    assert (counters.host_to_device_bytes, counters.device_to_device_bytes) == (nbytes, 2 * nbytes)
    assert (counters.retrieved_shards, counters.retrieved_bytes) == (12, 3 * nbytes)


async def test_ways_are_open_before_the_first_load(engine: Engine) -> None:
    for _ in range(1000):
        if len(engine.driver.opened) == 5:
            break
        await asyncio.sleep(0.005)
    # Of each reader's memory in its device's context, and of the others' in the first one's.
    assert sorted(opened.context for opened in engine.driver.opened.values()) == [1, 1, 1, 2, 3]


async def test_an_outcome_is_told_once_and_kept_for_a_while(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fills, "KEPT_SECONDS", 0.02)
    lease = engine.lookup()
    await engine.lead(lease)
    assert await engine.ask(1, lease) == [RETRIEVED] * 4
    await asyncio.sleep(0.05)
    for reader in (1, 2):
        with pytest.raises(RequestError) as caught:
            await engine.ask(reader, lease)
        assert caught.value.reason is Reason.UNKNOWN_LEASE


async def test_only_so_many_outcomes_are_kept(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fills, "MOST_KEPT", 3)
    leases = [engine.lookup() for _ in range(5)]
    for lease in leases:
        await engine.lead(lease)
    for lease in leases[:2]:
        with pytest.raises(RequestError):
            await engine.ask(1, lease)
    for lease in leases[2:]:
        assert await engine.ask(1, lease) == [RETRIEVED] * 4


async def test_a_leader_that_never_comes(engine: Engine) -> None:
    lease = engine.lookup()
    assert await engine.ask(1, lease, timeout_ms=20) == [FAILED] * 4
    # Now it comes after all: the blocks may belong to others, and are not touched.
    assert await engine.lead(lease) == [RETRIEVED] * 4
    assert [engine.is_filled(reader) for reader in range(3)] == [True, False, True]
    assert await engine.ask(1, lease) == [NOT_LOCKED] * 4
    assert await engine.ask(2, lease) == [RETRIEVED] * 4


async def test_a_leader_that_takes_too_long(engine: Engine) -> None:
    lease = engine.lookup()
    leading = asyncio.create_task(engine.lead(lease, ready_event=EVENT))
    assert await engine.ask(1, lease, timeout_ms=50) == [FAILED] * 4
    engine.driver.ready_events.add(EVENT)
    assert await leading == [RETRIEVED] * 4
    assert [engine.is_filled(reader) for reader in range(3)] == [True, False, True]


async def test_a_reader_whose_call_is_cancelled_gives_up(engine: Engine) -> None:
    lease = engine.lookup()
    leading = asyncio.create_task(engine.lead(lease, ready_event=EVENT))
    asking = asyncio.create_task(engine.ask(2, lease))
    await asyncio.sleep(0.02)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    engine.driver.ready_events.add(EVENT)
    assert await leading == [RETRIEVED] * 4
    assert [engine.is_filled(reader) for reader in range(3)] == [True, True, False]


async def test_the_leaders_time_is_up(engine: Engine) -> None:
    lease = engine.lookup()
    asking = asyncio.create_task(engine.ask(1, lease))
    assert await engine.lead(lease, ready_event=EVENT, timeout_ms=30) == [FAILED] * 4
    assert await asking == [FAILED] * 4
    assert await engine.ask(2, lease) == [FAILED] * 4
    assert not any(engine.is_filled(reader) for reader in range(3))


async def test_a_leader_that_goes_away(engine: Engine) -> None:
    lease = engine.lookup()
    asking = asyncio.create_task(engine.ask(1, lease))
    leading = asyncio.create_task(engine.lead(lease, ready_event=EVENT))
    await asyncio.sleep(0.02)
    leading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leading
    await engine.leave(0)
    assert await asking == [FAILED] * 4
    assert not any(engine.is_filled(reader) for reader in range(3))


async def test_a_reader_that_goes_away(engine: Engine) -> None:
    lease = engine.lookup()
    leading = asyncio.create_task(engine.lead(lease, ready_event=EVENT))
    await asyncio.sleep(0.02)
    await engine.leave(1)
    engine.driver.ready_events.add(EVENT)
    assert await leading == [RETRIEVED] * 4
    assert [engine.is_filled(reader) for reader in range(3)] == [True, False, True]


async def test_a_reader_that_is_back_is_another(engine: Engine) -> None:
    lease = engine.lookup()
    engine.workers.append(engine.workers[1])
    engine.workers[1] = await engine.worker(1, 1)
    await engine.leave(3)
    assert await engine.lead(lease) == [RETRIEVED] * 4
    assert await engine.ask(1, lease) == [RETRIEVED] * 4
    assert engine.is_filled(1)


async def test_a_reader_without_all_locks_is_not_filled(engine: Engine) -> None:
    lease = engine.lookup()
    at_once(engine.core.free_locks_in_steps(engine.scheduler, [LockRange(lease, 1, 2, 2)]))
    assert await engine.lead(lease) == [RETRIEVED] * 4
    assert await engine.ask(2, lease) == [NOT_LOCKED] * 4
    assert [engine.is_filled(reader) for reader in range(3)] == [True, True, False]


async def test_the_callers_chunks_decide(engine: Engine) -> None:
    lease = engine.lookup()
    at_once(engine.core.free_locks_in_steps(engine.scheduler, [LockRange(lease, 2, 3, 0)]))
    statuses = [RETRIEVED, RETRIEVED, NOT_LOCKED, RETRIEVED]
    assert await engine.lead(lease) == statuses
    assert await engine.ask(1, lease) == statuses
    third = engine.workers[1].cache.reshape(BLOCKS, PAGE)[TARGET[4:6]]
    assert not third.any()
    await engine.ask(2, lease)


async def test_part_of_a_lease_at_a_time(engine: Engine) -> None:
    lease = engine.lookup()
    asking = [asyncio.create_task(engine.ask(1, lease, first_chunk=n, end_chunk=n + 2))
              for n in (0, 2)]  # fmt: skip
    await engine.lead(lease, first_chunk=2, block_ids=TARGET[4:])
    assert await asking[1] == [RETRIEVED] * 2
    assert not asking[0].done()
    await engine.lead(lease, end_chunk=2, block_ids=TARGET[1:4], skip_blocks=1)
    assert await asking[0] == [RETRIEVED] * 2
    for reader in range(3):
        blocks = engine.workers[reader].cache.reshape(BLOCKS, PAGE)[TARGET[1:]]
        np.testing.assert_array_equal(blocks.ravel(), engine.bytes[PAGE:])


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"also_fill": [1, 1]}, "each other reader once"),
        ({"also_fill": [0, 1]}, "each other reader once"),
        ({"also_fill": [*range(200), 1]}, "also_fill 0, 1, 2, 3, 4, 5, 6, 7 of reader 0"),
        ({"also_fill": range(1, 257)}, "256 readers in also_fill: at most 255"),
        ({"also_fill": [1, 7]}, "the lease was given to 3 readers"),
        ({"block_ids": [*TARGET[:-1], 32]}, "32 blocks are registered"),
        ({"ready_event": b"x"}, "ready_event of 1 bytes: 64, or none"),
    ],
)
async def test_a_wrong_call_changes_nothing(
    engine: Engine, fields: dict[str, Any], complaint: str
) -> None:
    lease = engine.lookup()
    with pytest.raises(RequestError, match=complaint) as caught:
        await engine.lead(lease, **fields)
    assert caught.value.reason is Reason.INVALID_ARGUMENT_VALUE
    assert not any(engine.is_filled(reader) for reader in range(3))
    assert await engine.lead(lease) == [RETRIEVED] * 4
    assert await engine.ask(2, lease) == [RETRIEVED] * 4


@pytest.mark.parametrize(
    ("worker", "complaint"),
    [
        ({"per_chunk": 1}, "1 blocks a chunk, and the caller 2"),
        ({"blocks": 30}, "block id 30: reader 2 in also_fill has registered 30 blocks"),
    ],
)
async def test_a_reader_that_does_not_fit_is_refused_and_hears_of_it(
    engine: Engine, worker: dict[str, Any], complaint: str
) -> None:
    await engine.leave(2)
    other = await engine.worker(2, 2, **worker)
    lease = engine.lookup()
    asking = asyncio.create_task(engine.ask(1, lease))
    await asyncio.sleep(0.01)
    with pytest.raises(RequestError, match=complaint):
        await engine.lead(lease)
    assert await asking == [FAILED] * 4
    assert not other.cache.any()
    await engine.service.memory.release(other.session)
    at_once(engine.core.free_locks_in_steps(engine.scheduler, [LockRange(lease)]))


async def test_readers_of_another_shard_are_refused(engine: Engine) -> None:
    shards = Group(None, GroupKind.FULL_ATTENTION, 0, (CHUNK, CHUNK))
    engine.core.index.register(Namespace("sharded", 16, 2, (shards,), {}))
    lease = engine.lookup()
    engine.workers[2].session.kv_worker_id = 1
    with pytest.raises(RequestError, match="reads shard 1, and the caller 0"):
        await engine.lead(lease)
    engine.workers[2].session.kv_worker_id = 0
    assert await engine.lead(lease) == [RETRIEVED] * 4


async def register_elsewhere(engine: Engine, reader: int) -> None:
    """Have a reader's memory registered for another namespace."""
    request = session_pb2.RegisterMemoryRequest(namespace="other")
    handle, _ = engine.driver.export(CHUNK, reader)
    request.allocations.add(ipc_handle=handle, bytes=CHUNK, device_uuid=uuid(reader))
    group = request.groups.add(num_blocks=1, blocks_per_chunk=1)
    group.regions.add(allocation=0, offset=0, block_stride=CHUNK, page_bytes=CHUNK)
    await verbs.register_memory(engine.service, engine.workers[reader].session, request)


@pytest.mark.parametrize("elsewhere", ["another engine", "shared mode", "another namespace"])
async def test_who_has_no_memory_registered_is_left_to_itself(
    engine: Engine, elsewhere: str
) -> None:
    group = Group(None, GroupKind.FULL_ATTENTION, 0, (CHUNK,))
    engine.core.index.register(Namespace("other", 16, 1, (group,), {}))
    lease = engine.lookup()
    if elsewhere == "another engine":
        await engine.leave(2)
        engine.workers[2] = await engine.worker(2, 2, engine="another")
    elif elsewhere == "shared mode":
        await engine.service.memory.release(engine.workers[2].session)
    else:
        await register_elsewhere(engine, 2)
    assert await engine.lead(lease) == [RETRIEVED] * 4
    assert [engine.is_filled(reader) for reader in range(3)] == [True, True, False]
    if elsewhere == "another engine":
        return
    assert engine.core.leases.get(lease, "one").locks == 4  # type: ignore[union-attr]
    if elsewhere == "another namespace":
        with pytest.raises(RequestError, match="has left this reader to itself: send a Retrieve"):
            await engine.ask(2, lease)
    at_once(engine.core.free_locks_in_steps(engine.workers[2].session, [LockRange(lease)]))


@pytest.mark.parametrize("late", [0, 1])
async def test_who_is_about_to_register_is_waited_for(engine: Engine, late: int) -> None:
    await engine.leave(late)
    session = engine.core.open_session(engine_id="one", role=Role.WORKER, worker_id=late)
    lease = engine.lookup()
    asking = asyncio.create_task(engine.ask(2, lease))
    leading = asyncio.create_task(engine.lead(lease)) if late else None
    await asyncio.sleep(0.02)
    engine.workers[late] = await engine.worker(late, late, session=session)
    assert await (leading or engine.lead(lease)) == [RETRIEVED] * 4
    assert await asking == [RETRIEVED] * 4
    assert [engine.is_filled(reader) for reader in range(3)] == [True] * 3


async def test_a_reader_that_gives_up_while_its_leader_registers_is_not_filled(
    engine: Engine,
) -> None:
    await engine.leave(0)
    session = engine.core.open_session(engine_id="one", role=Role.WORKER, worker_id=0)
    lease = engine.lookup()
    asking = asyncio.create_task(engine.ask(1, lease))
    await asyncio.sleep(0.02)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    engine.workers[0] = await engine.worker(0, 0, session=session)
    assert await engine.lead(lease) == [RETRIEVED] * 4
    assert [engine.is_filled(reader) for reader in range(3)] == [True, False, True]


@pytest.mark.parametrize("late", [0, 1])
async def test_nobody_waits_longer_than_its_time_for_who_is_about_to_register(
    engine: Engine, late: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.core.open_session(engine_id="one", role=Role.WORKER, worker_id=late)
    lease = engine.lookup()
    if late:
        # It waits for half of this. The rest must do for the copies, on a busy machine too.
        timeout_ms = int(1000 * memory.SETTLED_SECONDS)
        assert await engine.lead(lease, timeout_ms=timeout_ms) == [RETRIEVED] * 4
    else:
        monkeypatch.setattr(memory, "SETTLED_SECONDS", 20.0)
        began = time.monotonic()
        assert await engine.ask(1, lease, timeout_ms=200) == [FAILED] * 4
        assert time.monotonic() - began < 0.9 * memory.SETTLED_SECONDS
        at_once(engine.core.free_locks_in_steps(engine.scheduler, [LockRange(lease)]))


async def test_a_way_that_is_not_open_in_time_is_none(engine: Engine) -> None:
    await test_ways_are_open_before_the_first_load(engine)
    await engine.leave(1)
    may_go_on = threading.Event()

    def take_long(name: str) -> None:
        if name == "can_access_peer":
            assert may_go_on.wait(60)

    engine.driver.before_call = take_long
    engine.workers[1] = await engine.worker(1, 1)
    lease = engine.lookup()
    assert await engine.lead(lease, timeout_ms=2_000) == [RETRIEVED] * 4
    assert [engine.is_filled(reader) for reader in range(3)] == [True] * 3
    assert engine.core.counters.device_to_device_bytes == len(KEYS) * CHUNK
    may_go_on.set()


@pytest.mark.parametrize("elsewhere", ["gone", "another namespace"])
async def test_a_leader_without_memory_cannot_be_asked(engine: Engine, elsewhere: str) -> None:
    group = Group(None, GroupKind.FULL_ATTENTION, 0, (CHUNK,))
    engine.core.index.register(Namespace("other", 16, 1, (group,), {}))
    lease = engine.lookup()
    if elsewhere == "gone":
        await engine.leave(0)
    else:
        await register_elsewhere(engine, 0)
    with pytest.raises(RequestError, match="reader 0, which is to fill reader 1, has registered"):
        await engine.ask(1, lease)
    alone = pb.RetrieveRequest(lease_id=lease, block_ids=TARGET)
    assert await engine.send(1, alone) == [RETRIEVED] * 4
    assert engine.is_filled(1)
    at_once(engine.core.free_locks_in_steps(engine.scheduler, [LockRange(lease)]))


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"filled_by": 1}, "filled_by 1: that is the reader itself"),
        ({"end_chunk": 0}, "chunks 0 to 0: from 1 to 16384"),
        ({"first_chunk": 5, "end_chunk": 4}, "chunks 5 to 4: from 1 to 16384"),
        ({"end_chunk": 16_385}, "chunks 0 to 16385: from 1 to 16384"),
        ({"reader": 2}, "may ask for shard 0 as reader 1 only"),
        ({"kv_worker_id": 1}, "may ask for shard 0 as reader 1 only"),
        ({"group_idx": 0}, "registered no memory for group 0"),
        ({"lease_id": 5}, "lease 5 ended"),
    ],
)
async def test_a_wrong_question_is_refused(
    engine: Engine, fields: dict[str, Any], complaint: str
) -> None:
    lease = engine.lookup()
    with pytest.raises(RequestError, match=complaint):
        await engine.ask(1, fields.pop("lease_id", lease), **fields)
    assert await engine.lead(lease) == [RETRIEVED] * 4
    assert engine.is_filled(1)


async def test_another_engines_lease_is_no_ones_to_ask_for(engine: Engine) -> None:
    stranger = await engine.worker(1, 1, engine="another")
    lease = engine.lookup()
    request = pb.AwaitFillRequest(
        lease_id=lease, reader=1, end_chunk=4, filled_by=0, timeout_ms=100
    )
    with pytest.raises(RequestError) as caught:
        await verbs.await_fill(engine.service, stranger.session, request)
    assert caught.value.reason is Reason.FOREIGN_LEASE
    await engine.service.memory.release(stranger.session)
    await engine.lead(lease)


async def test_other_modes_have_no_followers(engine: Engine) -> None:
    session = engine.core.open_session(engine_id="one", role=Role.WORKER, worker_id=1)
    lease = engine.lookup()
    for verb, request in (
        (verbs.retrieve, pb.RetrieveRequest(lease_id=lease, reader=1, also_fill=[2])),
        (verbs.await_fill, pb.AwaitFillRequest(lease_id=lease, reader=1, end_chunk=4)),
    ):
        with pytest.raises(RequestError) as caught:
            await verb(engine.service, session, request)  # type: ignore[operator]
        assert caught.value.reason is Reason.WRONG_MODE
    with pytest.raises(RequestError) as caught:
        await verbs.await_fill(engine.service, None, pb.AwaitFillRequest(lease_id=lease))
    assert caught.value.reason is Reason.SESSION_REQUIRED
    await engine.lead(lease)


async def test_two_engines_of_one_name_are_told_the_truth(engine: Engine) -> None:
    lease = engine.lookup()
    asking = asyncio.create_task(engine.ask(1, lease))
    await asyncio.sleep(0.02)
    other = await engine.worker(1, 1)
    assert await engine.lead(lease) == [RETRIEVED] * 4
    assert not engine.is_filled(1)
    assert await asking == [FAILED] * 4
    engine.workers.append(other)


async def test_a_session_that_ends_while_it_registers_anew_leaves_nothing_mapped(
    engine: Engine,
) -> None:
    session = engine.workers[0].session
    anew = asyncio.create_task(engine.worker(0, 0, session=session))
    for _ in range(10_000):  # until it lets go of what was there
        if session not in engine.service.memory._memory:
            break
        await asyncio.sleep(0)
    anew.cancel()
    with pytest.raises(asyncio.CancelledError):
        await anew
    await engine.leave(0)
    assert engine.driver.opened_for(0) == []


# What a worker has given up is not done later, when a server that stood still goes on.


def ns(seconds: float) -> int:
    """So far from now, as deadline_ns."""
    return time.monotonic_ns() + round(seconds * 1e9)


async def store(engine: Engine, **fields: Any) -> set[types.ChunkStatus.ValueType]:
    """Store new chunks from blocks that are there."""
    keys = [bytes([100 + n]) * 32 for n in range(4)]
    request = pb.StoreRequest(
        namespace="model", keys=keys, block_ids=range(4 * PER_CHUNK), timeout_ms=5000, **fields
    )
    response = await verbs.store(engine.service, engine.workers[0].session, request)
    found = engine.core.lookup(engine.scheduler, "model", keys, probe=True).chunks
    assert found == (
        len(keys)
        if {chunk.status for chunk in response.chunks} == {types.CHUNK_STATUS_STORED}
        else 0
    )
    assert engine.core.index.reserved_bytes == 0
    return {chunk.status for chunk in response.chunks}


async def test_a_store_in_time_and_one_that_is_read_too_late(engine: Engine) -> None:
    assert await store(engine, deadline_ns=ns(-0.001)) == {FAILED}
    assert await store(engine, deadline_ns=ns(4)) == {types.CHUNK_STATUS_STORED}


async def test_a_store_whose_copy_ends_too_late(engine: Engine) -> None:
    engine.driver.before_copy = lambda *_: time.sleep(0.05)
    assert await store(engine, deadline_ns=ns(0.02)) == {FAILED}


async def test_a_load_that_is_read_too_late(engine: Engine) -> None:
    assert await engine.lead(engine.lookup(), deadline_ns=ns(-0.001)) == [FAILED] * 4
    assert not any(engine.is_filled(reader) for reader in range(3))


async def test_a_deadline_of_another_clock_is_refused(engine: Engine) -> None:
    lease = engine.lookup(1)
    with pytest.raises(RequestError, match="time namespace"):
        await store(engine, deadline_ns=ns(60))
    with pytest.raises(RequestError, match=r"CLOCK_MONOTONIC"):
        await engine.lead(lease, also_fill=[], deadline_ns=ns(60))
    at_once(engine.core.free_locks_in_steps(engine.scheduler, [LockRange(lease)]))


@pytest.mark.parametrize("reader", [0, 1])
async def test_the_next_registration_of_a_worker_ends_what_its_last_session_asked_for(
    engine: Engine, reader: int
) -> None:
    lease = engine.lookup()
    leading = asyncio.create_task(engine.lead(lease, ready_event=EVENT))
    await asyncio.sleep(0.02)
    old = engine.workers[reader]
    engine.workers.append(await engine.worker(reader, reader))
    engine.driver.ready_events.add(EVENT)
    assert await leading == [FAILED if reader == 0 else RETRIEVED] * 4
    assert [engine.is_filled(each) for each in range(3)] == [
        reader == 1 and each != reader for each in range(3)
    ]
    request = pb.RetrieveRequest(lease_id=engine.lookup(), reader=reader, block_ids=TARGET)
    with pytest.raises(RequestError) as caught:
        await verbs.retrieve(engine.service, old.session, request)
    assert caught.value.reason is Reason.DEVICE_MEMORY
    assert not old.cache.any()
    engine.core.close_session(engine.scheduler)

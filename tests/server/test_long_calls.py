"""Calls about tens of thousands of chunks, and lists of 100,000 entries, hold up no server's loop.

The watchdog of ``start_server`` looks on: one callback of 20 ms fails the test.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from servers import ServerProcess
from wire import DEADLINE, SHARD, Wire, WireSession, key, raises

from kvdock.v1 import (
    admin_pb2,
    cache_pb2,
    events_pb2,
    events_pb2_grpc,
    session_pb2,
    types_pb2,
)

MANY = 16_384
"""As many keys as one call may have."""
PROMPTS = 3
SLOT = 4096
POOL_BYTES = PROMPTS * MANY * SLOT
LEASES = 64


def prompt(number: int) -> list[bytes]:
    return [(number * MANY + index + 1).to_bytes(32, "little") for index in range(MANY)]


def reserve(session: WireSession, number: int) -> Any:
    request = cache_pb2.ReserveRequest(namespace="n", keys=prompt(number))
    return session.ask(reserve=request).reserve


def store(session: WireSession, number: int) -> None:
    reservation = reserve(session, number).reservation_id
    session.ask(commit=cache_pb2.CommitRequest(reservation_id=reservation))


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def full(start_server: Callable[..., ServerProcess]) -> Iterator[Wire]:
    """A server whose pool is full: 49,152 parts."""
    wire = Wire(start_server(memory=f"{POOL_BYTES >> 20}MiB").address)
    wire.register(shard_bytes=1)
    eventually(lambda: wire.status().pool.ready_bytes == POOL_BYTES)
    worker = WireSession(wire)
    for number in range(PROMPTS):
        store(worker, number)
    worker.close()
    assert wire.status().index.parts == PROMPTS * MANY
    yield wire
    wire.channel.close()


def test_no_call_about_a_full_pool_holds_up_the_loop(full: Wire) -> None:
    listing = admin_pb2.ListChunksRequest(namespace="n")
    listed = sum(len(some.parts) for some in full.admin.ListChunks(listing, timeout=DEADLINE))
    assert listed == PROMPTS * MANY

    worker, scheduler = WireSession(full), WireSession(full, "SCHEDULER")
    reservation = reserve(worker, PROMPTS).reservation_id
    assert full.status().counters.evicted_parts == MANY
    abort = cache_pb2.AbortRequest(reservation_id=reservation)
    assert worker.ask(abort=abort).abort.aborted == MANY

    reserve(worker, PROMPTS)
    lookup = cache_pb2.LookupRequest(namespace="n", keys=prompt(PROMPTS - 1))
    for _ in range(LEASES):
        assert scheduler.ask(lookup=lookup).lookup.hit_chunks == MANY
    worker.close()
    eventually(lambda: not full.status().pool.reserved_bytes)
    scheduler.close()
    eventually(lambda: not full.status().index.leases)

    everything = admin_pb2.EvictRequest(bytes=POOL_BYTES)
    assert full.admin.Evict(everything, timeout=DEADLINE).parts == (PROMPTS - 1) * MANY


def test_a_clear_of_a_full_pool_holds_up_no_loop(full: Wire) -> None:
    cleared = full.admin.Clear(admin_pb2.ClearRequest(namespace="n"), timeout=DEADLINE)
    assert cleared.parts == PROMPTS * MANY
    eventually(lambda: not full.status().pool.used_bytes)


def send_lists_that_are_too_long(wire: Wire) -> None:
    """Each is refused for its length. To look at their entries would take tens of milliseconds."""
    too_many = 100_000
    regions = [session_pb2.BlockRegion(page_bytes=1)] * too_many
    memory = session_pb2.RegisterMemoryRequest(
        namespace="n0",
        mode=types_pb2.TRANSFER_MODE_SERVER,
        groups=[session_pb2.GroupMemory(regions=regions)],
    )
    locks = cache_pb2.FreeLocksRequest(locks=[cache_pb2.LockRange(lease_id=1)] * too_many)
    worker = WireSession(wire)
    assert f"{too_many} regions" in worker.error(register_memory=memory).message
    assert f"{too_many} locks" in worker.error(free_locks=locks).message
    worker.close()

    snapshot = events_pb2.StreamKVEventsRequest(
        snapshot=events_pb2.StartSnapshot(), namespaces=["?"] * too_many
    )
    with raises(grpc.StatusCode.INVALID_ARGUMENT) as caught:
        next(events_pb2_grpc.EventServiceStub(wire.channel).StreamKVEvents(snapshot))
    assert f"{too_many} namespaces" in caught.message


def test_a_list_that_is_too_long_holds_up_no_loop(
    start_server: Callable[..., ServerProcess],
) -> None:
    wire = Wire(start_server("--event-log", "16MiB").address)
    for number in range(100):
        wire.register(f"n{number}")
        wire.put([key(1)], [bytes(SHARD)], name=f"n{number}")
    send_lists_that_are_too_long(wire)
    wire.channel.close()

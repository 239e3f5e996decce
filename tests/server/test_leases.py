"""Locks and leases that do not go when their holder goes, or go when an error said nothing went."""

from __future__ import annotations

import time

from wire import DEADLINE, SHARD, Wire, WireSession, key

from kvdock.v1 import admin_pb2, cache_pb2


def wait_for_no_locks(wire: Wire, seconds: float = 3.0) -> admin_pb2.IndexStatus:
    deadline = time.monotonic() + seconds
    while (index := wire.status().index).leases and time.monotonic() < deadline:
        time.sleep(0.05)
    return index


def test_what_a_worker_session_looked_up_is_released_when_its_stream_ends(wire: Wire) -> None:
    wire.put([key(1)], [bytes(SHARD)])
    worker = WireSession(wire, "WORKER", worker_id=1)
    answer = worker.ask(lookup=cache_pb2.LookupRequest(namespace="n", keys=[key(1)]))
    assert answer.lookup.lease_id
    worker.close()
    index = wait_for_no_locks(wire)
    assert (index.leases, index.locks, index.locked_parts) == (0, 0, 0)


def test_what_a_worker_session_looked_up_is_released_when_it_expires(wire: Wire) -> None:
    wire.put([key(1)], [bytes(SHARD)])
    worker = WireSession(wire, "WORKER", worker_id=0, ttl_ms=1_000)
    worker.ask(lookup=cache_pb2.LookupRequest(namespace="n", keys=[key(1)], readers=2))
    index = wait_for_no_locks(wire, 4)
    assert (index.leases, index.locks, index.locked_parts) == (0, 0, 0)
    worker.close()


def test_free_locks_that_answers_an_error_has_freed_nothing(wire: Wire) -> None:
    wire.put([key(1)], [bytes(SHARD)])
    scheduler = WireSession(wire, "SCHEDULER")
    lookup = cache_pb2.LookupRequest(namespace="n", keys=[key(1)])
    lease = scheduler.ask(lookup=lookup).lookup.lease_id
    request = cache_pb2.FreeLocksRequest(
        locks=[
            cache_pb2.LockRange(lease_id=lease),
            cache_pb2.LockRange(lease_id=lease, group_idx=5),
        ]
    )
    error = scheduler.error(free_locks=request)
    assert error.reason == "INVALID_ARGUMENT_VALUE"
    # session.proto, SessionResponse.error: "The request failed and changed nothing."
    assert wire.status().index.locks == 1
    scheduler.close()


def test_a_reconnected_worker_keeps_its_locks_when_its_old_stream_ends(wire: Wire) -> None:
    wire.put([key(1)], [bytes(SHARD)])
    scheduler = WireSession(wire, "SCHEDULER")
    old = WireSession(wire, "WORKER", worker_id=0)
    new = WireSession(wire, "WORKER", worker_id=0)
    lookup = cache_pb2.LookupRequest(namespace="n", keys=[key(1)])
    lease = scheduler.ask(lookup=lookup).lookup.lease_id
    new.ask(retrieve=cache_pb2.RetrieveRequest(lease_id=lease))
    old.close()
    time.sleep(0.3)
    free = cache_pb2.FreeLocksRequest(locks=[cache_pb2.LockRange(lease_id=lease)])
    assert [freed.released for freed in new.ask(free_locks=free).free_locks.freed] == [1]
    new.close()
    scheduler.close()


def test_bytes_of_a_namespace_are_the_bytes_of_its_shards(wire: Wire) -> None:
    wire.register("tiny", shard_bytes=1)
    wire.put([key(1)], [b"x"], name="tiny")
    answers = wire.admin.ListNamespaces(admin_pb2.ListNamespacesRequest(), timeout=DEADLINE)
    assert {a.namespace.namespace.name: a.namespace.bytes for a in answers}["tiny"] == 1

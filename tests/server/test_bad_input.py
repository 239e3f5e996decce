"""Whatever comes in: the right status code, a message that helps, nothing stored, nothing leaked.

After each test the server must still be alive and hold exactly what it held before.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from wire import DEADLINE, SHARD, Wire, WireSession, key, raises

from kvdock.v1 import admin_pb2, cache_pb2, session_pb2, types_pb2

Code = grpc.StatusCode


@pytest.fixture(autouse=True)
def nothing_is_left_behind(wire: Wire, server) -> Iterator[None]:  # type: ignore[no-untyped-def]
    yield
    deadline = time.monotonic() + 8
    while True:
        status = wire.status()
        held = (
            status.pool.used_bytes,
            status.pool.reserved_bytes,
            status.index.locks,
            status.index.locked_parts,
            status.index.pending_parts,
            status.index.chunks,
            len(status.sessions),
        )
        if not any(held):
            break
        assert time.monotonic() < deadline, f"left behind: {status}"
        time.sleep(0.05)
    assert server.process.poll() is None


def clear(wire: Wire) -> None:
    wire.admin.Clear(admin_pb2.ClearRequest(all=True), timeout=DEADLINE)


@pytest.mark.parametrize("length", [0, 31, 33, 4096])
def test_wrong_key_length(wire: Wire, length: int) -> None:
    bad = bytes(length)
    with raises(Code.INVALID_ARGUMENT, "INVALID_ARGUMENT_VALUE") as caught:
        wire.lookup([key(1), bad])
    assert f"key 1 has {length} bytes" in caught.message
    with raises(Code.INVALID_ARGUMENT):
        wire.put([bad], [bytes(SHARD)])
    with raises(Code.INVALID_ARGUMENT):
        list(wire.cache.Get(cache_pb2.GetRequest(namespace="n", keys=[bad]), timeout=DEADLINE))
    if length:
        with raises(Code.INVALID_ARGUMENT) as caught:
            wire.put([key(1)], [bytes(SHARD)], parent_key=bad)
        assert "parent_key" in caught.message


def test_nothing_is_stored_under_the_key_of_32_zero_bytes(wire: Wire) -> None:
    """As a parent it says that a prompt begins, so nothing could ever follow such a chunk."""
    keys = [key(1), bytes(32)]
    with raises(Code.INVALID_ARGUMENT, "INVALID_ARGUMENT_VALUE") as caught:
        wire.put(keys, [])
    assert "key 1 is 32 zero bytes" in caught.message
    session = WireSession(wire)
    error = session.error(reserve=cache_pb2.ReserveRequest(namespace="n", keys=keys))
    assert (error.code, error.metadata["field"]) == (Code.INVALID_ARGUMENT.value[0], "keys")
    session.close()
    # So nobody finds it.
    assert wire.lookup([bytes(32)]).hit_chunks == 0
    (answer,) = wire.cache.Get(cache_pb2.GetRequest(namespace="n", keys=[bytes(32)]))
    assert answer.status == types_pb2.CHUNK_STATUS_NOT_FOUND


@pytest.mark.parametrize("count", [0, 16_385, 100_000])
def test_too_few_and_too_many_keys(wire: Wire, count: int) -> None:
    keys = [key(1)] * count
    with raises(Code.INVALID_ARGUMENT, "INVALID_ARGUMENT_VALUE") as caught:
        wire.lookup(keys)
    assert f"{count} keys: from 1 to 16384" in caught.message
    with raises(Code.INVALID_ARGUMENT):
        wire.put(keys, [])
    with raises(Code.INVALID_ARGUMENT):
        list(wire.cache.Get(cache_pb2.GetRequest(namespace="n", keys=keys), timeout=DEADLINE))
    session = WireSession(wire)
    error = session.error(reserve=cache_pb2.ReserveRequest(namespace="n", keys=keys))
    assert error.code == Code.INVALID_ARGUMENT.value[0]
    assert "as parent_key" in error.message  # how a prompt goes on in the next call
    session.close()


def test_unknown_namespace(wire: Wire) -> None:
    session = WireSession(wire)
    reserve = cache_pb2.ReserveRequest(namespace="?", keys=[key(1)])
    error = session.error(reserve=reserve)
    assert (error.code, error.reason) == (Code.NOT_FOUND.value[0], "UNKNOWN_NAMESPACE")
    session.close()
    for call in (
        lambda: wire.lookup([key(1)], name="?"),
        lambda: wire.put([key(1)], [b""], name="?"),
        lambda: list(wire.cache.Get(cache_pb2.GetRequest(namespace="?", keys=[key(1)]))),
        lambda: wire.admin.Clear(admin_pb2.ClearRequest(namespace="?")),
        lambda: list(wire.admin.ListChunks(admin_pb2.ListChunksRequest(namespace="?"))),
    ):
        with raises(Code.NOT_FOUND, "UNKNOWN_NAMESPACE") as caught:
            call()
        assert "'?'" in caught.message
        assert "RegisterNamespace" in caught.message


def namespace(**changes: object) -> types_pb2.Namespace:
    group = types_pb2.Group(kind=types_pb2.GROUP_KIND_FULL_ATTENTION, shard_bytes=[SHARD])
    fields: dict[str, object] = {
        "name": "other",
        "chunk_tokens": 16,
        "kv_world_size": 1,
        "groups": [group],
    }
    return types_pb2.Namespace(**(fields | changes))  # type: ignore[arg-type]


def group(**fields: object) -> types_pb2.Group:
    defaults = {"kind": types_pb2.GROUP_KIND_FULL_ATTENTION, "shard_bytes": [SHARD]}
    return types_pb2.Group(**(defaults | fields))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changes",
    [
        {"name": ""},
        {"name": "a b"},
        {"name": "ü"},
        {"name": "x" * 257},
        {"chunk_tokens": 0},
        {"chunk_tokens": 65_537},
        {"kv_world_size": 0},
        {"kv_world_size": 257},
        {"groups": []},
        {"groups": [group(kind=0)]},
        {"groups": [group(kind=99)]},
        {"groups": [group(shard_bytes=[])]},
        {"groups": [group(shard_bytes=[1, 2])]},
        {"groups": [group(), group(group_idx=1)]},
        {"groups": [group(group_idx=1), group(group_idx=1)]},
        {"groups": [group(window_tokens=5)]},
        {"groups": [group(attention_chunk_tokens=64)]},
        {"groups": [group(kind=types_pb2.GROUP_KIND_CHUNKED_LOCAL_ATTENTION)]},
        {"groups": [group(kind=types_pb2.GROUP_KIND_SLIDING_WINDOW)]},
        {"labels": {str(number): "" for number in range(33)}},
        {"labels": {"x": "y" * 257}},
    ],
    ids=str,
)
def test_impossible_namespaces(wire: Wire, changes: dict[str, object]) -> None:
    with raises(Code.INVALID_ARGUMENT):
        wire.cache.RegisterNamespace(
            cache_pb2.RegisterNamespaceRequest(namespace=namespace(**changes))
        )
    assert wire.status().index.namespaces == 1


def test_a_namespace_that_contradicts_itself(wire: Wire) -> None:
    with raises(Code.FAILED_PRECONDITION, "NAMESPACE_CONFLICT") as caught:
        wire.register(shard_bytes=SHARD + 1)
    assert str(SHARD) in caught.message
    with raises(Code.FAILED_PRECONDITION, "NAMESPACE_CONFLICT"):
        wire.register(world=2)


def test_fewer_bytes_than_a_shard_has(wire: Wire) -> None:
    responses = wire.put([key(1)], [bytes(SHARD - 1)])
    assert responses[-1].result.status == types_pb2.CHUNK_STATUS_FAILED
    assert wire.lookup([key(1)]).hit_chunks == 0


def test_more_bytes_than_a_shard_has(wire: Wire) -> None:
    with raises(Code.INVALID_ARGUMENT, "WRONG_LENGTH") as caught:
        wire.put([key(1)], [bytes(SHARD + 1)])
    assert str(SHARD) in caught.message
    assert wire.lookup([key(1)]).hit_chunks == 0


def test_one_bad_chunk_does_not_fail_its_neighbours(wire: Wire) -> None:
    keys = [key(1), key(1, 2)]
    responses = wire.put(keys, [bytes(SHARD), bytes(5)])
    results = {r.result.chunk: r.result.status for r in responses[1:]}
    assert results == {0: types_pb2.CHUNK_STATUS_STORED, 1: types_pb2.CHUNK_STATUS_FAILED}
    assert wire.lookup(keys, probe=True).hit_chunks == 1
    clear(wire)


def test_nonsense_in_a_put(wire: Wire) -> None:
    data = cache_pb2.PutRequest(data=cache_pb2.PutData(chunk=0, data=b"x"))
    opened = cache_pb2.PutRequest(open=cache_pb2.PutOpen(namespace="n", keys=[key(1)]))
    for requests in ([data], [cache_pb2.PutRequest()], [], [opened, opened]):
        with raises(Code.INVALID_ARGUMENT):
            list(wire.cache.Put(iter(requests), timeout=DEADLINE))
    with raises(Code.INVALID_ARGUMENT) as caught:
        wire.put([key(1)], [b"", b"x"])
    assert "chunk 1 of a Put of 1 chunks" in caught.message
    with raises(Code.INVALID_ARGUMENT):
        wire.put([key(1)], [bytes(SHARD)], event_data=[types_pb2.ChunkEventData()] * 2)


def test_a_chunk_larger_than_the_pool(wire: Wire) -> None:
    wire.register("big", shard_bytes=65 << 20)
    with raises(Code.INVALID_ARGUMENT, "CHUNK_TOO_LARGE") as caught:
        wire.put([key(1)], [b""], name="big")
    assert "--memory" in caught.message


def test_a_message_over_the_limit(wire: Wire) -> None:
    with raises(Code.RESOURCE_EXHAUSTED, "MESSAGE_TOO_LARGE") as caught:
        wire.put([key(1)], [bytes(5 << 20)])
    assert "4194304" in caught.message
    with raises(Code.RESOURCE_EXHAUSTED, "MESSAGE_TOO_LARGE"):
        wire.lookup([bytes(5 << 20)])
    with raises(Code.INVALID_ARGUMENT) as caught:
        wire.put([key(1)], [bytes(3 << 20)])
    assert "at most 2097152" in caught.message


@pytest.mark.hold_up(0.1, reason="gRPC joins the pieces of a message of 17 MB on the loop")
def test_a_session_goes_on_after_a_message_over_the_limit(wire: Wire) -> None:
    session = WireSession(wire)
    data = types_pb2.ChunkEventData(token_ids=bytes(1 << 10))
    many = cache_pb2.ReserveRequest(
        namespace="n",
        keys=[key(n & 255, n >> 8) for n in range(16_384)],
        event_data=[data] * 16_384,
    )
    assert many.ByteSize() > 17_000_000
    error = session.error(reserve=many)  # the answer has the request's id
    assert (error.code, error.reason) == (Code.RESOURCE_EXHAUSTED.value[0], "MESSAGE_TOO_LARGE")
    assert dict(error.metadata) == {"limit": str(4 << 20)}
    reserve = cache_pb2.ReserveRequest(namespace="n", keys=[key(1)])
    assert session.ask(reserve=reserve).reserve.reservation_id
    session.close()


def test_a_message_over_the_limit_is_a_sign_of_life(wire: Wire) -> None:
    session = WireSession(wire, ttl_ms=1_000)
    until = time.monotonic() + 3
    while time.monotonic() < until:
        large = cache_pb2.FreeLocksRequest(session_token=bytes(5 << 20))
        assert session.error(free_locks=large).reason == "MESSAGE_TOO_LARGE"
        time.sleep(0.2)
    assert session.ask(heartbeat=session_pb2.HeartbeatRequest()).HasField("heartbeat")
    session.close()


def test_a_message_that_grpc_refuses_ends_the_stream(wire: Wire) -> None:
    session = WireSession(wire)
    free = cache_pb2.FreeLocksRequest(session_token=bytes(33 << 20))
    with raises(Code.RESOURCE_EXHAUSTED):
        session.ask(free_locks=free)


def test_a_lease_of_another_session(wire: Wire) -> None:
    wire.put([key(1)], [bytes(SHARD)])
    mine = WireSession(wire, "SCHEDULER", engine="mine")
    other = WireSession(wire, "WORKER", engine="other")
    lookup = cache_pb2.LookupRequest(namespace="n", keys=[key(1)])
    lease_id = mine.ask(lookup=lookup).lookup.lease_id
    locks = cache_pb2.FreeLocksRequest(locks=[cache_pb2.LockRange(lease_id=lease_id)])
    retrieve = cache_pb2.RetrieveRequest(lease_id=lease_id)
    for error in (other.error(free_locks=locks), other.error(retrieve=retrieve)):
        assert (error.code, error.reason) == (Code.PERMISSION_DENIED.value[0], "FOREIGN_LEASE")
    with raises(Code.PERMISSION_DENIED, "FOREIGN_LEASE"):
        wire.cache.FreeLocks(locks, timeout=DEADLINE)
    with raises(Code.PERMISSION_DENIED, "FOREIGN_LEASE"):
        wire.cache.Retrieve(retrieve, timeout=DEADLINE)
    assert wire.status().index.locks == 1
    mine.close()
    other.close()
    clear(wire)


def test_a_stale_lease(wire: Wire) -> None:
    locks = cache_pb2.FreeLocksRequest(locks=[cache_pb2.LockRange(lease_id=123)])
    assert [freed.released for freed in wire.cache.FreeLocks(locks, timeout=DEADLINE).freed] == [0]
    with raises(Code.NOT_FOUND, "UNKNOWN_LEASE"):
        wire.cache.Retrieve(cache_pb2.RetrieveRequest(lease_id=123), timeout=DEADLINE)


def test_a_commit_twice_or_after_its_session_ended(wire: Wire) -> None:
    session = WireSession(wire)
    reserve = cache_pb2.ReserveRequest(namespace="n", keys=[key(1), key(1, 2)])
    reservation = session.ask(reserve=reserve).reserve.reservation_id
    commit = cache_pb2.CommitRequest(reservation_id=reservation, chunks=[0])
    sealed = session.ask(commit=commit).commit.chunks
    assert [chunk.status for chunk in sealed] == [types_pb2.CHUNK_STATUS_STORED]
    assert session.error(commit=commit).code == Code.INVALID_ARGUMENT.value[0]
    session.close()
    other = WireSession(wire)
    commit.chunks[:] = [1]
    error = other.error(commit=commit)
    assert (error.code, error.reason) == (Code.NOT_FOUND.value[0], "UNKNOWN_RESERVATION")
    commit.session_token = session.opened.session_token
    with raises(Code.NOT_FOUND, "UNKNOWN_SESSION"):
        wire.cache.Commit(commit, timeout=DEADLINE)
    other.close()
    clear(wire)


def test_calls_that_need_a_session(wire: Wire) -> None:
    with raises(Code.FAILED_PRECONDITION, "SESSION_REQUIRED"):
        wire.cache.Reserve(cache_pb2.ReserveRequest(namespace="n", keys=[key(1)]))
    with raises(Code.FAILED_PRECONDITION, "SESSION_REQUIRED"):
        wire.cache.Store(cache_pb2.StoreRequest(namespace="n", keys=[key(1)]))
    session = WireSession(wire)
    error = session.error(store=cache_pb2.StoreRequest(namespace="n", keys=[key(1)]))
    assert (error.code, error.reason) == (Code.FAILED_PRECONDITION.value[0], "WRONG_MODE")
    session.close()


CLIENT_THAT_DIES_WHILE_COPYING = """
import sys, time
sys.path.insert(0, sys.argv[2])
from wire import *
session = WireSession(Wire(sys.argv[1]))
chunks = session.ask(
    reserve=cache_pb2.ReserveRequest(namespace="n", keys=[key(1), key(1, 2)])
).reserve.chunks
segment = session.opened.segments[0]
with open("/dev/shm" + segment.shm_name, "r+b") as pool:
    pool.seek(chunks[0].location.offset)
    pool.write(b"half")
print("copying", flush=True)
time.sleep(60)
"""


def test_a_client_killed_half_way_through_a_copy(wire: Wire, server) -> None:  # type: ignore[no-untyped-def]
    client = subprocess.Popen(
        [
            sys.executable,
            "-c",
            CLIENT_THAT_DIES_WHILE_COPYING,
            server.address,
            str(Path(__file__).parent),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert client.stdout is not None
    assert client.stdout.readline() == "copying\n"
    assert wire.status().pool.reserved_bytes == 2 * SHARD
    client.send_signal(signal.SIGKILL)
    client.wait()
    deadline = time.monotonic() + 5
    while wire.status().pool.reserved_bytes:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert wire.lookup([key(1)]).hit_chunks == 0


def test_a_client_killed_half_way_through_a_put(wire: Wire) -> None:
    def requests() -> Iterator[cache_pb2.PutRequest]:
        yield cache_pb2.PutRequest(open=cache_pb2.PutOpen(namespace="n", keys=[key(1)]))
        yield cache_pb2.PutRequest(data=cache_pb2.PutData(chunk=0, data=bytes(100)))
        time.sleep(60)

    call = wire.cache.Put(requests())
    next(call)
    assert wire.status().pool.reserved_bytes == SHARD
    call.cancel()


def test_a_get_given_up_half_way_through(wire: Wire) -> None:
    wire.register("big", shard_bytes=16 << 20)
    wire.put([key(1)], [bytes(1 << 20)] * 0, name="big")
    pieces = [
        cache_pb2.PutRequest(data=cache_pb2.PutData(chunk=0, data=bytes(1 << 20)))
        for _ in range(16)
    ]
    opened = cache_pb2.PutRequest(open=cache_pb2.PutOpen(namespace="big", keys=[key(1)]))
    list(wire.cache.Put(iter([opened, *pieces])))
    call = wire.cache.Get(cache_pb2.GetRequest(namespace="big", keys=[key(1)]))
    next(call)
    assert wire.status().index.locked_parts == 1
    call.cancel()
    deadline = time.monotonic() + 5
    while wire.status().index.locked_parts:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    clear(wire)


def test_a_session_that_opens_and_says_nothing(wire: Wire) -> None:
    wire.put([key(1)], [bytes(SHARD)])
    session = WireSession(wire, "SCHEDULER", ttl_ms=1_000)
    lookup = cache_pb2.LookupRequest(namespace="n", keys=[key(1)])
    session.ask(lookup=lookup)
    assert wire.status().index.locks == 1
    time.sleep(2.5)
    status = wire.status()
    assert status.index.locks == 0
    assert status.sessions[0].expired
    error = session.error(lookup=lookup)
    assert error.reason == "SESSION_EXPIRED"
    session.close()
    clear(wire)


def test_a_session_stream_that_never_opens(wire: Wire) -> None:
    release = time.monotonic() + 7

    def nothing() -> Iterator[session_pb2.SessionRequest]:
        while time.monotonic() < release:
            time.sleep(0.05)
        yield from ()

    with raises(Code.DEADLINE_EXCEEDED) as caught:
        next(wire.sessions.Session(nothing()))
    assert "open" in caught.message


@pytest.mark.parametrize(
    "request_",
    [
        session_pb2.SessionRequest(),
        session_pb2.SessionRequest(heartbeat=session_pb2.HeartbeatRequest()),
        session_pb2.SessionRequest(open=session_pb2.OpenRequest()),
        session_pb2.SessionRequest(open=session_pb2.OpenRequest(engine_id="e")),
        session_pb2.SessionRequest(open=session_pb2.OpenRequest(engine_id="x" * 257, role=1)),
        session_pb2.SessionRequest(open=session_pb2.OpenRequest(engine_id="e", role=9)),
        session_pb2.SessionRequest(
            open=session_pb2.OpenRequest(engine_id="e", role=1, worker_id=1)
        ),
        session_pb2.SessionRequest(open=session_pb2.OpenRequest(engine_id="e", role=1, ttl_ms=5)),
        session_pb2.SessionRequest(
            open=session_pb2.OpenRequest(engine_id="e", role=1, client="x" * 257)
        ),
    ],
    ids=lambda request: str(request)[:60],
)
def test_a_first_message_that_opens_nothing(
    wire: Wire, request_: session_pb2.SessionRequest
) -> None:
    with raises(Code.INVALID_ARGUMENT, "INVALID_ARGUMENT_VALUE"):
        next(wire.sessions.Session(iter([request_])))


def test_nonsense_on_a_session_leaves_it_open(wire: Wire) -> None:
    session = WireSession(wire)
    assert session.error().code == Code.INVALID_ARGUMENT.value[0]
    again = session_pb2.OpenRequest(engine_id="e", role=1)
    assert session.error(open=again).code == Code.INVALID_ARGUMENT.value[0]
    assert session.ask(heartbeat=session_pb2.HeartbeatRequest()).heartbeat.epoch
    session.close()


@pytest.mark.parametrize(
    "request_",
    [
        cache_pb2.RetrieveRequest(end_chunk=4_000_000_000),
        cache_pb2.RetrieveRequest(reader=1),
        cache_pb2.RetrieveRequest(kv_worker_id=1),
        cache_pb2.RetrieveRequest(group_idx=0),
    ],
    ids=str,
)
def test_impossible_retrieves(wire: Wire, request_: cache_pb2.RetrieveRequest) -> None:
    wire.put([key(1)], [bytes(SHARD)])
    lease_id = wire.lookup([key(1)]).lease_id
    request_.lease_id = lease_id
    with raises(Code.INVALID_ARGUMENT):
        wire.cache.Retrieve(request_, timeout=DEADLINE)
    locks = cache_pb2.FreeLocksRequest(locks=[cache_pb2.LockRange(lease_id=lease_id)])
    assert [freed.released for freed in wire.cache.FreeLocks(locks, timeout=DEADLINE).freed] == [1]
    clear(wire)


@pytest.mark.parametrize(
    "chunks",
    [{"first_chunk": 1, "end_chunk": 1}, {"end_chunk": 0}, {"first_chunk": 2, "end_chunk": 1},
     {"first_chunk": 2}],
    ids=str,
)  # fmt: skip
def test_nothing_is_done_for_an_empty_range(wire: Wire, chunks: dict[str, int]) -> None:
    wire.put([key(1)], [bytes(SHARD)])
    lease_id = wire.lookup([key(1)]).lease_id
    answer = wire.cache.Retrieve(
        cache_pb2.RetrieveRequest(lease_id=lease_id, **chunks),  # type: ignore[arg-type]
        timeout=DEADLINE,
    )
    assert not answer.chunks
    empty = cache_pb2.LockRange(lease_id=lease_id, **chunks)  # type: ignore[arg-type]
    everything = cache_pb2.LockRange(lease_id=lease_id, first_chunk=0)
    locks = cache_pb2.FreeLocksRequest(locks=[empty, everything])
    assert [freed.released for freed in wire.cache.FreeLocks(locks, timeout=DEADLINE).freed] == [
        0,
        1,
    ]
    clear(wire)


def test_a_range_past_the_lease_is_not_locked(wire: Wire) -> None:
    wire.put([key(1)], [bytes(SHARD)])
    lease_id = wire.lookup([key(1)]).lease_id
    answer = wire.cache.Retrieve(
        cache_pb2.RetrieveRequest(lease_id=lease_id, end_chunk=3), timeout=DEADLINE
    )
    assert [chunk.status for chunk in answer.chunks] == [
        types_pb2.CHUNK_STATUS_RETRIEVED,
        types_pb2.CHUNK_STATUS_NOT_LOCKED,
        types_pb2.CHUNK_STATUS_NOT_LOCKED,
    ]
    clear(wire)
    locks = cache_pb2.FreeLocksRequest(locks=[cache_pb2.LockRange(lease_id=lease_id)])
    wire.cache.FreeLocks(locks, timeout=DEADLINE)


def test_limits_of_a_lookup(wire: Wire) -> None:
    for limits in ({"readers": 257}, {"ttl_ms": 600_001}):
        with raises(Code.INVALID_ARGUMENT):
            wire.lookup([key(1)], **limits)
    session = WireSession(wire, "SCHEDULER")
    lookup = cache_pb2.LookupRequest(namespace="n", keys=[key(1)], ttl_ms=5)
    assert session.error(lookup=lookup).code == Code.INVALID_ARGUMENT.value[0]
    session.close()


def test_random_bytes_on_the_socket(wire: Wire, server) -> None:  # type: ignore[no-untyped-def]
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    for start in (b"", preface):
        for _ in range(20):
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(str(server.socket))
                with contextlib.suppress(BrokenPipeError):
                    client.sendall(start + os.urandom(4096))
    assert wire.status().epoch


def test_random_bytes_as_messages(wire: Wire) -> None:
    method = wire.channel.unary_unary("/kvdock.v1.CacheService/Lookup")
    for _ in range(20):
        with pytest.raises(grpc.RpcError):
            method(b"\xff" + os.urandom(64), timeout=DEADLINE)
    assert wire.status().epoch


def test_more_memory_than_there_is(start_server: Callable[..., object]) -> None:
    with pytest.raises(RuntimeError) as caught:
        start_server(memory="900TiB")
    message = str(caught.value)
    assert "/dev/shm has" in message
    assert str(900 << 40) in message
    assert "ended with 2" in message


def test_a_second_server_on_the_same_socket(server) -> None:  # type: ignore[no-untyped-def]
    second = subprocess.run(
        [sys.executable, "-m", "kvdock_server", "--listen", server.address],
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert second.returncode == 2
    assert "another server listens" in second.stderr

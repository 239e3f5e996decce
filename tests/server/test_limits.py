"""Limits of the protocol that are not kept, and memory that grows without one."""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path

import grpc
import pytest
from wire import DEADLINE, SHARD, Wire, WireSession, key

from kvdock.pool import Pool
from kvdock.types import Location, Segment
from kvdock.v1 import cache_pb2, session_pb2, session_pb2_grpc, types_pb2


def rss_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise AssertionError


def test_the_index_of_a_wide_namespace_is_not_many_times_its_pool(server, wire: Wire) -> None:  # type: ignore[no-untyped-def]
    wire.register("wide", shard_bytes=1, world=256)
    keys = [index.to_bytes(4, "big").ljust(32, b"k") for index in range(16_384)]
    before = rss_bytes(server.process.pid)
    session = WireSession(wire)
    session.ask(reserve=cache_pb2.ReserveRequest(namespace="wide", keys=keys))
    grown = rss_bytes(server.process.pid) - before
    session.close()
    assert grown < 64 << 20  # the pool: 16,384 slots of 4 KiB


def test_a_session_that_reads_no_answers_costs_little_memory(wire: Wire, server) -> None:  # type: ignore[no-untyped-def]
    keys = [key(1, index) for index in range(50)]
    wire.put(keys, [bytes(SHARD)] * 50)

    async def flood() -> None:
        async with grpc.aio.insecure_channel(server.address) as channel:
            call = session_pb2_grpc.SessionServiceStub(channel).Session()
            opened = session_pb2.OpenRequest(engine_id="f", role=1)
            await call.write(session_pb2.SessionRequest(open=opened))
            await call.read()
            lookup = cache_pb2.LookupRequest(namespace="n", keys=keys)
            await call.write(session_pb2.SessionRequest(lookup=lookup))
            lease = (await call.read()).lookup.lease_id
            retrieve = cache_pb2.RetrieveRequest(lease_id=lease)
            with contextlib.suppress(TimeoutError):  # the server may take no more
                for _ in range(40_000):
                    request = session_pb2.SessionRequest(retrieve=retrieve)
                    await asyncio.wait_for(call.write(request), 1)
            call.cancel()

    before = rss_bytes(server.process.pid)
    asyncio.run(flood())
    assert rss_bytes(server.process.pid) - before < 24 << 20


def test_labels_are_limited_in_bytes(wire: Wire) -> None:
    group = types_pb2.Group(kind=types_pb2.GROUP_KIND_FULL_ATTENTION, shard_bytes=[SHARD])
    with pytest.raises(grpc.RpcError):
        wire.cache.RegisterNamespace(
            cache_pb2.RegisterNamespaceRequest(
                namespace=types_pb2.Namespace(
                    name="l",
                    labels={"k": "ü" * 256},
                    chunk_tokens=16,
                    kv_world_size=1,
                    groups=[group],
                )
            ),
            timeout=DEADLINE,
        )


def test_every_failed_call_has_an_error_info(wire: Wire) -> None:
    # types.proto: "A failed call answers with a gRPC status code, a message [...], and a
    # google.rpc.ErrorInfo of domain kvdock".
    import threading

    never = threading.Event()

    def nothing():  # type: ignore[no-untyped-def]
        never.wait(7)
        yield from ()

    with pytest.raises(grpc.RpcError) as caught:
        next(wire.sessions.Session(nothing()))
    never.set()
    assert "grpc-status-details-bin" in dict(caught.value.trailing_metadata() or ())  # type: ignore[attr-defined]


def test_a_session_stream_that_is_half_closed_before_open_is_an_error(wire: Wire) -> None:
    with pytest.raises(grpc.RpcError):
        list(wire.sessions.Session(iter([]), timeout=DEADLINE))


def test_memory_of_a_broken_stream_is_not_given_away_while_its_process_still_writes(
    wire: Wire,
) -> None:
    """A stream ends not only with its process: a cancel, a GOAWAY or a ping strike end it too."""
    first = WireSession(wire, engine="first")
    segment = Segment.from_proto(first.opened.segments[0])
    pool = Pool([segment], guard=first.opened.guard, server="", is_local=True)
    reserve = cache_pb2.ReserveRequest(namespace="n", keys=[key(1)])
    mine = first.ask(reserve=reserve).reserve.chunks[0].location
    view = pool.view(Location(0, mine.offset, SHARD))
    first._responses.cancel()  # the process and its copier thread live on
    wait_for_sessions(wire, 0)
    second = WireSession(wire, engine="second")
    answer = second.ask(reserve=reserve).reserve
    theirs = answer.chunks[0].location
    assert theirs.offset != mine.offset
    pool.view(Location(0, theirs.offset, SHARD))[:] = b"2" * SHARD
    view[:] = b"1" * SHARD  # the copy under way ends
    second.ask(commit=cache_pb2.CommitRequest(reservation_id=answer.reservation_id))
    get = cache_pb2.GetRequest(namespace="n", keys=[key(1)])
    assert next(wire.cache.Get(get, timeout=DEADLINE)).data == b"2" * SHARD
    second.close()
    assert wire.status().pool.reserved_bytes == SHARD
    view.release()
    pool.close()
    deadline = time.monotonic() + 5
    while wire.status().pool.reserved_bytes:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def wait_for_sessions(wire: Wire, count: int) -> None:
    deadline = time.monotonic() + 5
    while len(wire.status().sessions) != count:
        assert time.monotonic() < deadline
        time.sleep(0.02)

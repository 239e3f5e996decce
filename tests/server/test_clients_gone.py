"""A client that goes away in the midst of a call is no error of the server's."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from servers import ServerProcess
from wire import DEADLINE, Wire, key

from kvdock.v1 import (
    admin_pb2,
    cache_pb2,
    events_pb2,
    events_pb2_grpc,
    session_pb2,
    types_pb2,
)

KEYS = [key(index // 256, index % 256) for index in range(2_000)]
SHARD = 4096

Call = Callable[[Wire], Iterator[Any]]


def snapshot(wire: Wire) -> Iterator[Any]:
    stub = events_pb2_grpc.EventServiceStub(wire.channel)
    return stub.StreamKVEvents(
        events_pb2.StreamKVEventsRequest(snapshot=events_pb2.StartSnapshot()), timeout=DEADLINE
    )


def get(wire: Wire) -> Iterator[Any]:
    return wire.cache.Get(
        cache_pb2.GetRequest(namespace="n", keys=KEYS, message_bytes=1024), timeout=DEADLINE
    )


def list_chunks(wire: Wire) -> Iterator[Any]:
    return wire.admin.ListChunks(admin_pb2.ListChunksRequest(namespace="n"), timeout=DEADLINE)


def session(wire: Wire) -> Iterator[Any]:
    def requests() -> Iterator[session_pb2.SessionRequest]:
        opening = session_pb2.OpenRequest(engine_id="e", role=session_pb2.SESSION_ROLE_TOOL)
        yield session_pb2.SessionRequest(id=1, open=opening)
        lookup = cache_pb2.LookupRequest(namespace="n", keys=KEYS)
        for number in range(200):
            yield session_pb2.SessionRequest(id=2 + number, lookup=lookup)

    return wire.sessions.Session(requests(), timeout=DEADLINE)


def put(wire: Wire) -> Iterator[Any]:
    def requests() -> Iterator[cache_pb2.PutRequest]:
        yield cache_pb2.PutRequest(open=cache_pb2.PutOpen(namespace="n", keys=KEYS[::-1]))
        for chunk in range(len(KEYS)):
            yield cache_pb2.PutRequest(data=cache_pb2.PutData(chunk=chunk, data=bytes(SHARD)))

    return wire.cache.Put(requests(), timeout=DEADLINE)


def fill(wire: Wire) -> None:
    """Store a prompt with enough event data for a snapshot of many messages."""
    wire.register(shard_bytes=SHARD)
    for begin in range(0, len(KEYS), 500):
        keys = KEYS[begin : begin + 500]
        told = [types_pb2.ChunkEventData(token_ids=bytes(4_000), block_size=16)] * len(keys)
        parent = KEYS[begin - 1] if begin else b""
        wire.put(keys, [bytes(SHARD)] * len(keys), parent_key=parent, event_data=told)


@pytest.mark.parametrize("call", [snapshot, get, list_chunks, session, put])
def test_no_error_line_for_a_client_that_goes_away(
    start_server: Callable[..., ServerProcess], call: Call
) -> None:
    server = start_server("--event-log", "64MiB", memory="128MiB")
    wire = Wire(server.address)
    fill(wire)
    for number in range(16):
        leaving = Wire(server.address)
        answers = call(leaving)
        for _ in range(number % 4):
            next(answers)
        if number % 2:
            answers.cancel()  # type: ignore[attr-defined]
            time.sleep(0.02)
        leaving.channel.close()
    assert wire.lookup(KEYS[:1], probe=True).hit_chunks == 1
    wire.channel.close()
    server.stop()
    log = server.log
    assert "ERROR" not in log, log
    assert "Traceback" not in log, log

"""What docs/protocol.md says that a client may do when an answer was lost: each call made twice."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pb2 import MethodOptions
from one_engine import KEYS, PER_CHUNK, TARGET, Engine
from wire import DEADLINE, SHARD, Wire, WireSession, key, raises

import kvdock
from kvdock.v1 import admin_pb2, cache_pb2, events_pb2, session_pb2
from kvdock.v1 import types_pb2 as types
from kvdock_server.errors import Reason, RequestError
from kvdock_server.rpc import verbs

PAGE = Path(__file__).parents[2] / "docs/protocol.md"
LEVELS = {"unknown": 0, "no side effects": 1, "idempotent": 2}

Code = grpc.StatusCode


def test_the_page_has_every_call_with_its_level() -> None:
    section = PAGE.read_text().split("## When an answer was lost")[1].split("\n## ")[0]
    told = {}
    for cells in re.findall(r"^\| (`.*?) \| (.*?) \| .* \|$", section, re.MULTILINE):
        for name in re.findall(r"`([A-Za-z]+)`", cells[0]):
            told[name] = cells[1]
    calls = {}
    for module in (admin_pb2, cache_pb2, events_pb2, session_pb2):
        for service in module.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                options = MethodOptions.FromString(method.GetOptions().SerializeToString())
                assert options.HasField("idempotency_level"), method.full_name
                calls[method.name] = options.idempotency_level
    assert {name: LEVELS[told[name]] for name in calls} == calls
    assert set(told) - set(calls) == {"RegisterMemory", "SHARED", "SERVER"}


def test_register_namespace(wire: Wire) -> None:
    wire.register("other")
    wire.register("other")


def test_lookup_grants_another_lease(wire: Wire) -> None:
    wire.put([key(1)], [bytes(SHARD)])
    session = WireSession(wire, "SCHEDULER")
    lookup = cache_pb2.LookupRequest(namespace="n", keys=[key(1)])
    first, second = (session.ask(lookup=lookup).lookup.lease_id for _ in range(2))
    assert first != second
    assert wire.status().index.leases == 2
    session.close()
    assert wire.status().index.leases == 0


def test_free_locks_reports_nothing_the_second_time(wire: Wire) -> None:
    wire.put([key(1)], [bytes(SHARD)])
    lock = cache_pb2.LockRange(lease_id=wire.lookup([key(1)]).lease_id)
    request = cache_pb2.FreeLocksRequest(locks=[lock])
    answers = [wire.cache.FreeLocks(request, timeout=DEADLINE) for _ in range(2)]
    assert [[one.released for one in answer.freed] for answer in answers] == [[1], [0]]


def test_what_a_lost_reserve_has_returns_with_the_session(wire: Wire) -> None:
    session = WireSession(wire)
    reserve = cache_pb2.ReserveRequest(namespace="n", keys=[key(1)])
    session.ask(reserve=reserve)
    again = session.ask(reserve=reserve).reserve
    assert again.reservation_id == 0
    assert [chunk.status for chunk in again.chunks] == [types.CHUNK_STATUS_EXISTS]
    session.close()
    assert wire.status().pool.reserved_bytes == 0
    session = WireSession(wire)
    assert session.ask(reserve=reserve).reserve.reservation_id
    session.close()


def test_commit_is_not_repeated(wire: Wire) -> None:
    session = WireSession(wire)
    reserve = cache_pb2.ReserveRequest(namespace="n", keys=[key(1), key(2)])
    number = session.ask(reserve=reserve).reserve.reservation_id
    first = cache_pb2.CommitRequest(reservation_id=number, chunks=[0])
    assert session.ask(commit=first).HasField("commit")
    assert session.error(commit=first).reason == "INVALID_ARGUMENT_VALUE"
    rest = cache_pb2.CommitRequest(reservation_id=number)
    assert session.ask(commit=rest).HasField("commit")
    assert session.error(commit=rest).reason == "UNKNOWN_RESERVATION"
    assert wire.lookup([key(1), key(2)], probe=True).hit_chunks == 2
    session.close()


def test_abort(wire: Wire) -> None:
    session = WireSession(wire)
    reserve = cache_pb2.ReserveRequest(namespace="n", keys=[key(1)])
    number = session.ask(reserve=reserve).reserve.reservation_id
    abort = cache_pb2.AbortRequest(reservation_id=number)
    assert [session.ask(abort=abort).abort.aborted for _ in range(2)] == [1, 0]
    session.close()


def test_put_and_get(server: Any, wire: Wire) -> None:
    shards = [bytes([n]) * SHARD for n in range(3)]
    keys = [key(n) for n in range(3)]
    with kvdock.Client(server.address) as client:
        assert set(client.put("n", keys[:2], shards[:2])) == {kvdock.ChunkStatus.STORED}
        sent: list[int] = []
        statuses = client.put("n", keys, shards, progress=sent.append)
        assert [status.name for status in statuses] == ["EXISTS", "EXISTS", "STORED"]
        assert sum(sent) == SHARD
        assert [client.get("n", keys) for _ in range(2)] == [shards, shards]


def test_clear_and_evict(wire: Wire) -> None:
    wire.put([key(1), key(2), key(3)], [bytes(SHARD)] * 3)
    evict = admin_pb2.EvictRequest(bytes=1)
    assert [wire.admin.Evict(evict, timeout=DEADLINE).parts for _ in range(2)] == [1, 1]
    clear = admin_pb2.ClearRequest(namespace="n")
    assert [wire.admin.Clear(clear, timeout=DEADLINE).parts for _ in range(2)] == [1, 0]


def test_pin_and_unpin(wire: Wire) -> None:
    wire.put([key(1), key(2)], [bytes(SHARD)] * 2)
    keep = types.Keep(pin="mine")
    pin = admin_pb2.PinRequest(namespace="n", keys=[key(1), key(2)], keep=keep)
    assert [wire.admin.Pin(pin, timeout=DEADLINE).kept_chunks for _ in range(2)] == [2, 2]
    assert wire.status().pins.parts == 2
    unpin = admin_pb2.UnpinRequest(pin="mine")
    assert [wire.admin.Unpin(unpin, timeout=DEADLINE).parts for _ in range(2)] == [2, 0]


def test_a_retrieve_in_shared_mode(wire: Wire) -> None:
    wire.put([key(1)], [bytes(SHARD)])
    session = WireSession(wire)
    lookup = cache_pb2.LookupRequest(namespace="n", keys=[key(1)])
    lease = session.ask(lookup=lookup).lookup.lease_id
    retrieve = cache_pb2.RetrieveRequest(lease_id=lease)
    first, second = (session.ask(retrieve=retrieve).retrieve for _ in range(2))
    assert first == second
    assert first.chunks[0].HasField("location")
    session.close()


async def test_a_retrieve_in_server_mode_delivers_once(engine: Engine) -> None:
    shared = cache_pb2.RetrieveRequest(lease_id=engine.lookup(readers=2), block_ids=TARGET)
    assert await engine.send(0, shared) == [types.CHUNK_STATUS_RETRIEVED] * len(KEYS)
    assert await engine.send(0, shared) == [types.CHUNK_STATUS_NOT_LOCKED] * len(KEYS)
    assert await engine.send(1, shared) == [types.CHUNK_STATUS_RETRIEVED] * len(KEYS)
    alone = cache_pb2.RetrieveRequest(lease_id=engine.lookup(readers=1), block_ids=TARGET)
    assert await engine.send(0, alone) == [types.CHUNK_STATUS_RETRIEVED] * len(KEYS)
    with pytest.raises(RequestError) as caught:
        await engine.send(0, alone)
    assert caught.value.reason is Reason.UNKNOWN_LEASE


async def test_store(engine: Engine) -> None:
    """The engine has stored the chunks; here the same comes again."""
    again = cache_pb2.StoreRequest(
        namespace="model", keys=KEYS, block_ids=range(len(KEYS) * PER_CHUNK)
    )
    answer = await verbs.store(engine.service, engine.workers[0].session, again)
    assert [chunk.status for chunk in answer.chunks] == [types.CHUNK_STATUS_EXISTS] * len(KEYS)


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ({}, ["n", "a-1", "a-2", "b-1"]),
        ({"labels": {"model": "m"}}, ["a-1", "b-1"]),
        ({"labels": {"model": "m", "dtype": "bf16"}}, ["a-1"]),
        ({"labels": {"model": "m", "dtype": ""}}, []),
        ({"name_prefix": "a-"}, ["a-1", "a-2"]),
        ({"name_prefix": "a-", "labels": {"model": "m"}}, ["a-1"]),
    ],
)
def test_namespaces_are_found_by_their_labels(
    server: Any, wire: Wire, asked: dict[str, Any], found: list[str]
) -> None:
    group = kvdock.Group(shard_bytes=(64,))
    labels = {"a-1": {"model": "m", "dtype": "bf16"}, "a-2": {"model": "x"}, "b-1": {"model": "m"}}
    with kvdock.Client(server.address) as client:
        for name, own in labels.items():
            client.register_namespace(kvdock.Namespace(name, 16, 1, (group,), own))
        assert [entry.namespace.name for entry in client.namespaces(**asked)] == found


def test_the_chunks_of_one_group(server: Any, wire: Wire) -> None:
    groups = tuple(kvdock.Group(shard_bytes=(64,), group_idx=idx) for idx in (0, 5))
    with kvdock.Client(server.address) as client:
        client.register_namespace(kvdock.Namespace("two", 16, 1, groups))
        for idx in (0, 5):
            client.put("two", [key(1)], [bytes(64)], group_idx=idx)
        assert [part.group_idx for part in client.chunks("two")] == [0, 5]
        assert [part.group_idx for part in client.chunks("two", group_idx=5)] == [5]
        with pytest.raises(kvdock.errors.InvalidArgument, match="group 7 is not there"):
            list(client.chunks("two", group_idx=7))
    request = admin_pb2.ListChunksRequest(namespace="n", group_idx=0)
    with raises(Code.INVALID_ARGUMENT, "INVALID_ARGUMENT_VALUE"):
        list(wire.admin.ListChunks(request, timeout=DEADLINE))

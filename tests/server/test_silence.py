"""Clients and servers that stop (SIGSTOP, a lost network, an abandoned call) without ending."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from pathlib import Path

import grpc
import pytest
from wire import DEADLINE, SHARD, Wire, WireSession, key

from kvdock.v1 import admin_pb2, cache_pb2, cache_pb2_grpc, session_pb2, types_pb2
from kvdock_server.core import Core
from kvdock_server.index.index import Slot
from kvdock_server.index.namespace import Group, GroupKind, Namespace
from kvdock_server.rpc import cache, grpc_errors
from kvdock_server.rpc.server import Server
from kvdock_server.steps import at_once
from kvdock_server.tiers.host.pool import Pool
from kvdock_server.transfer import GpuTransfers

MIB = 1 << 20


def test_a_server_that_was_stopped_for_a_while_does_not_expire_sessions_that_sent_heartbeats(
    server,
    wire: Wire,  # type: ignore[no-untyped-def]
) -> None:
    wire.put([key(1)], [bytes(SHARD)])
    done = threading.Event()

    def requests():  # type: ignore[no-untyped-def]
        yield session_pb2.SessionRequest(
            open=session_pb2.OpenRequest(engine_id="e", role=1, ttl_ms=1_000)
        )
        yield session_pb2.SessionRequest(
            lookup=cache_pb2.LookupRequest(namespace="n", keys=[key(1)])
        )
        while not done.wait(0.2):
            yield session_pb2.SessionRequest(heartbeat=session_pb2.HeartbeatRequest())

    call = wire.sessions.Session(requests())
    next(call)
    assert next(call).lookup.lease_id
    reader = threading.Thread(target=lambda: [None for _ in call])
    reader.start()
    try:
        server.process.send_signal(signal.SIGSTOP)
        time.sleep(3)
        server.process.send_signal(signal.SIGCONT)
        time.sleep(1.5)
        status = wire.status()
        assert not status.sessions[0].expired
        assert status.index.locks == 1
    finally:
        server.process.send_signal(signal.SIGCONT)
        done.set()
        reader.join()


@pytest.mark.hold_up(1.0, reason="the pool is made on the loop, as before a server serves")
async def test_a_stream_on_which_nothing_moves_is_given_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Puts and gets hold memory without a session, so only time can end them."""
    for module in (grpc_errors, cache):
        monkeypatch.setattr(module, "STALL_SECONDS", 0.3)
    pool = Pool(64 * MIB)
    pool.start(asyncio.get_running_loop(), lambda offset, nbytes: None)
    await asyncio.sleep(0.1)
    core = Core(pool.slots)
    server = Server(core, pool, GpuTransfers(pool.segment.address, pool.segment.nbytes), 16)
    await server.start(f"unix:{tmp_path}/s")
    try:
        core.index.register(
            Namespace("big", 16, 1, (Group(None, GroupKind.FULL_ATTENTION, 0, (32 * MIB,)),))
        )
        async with grpc.aio.insecure_channel(f"unix:{tmp_path}/s") as channel:
            stub = cache_pb2_grpc.CacheServiceStub(channel)
            put = stub.Put()
            opened = cache_pb2.PutOpen(namespace="big", keys=[key(1)])
            await put.write(cache_pb2.PutRequest(open=opened))
            await put.read()
            assert core.index.reserved_bytes
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                while await put.read():
                    pass
            assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            assert not core.index.reserved_bytes
            (slot,) = at_once(core.reserve_in_steps(None, "big", None, 0, b"", [key(1)]))
            assert isinstance(slot, Slot)
            core.seal(slot)
            get = stub.Get(cache_pb2.GetRequest(namespace="big", keys=[key(1)]))
            await get.read()
            await asyncio.sleep(1.0)
            assert not core.index.pinned_parts
            get.cancel()
    finally:
        await server.stop(0)
        pool.stop()


def test_a_chunk_reserved_by_an_expired_session_can_be_stored_by_another(wire: Wire) -> None:
    silent = WireSession(wire, engine="silent", ttl_ms=1_000)
    silent.ask(reserve=cache_pb2.ReserveRequest(namespace="n", keys=[key(1)]))
    time.sleep(2.5)
    assert wire.status().sessions[0].expired
    # Its memory must stay out of use, its key need not: EXISTS says that "another writer is storing
    # it", which is no longer true, and no lookup ever hits this chunk while the stream hangs.
    statuses = [r.result.status for r in wire.put([key(1)], [bytes(SHARD)])[1:]]
    silent.close()
    assert statuses == [types_pb2.CHUNK_STATUS_STORED]


def test_listing_namespaces_works_however_many_shards_they_have(wire: Wire) -> None:
    for name in ("a", "b"):
        groups = [
            types_pb2.Group(group_idx=i, kind=1, shard_bytes=[(1 << 63) + i]) for i in range(64)
        ]
        wire.cache.RegisterNamespace(
            cache_pb2.RegisterNamespaceRequest(
                namespace=types_pb2.Namespace(
                    name=name, chunk_tokens=16, kv_world_size=256, groups=groups
                )
            ),
            timeout=DEADLINE,
        )
    # types.proto: "A message never exceeds 4 MiB". Nobody can take a namespace away again.
    answers = wire.admin.ListNamespaces(admin_pb2.ListNamespacesRequest(), timeout=DEADLINE)
    assert [answer.namespace.namespace.name for answer in answers] == ["n", "a", "b"]

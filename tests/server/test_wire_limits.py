"""Numbers and lists of a request are compared with their limits before they size anything.

A message of 4 MiB holds two million entries. What such a message costs the server is compared with
what it costs to decode it, which cannot be helped.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from wire import DEADLINE, SHARD, Wire, WireSession, key, raises

from kvdock.v1 import (
    admin_pb2,
    cache_pb2,
    events_pb2,
    session_pb2,
    types_pb2,
)
from kvdock_server.rpc import limits

Code = grpc.StatusCode

WIDTH = 4_000_000
TICK = os.sysconf("SC_CLK_TCK")


def entries(field: int, each: bytes = b"") -> bytes:
    """As many entries of a repeated field as a message holds."""
    entry = bytes([field << 3 | 2, len(each)]) + each
    return entry * (WIDTH // len(entry))


def packed(field: int) -> bytes:
    """Likewise of a field of numbers."""
    return inside(field, b"\1" * WIDTH)


def inside(field: int, content: bytes) -> bytes:
    """A message as a field of another one."""
    length, rest = bytearray(), len(content)
    while rest > 0x7F:
        length.append(rest & 0x7F | 0x80)
        rest >>= 7
    return bytes([field << 3 | 2]) + bytes(length) + bytes([rest]) + content


def label_entries() -> bytes:
    return b"".join(inside(2, inside(1, b"%06d" % i)) for i in range(WIDTH // 10))


CACHE, EVENTS = "/kvdock.v1.CacheService/", "/kvdock.v1.EventService/"

LONG: dict[str, tuple[str, type[Any], bytes]] = {
    "lock ranges": (CACHE + "FreeLocks", cache_pb2.FreeLocksRequest, entries(2)),
    "keys": (CACHE + "Lookup", cache_pb2.LookupRequest, entries(3)),
    "chunks": (CACHE + "Commit", cache_pb2.CommitRequest, packed(3)),
    "event data": (CACHE + "Reserve", cache_pb2.ReserveRequest, entries(6)),
    "followers": (CACHE + "Retrieve", cache_pb2.RetrieveRequest, packed(12)),
    "keys of a Get": (CACHE + "Get", cache_pb2.GetRequest, entries(5)),
    "event data of a Put": (CACHE + "Put", cache_pb2.PutRequest, inside(1, entries(7))),
    "groups": (CACHE + "RegisterNamespace", cache_pb2.RegisterNamespaceRequest,
               inside(1, entries(5))),
    "labels": (CACHE + "RegisterNamespace", cache_pb2.RegisterNamespaceRequest,
               inside(1, label_entries())),
    "shard sizes": (CACHE + "RegisterNamespace", cache_pb2.RegisterNamespaceRequest,
                    inside(1, inside(5, packed(4)))),
    "namespaces": (EVENTS + "StreamKVEvents", events_pb2.StreamKVEventsRequest,
                   inside(3, b"") + entries(4, b"?")),
}  # fmt: skip

ON_A_SESSION: dict[str, bytes] = {
    "regions": inside(12, inside(4, entries(4))),
    "allocations": inside(12, entries(3)),
    "groups": inside(12, entries(4)),
    "lock ranges": inside(6, entries(2)),
    "keys": inside(5, entries(3)),
}


def test_every_list_of_every_request_has_a_limit() -> None:
    found: set[str] = set()
    seen: set[str] = set()

    def walk(message: Any) -> None:
        if message.full_name in seen or message.name in limits.OPAQUE:
            return
        seen.add(message.full_name)
        for field in message.fields:
            is_map = field.message_type is not None and field.message_type.GetOptions().map_entry
            if field.is_repeated:
                found.add(field.full_name.removeprefix("kvdock.v1."))
            if field.message_type is not None and not is_map:
                walk(field.message_type)

    for module in (admin_pb2, cache_pb2, events_pb2, session_pb2):
        for service in module.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                walk(method.input_type)
    assert found == set(limits.MOST)


def test_a_limit_counts_in_the_whole_message() -> None:
    regions = [session_pb2.BlockRegion()] * (limits.MAX_REGIONS // 2)
    memory = session_pb2.RegisterMemoryRequest(groups=[session_pb2.GroupMemory(regions=regions)])
    memory.groups.append(memory.groups[0])
    limits.check(memory)
    memory.groups[1].regions.add()
    with pytest.raises(Exception, match=r"4097 regions: from 0 to 4096"):
        limits.check(memory)


def cpu_seconds(pid: int) -> float:
    """That a process has used so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICK


def decode_seconds(kind: type[Any], message: bytes) -> float:
    started = time.thread_time()
    kind.FromString(message)
    return time.thread_time() - started


@pytest.fixture
def many(start_server: Callable[..., Any]) -> Iterator[tuple[Any, Wire]]:
    """A server with an event log, and 100 namespaces with a chunk each."""
    server = start_server("--event-log", "16MiB")
    wire = Wire(server.address)
    for index in range(100):
        wire.register(f"n{index}")
        wire.put([key(1)], [bytes(SHARD)], name=f"n{index}")
    yield server, wire
    wire.channel.close()


def compare_with_decoding(
    server: Any, case: str, kind: type[Any], message: bytes, call: Callable[[], None]
) -> None:
    def used_by_a_call() -> float:
        before = cpu_seconds(server.process.pid)
        call()
        return cpu_seconds(server.process.pid) - before

    used = min(used_by_a_call() for _ in range(3))
    decoding = max(decode_seconds(kind, message) for _ in range(2))
    assert used < 3 * decoding + 0.1, f"{case}: {used:.2f} s, to decode it {decoding:.2f} s"


def test_a_list_that_is_too_long_is_refused_for_its_length(many: tuple[Any, Wire]) -> None:
    server, wire = many
    for case, (method, kind, message) in LONG.items():

        def call(method: str = method, message: bytes = message) -> None:
            with raises(Code.INVALID_ARGUMENT, "INVALID_ARGUMENT_VALUE") as caught:
                if method.endswith("Put"):
                    list(wire.channel.stream_stream(method)(iter([message]), timeout=DEADLINE))
                else:
                    list(wire.channel.unary_stream(method)(message, timeout=DEADLINE))
            assert " from " in caught.message

        compare_with_decoding(server, case, kind, message, call)


def test_likewise_on_a_session_which_goes_on(many: tuple[Any, Wire]) -> None:
    server, wire = many
    session = WireSession(wire)
    for case, message in ON_A_SESSION.items():
        request = session_pb2.SessionRequest.FromString(message)
        kind = str(request.WhichOneof("request"))
        long = {kind: getattr(request, kind)}

        def call(long: dict[str, Any] = long) -> None:
            error = session.error(**long)
            assert error.reason == "INVALID_ARGUMENT_VALUE"
            assert " from " in error.message

        compare_with_decoding(server, case, session_pb2.SessionRequest, message, call)
    assert session.ask(heartbeat=session_pb2.HeartbeatRequest()).heartbeat.epoch
    session.close()


def peak_bytes(pid: int, call: Callable[[], None]) -> int:
    """By how much a process grew meanwhile, at its highest."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak counts from here
    before = status_bytes(pid, "VmRSS")
    call()
    return status_bytes(pid, "VmHWM") - before


def status_bytes(pid: int, field: str) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split(f"{field}:")[1].split()[0]) * 1024


def test_numbers_are_compared_before_they_repeat_anything(many: tuple[Any, Wire]) -> None:
    server, wire = many
    group = types_pb2.Group(kind=types_pb2.GROUP_KIND_FULL_ATTENTION, shard_bytes=[1])

    for world in (257, 10**8, 2**32 - 1):
        namespace = types_pb2.Namespace(
            name="x", chunk_tokens=1, kv_world_size=world, groups=[group] * 3
        )

        def register(world: int = world, namespace: types_pb2.Namespace = namespace) -> None:
            request = cache_pb2.RegisterNamespaceRequest(namespace=namespace)
            with raises(Code.INVALID_ARGUMENT, "INVALID_ARGUMENT_VALUE") as caught:
                wire.cache.RegisterNamespace(request, timeout=DEADLINE)
            assert caught.message == f"kv_world_size {world}: from 1 to 256"

        assert peak_bytes(server.process.pid, register) < 32 << 20

    for message_bytes in (1, 1023, (2 << 20) + 1):
        get = cache_pb2.GetRequest(namespace="n0", keys=[key(1)], message_bytes=message_bytes)
        with raises(Code.INVALID_ARGUMENT) as caught:
            list(wire.cache.Get(get, timeout=DEADLINE))
        assert "from 1024 to 2097152" in caught.message

    data = types_pb2.ChunkEventData(block_hashes=[b""] * 65_537)
    with raises(Code.INVALID_ARGUMENT) as caught:
        wire.put([key(2)], [bytes(SHARD)], name="n0", event_data=[data])
    assert "event_data 0 with 65537 block_hashes" in caught.message

    session = WireSession(wire)
    memory = session_pb2.GroupMemory(
        num_blocks=1, blocks_per_chunk=65_537, regions=[session_pb2.BlockRegion(page_bytes=1)]
    )
    error = session.error(
        register_memory=session_pb2.RegisterMemoryRequest(
            namespace="n0", mode=types_pb2.TRANSFER_MODE_SERVER, groups=[memory]
        )
    )
    assert "blocks_per_chunk 65537 of the group without group_idx: at most 65536" in error.message
    session.close()

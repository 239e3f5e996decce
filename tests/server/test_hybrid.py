"""Hybrid namespaces whose chunk is evicted by the very call that stores more of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
from wire import DEADLINE, Wire, WireSession, key

from kvdock.v1 import admin_pb2, cache_pb2, types_pb2

MIB = 1 << 20
FULL, WINDOW = types_pb2.GROUP_KIND_FULL_ATTENTION, types_pb2.GROUP_KIND_SLIDING_WINDOW


def register(wire: Wire, name: str, groups: list[types_pb2.Group], world: int = 1) -> None:
    wire.cache.RegisterNamespace(
        cache_pb2.RegisterNamespaceRequest(
            namespace=types_pb2.Namespace(
                name=name, chunk_tokens=16, kv_world_size=world, groups=groups
            )
        ),
        timeout=DEADLINE,
    )


@pytest.fixture
def small(start_server: Callable[..., object]) -> Iterator[Wire]:
    server = start_server(memory="2MiB")
    wire = Wire(server.address)  # type: ignore[attr-defined]
    register(
        wire,
        "h",
        [
            types_pb2.Group(group_idx=0, kind=FULL, shard_bytes=[MIB]),
            types_pb2.Group(group_idx=1, kind=WINDOW, window_tokens=17, shard_bytes=[2 * MIB]),
        ],
    )
    register(
        wire,
        "h2",
        [
            types_pb2.Group(group_idx=0, kind=FULL, shard_bytes=[4096]),
            types_pb2.Group(group_idx=1, kind=WINDOW, window_tokens=17, shard_bytes=[MIB]),
        ],
        world=2,
    )
    yield wire
    wire.channel.close()


def put(wire: Wire, name: str, group: int, data: bytes, shard: int = 0) -> int:
    requests = [
        cache_pb2.PutRequest(
            open=cache_pb2.PutOpen(
                namespace=name, keys=[key(1)], group_idx=group, kv_worker_id=shard
            )
        )
    ]
    requests += [
        cache_pb2.PutRequest(data=cache_pb2.PutData(chunk=0, data=data[at : at + MIB]))
        for at in range(0, len(data), MIB)
    ]
    return list(wire.cache.Put(iter(requests), timeout=DEADLINE))[-1].result.status


def test_a_part_that_was_stored_belongs_to_a_chunk_that_clear_and_list_can_find(
    small: Wire,
) -> None:
    assert put(small, "h", 0, bytes(MIB)) == types_pb2.CHUNK_STATUS_STORED
    # There is only room for one of the two: making room for the second evicts the first, and with
    # it the chunk for which the second is being stored.
    status = put(small, "h", 1, bytes(2 * MIB))
    if status == types_pb2.CHUNK_STATUS_STORED:
        listed = [
            part
            for response in small.admin.ListChunks(admin_pb2.ListChunksRequest(namespace="h"))
            for part in response.parts
        ]
        assert len(listed) == small.status().index.parts == 1
    small.admin.Clear(admin_pb2.ClearRequest(all=True), timeout=DEADLINE)
    after = small.status()
    assert (after.index.parts, after.pool.used_bytes) == (0, 0)


def test_a_shard_stored_while_its_chunk_is_evicted_leaves_no_pending_part(small: Wire) -> None:
    for shard in (0, 1):
        assert put(small, "h2", 0, bytes(4096), shard) == types_pb2.CHUNK_STATUS_STORED
    # Shard 0 of the window part takes the other slab; shard 1 can only have the full part's.
    assert put(small, "h2", 1, bytes(MIB), 0) == types_pb2.CHUNK_STATUS_STORED
    put(small, "h2", 1, bytes(MIB), 1)
    small.admin.Clear(admin_pb2.ClearRequest(all=True), timeout=DEADLINE)
    small.admin.Evict(admin_pb2.EvictRequest(all=True), timeout=DEADLINE)
    after = small.status()
    held = (after.index.pending_parts, after.pool.reserved_bytes, after.pool.used_bytes)
    assert held == (0, 0, 0)


def test_a_locked_part_is_not_evicted_with_its_chunk(small: Wire) -> None:
    register(
        small,
        "h3",
        [
            types_pb2.Group(group_idx=0, kind=FULL, shard_bytes=[4096]),
            types_pb2.Group(group_idx=1, kind=WINDOW, window_tokens=17, shard_bytes=[4096]),
        ],
    )
    for group in (0, 1):
        assert put(small, "h3", group, bytes(4096)) == types_pb2.CHUNK_STATUS_STORED
    scheduler = WireSession(small, "SCHEDULER")
    lease = scheduler.ask(
        lookup=cache_pb2.LookupRequest(namespace="h3", keys=[key(1)])
    ).lookup.lease_id
    scheduler.ask(
        free_locks=cache_pb2.FreeLocksRequest(
            locks=[cache_pb2.LockRange(lease_id=lease, group_idx=0)]
        )
    )
    small.admin.Evict(admin_pb2.EvictRequest(all=True), timeout=DEADLINE)
    # DESIGN.md, 5: "part by part, never a locked one".
    listed = [
        part.group_idx
        for response in small.admin.ListChunks(admin_pb2.ListChunksRequest(namespace="h3"))
        for part in response.parts
    ]
    scheduler.close()
    assert 1 in listed


def test_a_message_of_list_chunks_has_at_most_1000_parts(wire: Wire) -> None:
    register(
        wire,
        "h7",
        [types_pb2.Group(group_idx=i, kind=FULL, shard_bytes=[1]) for i in range(7)],
    )
    keys = [key(i >> 8, i & 255) for i in range(200)]
    for group in range(7):
        wire.put(keys, [b"x"] * 200, name="h7", group_idx=group)
    sizes = [
        len(response.parts)
        for response in wire.admin.ListChunks(
            admin_pb2.ListChunksRequest(namespace="h7"), timeout=DEADLINE
        )
    ]
    assert sum(sizes) == 1400
    assert max(sizes) <= 1000


def test_a_window_of_one_token_does_not_make_an_unsealed_chunk_a_hit(wire: Wire) -> None:
    register(
        wire,
        "w1",
        [types_pb2.Group(group_idx=0, kind=WINDOW, window_tokens=1, shard_bytes=[4096])],
    )
    worker = WireSession(wire)
    worker.ask(reserve=cache_pb2.ReserveRequest(namespace="w1", keys=[key(1)], group_idx=0))
    answer = wire.lookup([key(1)], name="w1")
    time.sleep(0.05)
    worker.close()
    assert answer.lease_id == 0  # cache.proto: "0 if there are none (a miss or a probe)."

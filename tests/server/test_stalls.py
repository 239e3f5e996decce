"""One call within the protocol's limits must not keep all the others waiting for seconds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
from wire import Wire, WireSession

from kvdock.v1 import cache_pb2, types_pb2

KEYS = [index.to_bytes(4, "big").ljust(32, b"k") for index in range(16_384)]
FULL, WINDOW = types_pb2.GROUP_KIND_FULL_ATTENTION, types_pb2.GROUP_KIND_SLIDING_WINDOW


def longest_stall(address: str, call: Callable[[], object]) -> float:
    """Longest round trip of another client while ``call`` runs, in seconds."""
    wire = Wire(address)
    ended = threading.Event()
    stalls = [0.0]

    def probe() -> None:
        while not ended.is_set():
            started = time.monotonic()
            wire.lookup([KEYS[0]], probe=True)
            stalls.append(time.monotonic() - started)
            time.sleep(0.005)

    prober = threading.Thread(target=probe)
    prober.start()
    time.sleep(0.1)
    try:
        call()
    finally:
        ended.set()
        prober.join()
        wire.channel.close()
    return max(stalls)


@pytest.fixture
def filled(start_server: Callable[..., object]) -> tuple[str, Wire]:
    """A server with a prompt of 16,384 chunks."""
    server = start_server(memory="128MiB")
    wire = Wire(server.address)  # type: ignore[attr-defined]
    wire.register(shard_bytes=1)
    for _ in range(200):
        if wire.status().pool.ready_bytes == 128 << 20:
            break
        time.sleep(0.02)
    wire.put(KEYS, [b"x"] * len(KEYS))
    assert wire.status().index.parts == len(KEYS)
    return server.address, wire  # type: ignore[attr-defined]


@pytest.mark.parametrize("readers", [64, 256])
def test_freeing_a_long_lease_of_many_readers_stalls_nobody(
    filled: tuple[str, Wire], readers: int
) -> None:
    address, wire = filled
    scheduler = WireSession(wire, "SCHEDULER")
    lookup = cache_pb2.LookupRequest(namespace="n", keys=KEYS, readers=readers)
    lease = scheduler.ask(lookup=lookup).lookup.lease_id
    free = cache_pb2.FreeLocksRequest(locks=[cache_pb2.LockRange(lease_id=lease)])
    assert longest_stall(address, lambda: scheduler.ask(free_locks=free)) < 0.25
    scheduler.close()


def test_many_lock_ranges_of_a_lease_of_many_readers_stall_nobody(
    filled: tuple[str, Wire],
) -> None:
    address, wire = filled
    scheduler = WireSession(wire, "SCHEDULER")
    lookup = cache_pb2.LookupRequest(namespace="n", keys=KEYS[:1], readers=128)
    lease = scheduler.ask(lookup=lookup).lookup.lease_id
    lock = cache_pb2.LockRange(lease_id=lease, first_chunk=5, end_chunk=6)
    free = cache_pb2.FreeLocksRequest(locks=[lock] * 256)
    assert longest_stall(address, lambda: scheduler.ask(free_locks=free)) < 0.25
    scheduler.close()


def test_the_end_of_a_scheduler_with_100_long_leases_stalls_nobody(
    filled: tuple[str, Wire],
) -> None:
    address, wire = filled
    scheduler = WireSession(wire, "SCHEDULER")
    lookup = cache_pb2.LookupRequest(namespace="n", keys=KEYS)
    for _ in range(100):
        scheduler.ask(lookup=lookup)

    def end() -> None:
        scheduler.close()
        while wire.status().index.leases:
            time.sleep(0.01)

    assert longest_stall(address, end) < 0.25

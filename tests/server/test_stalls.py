"""One call within the protocol's limits must not keep all the others waiting for seconds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from servers import ServerProcess
from wire import Wire, WireSession

from kvdock.v1 import cache_pb2, types_pb2

KEYS = [index.to_bytes(4, "big").ljust(32, b"k") for index in range(16_384)]
FULL, WINDOW = types_pb2.GROUP_KIND_FULL_ATTENTION, types_pb2.GROUP_KIND_SLIDING_WINDOW


def loop_seconds(server: ServerProcess) -> float:
    """How long the thread of the server's loop has used a processor so far."""
    thread = server.process.pid
    return int(Path(f"/proc/{thread}/task/{thread}/schedstat").read_text().split()[0]) / 1e9


def longest_stall(server: ServerProcess, call: Callable[[], object]) -> float:
    """The most that the server computed while another client waited for an answer, in seconds,
    while ``call`` runs. The client's own clock would also count waiting for a processor.
    """
    wire = Wire(server.address)
    ended = threading.Event()
    stalls = [0.0]

    def probe() -> None:
        while not ended.is_set():
            started = loop_seconds(server)
            wire.lookup([KEYS[0]], probe=True)
            stalls.append(loop_seconds(server) - started)
            time.sleep(0.005)

    prober = threading.Thread(target=probe)
    prober.start()
    while len(stalls) < 3:
        time.sleep(0.005)
    try:
        call()
    finally:
        ended.set()
        prober.join()
        wire.channel.close()
    return max(stalls)


@pytest.fixture
def filled(start_server: Callable[..., ServerProcess]) -> tuple[ServerProcess, Wire]:
    """A server with a prompt of 16,384 chunks."""
    server = start_server(memory="128MiB")
    wire = Wire(server.address)
    wire.register(shard_bytes=1)
    while wire.status().pool.ready_bytes < 128 << 20:
        time.sleep(0.02)
    for first in range(0, len(KEYS), 4096):  # each in time on a busy machine, too
        keys = KEYS[first : first + 4096]
        wire.put(keys, [b"x"] * len(keys), parent_key=KEYS[first - 1] if first else b"")
    assert wire.status().index.parts == len(KEYS)
    return server, wire


@pytest.mark.parametrize("readers", [64, 256])
def test_freeing_a_long_lease_of_many_readers_stalls_nobody(
    filled: tuple[ServerProcess, Wire], readers: int
) -> None:
    server, wire = filled
    scheduler = WireSession(wire, "SCHEDULER")
    lookup = cache_pb2.LookupRequest(namespace="n", keys=KEYS, readers=readers)
    lease = scheduler.ask(lookup=lookup).lookup.lease_id
    free = cache_pb2.FreeLocksRequest(locks=[cache_pb2.LockRange(lease_id=lease)])
    assert longest_stall(server, lambda: scheduler.ask(free_locks=free)) < 0.25
    scheduler.close()


def test_many_lock_ranges_of_a_lease_of_many_readers_stall_nobody(
    filled: tuple[ServerProcess, Wire],
) -> None:
    server, wire = filled
    scheduler = WireSession(wire, "SCHEDULER")
    lookup = cache_pb2.LookupRequest(namespace="n", keys=KEYS[:1], readers=128)
    lease = scheduler.ask(lookup=lookup).lookup.lease_id
    lock = cache_pb2.LockRange(lease_id=lease, first_chunk=5, end_chunk=6)
    free = cache_pb2.FreeLocksRequest(locks=[lock] * 256)
    assert longest_stall(server, lambda: scheduler.ask(free_locks=free)) < 0.25
    scheduler.close()


def test_the_end_of_a_scheduler_with_100_long_leases_stalls_nobody(
    filled: tuple[ServerProcess, Wire],
) -> None:
    server, wire = filled
    scheduler = WireSession(wire, "SCHEDULER")
    lookup = cache_pb2.LookupRequest(namespace="n", keys=KEYS)
    for _ in range(100):
        scheduler.ask(lookup=lookup)

    def end() -> None:
        scheduler.close()
        while wire.status().index.leases:
            time.sleep(0.01)

    assert longest_stall(server, end) < 0.25

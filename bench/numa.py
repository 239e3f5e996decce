"""What it costs where the pool's memory lies, on a host with several sockets.

    python bench/numa.py [--device N]

Copies between one GPU and pinned memory, placed as the server places its pool: on the GPU's own
socket, on each other one, and evenly over all. Large copies, and batches of pieces of 64 KiB as a
lane queues them, by a thread on the GPU's socket and by one on another. All in turns in one run.
Prints a table. Memory whose pages do not lie where they should is named.

On a host with one NUMA node, or without a GPU, there is nothing to compare: it says so and ends.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import numpy as np
from report import Row, print_report

from kvdock_server.numa import Topology, read_topology
from kvdock_server.tiers.host.placement import bind, nodes_of
from kvdock_server.transfer.devices.driver import (
    BATCH_SEGMENTS,
    CudaUnavailableError,
    Driver,
    load_driver,
)

NBYTES = 1 << 30
PIECE = 64 << 10
ROUNDS = 9
WAYS = ("to the GPU", "to the host")


@dataclass
class Memory:
    """Pinned memory on some nodes. ``socket`` is None for memory on all of them."""

    name: str
    socket: int | None
    address: int
    found: str
    mapped: mmap.mmap


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", type=int, default=0, help="the GPU's number (0)")
    device = parser.parse_args().device
    topology = read_topology()
    if len(topology.sockets) < 2:
        print("skipped: this process may use one socket only, so no memory is near or far")
        return 0
    try:
        driver = load_driver()
    except CudaUnavailableError as error:
        print(f"skipped: {error}")
        return 0
    home = topology.socket_of_device(driver.pci_id(device))
    if home is None:
        print(f"skipped: Linux does not know the node of GPU {device}, {driver.pci_id(device)}")
        return 0
    driver.set_current(driver.retain_context(device))
    memories = [
        pinned(driver, topology, home, socket) for socket in (home, *others(topology, home))
    ]
    memories.append(pinned(driver, topology, home, None))
    target, stream = driver.allocate(NBYTES), driver.create_stream()

    def copies(memory: Memory, way: str) -> dict[str, Callable[[], None]]:
        host, gpu = memory.address, target
        starts = np.arange(0, NBYTES, PIECE, dtype=np.uint64)
        sides = starts + np.uint64(gpu), starts + np.uint64(host)
        sizes = np.full(len(starts), PIECE, dtype=np.uint64)
        to, out_of = sides if way == WAYS[0] else sides[::-1]

        def large() -> None:
            if way == WAYS[0]:
                driver.copy_to_device(gpu, host, NBYTES, stream)
            else:
                driver.copy_to_host(host, gpu, NBYTES, stream)

        def pieces() -> None:
            for first in range(0, len(starts), BATCH_SEGMENTS):
                call = slice(first, first + BATCH_SEGMENTS)
                driver.copy_batch(to[call], out_of[call], sizes[call], stream)

        return {"1 GiB": large} | ({"64 KiB pieces": pieces} if driver.has_batch_copy else {})

    rates: dict[tuple[str, str, str, int], list[float]] = {}
    for _ in range(ROUNDS):
        for thread in (home, *others(topology, home)):
            with topology.running_on(thread):
                for memory in memories:
                    for way in WAYS:
                        for kind, copy in copies(memory, way).items():
                            started = time.perf_counter()
                            copy()
                            driver.synchronize_stream(stream)
                            rate = NBYTES / (time.perf_counter() - started)
                            key = kind, way, memory.name, thread
                            rates.setdefault(key, []).append(rate)
    rows = []
    for (kind, way, name, thread), measured in rates.items():
        local = median(rates[kind, way, memories[0].name, home])
        rate = median(measured)
        rows.append(
            Row(
                f"{kind} {way}, {name}, thread on socket {thread}",
                f"{rate / 1e9:.1f} GB/s",
                f"{local / 1e9:.1f} GB/s",
                f"{rate / local:.2f}",
            )
        )
    for memory in memories:
        print(f"{memory.name}: pages found on nodes {memory.found}", file=sys.stderr)
    sockets = "; ".join(f"socket {i}: nodes {s.nodes}" for i, s in enumerate(topology.sockets))
    title = f"{driver.device_name(device)} on socket {home} ({sockets}); ratio to its own memory"
    return print_report(title, sorted(rows, key=lambda row: row.what))


def others(topology: Topology, home: int) -> list[int]:
    return [socket for socket in range(len(topology.sockets)) if socket != home]


def pinned(driver: Driver, topology: Topology, home: int, socket: int | None) -> Memory:
    """1 GiB on a socket, or evenly on all."""
    place = topology.evened().sockets[0] if socket is None else topology.sockets[socket]
    name = "even" if socket is None else "own socket" if socket == home else f"socket {socket}"
    mapped = mmap.mmap(-1, NBYTES)
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
    try:
        bind(address, NBYTES, place.nodes)
    except OSError as error:
        print(f"{name}: mbind was refused ({error}), the first touch decides", file=sys.stderr)
    with topology.running_on(socket):
        ctypes.memset(address, 1, NBYTES)
    driver.register_host(address, NBYTES)
    nodes = nodes_of(address, NBYTES)
    found = ", ".join(
        f"{node} ({nodes.count(node)} of {len(nodes)})" for node in sorted(set(nodes))
    )
    return Memory(name, socket, address, found or "that the kernel does not tell", mapped)


if __name__ == "__main__":
    sys.exit(main())

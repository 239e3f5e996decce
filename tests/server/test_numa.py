"""Hosts with several sockets: what is read of them, how a pool is cut, and where its pages are."""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fake_hosts import FOUR, MIB, TWO, FakeHost
from hypothesis import given, settings
from hypothesis import strategies as st
from servers import ServerProcess

import kvdock
from kvdock.cli.checks import Finding, Verdict, _numa
from kvdock.v1 import admin_pb2
from kvdock_server.core import Core, Group, GroupKind, Namespace, Role, Slot
from kvdock_server.numa import Socket, Topology, read_topology
from kvdock_server.steps import at_once
from kvdock_server.tiers.host import placement
from kvdock_server.tiers.host.placement import Share, bind, cut, nodes_of, wanted_topology
from kvdock_server.tiers.host.pool import Pool
from kvdock_server.tiers.host.slots import PAGE_BYTES, SlotAllocator

SLAB = 16 * PAGE_BYTES

StartServer = Callable[..., ServerProcess]


def nodes(topology: Topology) -> list[tuple[int, ...]]:
    return [socket.nodes for socket in topology.sockets]


# What is read


def test_two_nodes_are_two_sockets(tmp_path: Path) -> None:
    topology = read_topology(TWO.write(tmp_path))
    assert topology.sockets == (
        Socket((0,), frozenset({0, 1, 4, 5}), 4096 * MIB),
        Socket((1,), frozenset({2, 3, 6, 7}), 4096 * MIB),
    )
    assert topology.socket_of_device("0000:19:00.0") == 0
    assert topology.socket_of_device("0001:9A:00.0") == 1  # CUDA may write it in capitals
    assert topology.socket_of_device("0000:1b:00.0") is None  # node -1: Linux does not know
    assert topology.socket_of_device("0000:ff:00.0") is None


def test_nodes_of_one_processor_are_one_socket(tmp_path: Path) -> None:
    topology = read_topology(FOUR.write(tmp_path))
    assert nodes(topology) == [(0, 1), (2, 3)]
    assert topology.sockets[1].cpus == {2, 3}
    assert topology.socket_of_device("0000:19:00.0") == 1


@pytest.mark.parametrize(
    ("host", "sockets", "of_gpu"),
    [
        # No memory: its GPU goes to the nearest socket.
        (FakeHost({0: ("0", 9), 1: ("1", 9), 2: ("2", 0)}, gpus={"g": 2}), [(0,), (1,)], 1),
        # No processors: slow memory, or that of a GPU.
        (FakeHost({0: ("0", 9), 1: ("1", 9), 2: ("", 99)}, gpus={"g": 2}), [(0,), (1,)], 1),
        (FakeHost({0: ("0-7", 9), 8: ("8-15", 9)}, gpus={"g": 8}), [(0,), (8,)], 1),
        # A cpuset with the memory, or the processors, of one node.
        (FakeHost({0: ("0", 9), 1: ("1", 9)}, gpus={"g": 1}, mems="1"), [], None),
        (FakeHost({0: ("0", 9), 1: ("1", 9)}, gpus={"g": 1}, cpus="0"), [(0,), (1,)], 1),
        (FakeHost({0: ("0", 9), 1: ("1", 9), 4: ("2", 9)}, mems="0,4"), [(0,), (4,)], None),
        (FakeHost({0: ("0-3", 9)}, gpus={"g": 0}), [], None),
        (FakeHost({0: ("", 9), 1: ("", 9)}), [], None),
        # One processor of two nodes: nothing is far.
        (FakeHost({0: ("0", 9), 1: ("1", 9)}, [{0, 1}], gpus={"g": 1}), [(0, 1)], 0),
    ],
)
def test_odd_hosts(
    tmp_path: Path, host: FakeHost, sockets: list[tuple[int, ...]], of_gpu: int | None
) -> None:
    topology = read_topology(host.write(tmp_path))
    assert nodes(topology) == sockets
    assert topology.socket_of_device("g") == of_gpu


def test_a_cpuset_without_a_sockets_processors_leaves_it_its_memory(tmp_path: Path) -> None:
    host = FakeHost({0: ("0", 9), 1: ("1", 9)}, cpus="0")
    assert [socket.cpus for socket in read_topology(host.write(tmp_path)).sockets] == [{0}, set()]


@pytest.mark.parametrize("broken", ["online", "node0/distance", "node1/cpulist", "node0/meminfo"])
def test_what_cannot_be_read_is_as_one_node(tmp_path: Path, broken: str) -> None:
    file = TWO.write(tmp_path) / "sys/devices/system/node" / broken
    for content in ("?", "", None):
        file.unlink() if content is None else file.write_text(content)
        topology = read_topology(tmp_path)
        assert not topology.sockets or broken == "node1/cpulist"
        assert len(topology.sockets) < 2


def test_a_host_without_numa_has_no_sockets(tmp_path: Path) -> None:
    assert read_topology(tmp_path) == Topology()


def test_off_spreads_the_pool_evenly_and_knows_no_near_socket(tmp_path: Path) -> None:
    topology = wanted_topology("off", FOUR.write(tmp_path))
    assert nodes(topology) == [(0, 1, 2, 3)]
    assert topology.socket_of_device("0000:19:00.0") == 0
    assert cut(64 * SLAB, SLAB, topology) == [Share(0, 64 * SLAB, 0, frozenset(range(4)))]


# How a pool is cut


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 3000), st.lists(st.integers(1, 1000), min_size=1, max_size=8))
def test_shares_are_the_whole_pool_in_whole_slabs_by_memory(slabs: int, sizes: list[int]) -> None:
    sockets = tuple(Socket((i,), frozenset({i}), size) for i, size in enumerate(sizes))
    shares = cut(slabs * SLAB, SLAB, Topology(sockets))
    end = 0
    for share in shares:
        assert share.offset == end
        assert share.nbytes % SLAB == 0 < share.nbytes
        assert abs(share.nbytes / SLAB - slabs * sizes[share.socket] / sum(sizes)) <= 1
        assert share.cpus == {share.socket}
        end += share.nbytes
    assert end == slabs * SLAB


def test_a_host_with_one_node_has_one_share_and_no_system_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(placement, "_call", lambda *_: pytest.fail("called"))
    assert wanted_topology("auto", Path("/nowhere")) == Topology()
    pool = placement.Placement(Topology(), 0, 64 * SLAB, SLAB)
    assert pool.shares == [Share(0, 64 * SLAB)]
    assert pool.found(SLAB, SLAB) == 0


# The system calls, on this machine


@pytest.fixture
def memory() -> Iterator[int]:
    """The address of 8 MiB without pages."""
    mapped = mmap.mmap(-1, 8 * MIB)
    first = ctypes.c_char.from_buffer(mapped)
    yield ctypes.addressof(first)
    del first
    mapped.close()


def touch(address: int, nbytes: int) -> None:
    ctypes.memset(address, 1, nbytes)


def test_memory_that_is_bound_lies_there(memory: int) -> None:
    assert nodes_of(memory, 8 * MIB) == []  # no pages yet
    for one_or_all in ((0,), (0, 0)):
        bind(memory, 8 * MIB, one_or_all)
    touch(memory, 8 * MIB)
    assert nodes_of(memory, 8 * MIB) == [0] * 16
    assert nodes_of(memory, PAGE_BYTES) == [0]


def test_a_node_that_does_not_exist_is_refused(memory: int) -> None:
    with pytest.raises(OSError) as refused:  # noqa: PT011  # its number is looked at
        bind(memory, 8 * MIB, (1000,))
    assert refused.value.errno == errno.EINVAL


def test_an_unknown_machine_is_refused(memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement.platform, "machine", lambda: "vax")
    with pytest.raises(OSError, match="vax"):
        bind(memory, 8 * MIB, (0,))
    touch(memory, 8 * MIB)
    assert nodes_of(memory, 8 * MIB) == []


def test_a_policy_of_the_process_stays(tmp_path: Path) -> None:
    code = f"""
import ctypes
from pathlib import Path
from kvdock_server.tiers.host import placement
wanted = lambda: len(placement.wanted_topology("auto", Path({str(TWO.write(tmp_path))!r})).sockets)
assert wanted() == 2
set_mempolicy = {{"x86_64": 238, "aarch64": 237}}[placement.platform.machine()]
mask = ctypes.c_ulong(1)
assert ctypes.CDLL(None).syscall(set_mempolicy, 2, ctypes.byref(mask), 65) == 0
assert wanted() == 0
"""
    subprocess.run([sys.executable, "-c", code], check=True)


class Loop:
    """Calls what an event loop would, at once; the calls come from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def call_soon_threadsafe(self, call, *arguments) -> None:  # type: ignore[no-untyped-def]
        with self._lock:
            call(*arguments)


def started(nbytes: int, topology: Topology) -> Pool:
    pool = Pool(nbytes, topology)
    pool.start(Loop(), lambda offset, nbytes: None)  # type: ignore[arg-type]
    for thread in pool.segment._threads:
        thread.join()
    assert pool.slots.ready_bytes == pool.slots.limit_bytes
    return pool


def test_a_pool_tells_where_its_memory_really_lies(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """This machine has node 0 only: it refuses to bind to node 1, and all is found on node 0."""
    pool = started(256 * MIB, read_topology(TWO.write(tmp_path)))
    try:
        assert [(share.offset, share.nbytes) for share in pool.placement.shares] == [
            (0, 128 * MIB),
            (128 * MIB, 128 * MIB),
        ]
        assert pool.slots.ready_and_free() == [(256 * MIB, 256 * MIB), (0, 0)]
        assert "nodes [1] was refused (Invalid argument)" in pool.placement.refused
        assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
        assert "0.1 of the pool's 0.2 GiB lie on another socket than planned" in caplog.text
    finally:
        pool.stop()


def test_where_the_kernel_does_not_tell_memory_counts_as_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(name: str, *arguments: int) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(placement, "_call", refused)
    pool = started(64 * MIB, wanted_topology("auto", TWO.write(tmp_path)))
    try:
        assert pool.slots.ready_and_free() == [(32 * MIB, 32 * MIB)] * 2
        assert "Operation not permitted" in pool.placement.refused
        assert len(caplog.records) == 1
    finally:
        pool.stop()


def test_a_share_is_faulted_in_on_its_own_processors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    host = FakeHost({0: ("0", 1), 1: ("1", 1)})
    mine = os.sched_getaffinity(0)
    if not {0, 1} <= mine:
        pytest.skip("needs processors 0 and 1")
    caplog.set_level(logging.ERROR)
    ran_on = set()
    pool = Pool(256 * MIB, read_topology(host.write(tmp_path)))

    def faulted(offset: int, nbytes: int) -> None:
        if offset:  # the first piece is faulted in by the thread that starts the pool
            ran_on.add((offset >= 128 * MIB, *os.sched_getaffinity(0)))

    pool.start(Loop(), faulted)  # type: ignore[arg-type]
    for thread in pool.segment._threads:
        thread.join()
    pool.stop()
    assert ran_on == {(False, 0), (True, 1)}
    assert os.sched_getaffinity(0) == mine


# Slots


def two_sockets(slabs: int = 8) -> SlotAllocator:
    slots = SlotAllocator(slabs * SLAB, SLAB, 2)
    slots.add(0, slabs // 2 * SLAB, 0)
    slots.add(slabs // 2 * SLAB, slabs // 2 * SLAB, 1)
    return slots


@pytest.mark.parametrize("home", [0, 1])
def test_slots_lie_at_home_while_there_is_room(home: int) -> None:
    slots = two_sockets()
    at_home = [slots.allocate(SLAB, home) for _ in range(4)]
    assert [slots.socket_of(offset) for offset in at_home if offset is not None] == [home] * 4
    elsewhere = [slots.allocate(SLAB, home) for _ in range(4)]
    assert [slots.socket_of(offset) for offset in elsewhere if offset is not None] == [1 - home] * 4
    assert slots.allocate(SLAB, home) is None


def test_a_device_that_is_nowhere_gets_slots_of_both_sockets() -> None:
    slots = two_sockets()
    offsets = [slots.allocate(SLAB) for _ in range(4)]
    assert sorted(slots.socket_of(offset) for offset in offsets if offset is not None) == [
        0, 0, 1, 1,
    ]  # fmt: skip


def test_a_slot_larger_than_a_socket_lies_on_both() -> None:
    slots = two_sockets()
    assert slots.allocate(7 * SLAB, 1) == 0


def test_free_bytes_of_each_socket() -> None:
    slots = two_sockets(16)
    offset = slots.allocate(3 * PAGE_BYTES, 1)
    assert offset is not None
    run = slots.run_of(offset)
    used = 3 * PAGE_BYTES + run.slabs * SLAB - run.capacity * 3 * PAGE_BYTES
    assert slots.ready_and_free() == [(8 * SLAB, 8 * SLAB), (8 * SLAB, 8 * SLAB - used)]
    slots.free(offset)
    assert slots.ready_and_free() == [(8 * SLAB, 8 * SLAB)] * 2


# Eviction

CONVERSATIONS, TURNS, SLOTS = 300, 2000, 512


def hits_and_local_share(homes: bool) -> tuple[float, float]:
    """Conversations of two engines, each on its own socket, in a pool that is full."""
    slots = two_sockets(SLOTS * PAGE_BYTES // SLAB)
    core = Core(slots)
    group = Group(None, GroupKind.FULL_ATTENTION, 0, (PAGE_BYTES,))
    core.index.register(Namespace("n", 16, 1, (group,), {}))
    workers = [core.open_session(engine_id=str(home), role=Role.WORKER) for home in (0, 1)]
    for home, worker in enumerate(workers):
        worker.home = home if homes else None
    chance = random.Random(1)
    prompts: list[list[bytes]] = [[] for _ in range(CONVERSATIONS)]
    asked = hits = stored = local = 0
    for turn in range(TURNS):
        conversation = int(CONVERSATIONS * chance.random() ** 2)
        keys = prompts[conversation] = (
            prompts[conversation] if len(prompts[conversation]) < 9 else []
        )
        keys += [chance.randbytes(32) for _ in range(chance.randint(1, 3))]
        hit = core.lookup(None, "n", keys)
        if hit.lease is not None:
            at_once(core.leases.release_in_steps(hit.lease))
        parent = keys[hit.chunks - 1] if hit.chunks else b""
        home = conversation % 2
        outcomes = at_once(
            core.reserve_in_steps(workers[home], "n", None, 0, parent, keys[hit.chunks :])
        )
        is_full = turn > TURNS // 4
        for outcome in outcomes:
            assert isinstance(outcome, Slot)
            core.seal(outcome)
            stored += is_full
            local += is_full and slots.socket_of(outcome.offset) == home
        asked += is_full * len(keys)
        hits += is_full * hit.chunks
    assert core.index.totals.evicted_parts > 4 * SLOTS
    return hits / asked, local / stored


def test_a_full_pool_keeps_chunks_at_home_and_hits_as_often() -> None:
    anywhere, at_home = hits_and_local_share(homes=False), hits_and_local_share(homes=True)
    print(f"hits, and share of stores at home: anywhere {anywhere}, at home {at_home}")
    assert at_home[0] >= 0.99 * anywhere[0]
    assert at_home[1] >= 0.9 > 0.6 >= anywhere[1]


# A server, and what the command shows


def numa_server(start_server: StartServer, mode: str, root: Path) -> ServerProcess:
    """A server whose pool is faulted in."""
    program = str(Path(__file__).parents[1] / "fake_numa_server.py"), str(root)
    server = start_server("--numa", mode, memory="256MiB", program=program)
    with kvdock.Client(server.address) as client:
        while (pool := client.status().pool).ready_bytes < pool.total_bytes:
            time.sleep(0.01)
    return server


def shown_status(server: ServerProcess) -> str:
    command = [sys.executable, "-m", "kvdock", "status", "--address", server.address]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def found(status: admin_pb2.StatusResponse) -> list[tuple[list[int], int, int]]:
    return [(list(s.nodes), s.ready_bytes, s.free_bytes) for s in status.pool.sockets]


def test_a_server_goes_on_where_memory_cannot_be_placed(
    start_server: StartServer, tmp_path: Path
) -> None:
    """This machine has node 0 only, so nothing can be bound to node 1, and all lies on node 0."""
    server = numa_server(start_server, "auto", TWO.write(tmp_path))
    with kvdock.Client(server.address) as client:
        status = client.status()
    assert found(status) == [([0], 256 * MIB, 256 * MIB), ([1], 0, 0)]
    assert "was refused (Invalid argument)" in status.pool.place_refused
    shown = shown_status(server)
    assert "Invalid argument" in shown
    assert "256.0 MiB on NUMA node 0, 256.0 MiB of it free, 0 GPUs" in shown
    assert _numa(status, tmp_path / "sys") == Finding(
        "NUMA",
        Verdict.WARNING,
        "2 nodes; GPUs: 0000:19:00.0 on node 0, 0000:1b:00.0 on node -1, 0001:9a:00.0 on node 1; "
        f"Linux does not know the node of all GPUs: theirs is any memory; "
        f"{status.pool.place_refused}",
        "docker run --cap-add SYS_NICE; Kubernetes: securityContext.capabilities.add",
    )


def test_a_server_spreads_its_pool_evenly(start_server: StartServer, tmp_path: Path) -> None:
    server = numa_server(start_server, "off", FOUR.write(tmp_path))
    with kvdock.Client(server.address) as client:
        status = client.status()
    assert found(status) == [([0, 1, 2, 3], 256 * MIB, 256 * MIB)]
    assert not status.pool.place_refused  # of the four nodes this machine has one
    assert "256.0 MiB on NUMA nodes 0, 1, 2, 3, 256.0 MiB of it free" in shown_status(server)


def test_doctor_says_where_the_pool_and_the_gpus_are(tmp_path: Path) -> None:
    root = FOUR.write(tmp_path) / "sys"
    assert _numa(None, Path("/nowhere")).text == "one node"
    alone = _numa(None, root)
    assert (alone.verdict, alone.text) == (Verdict.NOTE, "4 nodes; GPUs: 0000:19:00.0 on node 3")
    status = admin_pb2.StatusResponse()
    assert _numa(status, root).text.endswith("the pool: not placed")
    for number in (0, 2):
        status.pool.sockets.add(nodes=[number, number + 1], ready_bytes=MIB)
    placed = _numa(status, root)
    assert placed.verdict is Verdict.OK
    assert placed.text.endswith("; the pool: 1.0 MiB on 0, 1; 1.0 MiB on 2, 3")

"""A device's threads run on its socket, and its chunks lie there. Nodes are this machine's
processors 0 and 1."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import pytest

from kvdock.v1 import cache_pb2 as pb
from kvdock_server.numa import Topology, read_topology
from kvdock_server.rpc import verbs
from kvdock_server.rpc.admin import _sockets
from kvdock_server.tiers.host import placement
from kvdock_server.transfer import gpu

sys.path.insert(0, str(Path(__file__).parents[1]))
from fake_hosts import FakeHost
from one_engine import KEYS, PER_CHUNK, Engine

GPUS = {"0000:00:00.0": 0, "0000:01:00.0": 1, "0000:02:00.0": -1}
"""As in HostDriver.pci_id."""

pytestmark = pytest.mark.skipif(
    not {0, 1} <= os.sched_getaffinity(0), reason="needs processors 0 and 1"
)


def affinities(name: str) -> set[frozenset[int]]:
    """The processors of the threads of a name."""
    return {
        frozenset(os.sched_getaffinity(thread.native_id))
        for thread in threading.enumerate()
        if name in thread.name and thread.native_id is not None
    }


@pytest.fixture
def topology(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Topology:
    # As where the kernel does not tell where pages are: this machine has no second node.
    monkeypatch.setattr(placement, "nodes_of", lambda address, nbytes: [])
    host = FakeHost({0: ("0", 9), 1: ("1", 9)}, gpus=GPUS)
    return read_topology(host.write(tmp_path))


async def test_copies_run_on_the_devices_socket_and_its_chunks_lie_there(
    topology: Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = frozenset(os.sched_getaffinity(0))
    engine = Engine(topology=topology)
    monkeypatch.setattr(gpu, "load_driver", lambda: engine.driver)
    try:
        await engine.start()
        assert affinities("-gpu0") == {frozenset({0})}
        assert affinities("-gpu1") == {frozenset({1})}
        assert affinities("-gpu2") == {mine}
        assert affinities("device-memory") == affinities("MainThread") == {mine}
        assert [worker.session.home for worker in engine.workers] == [0, 1, None]

        half = engine.pool.slots.limit_bytes // 2
        for device in (0, 1):
            keys = [bytes([100 + device, number]) + KEYS[0][2:] for number in range(4)]
            blocks = range(len(keys) * PER_CHUNK)
            request = pb.StoreRequest(namespace="model", keys=keys, block_ids=blocks)
            await verbs.store(engine.service, engine.workers[device].session, request)
            space = engine.core.index.space("model")
            parts = [engine.core.index.part(space, 0, key) for key in keys]
            slots = [part.slots[0] for part in parts if part is not None]
            assert [slot >= half for slot in slots] == [bool(device)] * 4

        shown = list(_sockets(engine.pool, engine.transfers.stats()))
        assert [list(socket.nodes) for socket in shown] == [[0], [1]]
        assert [socket.ready_bytes for socket in shown] == [half, half]
        assert half - 13 * 4096 < shown[0].free_bytes < half
        assert [len(socket.devices) for socket in shown] == [1, 1]
        assert shown[1].devices[0].startswith("GPU-01")
    finally:
        await engine.close()


@pytest.mark.parametrize("is_even", [False, True])
async def test_with_one_socket_nobody_asks_where_a_device_is(
    topology: Topology, is_even: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(topology=topology.evened() if is_even else Topology())
    engine.driver.pci_id = None  # type: ignore[assignment, method-assign]
    monkeypatch.setattr(gpu, "load_driver", lambda: engine.driver)
    try:
        await engine.start()
        assert affinities("-gpu0") == {frozenset(os.sched_getaffinity(0))}
        shown = list(_sockets(engine.pool, engine.transfers.stats()))
        assert [(list(s.nodes), len(s.devices)) for s in shown] == (
            [([0, 1], 3)] if is_even else []
        )
    finally:
        await engine.close()

"""The worker's own copies, against a real server.

Those of GPU memory copy this process's own memory here (own_device.py).
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import torch
from own_device import use_own_device

import kvdock
from kvdock.types import (
    BlockRegion,
    ChunkStatus,
    DeviceAllocation,
    GroupMemory,
    Location,
    TransferMode,
)
from kvdock_vllm.engine.copier import CopyStoppedError, HostBlocks
from kvdock_vllm.engine.device import transfers as device_module
from kvdock_vllm.engine.device.mover import DeviceMover
from kvdock_vllm.engine.device.transfers import DeviceTransfers
from kvdock_vllm.engine.groups import GroupShape
from kvdock_vllm.engine.layout import GroupLayout, Region
from kvdock_vllm.engine.parallel import ParallelStrategy
from kvdock_vllm.engine.specs import GroupLoad, GroupStore, Target
from kvdock_vllm.engine.transfers.base import CopyRequest, Mark
from kvdock_vllm.engine.transfers.shared import HostMover, SharedTransfers, joined

BLOCK_TOKENS = 16
CHUNKS = 300
"""More than the lock ranges that one FreeLocks may name."""
PAGE_BYTES = 32
STRATEGY = ParallelStrategy(use_mla=False, tensor_size=1, pipeline_size=1, worker_id=0)
SHAPE = GroupShape(None, kvdock.GroupKind.FULL_ATTENTION, BLOCK_TOKENS, ("one", "other"))
CPU = torch.device("cpu")
KEYS = tuple(hashlib.sha256(bytes([n % 256, n // 256])).digest() for n in range(CHUNKS))
IDS = tuple(int(n) for n in np.random.default_rng(1).permutation(CHUNKS))


def never() -> bool:
    return False


class Bench:
    """A server, an engine's two sessions, and a worker's blocks of two layers."""

    def __init__(self, server: Any, stack: ExitStack) -> None:
        self.blocks = np.random.default_rng(0).integers(0, 256, (2, CHUNKS, PAGE_BYTES), np.uint8)
        regions = [Region(layer.ctypes.data, PAGE_BYTES, PAGE_BYTES) for layer in self.blocks]
        self.layout = GroupLayout(CHUNKS, tuple(regions), ("page", "page"))
        self.client = stack.enter_context(kvdock.Client(server.address))
        group = kvdock.Group((2 * PAGE_BYTES,))
        self.client.register_namespace(kvdock.Namespace("n", BLOCK_TOKENS, 1, (group,)))
        self.session = stack.enter_context(self.client.session("e", role="worker"))
        self.scheduler = stack.enter_context(self.client.session("e", role="scheduler"))
        self.target = Target(self.session.epoch, "n", BLOCK_TOKENS)
        self.workers: dict[TransferMode, int] = {}

    def count_workers(self, mode: TransferMode, change: int) -> None:
        self.workers[mode] = self.workers.get(mode, 0) + change

    def shared(self, kind: str) -> SharedTransfers:
        """Ready to use."""
        layouts = [self.layout]
        mover = HostMover(layouts) if kind == "host" else DeviceMover(layouts, 0)
        transfers = SharedTransfers(mover, layouts, [SHAPE], STRATEGY, self.count_workers)
        transfers.prepare(self.session)
        return transfers

    def on_device(self, wanted: TransferMode) -> DeviceTransfers:
        layouts = [self.layout]
        return DeviceTransfers(layouts, [SHAPE], CPU, STRATEGY, wanted, self.count_workers)

    def store(
        self,
        transfers: SharedTransfers | DeviceTransfers,
        ready: Mark | None = None,
        stop: Callable[[], bool] = never,
        chunks: int = CHUNKS,
    ) -> list[ChunkStatus]:
        store = GroupStore(
            position=0,
            group_idx=None,
            first_chunk=0,
            parent=b"",
            keys=KEYS[:chunks],
            block_ids=IDS[:chunks],
        )
        return transfers.store(CopyRequest(self.session, self.target, store, ready or Mark(), stop))

    def load(
        self,
        transfers: SharedTransfers | DeviceTransfers,
        lease: int,
        ids: Sequence[int],
        ready: Mark | None = None,
    ) -> list[bool]:
        load = GroupLoad(
            position=0,
            group_idx=None,
            first_chunk=0,
            end_chunk=len(ids),
            skip_blocks=0,
            block_ids=tuple(ids),
            lease_id=lease,
        )
        return transfers.load(CopyRequest(self.session, self.target, load, ready or Mark(), never))

    def mode(self) -> tuple[str, str]:
        """What the server says of the worker's session."""
        workers = [s for s in self.client.status().sessions if s.session_id == self.session.id]
        return TransferMode(workers[0].mode).name, workers[0].mode_reason


@pytest.fixture
def bench(start_server: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    use_own_device(monkeypatch)
    with ExitStack() as stack:
        yield Bench(start_server(), stack)


each_mover = pytest.mark.parametrize("kind", ["host", "device"])


@each_mover
def test_a_chunk_that_is_not_to_be_had_costs_only_itself(bench: Bench, kind: str) -> None:
    transfers = bench.shared(kind)
    assert set(bench.store(transfers)) == {ChunkStatus.STORED}
    before = bench.blocks.copy()
    bench.blocks[:] = 0
    hit = bench.scheduler.lookup("n", KEYS)
    assert hit.lease is not None
    assert bench.scheduler.free_locks(hit.lease, 5, 6) == 1
    filled = bench.load(transfers, hit.lease.id, IDS)
    assert [chunk for chunk, ok in enumerate(filled) if not ok] == [5]
    before[:, IDS[5]] = 0
    np.testing.assert_array_equal(bench.blocks, before)
    assert bench.client.status().index.locks == 0


@each_mover
def test_a_store_waits_for_what_is_still_being_computed(bench: Bench, kind: str) -> None:
    transfers = bench.shared(kind)
    asked, computed = threading.Event(), threading.Event()

    def is_computed() -> bool:
        asked.set()
        return computed.is_set()

    def compute() -> None:
        assert asked.wait(10)
        bench.blocks[:] = 7
        computed.set()

    thread = threading.Thread(target=compute)
    thread.start()
    bench.store(transfers, Mark(is_computed), chunks=9)
    thread.join()
    bench.blocks[:] = 0
    hit = bench.scheduler.lookup("n", KEYS[:9])
    assert hit.lease is not None
    assert all(bench.load(transfers, hit.lease.id, range(9)))
    assert (bench.blocks[:, :9] == 7).all()
    assert (bench.blocks[:, 9:] == 0).all()


@each_mover
def test_a_load_waits_for_who_still_reads(bench: Bench, kind: str) -> None:
    transfers = bench.shared(kind)
    bench.store(transfers, chunks=9)
    bench.blocks[:] = 0
    asked, read = threading.Event(), threading.Event()
    seen: list[bool] = []

    def is_read() -> bool:
        asked.set()
        return read.is_set()

    def look() -> None:
        assert asked.wait(10)
        seen.append(bool((bench.blocks == 0).all()))
        read.set()

    thread = threading.Thread(target=look)
    thread.start()
    hit = bench.scheduler.lookup("n", KEYS[:9])
    assert hit.lease is not None
    assert all(bench.load(transfers, hit.lease.id, IDS[:9], Mark(is_read)))
    thread.join()
    assert seen == [True]


@each_mover
def test_what_is_told_to_stop_leaves_nothing(bench: Bench, kind: str) -> None:
    transfers = bench.shared(kind)
    began = time.monotonic()
    with pytest.raises(CopyStoppedError):
        # Its blocks are never computed.
        bench.store(transfers, Mark(never), lambda: time.monotonic() > began + 0.1)
    asked = iter([False])
    with pytest.raises(CopyStoppedError):
        bench.store(transfers, stop=lambda: next(asked, True))
    assert bench.scheduler.lookup("n", KEYS).chunks == 0
    deadline = time.monotonic() + 5
    while bench.client.status().pool.used_bytes:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@each_mover
def test_nothing_is_copied_after_the_end(bench: Bench, kind: str) -> None:
    transfers = bench.shared(kind)
    entered, go_on = threading.Event(), threading.Event()
    ended: list[float] = []

    def stop() -> bool:
        entered.set()
        return go_on.wait(5)

    def store() -> None:
        with pytest.raises(CopyStoppedError):
            bench.store(transfers, stop=stop)
        ended.append(time.monotonic())

    thread = threading.Thread(target=store)
    thread.start()
    assert entered.wait(5)
    threading.Timer(0.2, go_on.set).start()
    transfers.wait_for_end(bench.session)
    waited = time.monotonic()
    thread.join()
    assert ended[0] < waited + 0.1
    with pytest.raises(CopyStoppedError):
        bench.store(transfers)
    assert bench.workers == {TransferMode.SHARED: 0}


def test_groups_have_blocks_of_their_own_size(bench: Bench) -> None:
    large = np.random.default_rng(3).integers(0, 256, (5, 3000), np.uint8)
    layouts = [bench.layout, GroupLayout(5, (Region(large.ctypes.data, 3000, 3000),), ("page",))]
    mover = DeviceMover(layouts, 0)
    mover.open(bench.session)
    for position, ids, wanted in [
        (1, [4, 0, 2], large[[4, 0, 2]]),
        (0, [7, 1], bench.blocks[:, [7, 1]].transpose(1, 0, 2)),
    ]:
        host = np.zeros(wanted.size, np.uint8)
        mover.gather(bench.session, position, [HostBlocks(ids, host)], never)
        assert host.tobytes() == wanted.tobytes()
        host[:] = position
        mover.scatter(bench.session, position, [HostBlocks(ids, host)], never)
    assert (large[[4, 0, 2]] == 1).all()
    assert (bench.blocks[:, [7, 1]] == 0).all()
    mover.close(bench.session)


def test_memory_that_cannot_be_exported_is_copied_in_shared_mode(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvdock_vllm")
    transfers = bench.on_device(TransferMode.UNSPECIFIED)
    transfers.prepare(bench.session)
    transfers.expect(bench.session, bench.target)
    assert bench.workers == {TransferMode.SHARED: 1}
    assert bench.mode() == ("SHARED", "the client has no device memory to export")
    assert "KVDock copies in shared mode: " in caplog.text
    assert "no usable CUDA driver on this host" in caplog.text
    assert set(bench.store(transfers, transfers.mark())) == {ChunkStatus.STORED}
    before = bench.blocks.copy()
    bench.blocks[:] = 0
    hit = bench.scheduler.lookup("n", KEYS)
    assert hit.lease is not None
    assert all(bench.load(transfers, hit.lease.id, IDS, transfers.mark()))
    np.testing.assert_array_equal(bench.blocks, before)
    transfers.wait_for_end(bench.session)
    assert bench.workers == {TransferMode.SHARED: 0}
    with pytest.raises(CopyStoppedError):
        bench.store(transfers)


def test_memory_that_the_server_cannot_open_is_copied_in_shared_mode(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Only a GPU's memory has handles.
    allocation = DeviceAllocation(bytes(64), 1 << 20, bytes(16))
    regions = tuple(BlockRegion(0, n * 4096, PAGE_BYTES, PAGE_BYTES) for n in range(2))
    memory = device_module.ExportedMemory([allocation], [GroupMemory(None, 128, 1, regions)])
    monkeypatch.setattr(device_module, "export_memory", lambda groups, ordinal: memory)
    transfers = bench.on_device(TransferMode.UNSPECIFIED)
    assert set(bench.store(transfers)) == {ChunkStatus.STORED}
    mode, reason = bench.mode()
    assert mode == "SHARED"
    assert "CUDA" in reason or "not visible" in reason
    assert bench.workers == {TransferMode.SHARED: 1}


def test_shared_mode_that_is_asked_for_needs_no_reason(bench: Bench) -> None:
    transfers = bench.on_device(TransferMode.SHARED)
    assert set(bench.store(transfers, chunks=2)) == {ChunkStatus.STORED}
    assert bench.mode() == ("SHARED", "the client asked for it")


def test_server_mode_that_is_asked_for_and_impossible_is_told_once(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    transfers = bench.on_device(TransferMode.SERVER)
    for _ in range(3):
        with pytest.raises(CopyStoppedError):
            bench.store(transfers)
    warnings = [r.getMessage() for r in caplog.records if r.name.startswith("kvdock_vllm")]
    assert len(warnings) == 1
    assert warnings[0].startswith("KVDock does not cache for this worker: ")
    assert bench.workers == {}


def test_chunks_that_lie_one_behind_the_other_are_one_copy(bench: Bench) -> None:
    whole = bench.session.pool.array(Location(0, 0, 8 * 4096))
    whole[:] = np.arange(8).repeat(4096)
    places = [(2, [5]), (3, [4, 6]), (4, [0]), (6, [2]), (7, [1]), (1, [3])]
    located = [(Location(0, place * 4096, 4096), ids) for place, ids in places]
    parts = joined(bench.session, located)
    assert [list(part.block_ids) for part in parts] == [[5, 4, 6, 0], [2, 1], [3]]
    pages = [part.host.reshape(-1, 4096) for part in parts]
    assert [page[:, 0].tolist() for page in pages] == [[2, 3, 4], [6, 7], [1]]
    assert all((page == page[:, :1]).all() for page in pages)

"""Copies against a model that reads elements one by one, for every layout of vLLM's.

The device mover copies this process's own memory here (own_device.py).
"""

from __future__ import annotations

import itertools
import mmap
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kv_tensors import Cache, caches, mla, outside
from own_device import OwnMemoryDriver, use_own_device

from kvdock.types import Location
from kvdock_server.transfer.devices.driver import CudaError
from kvdock_server.transfer.devices.lane import TransferFailedError
from kvdock_server.transfer.plans import planner
from kvdock_server.transfer.plans.cost_model import COST_MODEL
from kvdock_server.transfer.plans.pieces import Pace
from kvdock_vllm.engine.copier import Copier, CopyStoppedError, HostBlocks, runs, stacks
from kvdock_vllm.engine.device import mover as mover_module
from kvdock_vllm.engine.device.mover import DeviceMover
from kvdock_vllm.engine.device.pinning import PIECE_BYTES, cut
from kvdock_vllm.engine.layout import GroupLayout, Region

Copy = Callable[[list[HostBlocks], Callable[[], bool]], None]


def never() -> bool:
    return False


def host_copies(layout: GroupLayout) -> tuple[Copy, Copy]:
    copier = Copier(layout)
    return copier.gather, copier.scatter


class OnePool:
    """Stands for a session whose pool is one array."""

    def __init__(self, memory: Any) -> None:
        self.pool = self
        self.memory = memory
        self.segments = [SimpleNamespace(segment_id=0, nbytes=len(memory))]

    def array(self, location: Location) -> Any:
        return self.memory[location.offset : location.offset + location.length]


class DeviceCopies:
    """The copies of a device mover. One is open at a time."""

    last: ClassVar[DeviceMover | None] = None
    session: ClassVar[Any] = None

    @classmethod
    def open(cls, layout: GroupLayout, pool: Any) -> DeviceMover:
        cls.close()
        cls.session = OnePool(pool)
        mover = DeviceMover([layout], 0)
        mover.open(cls.session)
        cls.last = mover
        return mover

    @classmethod
    def close(cls) -> None:
        if cls.last is not None:
            cls.last.close(cls.session)
            cls.last = None


def device_copies(
    layout: GroupLayout, blocks_a_piece: int = 2, pool: Any = None
) -> tuple[Copy, Copy]:
    with pytest.MonkeyPatch.context() as patch:
        staged = blocks_a_piece * layout.block_bytes
        patch.setattr(mover_module, "ENGINE_PACE", Pace(0.1, 1, staged, 3, 2, 1e-4))
        mover = DeviceCopies.open(layout, np.zeros(4096, np.uint8) if pool is None else pool)
    session = DeviceCopies.session
    return (
        lambda parts, stop: mover.gather(session, 0, parts, stop),
        lambda parts, stop: mover.scatter(session, 0, parts, stop),
    )


@pytest.fixture(autouse=True)
def own_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[OwnMemoryDriver]:
    # All that can be staged is, if two blocks fit a piece.
    monkeypatch.setattr(
        planner, "COST_MODEL", COST_MODEL._replace(stage_us=0.0, stage_rectangles_below=1.0)
    )
    yield use_own_device(monkeypatch)
    DeviceCopies.close()


ways = st.one_of(
    st.just(host_copies),
    st.builds(lambda blocks: partial(device_copies, blocks_a_piece=blocks), st.integers(1, 6)),
)


@settings(
    deadline=None,
    max_examples=150,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # the driver remembers nothing
)
@given(cache=caches, way=ways, data=st.data())
def test_gather_reads_exactly_the_pages_and_scatter_writes_exactly_them(
    cache: Cache, way: Callable[[GroupLayout], tuple[Copy, Copy]], data: st.DataObject
) -> None:
    ids = st.integers(0, cache.num_blocks - 1)
    block_ids = data.draw(st.lists(ids, min_size=1, max_size=cache.num_blocks, unique=True))
    middle = data.draw(st.integers(0, len(block_ids)))
    layout = cache.layout
    assert layout.block_bytes == cache.page_bytes * len(cache.layers)
    gather, scatter = way(layout)
    host = np.zeros((len(block_ids), layout.block_bytes), np.uint8)

    def parts(blocks: list[int]) -> list[HostBlocks]:
        return [
            HostBlocks(blocks[:middle], host[:middle].ravel()),
            HostBlocks(blocks[middle:], host[middle:].ravel()),
        ]

    gather(parts(block_ids), never)
    assert host.tobytes() == b"".join(cache.block(block_id) for block_id in block_ids)

    # Into other blocks, of which nothing else may change.
    targets = data.draw(st.permutations(range(cache.num_blocks)))[: len(block_ids)]
    before = [cache.block(block_id) for block_id in range(cache.num_blocks)]
    around = outside(cache)
    scatter(parts(targets), never)
    for block_id, old in enumerate(before):
        wanted = before[block_ids[targets.index(block_id)]] if block_id in targets else old
        assert cache.block(block_id) == wanted
    assert outside(cache) == around


each_way = pytest.mark.parametrize("way", [host_copies, device_copies])


def test_a_copy_stops_between_pieces() -> None:
    cache = mla(1, 5, tokens=1024, width=4096, gap=0)
    gather, _ = host_copies(cache.layout)
    host = np.zeros(5 * cache.page_bytes, np.uint8)
    asked = iter([False, False, True])
    with pytest.raises(CopyStoppedError):
        gather([HostBlocks([0, 1, 2, 3, 4], host)], lambda: next(asked))
    assert_begun_and_not_done(host)


def test_a_devices_copy_stops_between_pieces_and_nothing_follows(
    own_device: OwnMemoryDriver,
) -> None:
    cache = mla(1, 40, tokens=64, width=64, gap=0)
    gather, _ = device_copies(cache.layout, blocks_a_piece=1)
    host = np.zeros(40 * cache.page_bytes, np.uint8)
    copied = threading.Event()

    def slow(target: int, source: int, nbytes: int) -> None:
        copied.set()
        time.sleep(0.02)

    own_device.before_copy = slow
    with pytest.raises(CopyStoppedError):
        gather([HostBlocks(list(range(0, 40, 2)), host[: 20 * cache.page_bytes])], copied.is_set)
    before = host.copy()
    time.sleep(0.1)
    assert host.tobytes() == before.tobytes()
    assert_begun_and_not_done(host[: 20 * cache.page_bytes].reshape(20, -1))


def test_a_devices_copy_that_fails_says_so(own_device: OwnMemoryDriver) -> None:
    cache = mla(1, 5, tokens=64, width=64, gap=0)
    gather, _ = device_copies(cache.layout)

    def fail(name: str) -> None:
        if name.startswith("copy"):
            raise CudaError(name, 700, "CUDA_ERROR_ILLEGAL_ADDRESS", "it broke")

    own_device.before_call = fail
    with pytest.raises(TransferFailedError, match="it broke"):
        gather([HostBlocks([0], np.zeros(cache.page_bytes, np.uint8))], never)


def assert_begun_and_not_done(host: Any) -> None:
    written = host.reshape(-1, 1024).any(axis=1)
    assert written.any()
    assert not written.all()


@each_way
@pytest.mark.parametrize(
    ("block_ids", "nbytes", "message"),
    [
        ([0, 7], 2 * 12, "not all below 2"),
        ([-1, 0], 2 * 12, "not all below"),
        ([0], 11, "12 bytes"),
    ],
)
def test_copies_outside_the_cache_are_refused(
    way: Callable[[GroupLayout], tuple[Copy, Copy]], block_ids: list[int], nbytes: int, message: str
) -> None:
    gather, _ = way(mla(1, 2, tokens=3, width=4, gap=0).layout)
    with pytest.raises(ValueError, match=message):
        gather([HostBlocks(block_ids, np.zeros(nbytes, np.uint8))], never)


@each_way
def test_a_message_names_one_block_of_thousands(
    way: Callable[[GroupLayout], tuple[Copy, Copy]],
) -> None:
    gather, _ = way(mla(1, 2, tokens=3, width=4, gap=0).layout)
    ids = [0] * 5000 + [7]
    with pytest.raises(
        ValueError, match="block id 7: 5001 block ids are not all below 2"
    ) as refused:
        gather([HostBlocks(ids, np.zeros(12 * len(ids), np.uint8))], never)
    assert len(str(refused.value)) < 100


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 30), max_size=30),
    st.integers(1, 8),
)
def test_runs_are_the_blocks_in_order_and_never_too_long(ids: list[int], longest: int) -> None:
    found = list(runs(ids, longest))
    assert [first + i for _, first, count in found for i in range(count)] == ids
    assert [index for index, _, _ in found] == list(
        itertools.accumulate([0, *(count for _, _, count in found)][:-1])
    )[: len(found)]
    assert all(count <= longest for _, _, count in found)


def test_evenly_spaced_layers_are_one_copy() -> None:
    layers = [Region(1000 + n * 4096, 64, 64) for n in range(32)]
    (stack,) = stacks(layers)
    assert (stack.count, stack.pitch, stack.column) == (32, 4096, 0)
    assert [s.count for s in stacks([*layers, Region(10_000_000, 64, 64)])] == [32, 1]
    # Downwards is no even spacing, and neither is another size.
    assert [s.count for s in stacks([layers[1], layers[0], Region(5000, 64, 32)])] == [1, 1, 1]


@given(st.integers(0, 3 * PIECE_BYTES), st.integers(0, 3 * PIECE_BYTES))
def test_copies_are_cut_where_pinned_pieces_meet(address: int, nbytes: int) -> None:
    parts = list(cut(address, nbytes))
    assert [end for _, end in parts[:-1]] == [begin for begin, _ in parts[1:]]
    assert sum(end - begin for begin, end in parts) == nbytes
    for begin, end in parts:
        assert begin < end
        assert (address + begin) // PIECE_BYTES == (address + end - 1) // PIECE_BYTES


def test_a_block_may_lie_across_two_pinned_pieces() -> None:
    cache = mla(2, 4, tokens=64, width=64, gap=0)
    # Address space only; what is touched is a page or two.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = np.frombuffer(mmap.mmap(-1, 3 * PIECE_BYTES, flags), np.uint8)
    border = 2 * PIECE_BYTES - memory.ctypes.data % PIECE_BYTES
    host = memory[border - 5000 : border - 5000 + 2 * cache.layout.block_bytes]
    gather, _ = device_copies(cache.layout, pool=memory)
    gather([HostBlocks([3, 1], host)], never)
    assert host.tobytes() == cache.block(3) + cache.block(1)

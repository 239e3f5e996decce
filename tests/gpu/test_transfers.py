"""Bytes between two processes' GPU memory and the pool: exact, in order, and safe in every end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from device_memory import free_bytes

from kvdock_server.transfer import (
    DeviceAllocation,
    DeviceMemoryError,
    GpuTransfers,
    GroupMemory,
    LayoutError,
    Registration,
    TransferFailedError,
    gpu,
)
from kvdock_server.transfer.devices.copy_streams import CopyStreams, Direction
from kvdock_server.transfer.devices.driver import Driver
from kvdock_server.transfer.devices.kernels import GatherKernel
from kvdock_server.transfer.plans.pieces import CopyPiece, Piece, Rectangles, ScatteredBlocks

pytestmark = pytest.mark.gpu

LAYOUTS = [
    "kv_first",
    "block_first",
    "permuted",
    "layer_major",
    "block_major",
    "padded",
    "latent",
    "kernel_blocks",
]
AsServerTypes = Callable[[Any], tuple[list[DeviceAllocation], dict[int | None, GroupMemory]]]
Started = set[tuple[Direction, type[Piece]]]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    """The kinds of pieces that are started, with their direction."""
    kinds: Started = set()
    start = CopyStreams.start

    def recorded(streams: CopyStreams, piece: CopyPiece, kernel: GatherKernel | None) -> int:
        kinds.add((streams.direction, type(piece)))
        return start(streams, piece, kernel)

    monkeypatch.setattr(CopyStreams, "start", recorded)
    return kinds


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Where memory of other processes is mapped."""
    addresses: list[int] = []
    open_memory, close_memory = Driver.ipc_open_memory, Driver.ipc_close_memory

    def recorded_open(driver: Driver, handle: bytes) -> int:
        addresses.append(open_memory(driver, handle))
        return addresses[-1]

    def recorded_close(driver: Driver, address: int) -> None:
        close_memory(driver, address)
        addresses.remove(address)

    monkeypatch.setattr(Driver, "ipc_open_memory", recorded_open)
    monkeypatch.setattr(Driver, "ipc_close_memory", recorded_close)
    return addresses


async def register(
    transfers: GpuTransfers, worker: Any, as_server_types: AsServerTypes, blocks_per_chunk: int = 4
) -> tuple[Registration, GroupMemory]:
    allocations, groups = as_server_types(worker.export(blocks_per_chunk))
    return await transfers.register(allocations, groups), groups[None]


def block_rows(pool: Any, layout: GroupMemory, slots: list[int]) -> np.ndarray[Any, Any]:
    """The pool's bytes of the chunks at ``slots``, a row for each block."""
    rows = [pool.bytes[slot : slot + layout.chunk_bytes] for slot in slots]
    return np.concatenate(rows).reshape(-1, layout.block_bytes)


async def round_trip(
    pool: Any,
    transfers: GpuTransfers,
    worker: Any,
    as_server_types: AsServerTypes,
    *,
    blocks: int,
    blocks_per_chunk: int = 4,
    order: str = "random",
) -> None:
    """Store random blocks, load them into others, and compare every byte of the cache."""
    registration, layout = await register(transfers, worker, as_server_types, blocks_per_chunk)
    rng = np.random.default_rng(3)
    chunks = max(1, blocks // 2 // blocks_per_chunk)
    ids = rng.permutation(blocks) if order == "random" else np.arange(blocks)
    source = ids[: chunks * blocks_per_chunk].tolist()
    skip = blocks_per_chunk - 1
    target = ids[len(source) :][: len(source) - skip].tolist()
    step = -(-layout.chunk_bytes // 4096) * 4096
    slots = [4096 + step * int(slot) for slot in rng.permutation(chunks)]
    pool.bytes[: slots[0] + (chunks + 1) * step] = 0xEE

    await registration.store(None, source, slots, worker.done_event())
    before = worker.blocks(list(range(blocks)))
    np.testing.assert_array_equal(block_rows(pool, layout, slots), before[source])
    assert (pool.bytes[:4096] == 0xEE).all()

    await registration.retrieve(None, target, slots, skip, worker.done_event())
    expected = before.copy()
    expected[target] = before[source[skip:]]
    np.testing.assert_array_equal(worker.blocks(list(range(blocks))), expected)
    await registration.close()


@pytest.mark.parametrize("dtype", ["bf16", "fp8", "uint8"])
@pytest.mark.parametrize("layout", LAYOUTS)
async def test_every_layout(
    pool: Any,
    transfers: GpuTransfers,
    shared_worker: Any,
    as_server_types: AsServerTypes,
    layout: str,
    dtype: str,
) -> None:
    shared_worker.make(layout, dtype, 5, 64, 4096)
    for order in ("random", "consecutive"):
        await round_trip(pool, transfers, shared_worker, as_server_types, blocks=64, order=order)


@pytest.mark.parametrize("dtype", ["bf16", "fp8", "uint8"])
@pytest.mark.parametrize("nbytes", [64, 4096, 1 << 20, 64 << 20])
async def test_tensors_inside_an_allocation_at_odd_offsets(
    pool: Any,
    transfers: GpuTransfers,
    shared_worker: Any,
    as_server_types: AsServerTypes,
    nbytes: int,
    dtype: str,
) -> None:
    item = {"bf16": 2, "fp8": 1, "uint8": 1}[dtype]
    offsets = [3 * item, 3 * item + nbytes + 5 * item, 3 * item + 3 * nbytes + 7 * item]
    shared_worker.make_inside(dtype, offsets, 8, nbytes // 8)
    await round_trip(pool, transfers, shared_worker, as_server_types, blocks=8, blocks_per_chunk=2)


@pytest.mark.parametrize("page", [32768, 2064, 1032, 1004, 1002, 1001])
async def test_staged_blocks_of_every_alignment(
    pool: Any,
    transfers: GpuTransfers,
    shared_worker: Any,
    as_server_types: AsServerTypes,
    started: Started,
    page: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("cupy")
    # So that the buffers come round again.
    monkeypatch.setattr(gpu, "SERVER_PACE", replace(gpu.SERVER_PACE, staged_bytes=16 << 20))
    blocks = 4 * (((140 << 20) // (7 * page)) // 4)
    span = blocks * page
    shared_worker.make_inside(
        "uint8", [16 * 11 + i * (span + 16 * i) for i in range(7)], blocks, page
    )
    await round_trip(pool, transfers, shared_worker, as_server_types, blocks=blocks)
    assert {(direction, ScatteredBlocks) for direction in Direction} <= started


async def test_layers_gigabytes_apart(
    pool: Any,
    transfers: GpuTransfers,
    shared_worker: Any,
    as_server_types: AsServerTypes,
    started: Started,
) -> None:
    """As in the one allocation of a large cache; beyond 4 GiB only where there is the memory."""
    free = free_bytes()
    pitch = next(pitch for pitch in (5 << 30, 9 << 28) if free > 6 * pitch + (4 << 30))
    shared_worker.make_inside("uint8", [layer * pitch for layer in range(7)], 8, 8192)
    await round_trip(pool, transfers, shared_worker, as_server_types, blocks=8, blocks_per_chunk=2)
    assert {kind for _, kind in started} == {Rectangles}
    shared_worker.make_inside("uint8", [0], 8, 64)


async def test_parts_of_the_pool_that_are_not_pinned(
    pool: Any, shared_worker: Any, as_server_types: AsServerTypes
) -> None:
    transfers = GpuTransfers(pool.address, len(pool.bytes))
    for layout in ("block_major", "layer_major"):
        shared_worker.make(layout, "bf16", 32, 64, 16384)
        await round_trip(pool, transfers, shared_worker, as_server_types, blocks=64)
    assert transfers.stats().pinned_bytes == 0
    await transfers.close()


async def test_the_pool_is_pinned_once_a_worker_came(
    pool: Any, transfers: GpuTransfers, shared_worker: Any, as_server_types: AsServerTypes
) -> None:
    assert transfers.stats().pinned_bytes == 0
    shared_worker.make("block_major", "bf16", 2, 8, 4096)
    registration, _ = await register(transfers, shared_worker, as_server_types)
    for _ in range(200):
        if transfers.stats().pinned_bytes == len(pool.bytes):
            break
        await asyncio.sleep(0.01)
    assert transfers.stats().pinned_bytes == len(pool.bytes)
    assert transfers.stats().pin_refused == ""
    await registration.close()


async def test_a_store_waits_for_the_kernel_that_writes(
    pool: Any, transfers: GpuTransfers, shared_worker: Any, as_server_types: AsServerTypes
) -> None:
    shared_worker.make("block_first", "bf16", 4, 16, 4096)
    registration, layout = await register(transfers, shared_worker, as_server_types)
    await registration.store(None, range(16), [i * layout.chunk_bytes for i in range(4)])
    started = time.monotonic()
    event = shared_worker.write_late(500, 7)
    await registration.store(None, range(16), [i * layout.chunk_bytes for i in range(4)], event)
    assert time.monotonic() - started > 0.3
    written = block_rows(pool, layout, [i * layout.chunk_bytes for i in range(4)])
    np.testing.assert_array_equal(written, shared_worker.blocks(list(range(16))))
    await registration.close()


async def test_an_event_that_is_used_again_stands_for_what_was_recorded_last(
    pool: Any, transfers: GpuTransfers, start_worker: Any, as_server_types: AsServerTypes
) -> None:
    worker = start_worker()
    worker.make("block_first", "bf16", 4, 16, 4096)
    worker.use_one_event()
    registration, layout = await register(transfers, worker, as_server_types)
    slots = [i * layout.chunk_bytes for i in range(4)]
    for seed in range(4):
        event = worker.write_late(150, seed)
        await registration.store(None, range(16), slots, event)
        written = block_rows(pool, layout, slots)
        np.testing.assert_array_equal(written, worker.blocks(list(range(16))))
    await registration.close()


async def test_a_retrieve_does_not_overtake_the_kernel_that_reads(
    pool: Any, transfers: GpuTransfers, shared_worker: Any, as_server_types: AsServerTypes
) -> None:
    shared_worker.make("block_first", "bf16", 4, 16, 4096)
    registration, layout = await register(transfers, shared_worker, as_server_types)
    before = shared_worker.blocks(list(range(16)))
    slots = [i * layout.chunk_bytes for i in range(4)]
    pool.bytes[: 4 * layout.chunk_bytes] = 0x55
    event = shared_worker.read_late(500)
    await registration.retrieve(None, range(16), slots, 0, event)
    np.testing.assert_array_equal(shared_worker.snapshot_blocks(list(range(16))), before)
    assert (shared_worker.blocks(list(range(16))) == 0x55).all()
    await registration.close()


async def test_what_waits_for_a_kernel_holds_nobody_up(
    pool: Any, transfers: GpuTransfers, start_worker: Any, shared_worker: Any, as_server_types: Any
) -> None:
    """The waiting worker has a process of its own: its long kernel stops its own orders too."""
    other = start_worker()
    for worker in (shared_worker, other):
        worker.make("block_major", "bf16", 4, 16, 4096)
    one, _ = await register(transfers, shared_worker, as_server_types)
    two, _ = await register(transfers, other, as_server_types)
    event = other.write_late(500, 1)
    waiting = asyncio.create_task(two.store(None, range(4), [1 << 20], event))
    started = time.monotonic()
    await one.store(None, range(4), [0])
    assert time.monotonic() - started < 0.3
    assert not waiting.done()
    await waiting
    await one.close()
    await two.close()


async def test_a_cancelled_store_writes_nothing_later(
    pool: Any, transfers: GpuTransfers, shared_worker: Any, as_server_types: AsServerTypes
) -> None:
    shared_worker.make("block_major", "bf16", 32, 256, 32768)
    registration, layout = await register(transfers, shared_worker, as_server_types, 16)
    slots = [i * layout.chunk_bytes for i in range(15)]
    task = asyncio.create_task(registration.store(None, range(240), slots))
    await asyncio.sleep(0.002)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    pool.bytes[:] = 0xAA
    await asyncio.sleep(0.1)
    assert (pool.bytes == 0xAA).all()
    await registration.store(None, range(240), slots)  # and the lane goes on
    await registration.close()


async def test_a_store_that_waits_for_a_hung_kernel_ends_with_its_registration(
    transfers: GpuTransfers, start_worker: Any, as_server_types: AsServerTypes
) -> None:
    worker = start_worker()
    worker.make("block_major", "bf16", 4, 16, 4096)
    registration, _ = await register(transfers, worker, as_server_types)
    event = worker.write_late(3000, 1)
    task = asyncio.create_task(registration.store(None, range(4), [0], event))
    await asyncio.sleep(0.05)
    started = time.monotonic()
    await registration.close()
    assert time.monotonic() - started < 2
    with pytest.raises(TransferFailedError, match="cancelled"):
        await task


@pytest.mark.parametrize("when", ["copying", "waiting for its kernel"])
async def test_a_killed_worker_leaves_its_memory(
    pool: Any,
    transfers: GpuTransfers,
    start_worker: Any,
    shared_worker: Any,
    as_server_types: AsServerTypes,
    when: str,
) -> None:
    shared_worker.make("block_major", "bf16", 2, 8, 4096)
    neighbour, neighbours = await register(transfers, shared_worker, as_server_types)
    free_before = free_bytes()

    worker = start_worker()
    worker.make("layer_major", "bf16", 32, 2048, 65536)  # 4 GiB
    registration, layout = await register(transfers, worker, as_server_types, 16)
    slots = [i % 12 * layout.chunk_bytes for i in range(128)]
    event = b"" if when == "copying" else worker.write_late(2000, 1)

    async def copy_on() -> None:
        while True:
            await registration.store(None, range(2048), slots, event)

    task = asyncio.create_task(copy_on())
    await asyncio.sleep(0.05)
    worker.kill()
    killed = time.monotonic()
    await asyncio.sleep(0.05)
    await registration.close()
    with pytest.raises((TransferFailedError, DeviceMemoryError)):
        await task
    while free_bytes() < free_before - (64 << 20):
        assert time.monotonic() - killed < 10, (free_bytes(), free_before)
        await asyncio.sleep(0.05)
    await neighbour.store(None, range(4), [0])
    np.testing.assert_array_equal(
        block_rows(pool, neighbours, [0]),
        shared_worker.blocks(list(range(4))),
    )
    await neighbour.close()


async def test_the_same_memory_registered_twice(
    pool: Any,
    transfers: GpuTransfers,
    shared_worker: Any,
    as_server_types: AsServerTypes,
    opened: list[int],
) -> None:
    shared_worker.make("block_first", "bf16", 4, 16, 4096)
    first, layout = await register(transfers, shared_worker, as_server_types)
    second, _ = await register(transfers, shared_worker, as_server_types)
    mapped = list(opened)
    await first.close()
    await first.close()
    assert opened == mapped
    with pytest.raises(DeviceMemoryError, match="not registered any more"):
        await first.store(None, range(4), [0])
    await second.store(None, range(4), [0])
    rows = block_rows(pool, layout, [0])
    np.testing.assert_array_equal(rows, shared_worker.blocks(list(range(4))))
    await second.close()
    assert opened == []


async def test_a_registration_may_outlive_the_transfers(
    pool: Any, shared_worker: Any, as_server_types: AsServerTypes
) -> None:
    shared_worker.make("block_major", "bf16", 4, 16, 4096)
    transfers = GpuTransfers(pool.address, len(pool.bytes))
    registration, _ = await register(transfers, shared_worker, as_server_types)
    await transfers.close()
    with pytest.raises(TransferFailedError, match="closes this device"):
        await registration.store(None, range(4), [0])
    await registration.close()


async def test_another_server_opens_the_same_memory_after_the_first(
    pool: Any, shared_worker: Any, as_server_types: AsServerTypes
) -> None:
    shared_worker.make("block_major", "bf16", 4, 16, 4096)
    for _ in range(2):
        transfers = GpuTransfers(pool.address, len(pool.bytes))
        transfers.faulted(0, len(pool.bytes))
        await round_trip(pool, transfers, shared_worker, as_server_types, blocks=16)
        await transfers.close()


async def test_a_device_that_is_not_visible_is_named(
    transfers: GpuTransfers, shared_worker: Any, as_server_types: AsServerTypes
) -> None:
    shared_worker.make("block_major", "bf16", 1, 8, 4096)
    allocations, groups = as_server_types(shared_worker.export(4))
    elsewhere = [DeviceAllocation(a.ipc_handle, a.nbytes, bytes(16)) for a in allocations]
    with pytest.raises(DeviceMemoryError, match=r"GPU-00000000-.* is not visible to the server"):
        await transfers.register(elsewhere, groups)


async def test_descriptions_that_lie_are_refused(
    transfers: GpuTransfers, shared_worker: Any, as_server_types: AsServerTypes, opened: list[int]
) -> None:
    shared_worker.make("block_major", "bf16", 1, 8, 4096)
    allocations, groups = as_server_types(shared_worker.export(4))
    larger = [
        DeviceAllocation(a.ipc_handle, a.nbytes + (1 << 30), a.device_uuid) for a in allocations
    ]
    with pytest.raises(LayoutError, match="take its size from cuMemGetAddressRange"):
        await transfers.register(larger, groups)
    garbage = [DeviceAllocation(bytes(64), a.nbytes, a.device_uuid) for a in allocations]
    with pytest.raises(DeviceMemoryError, match="cannot be opened"):
        await transfers.register(garbage, groups)
    assert opened == []


async def test_arguments_that_do_not_fit_are_refused(
    transfers: GpuTransfers, pool: Any, shared_worker: Any, as_server_types: AsServerTypes
) -> None:
    shared_worker.make("block_major", "bf16", 1, 8, 4096)
    registration, _ = await register(transfers, shared_worker, as_server_types)
    for group, ids, slots, skip, event, complaint in [
        (None, range(3), [0], 0, b"", "3 block_ids: 1 chunks of 4 blocks less 0 make 4"),
        (None, [0, 1, 2, 8], [0], 0, b"", "block id 8: 8 blocks are registered"),
        (None, [0, 1, 2, -1], [0], 0, b"", "block id -1"),
        (None, [], [0], 4, b"", "skip_blocks 4"),
        (None, range(4), [len(pool.bytes)], 0, b"", "outside the pool"),
        (None, range(4), [0], 0, b"x", "64 bytes, this one has 1"),
        (0, range(4), [0], 0, b"", "group 0 is not registered"),
    ]:
        with pytest.raises(ValueError, match=complaint):
            await registration.retrieve(group, ids, slots, skip, event)
    with pytest.raises(TransferFailedError, match="cuIpcOpenEventHandle"):
        await registration.store(None, range(4), [0], bytes(64))
    await registration.close()


def test_memory_that_ipc_cannot_export_is_named(start_worker: Any) -> None:
    from worker_process import WorkerError

    worker = start_worker({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"})
    worker.make("block_major", "bf16", 1, 8, 4096)
    with pytest.raises(WorkerError, match="NotExportableError: cuIpcGetMemHandle failed"):
        worker.export(4)

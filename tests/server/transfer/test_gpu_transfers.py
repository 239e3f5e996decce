"""Registration, transfers and teardown, all but the GPU: its driver is host_driver.HostDriver."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

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
from kvdock_server.transfer.devices import opened_events, pinning

sys.path.insert(0, str(Path(__file__).parent))
import kv_layouts
from host_driver import UUID, HostDriver

POOL_BYTES = 1 << 20
BLOCKS = 40
PER_CHUNK = 4
EVENT = b"e" * 64


class Setting:
    """A pool, a driver, and workers' memory as the tests make it."""

    def __init__(self) -> None:
        self.pool: npt.NDArray[np.uint8] = np.zeros(POOL_BYTES, np.uint8)
        self.driver = HostDriver()
        self.transfers = GpuTransfers(self.pool.ctypes.data, POOL_BYTES)

    def export(
        self, case: kv_layouts.Case
    ) -> tuple[list[DeviceAllocation], list[kv_layouts.Bytes]]:
        rng = np.random.default_rng(len(self.driver.exported))
        allocations, arrays = [], []
        for size in case.allocation_bytes:
            handle, array = self.driver.export(size)
            array[:] = rng.integers(0, 256, size, np.uint8)
            allocations.append(DeviceAllocation(handle, size, UUID))
            arrays.append(array)
        return allocations, arrays

    async def worker(
        self, name: str = "block-major"
    ) -> tuple[Registration, kv_layouts.Case, list[kv_layouts.Bytes]]:
        case = kv_layouts.CASES[name](13, BLOCKS, 96, PER_CHUNK, 0)
        allocations, arrays = self.export(case)
        return await self.transfers.register(allocations, {None: case.layout}), case, arrays


@pytest.fixture
async def setting(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Setting]:
    monkeypatch.setattr(pinning, "SECTION_BYTES", 4096)
    setting = Setting()
    monkeypatch.setattr(gpu, "load_driver", lambda: setting.driver)
    yield setting
    await setting.transfers.close()
    setting.driver.assert_all_given_back()


@pytest.mark.parametrize("pinned", ["all", "half", "none"])
@pytest.mark.parametrize("name", sorted(kv_layouts.CASES))
async def test_every_layout_there_and_back(setting: Setting, name: str, pinned: str) -> None:
    faulted = {"all": POOL_BYTES, "half": 8192, "none": 0}[pinned]
    setting.transfers.faulted(0, faulted)
    registration, case, arrays = await setting.worker(name)
    for _ in range(1000):
        if setting.transfers.stats().pinned_bytes == faulted:
            break
        await asyncio.sleep(0.001)
    layout = case.layout
    slots = [1000 + layout.chunk_bytes * i for i in (0, 1, 2, 4)]
    source = [*range(8), *range(20, 12, -1)]
    before = [np.concatenate(case.pages(arrays, block)) for block in range(BLOCKS)]
    await registration.store(None, source, slots)
    stored = np.concatenate([setting.pool[slot : slot + layout.chunk_bytes] for slot in slots])
    np.testing.assert_array_equal(stored, np.concatenate([before[block] for block in source]))

    target = [*range(39, 30, -1), 21, 22, 23, 24]
    await registration.retrieve(None, target, slots, skip_blocks=3)
    for block, was in zip(target, source[3:], strict=True):
        np.testing.assert_array_equal(np.concatenate(case.pages(arrays, block)), before[was])
    for block in set(range(BLOCKS)) - set(target):
        np.testing.assert_array_equal(np.concatenate(case.pages(arrays, block)), before[block])
    await registration.close()


async def test_allocations_are_opened_once_and_closed_once(setting: Setting) -> None:
    case = kv_layouts.CASES["block-major"](3, BLOCKS, 96, PER_CHUNK, 0)
    allocations, _ = setting.export(case)
    twice = [*allocations, *allocations]
    first = await setting.transfers.register(twice, {None: case.layout})
    second = await setting.transfers.register(allocations, {None: case.layout})
    await first.close()
    await first.close()
    assert setting.driver.log == ["open"]
    await second.store(None, range(4), [0])
    await second.close()
    assert setting.driver.log == ["open", "close"]
    assert setting.driver.opened == {}


async def test_a_registration_that_fails_leaves_nothing_open(setting: Setting) -> None:
    case = kv_layouts.CASES["block first, layers apart"](3, BLOCKS, 96, PER_CHUNK, 0)
    allocations, _ = setting.export(case)
    gone = DeviceAllocation(b"x" * 64, 1, UUID)
    with pytest.raises(DeviceMemoryError, match="host 0 cannot be opened"):
        await setting.transfers.register([*allocations[:2], gone], {None: case.layout})
    larger = DeviceAllocation(allocations[2].ipc_handle, 1 << 40, UUID)
    with pytest.raises(LayoutError, match="is described with 1099511627776 bytes"):
        await setting.transfers.register([*allocations[:2], larger], {None: case.layout})
    with pytest.raises(LayoutError, match="names allocation 2"):
        await setting.transfers.register(allocations[:2], {None: case.layout})
    elsewhere = DeviceAllocation(allocations[0].ipc_handle, 1, bytes(16))
    with pytest.raises(DeviceMemoryError, match=r"GPU-00010203-.*: start the server with"):
        await setting.transfers.register([elsewhere], {None: case.layout})
    assert setting.driver.opened == {}


async def test_copies_wait_for_their_event(setting: Setting) -> None:
    registration, case, arrays = await setting.worker()
    task = asyncio.create_task(registration.store(None, range(4), [0], EVENT))
    await asyncio.sleep(0.02)
    assert not setting.pool.any()
    assert list(setting.driver.events.values()) == [EVENT]
    setting.driver.ready_events.add(EVENT)
    await task
    expected = np.concatenate(case.pages(arrays, 0))
    np.testing.assert_array_equal(setting.pool[: case.layout.block_bytes], expected)
    await registration.close()
    assert setting.driver.events == {}


async def test_an_event_is_opened_once_and_asked_anew_each_time(setting: Setting) -> None:
    registration, _, _ = await setting.worker()
    for _ in range(3):
        setting.driver.ready_events.discard(EVENT)
        task = asyncio.create_task(registration.store(None, range(4), [0], EVENT))
        await asyncio.sleep(0.02)
        assert not task.done()
        setting.driver.ready_events.add(EVENT)
        await task
        assert list(setting.driver.events.values()) == [EVENT]
    await registration.close()


async def test_more_events_than_an_engine_has_are_given_back_at_once(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opened_events, "_MOST_KEPT", 2)
    registration, _, _ = await setting.worker()
    for number in range(5):
        event = bytes([number]) * 64
        setting.driver.ready_events.add(event)
        await registration.store(None, range(4), [0], event)
    assert len(setting.driver.events) == 2
    await registration.close()


async def test_a_cancelled_transfer_is_over_when_it_says_so(setting: Setting) -> None:
    registration, _, _ = await setting.worker()
    task = asyncio.create_task(registration.store(None, range(4), [0], EVENT))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    setting.driver.ready_events.add(EVENT)
    await asyncio.sleep(0.01)
    assert not setting.pool.any()
    await registration.close()


async def test_closing_ends_what_waits(setting: Setting) -> None:
    registration, _, _ = await setting.worker()
    task = asyncio.create_task(registration.store(None, range(4), [0], EVENT))
    await asyncio.sleep(0.01)
    closing = asyncio.create_task(registration.close())
    await asyncio.sleep(0)
    closing.cancel()  # whoever closes may give up; the memory is let go all the same
    with pytest.raises(TransferFailedError, match="cancelled"):
        await task
    await registration.close()
    assert setting.driver.opened == {}
    with pytest.raises(DeviceMemoryError, match="not registered any more"):
        await registration.store(None, range(4), [0])


async def test_a_registration_may_outlive_the_transfers(setting: Setting) -> None:
    registration, _, _ = await setting.worker()
    await setting.transfers.close()
    with pytest.raises(TransferFailedError, match="closes this device"):
        await registration.store(None, range(4), [0])
    await registration.close()


async def test_a_registration_that_nobody_waits_for_is_undone(setting: Setting) -> None:
    case = kv_layouts.CASES["block-major"](3, BLOCKS, 96, PER_CHUNK, 0)
    allocations, _ = setting.export(case)
    for _ in range(20):
        task = asyncio.create_task(setting.transfers.register(allocations, {None: case.layout}))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    for _ in range(500):
        if not setting.driver.opened:
            break
        await asyncio.sleep(0.002)
    assert setting.driver.opened == {}
    assert setting.driver.log.count("open") == setting.driver.log.count("close")


@pytest.mark.parametrize(
    ("group", "ids", "slots", "skip", "event", "complaint"),
    [
        (None, range(3), [0], 0, b"", "3 block_ids: 1 chunks of 4 blocks less 0 make 4"),
        (None, [0, 1, 2, 40], [0], 0, b"", "block id 40: 40 blocks are registered"),
        (None, [0, 1, 2, -1], [0], 0, b"", "block id -1"),
        (None, [], [0], 4, b"", "skip_blocks 4: a chunk has 4 blocks"),
        (None, range(4), [POOL_BYTES], 0, b"", "one is outside the pool"),
        (None, range(4), [-1], 0, b"", "one is outside the pool"),
        (None, range(4), [0], 0, b"x", "64 bytes, this one has 1"),
        (0, range(4), [0], 0, b"", "group 0 is not registered, .None. are"),
    ],
)
async def test_arguments_that_do_not_fit_are_refused(
    setting: Setting,
    group: int | None,
    ids: range | list[int],
    slots: list[int],
    skip: int,
    event: bytes,
    complaint: str,
) -> None:
    registration, _, arrays = await setting.worker()
    before = arrays[0].copy()
    with pytest.raises(ValueError, match=complaint):
        await registration.retrieve(group, ids, slots, skip, event)
    np.testing.assert_array_equal(arrays[0], before)
    await registration.close()


async def test_nothing_to_copy_is_no_error(setting: Setting) -> None:
    registration, _, _ = await setting.worker()
    await registration.store(None, [], [])
    await registration.retrieve(None, [], [])
    await registration.close()


async def test_two_groups_of_one_worker(setting: Setting) -> None:
    case = kv_layouts.CASES["block-major"](3, BLOCKS, 96, PER_CHUNK, 0)
    allocations, arrays = setting.export(case)
    wide = GroupMemory(BLOCKS // 2, 2, (case.layout.regions[0],))
    registration = await setting.transfers.register(allocations, {0: case.layout, 1: wide})
    await registration.store(1, [5, 6], [0])
    page = case.layout.regions[0].page_bytes
    pages = [case.pages(arrays, block)[0] for block in (5, 6)]
    np.testing.assert_array_equal(setting.pool[: 2 * page], np.concatenate(pages))
    await registration.close()


async def test_statistics_do_not_wait_for_a_context_that_is_being_made(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, go_on = threading.Event(), threading.Event()
    retain = setting.driver.retain_context

    def slow(ordinal: int) -> int:
        made.set()
        assert go_on.wait(10)
        return retain(ordinal)

    monkeypatch.setattr(setting.driver, "retain_context", slow)
    registering = asyncio.create_task(setting.worker())
    assert await asyncio.to_thread(made.wait, 10)
    assert setting.transfers.stats().pinned_bytes == 0
    go_on.set()
    await registering

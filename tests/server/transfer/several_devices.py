"""A pool with workers on several devices, all of it host memory."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvdock_server.transfer import (
    CopiedBytes,
    DeviceAllocation,
    GpuTransfers,
    LoadFollower,
    Registration,
)

sys.path.insert(0, str(Path(__file__).parent))
import kv_layouts
from host_driver import HostDriver, uuid

POOL_BYTES = 1 << 20
BLOCKS = 40
PER_CHUNK = 4
DEVICES = 4
SKIP = 3
TARGET = [*range(39, 30, -1), 21, 22, 23, 24]
LOADED_BLOCKS = len(TARGET)


@dataclass
class Worker:
    """Memory of one worker: its layout, its arrays, and how the server holds it."""

    registration: Registration
    case: kv_layouts.Case
    arrays: list[kv_layouts.Bytes]

    def block(self, block: int) -> kv_layouts.Bytes:
        return np.concatenate(self.case.pages(self.arrays, block))


class Setting:
    """A pool with random bytes, and workers on several devices."""

    def __init__(self) -> None:
        rng = np.random.default_rng(9)
        self.pool: npt.NDArray[np.uint8] = rng.integers(0, 256, POOL_BYTES, np.uint8)
        self.driver = HostDriver(DEVICES)
        self.transfers = GpuTransfers(self.pool.ctypes.data, POOL_BYTES)
        self.transfers.faulted(0, POOL_BYTES)
        self._workers: list[Worker] = []

    async def close(self) -> None:
        """Everybody leaves, and nothing stays."""
        await asyncio.gather(*(worker.registration.close() for worker in self._workers))
        await self.transfers.close()
        self.driver.assert_all_given_back()
        self.driver.exported.clear()

    async def worker(self, device: int, name: str = "block-major", pad: int = 0) -> Worker:
        case = kv_layouts.CASES[name](13, BLOCKS, 96, PER_CHUNK, pad)
        allocations, arrays = [], []
        for size in case.allocation_bytes:
            handle, array = self.driver.export(size, device)
            array[:] = 0xA5
            allocations.append(DeviceAllocation(handle, size, uuid(device)))
            arrays.append(array)
        registration = await self.transfers.register(allocations, {None: case.layout})
        self._workers.append(Worker(registration, case, arrays))
        return self._workers[-1]

    async def workers(self, name: str = "block-major") -> list[Worker]:
        return [await self.worker(device, name, pad=3 * device) for device in range(DEVICES)]

    async def load(
        self, leader: Worker, others: list[Worker], event: bytes = b"", seconds: float = 10
    ) -> tuple[CopiedBytes, list[LoadFollower]]:
        followers = [worker.registration.follower() for worker in others]
        return await self.load_for(leader, followers, event, seconds), followers

    async def load_for(
        self, leader: Worker, followers: list[LoadFollower], event: bytes = b"", seconds: float = 10
    ) -> CopiedBytes:
        return await leader.registration.retrieve(
            None, TARGET, self.slots(leader), SKIP, event, seconds, followers
        )

    def slots(self, worker: Worker) -> list[int]:
        return [1000 + worker.case.layout.chunk_bytes * i for i in (0, 1, 2, 4)]

    def is_filled(self, worker: Worker) -> bool:
        """True if the target blocks have the pool's bytes, False if none has; all others are as
        they were."""
        layout = worker.case.layout
        rows = [self.pool[slot : slot + layout.chunk_bytes] for slot in self.slots(worker)]
        wanted = np.concatenate(rows).reshape(-1, layout.block_bytes)[SKIP:]
        filled = [
            bool((worker.block(block) == row).all())
            for block, row in zip(TARGET, wanted, strict=True)
        ]
        for block in range(BLOCKS):
            if block not in TARGET or not any(filled):
                assert (worker.block(block) == 0xA5).all()
        assert all(filled) or not any(filled)
        return all(filled)

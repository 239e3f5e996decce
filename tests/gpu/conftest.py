"""GPU tests: the server's transfers in this process, a worker in another one."""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvdock_server.transfer import BlockRegion, DeviceAllocation, GpuTransfers, GroupMemory
from kvdock_server.transfer.devices.driver import CudaUnavailableError, load_driver

sys.path.insert(0, str(Path(__file__).parent))
from worker_process import WorkerProcess

POOL_BYTES = 512 << 20


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    try:
        load_driver().device_uuids()[0]
        import torch  # noqa: F401
    except (CudaUnavailableError, ImportError, IndexError) as error:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason=f"no GPU here: {error}"))


class HostPool:
    """A pool as the server's: one mapping, all of it there."""

    def __init__(self, nbytes: int = POOL_BYTES) -> None:
        self._map = mmap.mmap(-1, nbytes)
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(self._map, dtype=np.uint8)
        self.bytes[:] = 0xEE
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))


@pytest.fixture(scope="session")
def pool() -> HostPool:
    return HostPool()


@pytest.fixture
async def transfers(pool: HostPool) -> AsyncIterator[GpuTransfers]:
    transfers = GpuTransfers(pool.address, len(pool.bytes))
    transfers.faulted(0, len(pool.bytes))
    yield transfers
    await transfers.close()


@pytest.fixture
def start_worker() -> Iterator[Callable[..., WorkerProcess]]:
    workers: list[WorkerProcess] = []

    def start(environment: Mapping[str, str] | None = None) -> WorkerProcess:
        workers.append(WorkerProcess(environment))
        return workers[-1]

    yield start
    for worker in workers:
        worker.stop()


@pytest.fixture(scope="session")
def shared_worker() -> Iterator[WorkerProcess]:
    """One for all tests that do it no harm: starting one takes seconds."""
    worker = WorkerProcess()
    yield worker
    worker.stop()


def from_export(
    exported: tuple[Any, Any],
) -> tuple[list[DeviceAllocation], dict[int | None, GroupMemory]]:
    """The client's description as the server's own types."""
    allocations, groups = exported
    return (
        [DeviceAllocation(a.ipc_handle, a.nbytes, a.device_uuid) for a in allocations],
        {
            group.group_idx: GroupMemory(
                group.num_blocks,
                group.blocks_per_chunk,
                tuple(
                    BlockRegion(r.allocation, r.offset, r.block_stride, r.page_bytes)
                    for r in group.regions
                ),
            )
            for group in groups
        },
    )


@pytest.fixture(scope="session")
def as_server_types() -> Callable[..., Any]:
    return from_export

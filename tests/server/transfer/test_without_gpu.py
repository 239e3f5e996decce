"""A server on a host without GPU starts as ever, and says why it cannot open device memory."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvdock_server.transfer import (
    BlockRegion,
    DeviceAllocation,
    DeviceMemoryError,
    GpuTransfers,
    GroupMemory,
    LayoutError,
)
from kvdock_server.transfer.devices.driver import CudaUnavailableError, load_driver

LAYOUT = GroupMemory(4, 2, (BlockRegion(0, 0, 64, 64),))
ALLOCATION = DeviceAllocation(bytes(64), 256, bytes(16))


def has_cuda() -> bool:
    try:
        load_driver()
    except CudaUnavailableError:
        return False
    return True


@pytest.mark.skipif(has_cuda(), reason="this host has a CUDA driver")
async def test_registering_says_what_is_missing() -> None:
    transfers = GpuTransfers(1 << 40, 1 << 20)
    transfers.faulted(0, 1 << 20)
    with pytest.raises(DeviceMemoryError, match="no usable CUDA driver on this host"):
        await transfers.register([ALLOCATION], {None: LAYOUT})
    assert transfers.stats().pinned_bytes == 0
    await transfers.close()


async def test_a_worker_has_one_device() -> None:
    transfers = GpuTransfers(1 << 40, 1 << 20)
    other = DeviceAllocation(bytes(64), 256, bytes(15) + b"\1")
    for allocations in ([], [ALLOCATION, other]):
        with pytest.raises(LayoutError, match="a worker has one"):
            await transfers.register(allocations, {None: LAYOUT})
    await transfers.close()


def test_handles_and_uuids_have_their_length() -> None:
    with pytest.raises(LayoutError, match="64 bytes, this one has 66"):
        DeviceAllocation(bytes(66), 256, bytes(16))
    with pytest.raises(LayoutError, match="16 bytes, this one has 4"):
        DeviceAllocation(bytes(64), 256, bytes(4))


def test_importing_the_package_loads_no_cuda() -> None:
    code = (
        "import sys; import kvdock_server.transfer as t; t.GpuTransfers(1 << 40, 1 << 20); "
        "sys.exit('cupy' in sys.modules or 'libcuda' in open('/proc/self/maps').read())"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

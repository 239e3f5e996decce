"""Bytes between the pool and workers' device memory.

What a worker describes is a ``layout``. Where its ``regions`` are mapped, a ``plan`` finds the
copies that move its blocks at the lowest ``prices``, in ``pieces``; all of these are pure.
``driver``, ``staging`` and ``pinning`` are the CUDA there is; ``cuda`` carries pieces out, ``lane``
is a thread of such work, ``device`` a GPU, and ``gpu`` the asyncio face of it all. Importing this
package loads no CUDA library: the first registration does.

A load may fill several workers' memory: ``fan_out`` leads it, ``relay`` is the way from device to
device, and ``relay_plan`` says which copies make it.
"""

from kvdock_server.transfer.device import DeviceStats
from kvdock_server.transfer.fan_out import Copied, Follower
from kvdock_server.transfer.gpu import DeviceMemoryError, GpuStats, GpuTransfers, Registration
from kvdock_server.transfer.lane import TransferCancelledError, TransferFailedError
from kvdock_server.transfer.layout import (
    BlockRegion,
    DeviceAllocation,
    GroupLayout,
    LayoutError,
)

__all__ = [
    "BlockRegion",
    "Copied",
    "DeviceAllocation",
    "DeviceMemoryError",
    "DeviceStats",
    "Follower",
    "GpuStats",
    "GpuTransfers",
    "GroupLayout",
    "LayoutError",
    "Registration",
    "TransferCancelledError",
    "TransferFailedError",
]

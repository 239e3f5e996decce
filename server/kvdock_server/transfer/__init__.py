"""Bytes between the pool and workers' device memory.

Each of the three folders imports only those named before it. ``plans`` finds the copies that move a
worker's blocks, and is pure. ``devices`` carries the copies out on a GPU. ``fan_out`` is a load
that fills several workers' memory. ``gpu`` is the asyncio face of them all.

The rest of the server imports from here only. No CUDA library is loaded before the first worker
registers.
"""

from kvdock_server.transfer.devices.lane import TransferFailedError
from kvdock_server.transfer.fan_out.load import CopiedBytes, LoadFollower
from kvdock_server.transfer.gpu import DeviceMemoryError, GpuStats, GpuTransfers, Registration
from kvdock_server.transfer.plans.arrays import I64
from kvdock_server.transfer.plans.group_memory import (
    BlockRegion,
    DeviceAllocation,
    GroupMemory,
    LayoutError,
)

__all__ = [
    "I64",
    "BlockRegion",
    "CopiedBytes",
    "DeviceAllocation",
    "DeviceMemoryError",
    "GpuStats",
    "GpuTransfers",
    "GroupMemory",
    "LayoutError",
    "LoadFollower",
    "Registration",
    "TransferFailedError",
]

"""Scattered blocks by way of a large buffer in device memory, gathered and spread by a kernel.

For what copy engines would do too slowly: many small segments at no pitch. The kernel runs in this
process and so takes time slices from the engine's kernels; few launches over much work, on as many
blocks of threads as the device holds, take the fewest.

The kernel is compiled by CuPy, and launched like all else (driver.py). Where CuPy is absent nothing
is staged and copy engines do it all.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvdock_server.transfer.devices.driver import Driver
from kvdock_server.transfer.plans.arrays import U64
from kvdock_server.transfer.plans.pieces import (
    MAX_STAGED_BLOCKS,
    STAGED_PIECE_BYTES,
    STAGING_BUFFERS,
    ScatteredBlocks,
)
from kvdock_server.transfer.plans.planner import Planner

THREADS = 512
THREAD_BLOCKS = 528  # four for each of the 132 multiprocessors of an H100

FEW_IDS = 960
"""As many block ids as fit into a kernel's parameters."""

_SOURCE = r"""
struct FewIds { unsigned int ids[FEW_IDS]; };

extern "C" __global__ void move_blocks(
    const unsigned long long* __restrict__ device, const unsigned long long* __restrict__ stride,
    const unsigned long long* __restrict__ nbytes, const unsigned long long* __restrict__ offset,
    const unsigned int* __restrict__ many, char* __restrict__ buffer,
    unsigned long long block_bytes, long long segments, int regions, int threads_per_segment,
    int gather, const FewIds few)
{
    const int team = threadIdx.x / threads_per_segment;
    const int teams = blockDim.x / threads_per_segment;
    const int lane = threadIdx.x % threads_per_segment;
    for (long long s = (long long)blockIdx.x * teams + team; s < segments;
         s += (long long)gridDim.x * teams) {
        const long long block = s / regions;
        const int region = (int)(s % regions);
        const unsigned long long id = many ? many[block] : few.ids[block];
        UNIT* page = (UNIT*)(device[region] + id * stride[region]);
        UNIT* staged = (UNIT*)(buffer + block * block_bytes + offset[region]);
        const UNIT* __restrict__ source = gather ? page : staged;
        UNIT* __restrict__ target = gather ? staged : page;
        const int units = (int)(nbytes[region] / sizeof(UNIT));
        #pragma unroll 4
        for (int u = lane; u < units; u += threads_per_segment) target[u] = source[u];
    }
}
"""
_UNITS = {16: "uint4", 8: "uint2", 4: "unsigned int", 2: "unsigned short", 1: "unsigned char"}


@functools.cache
def missing() -> str | None:
    """Why nothing can be staged here, or None. Imports CuPy: seconds, the first time."""
    try:
        import cupy  # noqa: F401
    except Exception as error:  # whatever a broken installation raises
        return f"CuPy cannot be imported: {error}"
    return None


class RegionTable:
    """The regions of one group in device memory, for the kernel."""

    def __init__(self, driver: Driver, ordinal: int, planner: Planner) -> None:
        """Compiles the kernel and uploads the table. The device's context is current."""
        self._driver = driver
        regions = planner.regions
        self.count = len(regions.device)
        columns = np.stack([regions.device, regions.stride, regions.nbytes, regions.host_offset])
        # The widest access that every page allows, here and in the buffer.
        self.unit = alignment([*columns.ravel().tolist(), planner.block_bytes])
        self.threads_per_segment = threads_per_segment(regions.nbytes, self.unit)
        self.function = compiled(_SOURCE, "move_blocks", ordinal, self.unit)
        self._address = upload(driver, columns)

    @property
    def columns(self) -> list[int]:
        """Addresses of device address, stride, bytes and host offset of the regions."""
        return [self._address + 8 * self.count * column for column in range(4)]

    def close(self) -> None:
        self._driver.free(self._address)


class StagingBuffers:
    """Two buffers, used in turn; one direction of one device. On the lane's thread only."""

    def __init__(self, driver: Driver) -> None:
        """CudaError where the device has no memory for them."""
        self._driver = driver
        self._turn = 0
        self._released: list[int] = []
        with contextlib.ExitStack() as made:
            self._buffers = driver.allocate(STAGING_BUFFERS * STAGED_PIECE_BYTES)
            made.callback(driver.free, self._buffers)
            self._ids = driver.allocate_host(STAGING_BUFFERS * MAX_STAGED_BLOCKS * 4)
            made.callback(driver.free_host, self._ids)
            for _ in range(STAGING_BUFFERS):
                self._released.append(driver.create_event())
                made.callback(driver.destroy_event, self._released[-1])
            self._made = made.pop_all()

    @property
    def nbytes(self) -> int:
        """Bytes of device memory."""
        return STAGING_BUFFERS * STAGED_PIECE_BYTES

    def acquire(self) -> int:
        """The address of the next buffer, when whoever had it before is done with it."""
        self._turn = (self._turn + 1) % STAGING_BUFFERS
        self._driver.synchronize_event(self._released[self._turn])
        return self._buffers + self._turn * STAGED_PIECE_BYTES

    def release(self, stream: int) -> None:
        """What the stream has queued so far is the last use of the buffer acquired last."""
        self._driver.record_event(self._released[self._turn], stream)

    def launch(
        self, table: RegionTable, piece: ScatteredBlocks, stream: int, *, gather: bool
    ) -> None:
        """Queue the kernel between the blocks and the buffer acquired last."""
        # Ids go as parameters. Too many for that are read where they are, over the link, which is
        # slow while it carries loads; but then blocks are small, and so is the rate.
        few, many = (ctypes.c_uint32 * FEW_IDS)(), 0
        ids = piece.ids.astype(np.uint32)
        if len(ids) <= FEW_IDS:
            ctypes.memmove(few, ids.ctypes.data, ids.nbytes)
        else:
            many = self._ids + self._turn * MAX_STAGED_BLOCKS * 4
            ctypes.memmove(many, ids.ctypes.data, ids.nbytes)
        self._driver.launch(
            table.function,
            THREAD_BLOCKS,
            THREADS,
            stream,
            [
                *(ctypes.c_uint64(column) for column in table.columns),
                ctypes.c_uint64(many),
                ctypes.c_uint64(self._buffers + self._turn * STAGED_PIECE_BYTES),
                ctypes.c_uint64(piece.block_bytes),
                ctypes.c_int64(len(ids) * table.count),
                ctypes.c_int32(table.count),
                ctypes.c_int32(table.threads_per_segment),
                ctypes.c_int32(gather),
                few,
            ],
        )

    def close(self) -> None:
        self._made.close()


@functools.cache
def compiled(source: str, name: str, ordinal: int, unit: int) -> int:
    """A kernel of this process for a device, its accesses ``unit`` bytes wide."""
    import cupy

    with cupy.cuda.Device(ordinal):
        kernel = cupy.RawKernel(
            source, name, options=(f"-DUNIT={_UNITS[unit]}", f"-DFEW_IDS={FEW_IDS}")
        )
        kernel.compile()
        _kernels.append(kernel)
        return int(kernel.kernel.ptr)


_kernels: list[Any] = []
"""A function lives as long as what CuPy made of it."""


def upload(driver: Driver, columns: U64) -> int:
    """A table in memory of the current device, for kernels."""
    with contextlib.ExitStack() as made:
        address = driver.allocate(columns.nbytes)
        made.callback(driver.free, address)
        stream = driver.create_stream()
        try:
            driver.copy_to_device(address, columns.ctypes.data, columns.nbytes, stream)
            driver.synchronize_stream(stream)
        finally:
            driver.destroy_stream(stream)
        made.pop_all()
    return address


def alignment(numbers: Sequence[int]) -> int:
    """The widest access that addresses, strides and sizes all allow."""
    bits = functools.reduce(operator.or_, numbers)
    return max(unit for unit in _UNITS if bits % unit == 0)


def threads_per_segment(nbytes: U64, unit: int) -> int:
    """A power of two that gives each thread about four accesses of a mean page."""
    accesses = int(nbytes.mean()) // (unit * 4)
    return min(THREADS, max(1, 1 << max(0, accesses.bit_length() - 1)))

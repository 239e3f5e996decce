"""The server's two kernels, for what copy engines move too slowly: many short ranges at no pitch.

A kernel of this process takes time slices from the engine's kernels. It takes the fewest if there
are few launches with much work each, on as many blocks of threads as the device holds.

CuPy compiles the kernels, and driver.py launches them. Without CuPy there are no kernels, and copy
engines do all the work.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from kvdock_server.transfer.devices.driver import Driver
from kvdock_server.transfer.plans.arrays import I64, U64
from kvdock_server.transfer.plans.pieces import ScatteredBlocks

logger = logging.getLogger(__name__)

THREADS = 512
THREAD_BLOCKS = 528  # four for each of the 132 multiprocessors of an H100

FEW_IDS = 960
"""How many block ids fit into a kernel's parameters."""

_MOST_PAIRS = (1 << 31) // FEW_IDS - THREAD_BLOCKS * THREADS
"""The ranges of one launch of a PeerKernel are counted in 31 bits."""

_UNITS = {16: "uint4", 8: "uint2", 4: "unsigned int", 2: "unsigned short", 1: "unsigned char"}

_GATHER = r"""
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
_TO_PEER = r"""
struct FewIds { unsigned int ids[FEW_IDS]; };

extern "C" __global__ void copy_to_peer(
    const unsigned long long* __restrict__ source,
    const unsigned long long* __restrict__ source_stride,
    const unsigned long long* __restrict__ target,
    const unsigned long long* __restrict__ target_stride,
    const unsigned long long* __restrict__ nbytes,
    int segments, int pairs, int threads_per_segment, const FewIds few)
{
    const int team = threadIdx.x / threads_per_segment;
    const int teams = blockDim.x / threads_per_segment;
    const int lane = threadIdx.x % threads_per_segment;
    for (int s = blockIdx.x * teams + team; s < segments; s += gridDim.x * teams) {
        const unsigned long long id = few.ids[s / pairs];
        const int pair = s % pairs;
        const UNIT* __restrict__ from = (const UNIT*)(source[pair] + id * source_stride[pair]);
        UNIT* __restrict__ to = (UNIT*)(target[pair] + id * target_stride[pair]);
        const int units = (int)(nbytes[pair] / sizeof(UNIT));
        #pragma unroll 4
        for (int u = lane; u < units; u += threads_per_segment) to[u] = from[u];
    }
}
"""


class _Kernel:
    """A kernel of one device, and its table in device memory. The device's context is current."""

    def __init__(
        self,
        driver: Driver,
        ordinal: int,
        source: str,
        name: str,
        table: U64,
        nbytes: U64,
        aligned: Sequence[int] = (),
    ) -> None:
        """Compile the kernel and upload ``table``. ``nbytes`` are the lengths of its ranges.

        Accesses are as wide as all numbers of the table and of ``aligned`` allow. Raises CudaError,
        and what CuPy raises.
        """
        self._driver = driver
        self._rows = table.shape[1]
        unit = _alignment([*table.ravel().tolist(), *aligned])
        self._threads_per_segment = _threads_per_segment(nbytes, unit)
        self._function = compiled(source, name, ordinal, unit)
        self._address = _upload(driver, table)
        self._columns = [
            ctypes.c_uint64(self._address + column * table[0].nbytes)
            for column in range(len(table))
        ]

    def close(self) -> None:
        self._driver.free(self._address)

    def _launch(self, stream: int, arguments: Sequence[ctypes._CData]) -> None:
        self._driver.launch(
            self._function, THREAD_BLOCKS, THREADS, stream, [*self._columns, *arguments]
        )


class GatherKernel(_Kernel):
    """Moves blocks of one group between the cache and a staging buffer."""

    def __init__(self, driver: Driver, ordinal: int, regions: U64, block_bytes: int) -> None:
        """``regions`` has four rows: address, stride, bytes and host offset of each region."""
        super().__init__(
            driver, ordinal, _GATHER, "move_blocks", regions, regions[2], [block_bytes]
        )

    def launch(
        self, piece: ScatteredBlocks, buffer: int, ids_address: int, stream: int, *, gather: bool
    ) -> None:
        """Queue the kernel between the piece's blocks and the staging buffer at ``buffer``.

        ``gather``: from the cache to the buffer. ``ids_address`` is pinned host memory for the
        piece's block ids, 4 bytes each, in use until the kernel is done.
        """
        # Ids go as parameters. If they do not fit, the kernel reads them from host memory, which is
        # slow while the link carries loads. But so many blocks in a piece are small ones, and
        # these are slow in any case.
        few, many = (ctypes.c_uint32 * FEW_IDS)(), 0
        ids = piece.ids.astype(np.uint32)
        if len(ids) <= FEW_IDS:
            ctypes.memmove(few, ids.ctypes.data, ids.nbytes)
        else:
            many = ids_address
            ctypes.memmove(many, ids.ctypes.data, ids.nbytes)
        self._launch(
            stream,
            [
                ctypes.c_uint64(many),
                ctypes.c_uint64(buffer),
                ctypes.c_uint64(piece.block_bytes),
                ctypes.c_int64(len(ids) * self._rows),
                ctypes.c_int32(self._rows),
                ctypes.c_int32(self._threads_per_segment),
                ctypes.c_int32(gather),
                few,
            ],
        )


class PeerKernel(_Kernel):
    """Copies blocks to another device over NVLink: one launch in place of many copies.

    Copy engines would be fast enough, but the thread that feeds the link has no time to queue so
    many copies for every receiver.
    """

    def __init__(self, driver: Driver, ordinal: int, pairs: U64) -> None:
        """``pairs`` has the columns of ``Pairs`` as rows. ValueError if there are too many."""
        if pairs.shape[1] > _MOST_PAIRS:
            raise ValueError(f"blocks of {pairs.shape[1]} pairs")
        super().__init__(driver, ordinal, _TO_PEER, "copy_to_peer", pairs, pairs[4])

    def launch(self, ids: I64, stream: int) -> None:
        """Queue the kernel for blocks ``ids``."""
        for start in range(0, len(ids), FEW_IDS):
            some = ids[start : start + FEW_IDS].astype(np.uint32)
            few = (ctypes.c_uint32 * FEW_IDS)()
            ctypes.memmove(few, some.ctypes.data, some.nbytes)
            self._launch(
                stream,
                [
                    ctypes.c_int32(len(some) * self._rows),
                    ctypes.c_int32(self._rows),
                    ctypes.c_int32(self._threads_per_segment),
                    few,
                ],
            )


K = TypeVar("K", bound=_Kernel)


def made(make: Callable[[], K], without: str) -> K | None:
    """The kernel that ``make`` makes. None if it cannot: a warning says ``without``, and why."""
    reason = missing()
    if reason is None:
        try:
            return make()
        except Exception as error:  # CuPy raises what its compiler and loader raise
            reason = f"the kernel cannot be made: {error}"
    logger.warning("%s: %s", without, reason)
    return None


@functools.cache
def missing() -> str | None:
    """Why there are no kernels here, or None. Imports CuPy: seconds, the first time."""
    try:
        import cupy  # noqa: F401
    except Exception as error:  # whatever a broken installation raises
        return f"CuPy cannot be imported: {error}"
    return None


@functools.cache
def compiled(source: str, name: str, ordinal: int, unit: int) -> int:
    """Kernel ``name`` of ``source`` for a device, its accesses ``unit`` bytes wide; its handle."""
    import cupy

    with cupy.cuda.Device(ordinal):
        kernel = cupy.RawKernel(
            source, name, options=(f"-DUNIT={_UNITS[unit]}", f"-DFEW_IDS={FEW_IDS}")
        )
        kernel.compile()
        _kernels.append(kernel)
        return int(kernel.kernel.ptr)


_kernels: list[Any] = []
"""Keeps CuPy's objects, since a kernel's handle is valid only as long as its object lives."""


def _upload(driver: Driver, table: U64) -> int:
    """A copy of the table in memory of the current device; its address."""
    with contextlib.ExitStack() as undo:
        address = driver.allocate(table.nbytes)
        undo.callback(driver.free, address)
        stream = driver.create_stream()
        try:
            driver.copy_to_device(address, table.ctypes.data, table.nbytes, stream)
            driver.synchronize_stream(stream)
        finally:
            driver.destroy_stream(stream)
        undo.pop_all()
    return address


def _alignment(numbers: Sequence[int]) -> int:
    """Bytes of the widest access that all of these addresses, strides and sizes allow."""
    bits = functools.reduce(operator.or_, numbers)
    return max(unit for unit in _UNITS if bits % unit == 0)


def _threads_per_segment(nbytes: U64, unit: int) -> int:
    """A power of two that gives each thread about four accesses of a range of mean length."""
    accesses = int(nbytes.mean()) // (unit * 4)
    return min(THREADS, max(1, 1 << max(0, accesses.bit_length() - 1)))

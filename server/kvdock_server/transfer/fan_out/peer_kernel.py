"""Blocks from one device to another by a kernel of the first: one launch instead of many copies.

Where a block is many pieces at no pitch, copy engines could pass it on fast enough, but the thread
that feeds the link cannot feed so many copies for every receiver besides. The kernel reads where
the load has written, and writes over NVLink to where the receiver has the block.

It takes time slices from the engine on the sending device, so it is for nothing else.
"""

from __future__ import annotations

import ctypes

import numpy as np

from kvdock_server.transfer.devices.driver import Driver
from kvdock_server.transfer.devices.staging import (
    FEW_IDS,
    THREAD_BLOCKS,
    THREADS,
    alignment,
    compiled,
    threads_per_segment,
    upload,
)
from kvdock_server.transfer.plans.arrays import I64
from kvdock_server.transfer.plans.peer_planner import Pairs

_SOURCE = r"""
struct FewIds { unsigned int ids[FEW_IDS]; };

extern "C" __global__ void relay_blocks(
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
_MOST_PAIRS = (1 << 31) // FEW_IDS - THREAD_BLOCKS * THREADS
"""Segments of one launch are counted in 31 bits."""


class RelayKernel:
    """The kernel for one group of one relay. The sender's context is current in all methods."""

    def __init__(self, driver: Driver, ordinal: int, pairs: Pairs) -> None:
        """Compiles it and uploads its table. Raises what CuPy raises, ValueError for too much."""
        self._driver = driver
        self._pairs = len(pairs.nbytes)
        if self._pairs > _MOST_PAIRS:
            raise ValueError(f"blocks of {self._pairs} pieces")
        columns = np.stack(pairs)
        unit = alignment(columns.ravel().tolist())
        self._threads_per_segment = threads_per_segment(pairs.nbytes, unit)
        self._function = compiled(_SOURCE, "relay_blocks", ordinal, unit)
        self._address = upload(driver, columns)
        self._columns = [
            ctypes.c_uint64(self._address + column * columns[0].nbytes) for column in range(5)
        ]

    def launch(self, ids: I64, stream: int) -> None:
        """Queue the kernel for blocks ``ids``."""
        for start in range(0, len(ids), FEW_IDS):
            some = ids[start : start + FEW_IDS].astype(np.uint32)
            few = (ctypes.c_uint32 * FEW_IDS)()
            ctypes.memmove(few, some.ctypes.data, some.nbytes)
            self._driver.launch(
                self._function,
                THREAD_BLOCKS,
                THREADS,
                stream,
                [
                    *self._columns,
                    ctypes.c_int32(len(some) * self._pairs),
                    ctypes.c_int32(self._pairs),
                    ctypes.c_int32(self._threads_per_segment),
                    few,
                ],
            )

    def close(self) -> None:
        self._driver.free(self._address)

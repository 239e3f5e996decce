"""Staging buffers: device memory between the kernel and the copy of scattered blocks."""

from __future__ import annotations

import contextlib
from itertools import cycle
from typing import NamedTuple

from kvdock_server.transfer.devices.driver import Driver
from kvdock_server.transfer.plans.pieces import (
    MAX_STAGED_BLOCKS,
    STAGING_BUFFERS,
)

_ID_BYTES = 4


class StagingBuffer(NamedTuple):
    """Room for one staged piece: device memory for its blocks, pinned host memory for their ids.

    ``released`` is a CUDA event that is done when the last use of the buffer is.
    """

    address: int
    ids_address: int
    released: int


class StagingBuffers:
    """The buffers of one direction of one device, used in turn. On the lane's thread only."""

    def __init__(self, driver: Driver, buffer_bytes: int) -> None:
        """CudaError if the device has no memory for them."""
        self._driver = driver
        with contextlib.ExitStack() as made:
            address = driver.allocate(STAGING_BUFFERS * buffer_bytes)
            made.callback(driver.free, address)
            ids_address = driver.allocate_host(STAGING_BUFFERS * MAX_STAGED_BLOCKS * _ID_BYTES)
            made.callback(driver.free_host, ids_address)
            buffers = []
            for number in range(STAGING_BUFFERS):
                released = driver.create_event()
                made.callback(driver.destroy_event, released)
                buffers.append(
                    StagingBuffer(
                        address + number * buffer_bytes,
                        ids_address + number * MAX_STAGED_BLOCKS * _ID_BYTES,
                        released,
                    )
                )
            self._in_turn = cycle(buffers)
            self._made = made.pop_all()

    def acquire(self) -> StagingBuffer:
        """The next buffer. Waits until its last use is done."""
        buffer = next(self._in_turn)
        self._driver.synchronize_event(buffer.released)
        return buffer

    def release(self, buffer: StagingBuffer, stream: int) -> None:
        """The buffer is free again when all that the stream has queued so far is done."""
        self._driver.record_event(buffer.released, stream)

    def close(self) -> None:
        self._made.close()

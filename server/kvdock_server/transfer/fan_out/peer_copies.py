"""How blocks of one group get from one device to another: by copy engines, or by a kernel.

Copy engines do it if there are few copies to queue. Otherwise the kernel does it, which takes time
slices from the engine on the sending device.
"""

from __future__ import annotations

import logging

import numpy as np

from kvdock_server.transfer.devices import kernels
from kvdock_server.transfer.devices.device import Device
from kvdock_server.transfer.devices.driver import CudaError, Driver, Side
from kvdock_server.transfer.devices.kernels import PeerKernel
from kvdock_server.transfer.devices.libcuda import (
    CUDA_ERROR_INVALID_VALUE,
    CUDA_ERROR_NOT_SUPPORTED,
)
from kvdock_server.transfer.plans.cost_model import COST_MODEL
from kvdock_server.transfer.plans.peer_planner import PeerPlanner
from kvdock_server.transfer.plans.pieces import SERVER_PACE, ForwardedBlocks, Rectangles, Segments
from kvdock_server.transfer.plans.regions import MergedRegions

logger = logging.getLogger(__name__)

_REFUSALS = CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_SUPPORTED
"""What a driver answers to a kind of copy that it does not know."""
_COPY_US = 1.0
"""Microseconds of the thread that queueing one copy takes, beside the call itself."""
_MOST_QUEUEING = 0.3
"""To queue the copies of blocks to all receivers may take this share of the time that the blocks
take on the link to the host."""


class PeerGroup:
    """One group in which blocks of sender and receiver have the same number of bytes.

    The sending device's context is current in all methods.
    """

    def __init__(self, device: Device, source: MergedRegions, target: MergedRegions) -> None:
        """``device`` is the sending one. ``source`` are the sender's regions. ``target`` are the
        receiver's regions, as they are mapped for the sending device."""
        self._driver = device.driver
        self._planner = PeerPlanner(source, target)
        self._kernel: PeerKernel | None = None
        pairs = np.stack(self._planner.pairs)
        if pairs.shape[1] > 1:  # else a block is one copy
            self._kernel = kernels.made(
                lambda: PeerKernel(device.driver, device.ordinal, pairs),
                f"scattered blocks go on from {device.name} by copies",
            )

    def queue(self, blocks: ForwardedBlocks, stream: int) -> None:
        """Queue the copies to this receiver. CudaError if the driver refuses."""
        link_us = blocks.total_bytes / COST_MODEL.link_bytes_per_us
        queueing_us = self._planner.count(blocks.ids) * blocks.receivers * _COPY_US
        if self._kernel is not None and queueing_us > link_us * _MOST_QUEUEING:
            self._kernel.launch(blocks.ids, stream)
        else:
            segments, rectangles = self._planner.plan(blocks.ids)
            _copy_rectangles(self._driver, rectangles, stream)
            _copy_segments(self._driver, segments, stream)

    def close(self) -> None:
        if self._kernel is not None:
            self._kernel.close()


def _copy_segments(driver: Driver, segments: Segments, stream: int) -> None:
    if driver.has_batch_copy:
        try:
            for start in range(0, len(segments), SERVER_PACE.batch_segments):
                call = segments.take(slice(start, start + SERVER_PACE.batch_segments))
                driver.copy_batch(call.host, call.device, call.nbytes, stream)
            return
        except CudaError as error:
            if error.code not in _REFUSALS:
                raise
            # What the earlier batches queued is copied twice.
            logger.warning("this driver refuses batches between devices: %s", error)
    for source, target, nbytes in segments:
        driver.copy_between(target, source, nbytes, stream)


def _copy_rectangles(driver: Driver, rectangles: Rectangles, stream: int) -> None:
    if not len(rectangles):
        return
    if driver.has_batch_copy:
        try:
            driver.copy_rectangles(
                Side(rectangles.host, rectangles.host_pitch),
                Side(rectangles.device, rectangles.device_pitch),
                rectangles.width,
                rectangles.height,
                stream,
            )
            return
        except CudaError as error:
            if error.code not in _REFUSALS:
                raise
            logger.warning("this driver refuses rectangles, rows go one by one: %s", error)
    _copy_segments(driver, rectangles.rows(), stream)

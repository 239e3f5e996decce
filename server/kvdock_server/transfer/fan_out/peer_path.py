"""From the memory of one worker on to another's on another device: the second leg of a load.

A load for several workers comes from host memory once, to the first worker's device, and goes on
from there, window by window, while the next window is on its way from the host.

Which device is current when an IPC handle is opened decides what the mapping is good for. Opened
on its own device, memory is copied to from others at a tenth of the speed, and nothing tells so. So
the receiver's memory is opened a second time here, with the sender's device current, beside the
mapping that copies between it and the host use. Kernels of the sender's device may write there.

Copy engines pass on what is few copies, a kernel the rest (relay_kernel.py).
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle

import numpy as np

from kvdock_server.transfer.devices import staging
from kvdock_server.transfer.devices.block_transfer import BlockTransfer, Start
from kvdock_server.transfer.devices.copy_streams import Direction
from kvdock_server.transfer.devices.device import Device, MappedGroup, WorkerMemory
from kvdock_server.transfer.devices.driver import (
    CUDA_ERROR_INVALID_VALUE,
    CUDA_ERROR_NOT_SUPPORTED,
    CudaError,
    Driver,
    Side,
)
from kvdock_server.transfer.fan_out.peer_kernel import RelayKernel
from kvdock_server.transfer.plans.arrays import I64, U64
from kvdock_server.transfer.plans.cost_model import COPY_PRICES
from kvdock_server.transfer.plans.group_memory import LayoutError
from kvdock_server.transfer.plans.peer_planner import RelayPlanner
from kvdock_server.transfer.plans.pieces import Piece, Rectangles, RelayedBlocks, Segments
from kvdock_server.transfer.plans.planner import Planner

logger = logging.getLogger(__name__)

WINDOW_BYTES = 128 << 20
"""Queueing copies between devices takes the driver 0.12 to 0.25 ms of the lane's thread for every
window and receiver, however few they are. With windows of 32 MiB three receivers took all of the
thread's time, and the link waited for it; with 16 MiB loads took twice as long."""
LAST_WINDOW_BYTES = 32 << 20
"""Windows grow shorter towards the end: the last one's way to the receivers adds to the time of a
load, 0.25 to 0.5 ms for three of them at 376 GB/s, beside 19.7 ms for 1 GiB from the host."""

_BATCH_SEGMENTS = 512
_REFUSALS = CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_SUPPORTED
"""What a driver says to a kind of copy that it does not know."""
_COPY_US = 1.0
"""What queueing a copy takes of the thread, beyond the call."""
_MOST_QUEUEING = 0.3
"""Share of a window's time on the link that queueing its way on may take, over all receivers."""


class NoRelayError(Exception):
    """There is no way from device to device. The message says why."""


@dataclass(frozen=True, slots=True)
class _Group:
    planner: RelayPlanner
    kernel: RelayKernel | None
    """None where none is needed, or can be made."""


class Relay:
    """The way from one worker's memory to another's. Made and closed on threads that may wait."""

    def __init__(self, sender: WorkerMemory, receiver: WorkerMemory) -> None:
        """NoRelayError if there is none."""
        self._device = device = sender.device
        self.driver: Driver = device.driver
        if receiver.device is device:
            raise NoRelayError(f"both lie on {device.uuid}")
        self._lock = threading.Lock()
        self._closed = False
        self._handles: list[bytes] = []
        self._groups: dict[int | None, _Group] = {}
        self.stream = 0
        self.passed = 0
        """Event: all that was queued on ``stream`` so far is done."""
        try:
            if not self.driver.can_access_peer(device.ordinal, receiver.device.ordinal):
                raise NoRelayError(f"{device.uuid} has no access to {receiver.device.uuid}")
            sender.expect_to_pass_on()
            self.driver.set_current(device.context)
            self.stream = self.driver.create_stream()
            self.passed = self.driver.create_event()
            bases = []
            for allocation in receiver.allocations:
                bases.append(device.peer_mappings.open(allocation))
                self._handles.append(allocation.ipc_handle)
            for group_idx, group in receiver.groups.items():
                own = sender.groups.get(group_idx)
                if own is not None and own.planner.block_bytes == group.planner.block_bytes:
                    self._groups[group_idx] = self._group(own, Planner(group.planner.layout, bases))
        except (CudaError, LayoutError) as error:
            self.close()
            raise NoRelayError(
                f"memory on {receiver.device.uuid} cannot be opened for {device.uuid}: {error}"
            ) from error

    def group(self, group_idx: int | None) -> _Group:
        """A group in which blocks of sender and receiver have equally many bytes."""
        return self._groups[group_idx]

    def wait(self) -> None:
        """Return when nothing that was queued so far touches the receiver's memory any more."""
        try:
            self.driver.set_current(self._device.context)
            self.driver.synchronize_event(self.passed)
        except CudaError as error:
            logger.warning("%s failed, and with it what it passed on: %s", self._device.name, error)

    def close(self) -> None:
        """Unmap the receiver's memory. Nothing may be under way. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self.driver.set_current_to_close(self._device.context)
        for group in self._groups.values():
            if group.kernel is not None:
                group.kernel.close()
        for handle in self._handles:
            self._device.peer_mappings.close(handle)
        if self.passed:
            self.driver.destroy_event(self.passed)
        if self.stream:
            self.driver.destroy_stream(self.stream)

    def _group(self, own: MappedGroup, receiver: Planner) -> _Group:
        planner = RelayPlanner(own.planner.regions, receiver.regions)
        if len(planner.pairs.nbytes) == 1:
            return _Group(planner, None)  # a block is one copy
        reason = staging.missing()
        if reason is None:
            try:
                kernel = RelayKernel(self.driver, self._device.ordinal, planner.pairs)
                return _Group(planner, kernel)
            except Exception as error:  # CuPy raises what its compiler and loader raise
                reason = f"the kernel cannot be made: {error}"
        logger.warning("scattered blocks go on from %s by copies: %s", self._device.name, reason)
        return _Group(planner, None)


class Branch:
    """What one receiver gets of one load. On the thread of the load's lane, but for ``cut``."""

    def __init__(self, relay: Relay, group_idx: int | None) -> None:
        self._relay = relay
        self._driver = relay.driver
        self._group = relay.group(group_idx)
        self._lock = threading.Lock()
        self.failure: str | None = None
        """Why the receiver has not got everything; None as long as it has."""

    def cut(self) -> None:
        """Pass nothing on any more; return when nothing is under way. Threads that may wait."""
        with self._lock:
            self.failure = self.failure or "the receiver gave up"
        self._relay.wait()

    def pass_on(self, blocks: RelayedBlocks) -> int | None:
        """Queue it; the event that ends it, None if there is nothing to do."""
        with self._lock:
            if self.failure is not None:
                return None
            stream = self._relay.stream
            try:
                for event in blocks.after:
                    self._driver.wait_event(stream, event)
                self._queue(blocks, stream)
            except CudaError as error:
                self.failure = str(error)
                logger.warning("a reader is not filled from another device: %s", error)
            try:
                self._driver.record_event(self._relay.passed, stream)
            except CudaError:
                # What is queued has no event that anybody could wait for.
                with contextlib.suppress(CudaError):  # the first one is raised
                    self._driver.synchronize_stream(stream)
                raise
            return self._relay.passed

    def end_all(self) -> None:
        """Nothing of it is under way any more."""
        self._relay.wait()

    def _queue(self, blocks: RelayedBlocks, stream: int) -> None:
        planner, kernel = self._group.planner, self._group.kernel
        link_us = len(blocks.ids) * blocks.block_bytes / COPY_PRICES.link_bytes_per_us
        queueing_us = planner.count(blocks.ids) * blocks.receivers * _COPY_US
        if kernel is not None and queueing_us > link_us * _MOST_QUEUEING:
            kernel.launch(blocks.ids, stream)
        else:
            segments, rectangles = planner.plan(blocks.ids)
            _copy_rectangles(self._driver, rectangles, stream)
            _copy_segments(self._driver, segments, stream)


class FanOut(BlockTransfer):
    """A load into one worker's memory that goes on to others'."""

    _passed_on = True

    def __init__(
        self,
        device: Device,
        group: MappedGroup,
        ids: I64,
        hosts: U64,
        start: Start,
        branches: Sequence[Branch],
    ) -> None:
        super().__init__(device, Direction.LOAD, group, ids, hosts, start)
        self._driver = device.driver
        self._branches = branches
        self._block_bytes = group.planner.block_bytes
        self._events: list[int] = []

    @property
    def total_bytes(self) -> int:
        return 2 * super().total_bytes  # what is passed on counts like what comes

    def pieces(self) -> Iterator[Piece]:
        stage = self._may_stage()
        # Not the mover's own, which come round again with other transfers' pieces.
        for _ in range(4):
            self._events.append(self._driver.create_event())
        events = cycle([self._events[:2], self._events[2:]])
        waiting: RelayedBlocks | None = None
        for window in _windows(len(self._ids), self._block_bytes):
            ids = self._ids[window]
            yield from self._copies(ids, self._hosts[window], stage=stage)
            copied, spread = next(events)
            self._mover.mark(copied, spread)
            # Only now, so that the link always has the next window's copies to go on with.
            if waiting is not None:
                yield waiting
            receivers = len(self._branches)
            waiting = RelayedBlocks(ids, self._block_bytes, receivers, (copied, spread))
        assert waiting is not None
        yield waiting

    def start(self, piece: Piece) -> int:
        if not isinstance(piece, RelayedBlocks):
            return super().start(piece)
        try:
            ends = [branch.pass_on(piece) for branch in self._branches]
            return self._mover.join([end for end in ends if end is not None])
        except CudaError:
            for branch in self._branches:
                branch.end_all()
            self._mover.end_all()
            raise

    def finish(self) -> None:
        for event in self._events:
            self._driver.destroy_event(event)
        super().finish()


def _windows(count: int, block_bytes: int) -> Iterator[slice]:
    """Slices of ``count`` blocks: half of what is left, within the bounds of a window."""
    most, least = (max(1, nbytes // block_bytes) for nbytes in (WINDOW_BYTES, LAST_WINDOW_BYTES))
    start = 0
    while start < count:
        end = start + min(most, max(least, (count - start) // 2))
        # What would be left over goes along.
        end = end if count - end >= least else count
        yield slice(start, end)
        start = end


def _copy_segments(driver: Driver, segments: Segments, stream: int) -> None:
    columns = [
        np.ascontiguousarray(column) for column in (segments.host, segments.device, segments.nbytes)
    ]
    if driver.has_batch_copy:
        try:
            for start in range(0, len(segments), _BATCH_SEGMENTS):
                count = min(_BATCH_SEGMENTS, len(segments) - start)
                targets, sources, sizes = (column[start:].ctypes.data for column in columns)
                driver.copy_batch(targets, sources, sizes, count, stream)
            return
        except CudaError as error:
            if error.code not in _REFUSALS:
                raise
            # Whatever was queued before is copied twice.
            logger.warning("this driver refuses batches between devices: %s", error)
    for target, source, nbytes in zip(*(column.tolist() for column in columns), strict=True):
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

"""From the memory of one worker on to another's on another device: the second leg of a load.

A load for several workers comes from host memory once, to the first worker's device, and goes on
from there, window by window, while the next window is on its way from the host.

Which device is current when an IPC handle is opened decides what the mapping is good for. Opened
on its own device, memory is copied to from others at a tenth of the speed, and nothing tells so. So
the receiver's memory is opened a second time here, with the sender's device current, beside the
mapping that copies between it and the host use. Kernels of the sender's device may write there.

Copy engines pass on what came as segments or rectangles. What comes staged for a kernel to spread
is spread to the receivers by the same kernel from the same buffer: segments so short cost the
thread that feeds the link more time than they would take on it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle

import numpy as np

from kvdock_server.transfer.block_transfer import BlockTransfer, Start
from kvdock_server.transfer.cuda import Direction
from kvdock_server.transfer.device import Device, MappedGroup, WorkerMemory
from kvdock_server.transfer.driver import CUDA_ERROR_INVALID_VALUE, CudaError, Driver, Side
from kvdock_server.transfer.plan import (
    COPY_PRICES,
    I64,
    U64,
    Piece,
    Planner,
    Rectangles,
    RelayedBlocks,
    ScatteredBlocks,
    Segments,
)
from kvdock_server.transfer.relay_plan import RelayPlanner
from kvdock_server.transfer.staging import RegionTable, StagingBuffers

logger = logging.getLogger(__name__)

WINDOW_BYTES = 32 << 20
"""The last window's way to the receivers adds to the time of a load: 0.25 ms for three of them at
376 GB/s, beside 19.7 ms for 1 GiB from the host."""

_BATCH_SEGMENTS = 512


class NoRelayError(Exception):
    """There is no way from device to device. The message says why."""


@dataclass(frozen=True, slots=True)
class _Group:
    planner: RelayPlanner
    table: RegionTable | None
    """The receiver's regions as the sender's device addresses them, where blocks may be staged."""


class Relay:
    """The way from one worker's memory to another's. Made and closed on threads that may wait."""

    def __init__(self, sender: WorkerMemory, receiver: WorkerMemory) -> None:
        """NoRelayError if there is none."""
        self._device = device = sender.device
        self.driver: Driver = device.driver
        if receiver.device is device:
            raise NoRelayError(f"both lie on {device.uuid}")
        if not self.driver.can_access_peer(device.ordinal, receiver.device.ordinal):
            raise NoRelayError(f"{device.uuid} has no access to {receiver.device.uuid}")
        self._lock = threading.Lock()
        self._closed = False
        self._handles: list[bytes] = []
        self._groups: dict[int | None, _Group] = {}
        self.stream = 0
        self.copied = 0
        """Event: all copies on ``stream`` so far are done."""
        self.spread = 0
        """Event: all kernels for the receiver so far are done."""
        self.driver.set_current(device.context)
        try:
            self.stream = self.driver.create_stream()
            self.copied = self.driver.create_event()
            self.spread = self.driver.create_event()
            bases = []
            for allocation in receiver.allocations:
                bases.append(device.peer_mappings.open(allocation))
                self._handles.append(allocation.ipc_handle)
            for group_idx, group in receiver.groups.items():
                own = sender.groups.get(group_idx)
                if own is not None and own.planner.block_bytes == group.planner.block_bytes:
                    self._groups[group_idx] = self._group(own, Planner(group.planner.layout, bases))
        except Exception as error:  # of the driver's, or whatever CuPy raises
            self.close()
            raise NoRelayError(
                f"memory on {receiver.device.uuid} cannot be opened for {device.uuid}: {error}"
            ) from error

    def group(self, group_idx: int | None) -> _Group:
        """A group in which blocks of sender and receiver have equally many bytes."""
        return self._groups[group_idx]

    def wait(self) -> None:
        """Return when nothing that was queued so far touches the receiver's memory any more."""
        self.driver.set_current(self._device.context)
        self.driver.synchronize_event(self.copied)
        self.driver.synchronize_event(self.spread)

    def close(self) -> None:
        """Unmap the receiver's memory. Nothing may be under way. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self.driver.set_current(self._device.context)
        for group in self._groups.values():
            if group.table is not None:
                group.table.close()
        for handle in self._handles:
            self._device.peer_mappings.close(handle)
        for event in (self.copied, self.spread):
            if event:
                self.driver.destroy_event(event)
        if self.stream:
            self.driver.destroy_stream(self.stream)

    def _group(self, own: MappedGroup, receiver: Planner) -> _Group:
        table = None
        if own.table is not None:
            table = RegionTable(self.driver, self._device.ordinal, receiver)
        return _Group(RelayPlanner(own.planner.regions, receiver.regions), table)


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

    def pass_on(self, ids: I64, after: int) -> int | None:
        """Queue copies of blocks that are there after that event; the event that ends them."""
        with self._lock:
            if self.failure is not None:
                return None
            stream = self._relay.stream
            try:
                segments, rectangles = self._group.planner.plan(ids)
                self._driver.wait_event(stream, after)
                _copy_rectangles(self._driver, rectangles, stream)
                _copy_segments(self._driver, segments, stream)
            except CudaError as error:
                self._fail(error)
            self._driver.record_event(self._relay.copied, stream)
            return self._relay.copied

    def spread(self, staging: StagingBuffers, piece: ScatteredBlocks, stream: int) -> None:
        """Queue the kernel that takes staged blocks to the receiver."""
        with self._lock:
            if self.failure is not None:
                return
            assert self._group.table is not None
            try:
                staging.launch(self._group.table, piece, stream, gather=False)
            except CudaError as error:
                self._fail(error)
            self._driver.record_event(self._relay.spread, stream)

    def _fail(self, error: CudaError) -> None:
        self.failure = str(error)
        logger.warning("a reader is not filled from another device: %s", error)


class FanOut(BlockTransfer):
    """A load into one worker's memory that goes on to others'."""

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
        self._windows_copied: list[int] = []

    def pieces(self) -> Iterator[Piece]:
        stage = self._may_stage()
        # A smaller window would not be staged at all.
        window_bytes = COPY_PRICES.stage_from_bytes if stage else WINDOW_BYTES
        # Not the mover's own, which come round again with other transfers' pieces.
        self._windows_copied = [self._driver.create_event() for _ in range(2)]
        events = cycle(self._windows_copied)
        waiting: RelayedBlocks | None = None
        for window in _windows(len(self._ids), self._block_bytes, window_bytes):
            ids = self._ids[window]
            copied = np.full(len(ids), True)
            for piece in self._copies(ids, self._hosts[window], stage=stage):
                yield piece
                if isinstance(piece, ScatteredBlocks):
                    copied &= ~np.isin(ids, piece.ids)
            event = next(events)
            self._mover.mark(event)
            # Only now, so that the link always has the next window's copies to go on with.
            if waiting is not None:
                yield waiting
            waiting = None
            if copied.any():
                receivers = len(self._branches)
                waiting = RelayedBlocks(ids[copied], self._block_bytes, receivers, after=event)
        if waiting is not None:
            yield waiting

    def start(self, piece: Piece) -> int:
        if isinstance(piece, RelayedBlocks):
            ends = [branch.pass_on(piece.ids, piece.after) for branch in self._branches]
            return self._mover.join([end for end in ends if end is not None])
        return self._mover.start(piece, self._group.table, self._spread)

    def finish(self) -> None:
        for event in self._windows_copied:
            self._driver.destroy_event(event)
        super().finish()

    def _spread(self, staging: StagingBuffers, piece: ScatteredBlocks, stream: int) -> None:
        for branch in self._branches:
            branch.spread(staging, piece, stream)


def _windows(count: int, block_bytes: int, window_bytes: int) -> Iterator[slice]:
    """Slices of ``count`` blocks of equal length, of so many bytes or, if there are fewer, one."""
    windows = max(1, count * block_bytes // window_bytes)
    for window in range(windows):
        yield slice(count * window // windows, count * (window + 1) // windows)


def _copy_segments(driver: Driver, segments: Segments, stream: int) -> None:
    if not driver.has_batch_copy:
        for source, target, nbytes in zip(
            segments.device.tolist(), segments.host.tolist(), segments.nbytes.tolist(), strict=True
        ):
            driver.copy_between(target, source, nbytes, stream)
        return
    columns = [
        np.ascontiguousarray(column) for column in (segments.host, segments.device, segments.nbytes)
    ]
    for start in range(0, len(segments), _BATCH_SEGMENTS):
        count = min(_BATCH_SEGMENTS, len(segments) - start)
        targets, sources, sizes = (column[start:].ctypes.data for column in columns)
        driver.copy_batch(targets, sources, sizes, count, stream)


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
            if error.code != CUDA_ERROR_INVALID_VALUE:
                raise
            logger.warning("this driver refuses rectangles, rows go one by one: %s", error)
    _copy_segments(driver, rectangles.rows(), stream)

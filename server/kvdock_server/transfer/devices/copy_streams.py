"""The CUDA streams that carry out pieces in one direction of one device, on its lane's thread."""

from __future__ import annotations

import contextlib
import enum
import logging
import time
from collections.abc import Iterator, Sequence
from itertools import cycle
from typing import TypeVar

import numpy as np

from kvdock_server.transfer.devices.driver import CudaError, Driver, Side
from kvdock_server.transfer.devices.kernels import GatherKernel
from kvdock_server.transfer.devices.libcuda import CUDA_ERROR_INVALID_VALUE, rectangle
from kvdock_server.transfer.devices.pinning import Pinned
from kvdock_server.transfer.devices.staging import StagingBuffers
from kvdock_server.transfer.plans.pieces import (
    CopyPiece,
    Pace,
    Rectangles,
    ScatteredBlocks,
    Segments,
)

T = TypeVar("T")

logger = logging.getLogger(__name__)

_EVENTS = 16
"""At least two for each piece that may be under way."""

_FIRST_SEGMENTS = 32
_FIRST_RECTANGLES = 4
"""Copies in the first call of the driver if the link is idle. Further calls have more and more. The
link begins only when a call returns, and a call with 512 segments takes up to a millisecond on
a processor that rested."""


class Direction(enum.Enum):
    """STORE is from the device to the host, LOAD from the host to the device."""

    STORE = "store"
    LOAD = "load"


class CopyStreams:
    """Queues copies on streams of its own. All methods run on one thread.

    A ticket stands for one started piece: an event that is done when the piece is.
    """

    def __init__(
        self, driver: Driver, context: int, direction: Direction, pool: Pinned, pace: Pace
    ) -> None:
        self._driver = driver
        self._context = context
        self.direction = direction
        self._pool = pool
        self._pace = pace
        self._streams: list[int] = []
        """For copies, for kernels, and for the ends of work on other streams."""
        self._events: list[int] = []
        self._staging: StagingBuffers | None = None
        self._under_way = 0
        self.failure: str | None = None
        """Why this process can copy nothing any more. Any thread may read it."""

    def open(self) -> None:
        try:
            self._driver.set_current(self._context)
            for _ in range(3):
                self._streams.append(self._driver.create_stream())
            for _ in range(_EVENTS):
                self._events.append(self._driver.create_event())
        except CudaError as error:
            self.failure = str(error)
            raise
        self._next_event = cycle(self._events)

    def start(self, piece: CopyPiece, kernel: GatherKernel | None) -> int:
        """Queue a piece; its ticket. ``kernel`` is the group's, needed for scattered blocks.

        CudaError if the piece cannot be queued. Then no copy of the piece is under way.
        """
        try:
            ticket = self._start(piece, kernel)
        except CudaError:
            self.end_all()
            raise
        self._under_way += 1
        return ticket

    def _start(self, piece: CopyPiece, kernel: GatherKernel | None) -> int:
        copies, kernels, _ = self._streams
        last = copies
        if isinstance(piece, Segments):
            self._copy_segments(piece, copies)
        elif isinstance(piece, Rectangles):
            self._copy_rectangles(piece, copies)
        else:
            assert kernel is not None
            last = self._copy_staged(piece, kernel, copies, kernels)
        event = next(self._next_event)
        self._driver.record_event(event, last)
        return event

    def mark(self, copied: int, scattered: int) -> None:
        """Record two events. When both are done, so are all pieces started so far."""
        copies, kernels, _ = self._streams
        self._driver.record_event(copied, copies)
        self._driver.record_event(scattered, kernels)

    def join(self, events: Sequence[int]) -> int:
        """A ticket for work on other streams of the device: done when all ``events`` are."""
        *_, ends = self._streams
        for event in events:
            self._driver.wait_event(ends, event)
        ticket = next(self._next_event)
        self._driver.record_event(ticket, ends)
        self._under_way += 1
        return ticket

    def wait(self, ticket: int, *, more_under_way: bool) -> None:
        """Return when the ticket's piece is done. CudaError if the piece failed."""
        self._under_way -= 1
        try:
            if more_under_way:
                # There is time, since the link is busy with the next piece.
                while not self._driver.query_event(ticket):
                    time.sleep(self._pace.poll_seconds)
            else:
                self._driver.synchronize_event(ticket)
        except CudaError:
            self.end_all()
            raise

    def end_all(self) -> None:
        """After an error: wait until nothing is under way on these streams any more."""
        for stream in self._streams:
            with contextlib.suppress(CudaError):  # the caller raises the first error
                self._driver.synchronize_stream(stream)
        self.check()

    def check(self) -> None:
        """After an error: set ``failure`` if nothing can be copied any more.

        A refused call leaves everything else as it was. But once work on the device has failed (a
        memory error, a link or device that is gone), CUDA answers every call with this error.
        """
        try:
            self._driver.query_event(self._events[0])
        except CudaError as error:
            self.failure = str(error)

    def close(self) -> None:
        self.release_staging()
        for event in self._events:
            self._driver.destroy_event(event)
        for stream in self._streams:
            self._driver.destroy_stream(stream)

    def reserve_staging(self) -> bool:
        """Make the staging buffers if there are none. False if the device lacks the memory."""
        if self._staging is None:
            try:
                self._staging = StagingBuffers(self._driver, self._pace.staged_bytes)
            except CudaError as error:
                logger.warning("no memory to stage in, copy engines do it all: %s", error)
                return False
        return True

    def release_staging(self) -> None:
        """Give the staging buffers back. No staged piece may be under way."""
        if self._staging is not None:
            self._staging.close()
            self._staging = None

    def _copy_segments(self, segments: Segments, stream: int) -> None:
        if not self._driver.has_batch_copy:
            self._copy_one_by_one(segments, stream)
            return
        pinned = self._pool.covers(segments.host)
        if pinned is not None and not pinned.all():
            self._copy_one_by_one(segments.take(~pinned), stream)
            segments = segments.take(pinned)
            if not len(segments):
                return
        targets, sources = self._sides(segments.device, segments.host)
        for call in self._calls(len(segments), _FIRST_SEGMENTS, self._pace.batch_segments):
            self._driver.copy_batch(targets[call], sources[call], segments.nbytes[call], stream)

    def _calls(self, count: int, first: int, most: int) -> Iterator[slice]:
        """Slices of ``count`` copies, one slice for each call of the driver."""
        size = most if self._under_way else first
        start = 0
        while start < count:
            yield slice(start, start + size)
            start, size = start + size, min(self._pace.call_growth * size, most)

    def _sides(self, device: T, host: T) -> tuple[T, T]:
        """The target's side and the source's."""
        return (host, device) if self.direction is Direction.STORE else (device, host)

    def _copy_one_by_one(self, segments: Segments, stream: int) -> None:
        for device, host, nbytes in segments:
            if self.direction is Direction.STORE:
                self._driver.copy_to_host(host, device, nbytes, stream)
            else:
                self._driver.copy_to_device(device, host, nbytes, stream)

    def _copy_rectangles(self, rectangles: Rectangles, stream: int) -> None:
        pinned = self._pool.covers(rectangles.host)
        try:
            if self._driver.has_batch_copy and (pinned is None or pinned.all()):
                for call in self._calls(len(rectangles), _FIRST_RECTANGLES, len(rectangles)):
                    self._copy_rectangles_at_once(rectangles.take(call), stream)
            else:
                self._copy_rectangles_one_by_one(rectangles, stream)
        except CudaError as error:
            if error.code != CUDA_ERROR_INVALID_VALUE:
                raise
            # Large caches have pitches of 2 GiB (CU_DEVICE_ATTRIBUTE_MAX_PITCH) or more, which are
            # not documented to work. With driver 580 they do, also beyond 4 GiB (tests/gpu).
            logger.warning("this driver refuses rectangles, rows go one by one: %s", error)
            self._copy_segments(rectangles.rows(), stream)

    def _copy_rectangles_at_once(self, rectangles: Rectangles, stream: int) -> None:
        device = Side(rectangles.device, rectangles.device_pitch)
        host = Side(rectangles.host, rectangles.host_pitch)
        targets, sources = self._sides(device, host)
        self._driver.copy_rectangles(targets, sources, rectangles.width, rectangles.height, stream)

    def _copy_rectangles_one_by_one(self, rectangles: Rectangles, stream: int) -> None:
        to_host = self.direction is Direction.STORE
        for device, host, width, height, device_pitch, host_pitch in rectangles:
            copy = rectangle(device, host, width, height, device_pitch, host_pitch, to_host=to_host)
            self._driver.copy_2d(copy, stream)

    def _copy_staged(
        self, piece: ScatteredBlocks, kernel: GatherKernel, copies: int, kernels: int
    ) -> int:
        """Queue kernel and copy, each on its own stream, so that neighbouring pieces overlap.

        Returns the stream on which the piece ends.
        """
        assert self._staging is not None
        buffer = self._staging.acquire()
        in_buffer = Segments(
            piece.host.device + np.uint64(buffer.address), piece.host.host, piece.host.nbytes
        )
        event = next(self._next_event)
        if self.direction is Direction.STORE:
            kernel.launch(piece, buffer.address, buffer.ids_address, kernels, gather=True)
            self._driver.record_event(event, kernels)
            self._driver.wait_event(copies, event)
            self._copy_segments(in_buffer, copies)
            last = copies
        else:
            self._copy_segments(in_buffer, copies)
            self._driver.record_event(event, copies)
            self._driver.wait_event(kernels, event)
            kernel.launch(piece, buffer.address, buffer.ids_address, kernels, gather=False)
            last = kernels
        self._staging.release(buffer, last)
        return last

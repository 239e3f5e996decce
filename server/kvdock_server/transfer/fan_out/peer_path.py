"""Paths from one worker's memory to another worker's on another device.

A mapping of memory serves only the device that was current when the IPC handle was opened. Other
devices copy through this mapping at a tenth of the speed, silently. The receiver's memory is mapped
for its own device, for copies from and to the host. So it is mapped here a second time, for the
sender's device. Copies and kernels of the sender's device use the second mapping.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from kvdock_server.transfer.devices.driver import CudaError
from kvdock_server.transfer.devices.mapped_memory import MappedMemory
from kvdock_server.transfer.fan_out.peer_copies import PeerGroup
from kvdock_server.transfer.plans.group_memory import LayoutError
from kvdock_server.transfer.plans.pieces import ForwardedBlocks
from kvdock_server.transfer.plans.regions import merged

logger = logging.getLogger(__name__)

_OPEN_SECONDS = 5.0
"""The first path of a server may have to wait until its kernel is compiled."""


class NoPeerPathError(Exception):
    """One device cannot copy to the other. The message says why."""


class PeerPath:
    """A path from ``sender`` to ``receiver``. Made and closed on threads that may wait."""

    def __init__(self, sender: MappedMemory, receiver: MappedMemory) -> None:
        """NoPeerPathError if there is no path."""
        self._device = device = sender.device
        self.driver = device.driver
        if receiver.device is device:
            raise NoPeerPathError(f"both lie on {device.uuid}")
        self._lock = threading.Lock()
        self._closed = False
        self._handles: list[bytes] = []
        self.groups: dict[int | None, PeerGroup] = {}  # by group_idx
        self.stream = 0
        self.forwarded = 0
        """CUDA event, done when all that was queued on ``stream`` so far is done."""
        try:
            if not self.driver.can_access_peer(device.ordinal, receiver.device.ordinal):
                raise NoPeerPathError(f"{device.uuid} has no access to {receiver.device.uuid}")
            sender.expect_forwarding()
            self.driver.set_current(device.context)
            self.stream = self.driver.create_stream()
            self.forwarded = self.driver.create_event()
            bases = []
            for allocation in receiver.allocations:
                bases.append(device.peer_mappings.open(allocation))
                self._handles.append(allocation.ipc_handle)
            for group_idx, group in receiver.groups.items():
                own = sender.groups.get(group_idx)
                if own is not None and own.planner.block_bytes == group.planner.block_bytes:
                    regions = merged(group.planner.layout, bases)
                    self.groups[group_idx] = PeerGroup(device, own.planner.regions, regions)
        except (CudaError, LayoutError) as error:
            self.close()
            raise NoPeerPathError(
                f"memory on {receiver.device.uuid} cannot be opened for {device.uuid}: {error}"
            ) from error

    def wait(self) -> None:
        """Return when nothing that was queued so far touches the receiver's memory any more."""
        try:
            self.driver.set_current(self._device.context)
            self.driver.synchronize_event(self.forwarded)
        except CudaError as error:
            logger.warning("%s failed, and with it what it passed on: %s", self._device.name, error)

    def close(self) -> None:
        """Unmap the receiver's memory. Nothing may be under way. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self.driver.set_current_to_close(self._device.context)
        for group in self.groups.values():
            group.close()
        for handle in self._handles:
            self._device.peer_mappings.close(handle)
        if self.forwarded:
            self.driver.destroy_event(self.forwarded)
        if self.stream:
            self.driver.destroy_stream(self.stream)


class PeerBranch:
    """One receiver's share of one load. On the thread of the load's lane, except ``cut``."""

    def __init__(self, path: PeerPath, group_idx: int | None) -> None:
        """The path must have that group."""
        self._path = path
        self._driver = path.driver
        self._group = path.groups[group_idx]
        self._lock = threading.Lock()
        self.failure: str | None = None
        """Why the receiver has not got everything that was forwarded; None if it has."""

    def cut(self) -> None:
        """Forward nothing more; return when nothing is under way. For threads that may wait."""
        with self._lock:
            self.failure = self.failure or "the receiver gave up"
        self._path.wait()

    def forward(self, blocks: ForwardedBlocks) -> int | None:
        """Queue the copies of these blocks; the event that is done when they are.

        None if the receiver has failed or given up. CudaError if the device takes no more work.
        """
        with self._lock:
            if self.failure is not None:
                return None
            stream = self._path.stream
            try:
                for event in blocks.after:
                    self._driver.wait_event(stream, event)
                self._group.queue(blocks, stream)
            except CudaError as error:
                self.failure = str(error)
                logger.warning("a reader is not filled from another device: %s", error)
            try:
                self._driver.record_event(self._path.forwarded, stream)
            except CudaError:
                # There is no event with which to wait for what is queued.
                with contextlib.suppress(CudaError):  # the first error is raised
                    self._driver.synchronize_stream(stream)
                raise
            return self._path.forwarded

    def end_all(self) -> None:
        """Return when nothing of the path is under way any more."""
        self._path.wait()


class PeerPaths:
    """All paths, each opened when it is first wanted. Methods belong to the event loop."""

    def __init__(self, driver_threads: ThreadPoolExecutor) -> None:
        self._driver_threads = driver_threads
        self._opened: dict[tuple[MappedMemory, MappedMemory], asyncio.Task[PeerPath | None]] = {}

    def between(
        self, sender: MappedMemory, receiver: MappedMemory
    ) -> asyncio.Future[PeerPath | None]:
        """The path, None if there is none. ``close`` must not have been called for either."""
        opened = self._opened.get((sender, receiver))
        if opened is None:
            # Entered before the path is open, so that a ``close`` meanwhile finds it.
            opened = asyncio.create_task(self._open(sender, receiver))
            self._opened[sender, receiver] = opened
        return asyncio.shield(opened)

    async def open_in_time(
        self, sender: MappedMemory, receivers: Sequence[MappedMemory], deadline: float
    ) -> list[PeerPath | None]:
        """The path to each receiver; None if there is no path, or none yet.

        Waits for half of the time until ``deadline`` (time.monotonic) at most.
        """
        paths = [self.between(sender, receiver) for receiver in receivers]
        if paths:
            await asyncio.wait(paths, timeout=min(_OPEN_SECONDS, (deadline - time.monotonic()) / 2))
        return [path.result() if path.done() else None for path in paths]

    async def close(self, memory: MappedMemory) -> None:
        """Close every path from a worker's memory and to it. Nothing may be under way there."""
        for pair in [pair for pair in self._opened if memory in pair]:
            # The worker at the other end may be closing at the same time.
            opened = self._opened.pop(pair, None)
            path = await opened if opened is not None else None
            if path is not None:
                await asyncio.wrap_future(self._driver_threads.submit(path.close))

    async def _open(self, sender: MappedMemory, receiver: MappedMemory) -> PeerPath | None:
        try:
            path = await asyncio.wrap_future(
                self._driver_threads.submit(PeerPath, sender, receiver)
            )
        except NoPeerPathError as error:
            logger.info("each reader gets its own copy from the pool: %s", error)
            return None
        except Exception:
            logger.exception("each reader gets its own copy from the pool")
            return None
        logger.info("what %s loads goes on to %s", sender.device.uuid, receiver.device.uuid)
        return path

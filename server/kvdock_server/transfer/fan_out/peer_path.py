"""The path from one worker's memory to another worker's on another device.

A mapping of the receiver's memory serves only one device: the one that was current when its IPC
handle was opened. Through a mapping made for the memory's own device, other devices copy at a tenth
of the speed, and nothing tells so. So the receiver's memory is opened a second time here, with the
sender's device current. The first mapping stays, for copies between the receiver and the host.
Kernels of the sender's device may write through the second one.
"""

from __future__ import annotations

import contextlib
import logging
import threading

from kvdock_server.transfer.devices.driver import CudaError
from kvdock_server.transfer.devices.mapped_memory import MappedMemory
from kvdock_server.transfer.fan_out.peer_copies import PeerGroup
from kvdock_server.transfer.plans.group_memory import LayoutError
from kvdock_server.transfer.plans.pieces import ForwardedBlocks
from kvdock_server.transfer.plans.regions import merged

logger = logging.getLogger(__name__)


class NoPeerPathError(Exception):
    """One device cannot copy to the other. The message says why."""


class PeerPath:
    """Copies go from ``sender`` to ``receiver``. Made and closed on threads that may wait."""

    def __init__(self, sender: MappedMemory, receiver: MappedMemory) -> None:
        """NoPeerPathError if there is no path."""
        self._device = device = sender.device
        self.driver = device.driver
        if receiver.device is device:
            raise NoPeerPathError(f"both lie on {device.uuid}")
        self._lock = threading.Lock()
        self._closed = False
        self._handles: list[bytes] = []
        self.groups: dict[int | None, PeerGroup] = {}
        """By group_idx."""
        self.stream = 0
        self.forwarded = 0
        """CUDA event. It is done when all that was queued on ``stream`` so far is."""
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
                    self.groups[group_idx] = PeerGroup(
                        self.driver,
                        device.ordinal,
                        device.name,
                        own.planner.regions,
                        merged(group.planner.layout, bases),
                    )
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
    """What one receiver gets of one load. On the thread of the load's lane, except ``cut``."""

    def __init__(self, path: PeerPath, group_idx: int | None) -> None:
        """The path must have that group."""
        self._path = path
        self._driver = path.driver
        self._group = path.groups[group_idx]
        self._lock = threading.Lock()
        self.failure: str | None = None
        """Why the receiver has not got everything; None as long as it has."""

    def cut(self) -> None:
        """Forward nothing any more; return when nothing is under way. Threads that may wait."""
        with self._lock:
            self.failure = self.failure or "the receiver gave up"
        self._path.wait()

    def forward(self, blocks: ForwardedBlocks) -> int | None:
        """Queue the copies of these blocks.

        Returns the event that is done when they are, None if there is nothing to do. CudaError if
        the device takes no more work.
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
                # What is queued has no event that anybody could wait for.
                with contextlib.suppress(CudaError):  # the first error is raised
                    self._driver.synchronize_stream(stream)
                raise
            return self._path.forwarded

    def end_all(self) -> None:
        """Return when nothing of the path is under way any more."""
        self._path.wait()

"""One GPU as the server uses it: a context, the memory mapped in it, and two lanes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from uuid import UUID

import numpy as np

from kvdock_server.transfer.devices import kernels
from kvdock_server.transfer.devices.copy_streams import CopyStreams, Direction
from kvdock_server.transfer.devices.driver import Driver
from kvdock_server.transfer.devices.kernels import GatherKernel
from kvdock_server.transfer.devices.lane import Lane
from kvdock_server.transfer.devices.opened_events import OpenedEvents
from kvdock_server.transfer.devices.pinning import Pinned
from kvdock_server.transfer.plans.group_memory import DeviceAllocation, GroupMemory, LayoutError
from kvdock_server.transfer.plans.pieces import Pace, Piece
from kvdock_server.transfer.plans.planner import Planner

logger = logging.getLogger(__name__)


class MappedGroup(NamedTuple):
    """One group of a worker whose memory is mapped."""

    planner: Planner
    kernel: GatherKernel | None
    """For scattered blocks. None where nothing is staged."""


class Device:
    """One GPU. Made when its first worker registers; lives as long as the server."""

    def __init__(
        self, driver: Driver, ordinal: int, pool: Pinned, pace: Pace, socket: int | None = None
    ) -> None:
        """CudaError if the device gives no context.

        CUDA's threads and those of the lanes are started here, and run where this one does.
        """
        self.driver = driver
        self.ordinal = ordinal
        self.uuid = format_uuid(driver.device_uuids()[ordinal])
        self.name = driver.device_name(ordinal)
        self.context = driver.retain_context(ordinal)
        self.pool = pool
        self.pace = pace
        self.socket = socket
        self.mappings = Mappings(driver)
        self.peer_mappings = Mappings(driver, sizes_are_known=True)
        """Memory of other devices, opened for copies from this one."""
        self._workers: set[OpenedEvents] = set()
        self._lock = threading.Lock()
        self.streams: dict[Direction, CopyStreams] = {}
        """Used by the lane of the same direction, on its thread."""
        self.lanes: dict[Direction, Lane] = {}
        for direction in Direction:
            streams = CopyStreams(driver, self.context, direction, pool, pace)
            self.streams[direction] = streams
            self.lanes[direction] = Lane(
                f"{direction.value}-gpu{ordinal}", streams, pace.under_way_bytes
            )

    def planned(self, layout: GroupMemory, bases: Sequence[int]) -> MappedGroup:
        """A group whose allocations lie at ``bases`` in this process. Its context is current."""
        planner = Planner(layout, bases, borders=self.pool.borders, pace=self.pace)
        kernel = self.gather_kernel(planner) if planner.may_stage(forwarded=False) else None
        return MappedGroup(planner, kernel)

    def gather_kernel(self, planner: Planner) -> GatherKernel | None:
        """The kernel for the scattered blocks of a group; None if it cannot be made."""
        regions = planner.regions
        table = np.stack([regions.device, regions.stride, regions.nbytes, regions.host_offset])
        return kernels.made(
            lambda: GatherKernel(self.driver, self.ordinal, table, planner.block_bytes),
            f"scattered blocks on {self.name} go by copy engines, at up to half the speed",
        )

    def worker_came(self, events: OpenedEvents) -> None:
        """A worker registers. ``events`` stand for the worker here."""
        with self._lock:
            self._workers.add(events)

    def worker_left(self, events: OpenedEvents) -> None:
        """A worker leaves. With the last one the staging buffers are freed."""
        with self._lock:
            self._workers.discard(events)
            idle = not self._workers
        if idle:
            for direction, lane in self.lanes.items():
                lane.submit(_ReleaseStaging(self, self.streams[direction]))

    @property
    def has_workers(self) -> bool:
        return bool(self._workers)

    @property
    def failure(self) -> str | None:
        """Why this process cannot use the device any more; None if it can."""
        failures = (streams.failure for streams in self.streams.values())
        return next((failure for failure in failures if failure is not None), None)

    def close(self) -> None:
        """End all transfers and unmap everything. The context stays until the process ends."""
        for lane in self.lanes.values():
            lane.close()
        self.driver.set_current_to_close(self.context)
        for events in list(self._workers):
            events.close_all()
        self.peer_mappings.close_all()
        self.mappings.close_all()


@dataclass(slots=True)
class _Mapping:
    address: int
    nbytes: int
    users: int = 0


class Mappings:
    """Other processes' allocations, mapped for one device: each opened once, and closed once.

    Layers share allocations, and a worker that registers again names allocations that are open. The
    driver refuses to open a handle twice, and one close ends the mapping for all its users. So
    users are counted here. Any thread with the device's context current.
    """

    def __init__(self, driver: Driver, *, sizes_are_known: bool = False) -> None:
        """``sizes_are_known``: the sizes of all allocations were checked before."""
        self._driver = driver
        self._sizes_are_known = sizes_are_known
        self._lock = threading.Lock()
        self._open: dict[bytes, _Mapping] = {}

    def open(self, allocation: DeviceAllocation) -> int:
        """The allocation's address here. Each call needs its own ``close``.

        CudaError if it cannot be mapped, LayoutError if it is smaller than described.
        """
        with self._lock:
            mapping = self._open.get(allocation.ipc_handle)
            if mapping is None:
                mapping = self._map(allocation)
                self._open[allocation.ipc_handle] = mapping
            mapping.users += 1
        if allocation.nbytes > mapping.nbytes:
            self.close(allocation.ipc_handle)
            raise LayoutError(
                f"an allocation is described with {allocation.nbytes} bytes, and has "
                f"{mapping.nbytes}: take its size from cuMemGetAddressRange"
            )
        return mapping.address

    def close(self, ipc_handle: bytes) -> None:
        """Take back one ``open``."""
        with self._lock:
            mapping = self._open.get(ipc_handle)
            if mapping is None:
                return  # the device was closed before
            mapping.users -= 1
            if not mapping.users:
                del self._open[ipc_handle]
                self._driver.ipc_close_memory(mapping.address)

    def close_all(self) -> None:
        """End all mappings, whoever uses them."""
        with self._lock:
            while self._open:
                _, mapping = self._open.popitem()
                self._driver.ipc_close_memory(mapping.address)

    def _map(self, allocation: DeviceAllocation) -> _Mapping:
        address = self._driver.ipc_open_memory(allocation.ipc_handle)
        if self._sizes_are_known:
            return _Mapping(address, allocation.nbytes)
        try:
            base, nbytes = self._driver.allocation(address)
            return _Mapping(address, nbytes - (address - base))
        except BaseException:
            self._driver.ipc_close_memory(address)
            raise


class _ReleaseStaging:
    """A transfer without bytes: frees the staging buffers on the lane's thread, in its turn."""

    def __init__(self, device: Device, streams: CopyStreams) -> None:
        self._device = device
        self._streams = streams

    @property
    def total_bytes(self) -> int:
        return 0

    def ready(self) -> bool:
        return True

    def pieces(self) -> Iterator[Piece]:
        return iter(())

    def start(self, piece: Piece) -> int:
        raise NotImplementedError(f"there is no piece: {piece}")

    def finish(self) -> None:
        if not self._device.has_workers:
            self._streams.release_staging()


def format_uuid(uuid: bytes) -> str:
    """A device's 16-byte UUID as nvidia-smi prints it."""
    return f"GPU-{UUID(bytes=uuid)}"

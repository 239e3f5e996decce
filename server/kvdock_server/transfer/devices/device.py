"""One GPU as the server uses it: a context, the workers' memory mapped in it, and two lanes."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvdock_server.transfer.devices import staging
from kvdock_server.transfer.devices.copy_streams import DeviceMover, Direction
from kvdock_server.transfer.devices.driver import Driver
from kvdock_server.transfer.devices.lane import Job, Lane, Transfer
from kvdock_server.transfer.devices.opened_events import ReadyEvents
from kvdock_server.transfer.devices.pinning import PinnedPool
from kvdock_server.transfer.devices.staging import RegionTable
from kvdock_server.transfer.plans.group_memory import DeviceAllocation, GroupLayout, LayoutError
from kvdock_server.transfer.plans.pieces import Piece
from kvdock_server.transfer.plans.planner import Planner

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DeviceStats:
    """A device that workers have registered memory on since the server's start.

    ``copied_bytes`` is by direction ("store", "load") and kind of copy ("Segments", "Rectangles",
    "ScatteredBlocks", and "RelayedBlocks" for what went on to other devices).
    """

    uuid: str
    name: str
    workers: int
    mapped_bytes: int
    staging_bytes: int
    copied_bytes: Mapping[tuple[str, str], int]


class Device:
    """Made when the first worker of a GPU registers; lives as long as the server."""

    def __init__(self, driver: Driver, ordinal: int, pool: PinnedPool) -> None:
        """CudaError if the device gives no context."""
        self.driver = driver
        self.ordinal = ordinal
        self.uuid = format_uuid(driver.device_uuids()[ordinal])
        self.name = driver.device_name(ordinal)
        self.context = driver.retain_context(ordinal)
        self.pool = pool
        self.mappings = Mappings(driver)
        self.peer_mappings = Mappings(driver, sizes_are_known=True)
        """Memory of other devices, opened for copies from this one."""
        self._workers: set[WorkerMemory] = set()
        self._lock = threading.Lock()
        self._copied: Counter[tuple[str, str]] = Counter()
        self._movers: dict[Direction, DeviceMover] = {}
        self._lanes: dict[Direction, Lane] = {}
        for direction in Direction:
            mover = DeviceMover(driver, self.context, direction, pool)
            self._movers[direction] = mover
            self._lanes[direction] = Lane(
                f"{direction.value}-gpu{ordinal}", mover, moved=self._counter(direction)
            )

    def mover(self, direction: Direction) -> DeviceMover:
        """For transfers of that direction, which use it on their lane's thread only."""
        return self._movers[direction]

    def submit(self, direction: Direction, transfer: Transfer, deadline: float) -> Job:
        """Queue a transfer of this device."""
        return self._lanes[direction].submit(transfer, deadline)

    def region_table(self, planner: Planner) -> RegionTable | None:
        """What staging needs to know of a group. None where nothing can be staged."""
        reason = staging.missing()
        if reason is None:
            try:
                return RegionTable(self.driver, self.ordinal, planner)
            except Exception as error:  # CuPy raises what its compiler and loader raise
                reason = f"the staging kernel cannot be made: {error}"
        logger.warning(
            "scattered blocks on %s go by copy engines, at up to half the speed: %s",
            self.name,
            reason,
        )
        return None

    def worker_came(self, worker: WorkerMemory) -> None:
        with self._lock:
            self._workers.add(worker)

    def worker_left(self, worker: WorkerMemory) -> None:
        """Gives back the staging buffers with the last worker."""
        with self._lock:
            self._workers.discard(worker)
            idle = not self._workers
        if idle:
            for direction, lane in self._lanes.items():
                lane.submit(_ReleaseStaging(self, self._movers[direction]))

    @property
    def has_workers(self) -> bool:
        return bool(self._workers)

    @property
    def failure(self) -> str | None:
        """Why this process cannot use the device any more, until it is started again."""
        failures = (mover.failure for mover in self._movers.values())
        return next((failure for failure in failures if failure is not None), None)

    def stats(self) -> DeviceStats:
        """A snapshot. Any thread."""
        return DeviceStats(
            self.uuid,
            self.name,
            len(self._workers),
            self.mappings.mapped_bytes,
            sum(mover.staging_bytes for mover in self._movers.values()),
            dict(self._copied),
        )

    def close(self) -> None:
        """End all transfers and unmap everything. The context stays until the process ends."""
        for lane in self._lanes.values():
            lane.close()
        self.driver.set_current_to_close(self.context)
        for worker in list(self._workers):
            worker.ready_events.close_all()
        self.peer_mappings.close_all()
        self.mappings.close_all()

    def _counter(self, direction: Direction) -> _Count:
        return _Count(self._copied, direction.value)


class _Count:
    """Counts the pieces of one lane; its keys are no other lane's."""

    def __init__(self, counter: Counter[tuple[str, str]], direction: str) -> None:
        self._counter = counter
        self._direction = direction

    def __call__(self, piece: Piece) -> None:
        self._counter[self._direction, type(piece).__name__] += piece.total_bytes


class Mappings:
    """Allocations of other processes, mapped here: opened once each, closed exactly once.

    Layers share allocations, and a worker that registers again names those that are open already;
    the driver refuses a second open, and one close ends it for all. Any thread with the device's
    context current.
    """

    def __init__(self, driver: Driver, *, sizes_are_known: bool = False) -> None:
        """``sizes_are_known``: those described were compared with the driver's before."""
        self._driver = driver
        self._sizes_are_known = sizes_are_known
        self._lock = threading.Lock()
        self._open: dict[bytes, _Mapping] = {}

    @property
    def mapped_bytes(self) -> int:
        # No lock: that one is held while the driver maps, and this is asked by the event loop.
        return sum(mapping.nbytes for mapping in list(self._open.values()))

    def open(self, allocation: DeviceAllocation) -> int:
        """Where the allocation is mapped. Each call needs its own ``close``."""
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
        with self._lock:
            while self._open:
                _, mapping = self._open.popitem()
                self._driver.ipc_close_memory(mapping.address)

    def _map(self, allocation: DeviceAllocation) -> _Mapping:
        address = self._driver.ipc_open_memory(allocation.ipc_handle)
        if self._sizes_are_known:
            return _Mapping(address, allocation.nbytes)
        try:
            return _Mapping(address, self._driver.allocation_bytes(address))
        except BaseException:
            self._driver.ipc_close_memory(address)
            raise


@dataclass(slots=True)
class _Mapping:
    address: int
    nbytes: int
    users: int = 0


class MappedGroup(NamedTuple):
    """One group of a worker: its plans and, where it may be staged, its regions on the device."""

    planner: Planner
    table: RegionTable | None


class WorkerMemory:
    """The allocations of one worker, mapped. Made and closed on any thread that may wait."""

    def __init__(
        self,
        device: Device,
        allocations: Sequence[DeviceAllocation],
        layouts: Mapping[int | None, GroupLayout],
    ) -> None:
        """CudaError if memory cannot be opened, LayoutError if it is not as described."""
        self.device = device
        self.allocations = tuple(allocations)
        self.groups: dict[int | None, MappedGroup] = {}
        self.ready_events = ReadyEvents(device.driver)
        self._handles: list[bytes] = []
        self._lock = threading.Lock()
        device.driver.set_current(device.context)
        device.worker_came(self)
        try:
            bases = []
            for allocation in allocations:
                bases.append(device.mappings.open(allocation))
                self._handles.append(allocation.ipc_handle)
            for group_idx, layout in layouts.items():
                layout.check([allocation.nbytes for allocation in allocations])
                planner = Planner(layout, bases, borders=device.pool.borders)
                stages = planner.may_stage(passed_on=False)
                table = device.region_table(planner) if stages else None
                self.groups[group_idx] = MappedGroup(planner, table)
        except BaseException:
            self.close()
            raise
        how = (
            "copy engines, and staging for scattered blocks"
            if any(group.table for group in self.groups.values())
            else "copy engines"
        )
        self.description = (
            f"{len(set(self._handles))} allocations opened on {device.name} {device.uuid}, "
            f"copied by {how}"
        )

    def expect_to_pass_on(self) -> None:
        """What is loaded goes on to other devices from now on, and more of it is staged."""
        with self._lock:
            if self._handles is _CLOSED:
                return
            self.device.driver.set_current(self.device.context)
            for group_idx, (planner, table) in self.groups.items():
                if table is None and planner.may_stage(passed_on=True):
                    table = self.device.region_table(planner)
                    self.groups[group_idx] = MappedGroup(planner, table)

    def close(self) -> None:
        """Unmap the memory. No transfer may be under way. Idempotent."""
        with self._lock:
            if self._handles is _CLOSED:
                return
            handles, self._handles = self._handles, _CLOSED
        self.device.driver.set_current_to_close(self.device.context)
        self.ready_events.close_all()
        for group in self.groups.values():
            if group.table is not None:
                group.table.close()
        for handle in handles:
            self.device.mappings.close(handle)
        self.device.worker_left(self)


_CLOSED: list[bytes] = []


class _ReleaseStaging:
    """Not a transfer: gives the staging buffers back on the lane's thread, in order."""

    def __init__(self, device: Device, mover: DeviceMover) -> None:
        self._device = device
        self._mover = mover

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
            self._mover.release_staging()


def format_uuid(uuid: bytes) -> str:
    """As nvidia-smi prints it."""
    digits = uuid.hex()
    parts = digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]
    return "GPU-" + "-".join(parts)

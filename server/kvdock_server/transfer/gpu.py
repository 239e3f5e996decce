"""Transfers between the pool and workers' GPUs, for the event loop.

Everything that may wait for the driver runs on threads: a few that open and close memory, and two
lanes for each device that copy. The loop only awaits.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakSet

import numpy as np
import numpy.typing as npt

from kvdock_server.transfer.devices.block_transfer import BlockTransfer, ReadyEvent
from kvdock_server.transfer.devices.copy_streams import Direction
from kvdock_server.transfer.devices.device import Device, MappedGroup, format_uuid
from kvdock_server.transfer.devices.driver import (
    CudaError,
    CudaUnavailableError,
    Driver,
    load_driver,
)
from kvdock_server.transfer.devices.lane import Job
from kvdock_server.transfer.devices.mapped_memory import MappedMemory
from kvdock_server.transfer.devices.pinning import PinnedPool
from kvdock_server.transfer.fan_out.load import CopiedBytes, FanOutLoad, LoadFollower, until_settled
from kvdock_server.transfer.fan_out.peer_path import PeerPaths
from kvdock_server.transfer.plans.arrays import I64, U64
from kvdock_server.transfer.plans.group_memory import (
    IPC_HANDLE_BYTES,
    DeviceAllocation,
    GroupMemory,
    LayoutError,
)
from kvdock_server.transfer.plans.pieces import SERVER_PACE
from kvdock_server.transfer.plans.planner import host_addresses

logger = logging.getLogger(__name__)

_THREADS = 4


class Sockets(Protocol):
    """The sockets of the host, by index."""

    def socket_of_device(self, pci_id: str) -> int | None:
        """The socket of a device; None if that is not known."""

    def running_on(self, socket: int | None) -> AbstractContextManager[None]:
        """Until the block ends, this thread and those that it starts run on the socket."""


class DeviceMemoryError(Exception):
    """A worker's device memory cannot be used by this server. The message says why."""


@dataclass(frozen=True, slots=True)
class GpuStats:
    """How much of the pool is pinned. ``pin_refused`` is empty unless CUDA refused the rest.

    ``sockets`` has the socket of each device that a worker has registered, by the device's UUID.
    """

    pinned_bytes: int
    pin_refused: str
    sockets: dict[str, int | None]


class GpuTransfers:
    """Transfers between one pool and the device memory of any number of workers.

    Until the first worker registers, no driver is loaded and no context is made. Methods belong to
    the event loop, except ``faulted`` and ``stats``.
    """

    def __init__(self, pool_address: int, pool_bytes: int, sockets: Sockets | None = None) -> None:
        """``pool_address`` is where the pool is mapped in this process.

        With ``sockets``, all threads of a device run on its socket.
        """
        self._pool = PinnedPool(pool_address, pool_bytes)
        self._pool_range = range(pool_address, pool_address + pool_bytes)
        self._driver_threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="device-memory")
        self._paths = PeerPaths(self._driver_threads)
        self._sockets = sockets
        self._lock = threading.Lock()
        self._devices: dict[int, Device] = {}  # by ordinal

    def faulted(self, offset: int, nbytes: int) -> None:
        """A range of the pool has its memory, so it can be pinned from now on.

        Each byte is reported once. Called on any thread.
        """
        self._pool.faulted(offset, nbytes)

    async def register(
        self, allocations: Sequence[DeviceAllocation], groups: Mapping[int | None, GroupMemory]
    ) -> Registration:
        """Map a worker's allocations. ``groups`` are by group_idx, None for "no groups".

        DeviceMemoryError if this server cannot open the memory: it has no GPU or driver, does not
        see the device, or CUDA IPC does not export the memory. LayoutError (a ValueError) if the
        description is wrong.
        """
        mapped = self._driver_threads.submit(self._map, list(allocations), dict(groups))
        try:
            memory = await asyncio.wrap_future(mapped)
        except asyncio.CancelledError:
            # A thread that has begun cannot be stopped, so what it maps is closed afterwards.
            if not mapped.cancelled():
                mapped.add_done_callback(self._abandon)
            raise
        return Registration(memory, self._driver_threads, self._paths, self._pool_range)

    def stats(self) -> GpuStats:
        """A snapshot. Any thread."""
        sockets = {device.uuid: device.socket for device in self._devices.copy().values()}
        return GpuStats(self._pool.pinned_bytes, self._pool.refused or "", sockets)

    async def close(self) -> None:
        """End all transfers, unmap everything and unpin the pool.

        Registrations may be closed before or after. When this returns, the pool may be unmapped.
        """
        await asyncio.wrap_future(self._driver_threads.submit(self._close))

    def _abandon(self, mapped: Future[MappedMemory]) -> None:
        if not mapped.cancelled() and mapped.exception() is None:
            self._driver_threads.submit(mapped.result().close)

    def _map(
        self, allocations: list[DeviceAllocation], groups: dict[int | None, GroupMemory]
    ) -> MappedMemory:
        device = self._device(allocations)
        if device.failure is not None:
            raise DeviceMemoryError(
                f"{device.name} {device.uuid} failed, and CUDA lets this process do nothing more "
                f"with it ({device.failure}): restart the server when it is mended"
            )
        self._pool.start(device.driver, device.context)
        try:
            memory = MappedMemory(device, allocations, groups)
        except CudaError as error:
            raise DeviceMemoryError(
                f"the worker's memory on {device.name} cannot be opened ({error}): CUDA IPC "
                "exports plain device allocations only (no expandable segments, no cumem "
                "allocator), and server and worker must share an IPC namespace"
            ) from error
        logger.info("%s", memory.description)
        return memory

    def _device(self, allocations: list[DeviceAllocation]) -> Device:
        """The device on which the allocations lie, made if need be."""
        uuids = {allocation.device_uuid for allocation in allocations}
        if len(uuids) != 1:
            raise LayoutError(f"the allocations lie on {len(uuids)} devices: a worker has one")
        uuid = uuids.pop()
        try:
            driver = load_driver()
            visible = driver.device_uuids()
            if uuid not in visible:
                raise DeviceMemoryError(
                    f"the worker's device {format_uuid(uuid)} is not visible to the server, which "
                    f"sees {', '.join(map(format_uuid, visible)) or 'none'}: start the server "
                    "with a CUDA_VISIBLE_DEVICES that has it, or without one"
                )
            ordinal = visible.index(uuid)
            with self._lock:
                if ordinal not in self._devices:
                    self._devices[ordinal] = self._made(driver, ordinal)
                return self._devices[ordinal]
        except CudaUnavailableError as error:
            raise DeviceMemoryError(str(error)) from error
        except CudaError as error:
            raise DeviceMemoryError(
                f"the server cannot use the worker's device: {error}"
            ) from error

    def _made(self, driver: Driver, ordinal: int) -> Device:
        if self._sockets is None:
            return Device(driver, ordinal, self._pool, SERVER_PACE)
        socket = self._sockets.socket_of_device(driver.pci_id(ordinal))
        with self._sockets.running_on(socket):
            return Device(driver, ordinal, self._pool, SERVER_PACE, socket)

    def _close(self) -> None:
        with self._lock:
            devices = list(self._devices.values())
        for device in devices:
            device.close()
        self._pool.stop()


class Registration:
    """The mapped memory of one worker. Methods belong to the event loop."""

    def __init__(
        self,
        memory: MappedMemory,
        driver_threads: ThreadPoolExecutor,
        paths: PeerPaths,
        pool_range: range,
    ) -> None:
        """``pool_range`` are the addresses of the pool in this process."""
        self._memory = memory
        self._driver_threads = driver_threads
        self._paths = paths
        self._pool_range = pool_range
        self._jobs: set[Job] = set()
        self._followers: WeakSet[LoadFollower] = WeakSet()
        self._closing: asyncio.Task[None] | None = None
        self.description = memory.description
        """What was opened and how it is copied, for a log line."""

    async def store(
        self,
        group_idx: int | None,
        block_ids: Sequence[int] | npt.NDArray[np.integer],
        slot_offsets: Sequence[int],
        ready_event: bytes = b"",
        seconds: float = float("inf"),
    ) -> None:
        """Copy blocks from the device to the pool: the blocks of each chunk to one slot.

        ``block_ids`` come chunk by chunk. ``slot_offsets`` has a slot for each chunk, in bytes from
        the beginning of the pool. A slot has the group's ``chunk_bytes``. Copying starts when the
        event ``ready_event`` (a 64-byte IPC handle) is done, or at once if the handle is empty.
        After ``seconds`` the copy is given up.

        ValueError if the arguments do not fit the group, DeviceMemoryError if the memory is closed.
        TransferFailedError if not all bytes arrived. Then none of the slots may be used. When this
        has returned, raised or been cancelled, nothing touches the slots any more.
        """
        deadline = time.monotonic() + seconds
        group, ids, hosts = self._checked(group_idx, block_ids, slot_offsets, 0, ready_event)
        if not len(ids):
            return
        device = self._memory.device
        start = ReadyEvent(self._memory.events, ready_event)
        transfer = BlockTransfer(device, Direction.STORE, group, ids, hosts, start)
        with self._under_way(device.lanes[Direction.STORE].submit(transfer, deadline)) as job:
            await until_settled(job)

    async def retrieve(
        self,
        group_idx: int | None,
        block_ids: Sequence[int] | npt.NDArray[np.integer],
        slot_offsets: Sequence[int],
        skip_blocks: int = 0,
        ready_event: bytes = b"",
        seconds: float = float("inf"),
        followers: Sequence[LoadFollower] = (),
    ) -> CopiedBytes:
        """Copy chunks from the pool to the device, without ``skip_blocks`` blocks of the first.

        The arguments are those of ``store``. After an error some of the blocks may be overwritten.

        ``followers`` get the same bytes at the same block ids: from this device if it has a path to
        theirs, else from the pool. Each follower tells in ``failure`` whether it has all bytes. A
        follower's group must have all the blocks, of the same size. A follower never makes the load
        fail or wait for long. If the load fails, so do the followers.
        """
        deadline = time.monotonic() + seconds
        group, ids, hosts = self._checked(
            group_idx, block_ids, slot_offsets, skip_blocks, ready_event
        )
        for follower in followers:
            _check_follower(follower, group_idx, group.planner.layout, ids)
        if not len(ids):
            return CopiedBytes()
        wanting = [follower for follower in followers if not follower.has_given_up]
        paths = await self._paths.open_in_time(
            self._memory, [follower.memory for follower in wanting], deadline
        )
        self._check_open()
        load = FanOutLoad(self._memory, group_idx, ids, hosts, ready_event, deadline)
        with self._under_way(load.start(zip(wanting, paths, strict=True))) as job:
            return await load.end(job)

    @property
    def failure(self) -> str | None:
        """Why nothing can be copied any more. None unless the device failed."""
        return self._memory.device.failure

    @property
    def socket(self) -> int | None:
        """The socket of the worker's device, if it is known."""
        return self._memory.device.socket

    def follower(self) -> LoadFollower:
        """This worker as a follower, for another worker's ``retrieve``.

        DeviceMemoryError if the memory is not registered any more.
        """
        self._check_open()
        follower = LoadFollower(self._memory, self._driver_threads)
        self._followers.add(follower)
        return follower

    def expect_follower(self, other: Registration) -> None:
        """Open the path to another worker's memory in the background, before a load needs it."""
        if self._closing is None and other._closing is None:
            self._paths.between(self._memory, other._memory)

    async def close(self) -> None:
        """Cancel transfers and unmap the memory.

        Closing goes on in the background if the caller is cancelled. May be called again.
        """
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        jobs = list(self._jobs)
        for job in jobs:
            job.cancel()
        settled = [asyncio.wrap_future(job.settled) for job in jobs]
        await asyncio.gather(*settled, return_exceptions=True)
        await asyncio.gather(*(follower.give_up() for follower in list(self._followers)))
        await self._paths.close(self._memory)
        await asyncio.wrap_future(self._driver_threads.submit(self._memory.close))

    @contextmanager
    def _under_way(self, job: Job) -> Iterator[Job]:
        """Until the block ends, ``close`` cancels the job."""
        self._jobs.add(job)
        try:
            yield job
        finally:
            self._jobs.discard(job)

    def _check_open(self) -> None:
        if self._closing is not None:
            raise DeviceMemoryError("the worker's memory is not registered any more")

    def _checked(
        self,
        group_idx: int | None,
        block_ids: Sequence[int] | npt.NDArray[np.integer],
        slot_offsets: Sequence[int],
        skip_blocks: int,
        ready_event: bytes,
    ) -> tuple[MappedGroup, I64, U64]:
        """The group, the block ids and their host addresses; raises as ``store`` does."""
        self._check_open()
        group = self._memory.groups.get(group_idx)
        if group is None:
            raise ValueError(
                f"group {group_idx} is not registered, {list(self._memory.groups)} are"
            )
        if len(ready_event) not in (0, IPC_HANDLE_BYTES):
            raise ValueError(f"an event handle has 64 bytes, this one has {len(ready_event)}")
        layout = group.planner.layout
        ids = layout.block_ids(block_ids, len(slot_offsets), skip_blocks)
        slots = np.asarray(slot_offsets, dtype=np.int64)
        last = len(self._pool_range) - layout.chunk_bytes
        if len(slots) and not 0 <= slots.min() <= slots.max() <= last:
            raise ValueError(f"slots at {slots.min()} to {slots.max()}: one is outside the pool")
        return group, ids, host_addresses(slots + self._pool_range.start, layout, skip_blocks)


def _check_follower(
    follower: LoadFollower, group_idx: int | None, layout: GroupMemory, ids: I64
) -> None:
    """ValueError unless the follower has all the blocks, of the same size."""
    group = follower.memory.groups.get(group_idx)
    if group is None:
        raise ValueError(f"group {group_idx} of a follower is not registered")
    theirs = group.planner.layout
    if theirs.block_bytes != layout.block_bytes or ids.max(initial=0) >= theirs.num_blocks:
        raise ValueError(
            f"{theirs.num_blocks} blocks of {theirs.block_bytes} bytes of a follower, and block id "
            f"{ids.max(initial=0)} of {layout.block_bytes} bytes: they must hold the same"
        )

"""Transfers between the pool and workers' GPUs, for the event loop.

Everything that may wait for the driver runs on threads: registration and teardown on a few of
their own, copies on two lanes for each device. The loop only awaits.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from weakref import WeakSet

import numpy as np
import numpy.typing as npt

from kvdock_server.transfer.devices.block_transfer import BlockTransfer, ReadyEvent
from kvdock_server.transfer.devices.copy_streams import Direction
from kvdock_server.transfer.devices.device import (
    Device,
    DeviceStats,
    MappedGroup,
    WorkerMemory,
    format_uuid,
)
from kvdock_server.transfer.devices.driver import CudaError, CudaUnavailableError, load_driver
from kvdock_server.transfer.devices.lane import Job
from kvdock_server.transfer.devices.pinning import PinnedPool
from kvdock_server.transfer.fan_out.load import Copied, Follower, Load, Relays, until_settled
from kvdock_server.transfer.plans.arrays import I64, U64
from kvdock_server.transfer.plans.group_memory import DeviceAllocation, GroupLayout, LayoutError
from kvdock_server.transfer.plans.planner import block_hosts

logger = logging.getLogger(__name__)

_EVENT_HANDLE_BYTES = 64
_ADMIN_THREADS = 4


class DeviceMemoryError(Exception):
    """A worker's device memory cannot be used by this server. The message says why."""


@dataclass(frozen=True, slots=True)
class GpuStats:
    """The state of all GPU transfers. ``pin_refused`` is empty unless CUDA refused to pin."""

    pinned_bytes: int
    pin_refused: str
    devices: Sequence[DeviceStats]


class GpuTransfers:
    """Transfers between one pool and the device memory of any number of workers.

    Costs nothing until the first worker registers: no driver is loaded, no context made. Methods
    belong to the event loop, except ``faulted`` and ``stats``.
    """

    def __init__(self, pool_address: int, pool_bytes: int) -> None:
        """``pool_address`` is where the pool is mapped in this process."""
        self._pool = PinnedPool(pool_address, pool_bytes)
        self._pool_range = range(pool_address, pool_address + pool_bytes)
        self._admin = ThreadPoolExecutor(_ADMIN_THREADS, thread_name_prefix="device-memory")
        self._relays = Relays(self._admin)
        self._lock = threading.Lock()
        self._devices: dict[int, Device] = {}

    def faulted(self, offset: int, nbytes: int) -> None:
        """A range of the pool is backed by memory and can be pinned. Each byte once."""
        self._pool.faulted(offset, nbytes)

    async def register(
        self,
        allocations: Sequence[DeviceAllocation],
        groups: Mapping[int | None, GroupLayout],
    ) -> Registration:
        """Map a worker's allocations. ``groups`` are by group_idx, None for "no groups".

        DeviceMemoryError if this server cannot open the memory: no GPU or driver here, a device
        that is not visible, memory that CUDA IPC does not export. LayoutError (a ValueError) if the
        description is wrong.
        """
        mapped = self._admin.submit(self._map, list(allocations), dict(groups))
        try:
            worker = await asyncio.wrap_future(mapped)
        except asyncio.CancelledError:
            # Too late to stop it, where it has begun.
            if not mapped.cancelled():
                mapped.add_done_callback(self._abandon)
            raise
        return Registration(worker, self._admin, self._relays, self._pool_range)

    def stats(self) -> GpuStats:
        """A snapshot. Any thread."""
        # No lock: that one is held while a context is made, and this is asked by the event loop.
        devices = self._devices.copy().values()
        return GpuStats(
            self._pool.pinned_bytes,
            self._pool.refused or "",
            [device.stats() for device in devices],
        )

    async def close(self) -> None:
        """End all transfers, unmap everything and unpin the pool.

        Registrations may be closed before or after. The pool may be unmapped when this returns.
        """
        await asyncio.wrap_future(self._admin.submit(self._close))

    def _abandon(self, mapped: Future[WorkerMemory]) -> None:
        if not mapped.cancelled() and mapped.exception() is None:
            self._admin.submit(mapped.result().close)

    def _map(
        self, allocations: list[DeviceAllocation], groups: dict[int | None, GroupLayout]
    ) -> WorkerMemory:
        device = self._device(allocations)
        if device.failure is not None:
            raise DeviceMemoryError(
                f"{device.name} {device.uuid} failed, and CUDA lets this process do nothing more "
                f"with it ({device.failure}): restart the server when it is mended"
            )
        self._pool.start(device.driver, device.context)
        try:
            worker = WorkerMemory(device, allocations, groups)
        except CudaError as error:
            raise DeviceMemoryError(
                f"the worker's memory on {device.name} cannot be opened ({error}): CUDA IPC "
                "exports plain device allocations only (no expandable segments, no cumem "
                "allocator), and server and worker must share an IPC namespace"
            ) from error
        logger.info("%s", worker.description)
        return worker

    def _device(self, allocations: list[DeviceAllocation]) -> Device:
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
                    self._devices[ordinal] = Device(driver, ordinal, self._pool)
                return self._devices[ordinal]
        except CudaUnavailableError as error:
            raise DeviceMemoryError(str(error)) from error
        except CudaError as error:
            raise DeviceMemoryError(
                f"the server cannot use the worker's device: {error}"
            ) from error

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
        worker: WorkerMemory,
        admin: ThreadPoolExecutor,
        relays: Relays,
        pool_range: range,
    ) -> None:
        self._worker = worker
        self._admin = admin
        self._relays = relays
        self._pool_range = pool_range
        self._jobs: set[Job] = set()
        self._followers: WeakSet[Follower] = WeakSet()
        self._closing: asyncio.Task[None] | None = None
        self.description = worker.description
        """What was opened and how it is copied, for a log line."""

    async def store(
        self,
        group_idx: int | None,
        block_ids: Sequence[int] | npt.NDArray[np.integer],
        slot_offsets: Sequence[int],
        ready_event: bytes = b"",
        seconds: float = float("inf"),
    ) -> None:
        """Copy blocks from the device to the pool: a chunk's blocks to each slot.

        ``slot_offsets`` are bytes from the beginning of the pool, each slot the group's
        ``chunk_bytes`` long; ``block_ids`` come chunk by chunk. Copying starts when the event of
        that 64-byte IPC handle is done, at once if there is none. After ``seconds`` it is given up.

        ValueError if the arguments do not fit the layout. TransferFailedError if not all bytes
        arrived; then none of the slots may be used. When this has returned, raised or been
        cancelled, nothing touches the slots any more.
        """
        deadline = time.monotonic() + seconds
        group, ids, hosts = self._checked(group_idx, block_ids, slot_offsets, 0, ready_event)
        if not len(ids):
            return
        device = self._worker.device
        start = ReadyEvent(self._worker.ready_events, ready_event)
        transfer = BlockTransfer(device, Direction.STORE, group, ids, hosts, start)
        with self._under_way(device.submit(Direction.STORE, transfer, deadline)) as job:
            await until_settled(job)

    async def retrieve(
        self,
        group_idx: int | None,
        block_ids: Sequence[int] | npt.NDArray[np.integer],
        slot_offsets: Sequence[int],
        skip_blocks: int = 0,
        ready_event: bytes = b"",
        seconds: float = float("inf"),
        followers: Sequence[Follower] = (),
    ) -> Copied:
        """Copy chunks from the pool to the device, all but ``skip_blocks`` blocks of the first.

        As ``store``, the other way. After an error some of the blocks may be overwritten.

        ``followers`` get the same bytes at the same block ids, from this device where it reaches
        theirs, and each tells in ``failure`` whether it has them all. Their groups must have the
        same bytes a block, and the blocks. None of them makes the load fail or wait for long; if
        the load fails, they fail.
        """
        deadline = time.monotonic() + seconds
        group, ids, hosts = self._checked(
            group_idx, block_ids, slot_offsets, skip_blocks, ready_event
        )
        for follower in followers:
            _check_follower(follower, group_idx, group.planner.layout, ids)
        if not len(ids):
            return Copied()
        wanting = [follower for follower in followers if not follower.has_given_up]
        relays = await self._relays.open_in_time(
            self._worker, [follower.worker for follower in wanting], deadline
        )
        self._check_open()
        load = Load(self._worker, group_idx, ids, hosts, ready_event, deadline)
        with self._under_way(load.start(zip(wanting, relays, strict=True))) as job:
            return await load.end(job)

    @property
    def failure(self) -> str | None:
        """Why nothing can be copied any more: the device failed. None if it did not."""
        return self._worker.device.failure

    def follower(self) -> Follower:
        """This worker as one that another's ``retrieve`` fills as well.

        DeviceMemoryError if the memory is not registered any more.
        """
        self._check_open()
        follower = Follower(self._worker, self._admin)
        self._followers.add(follower)
        return follower

    def expect_follower(self, other: Registration) -> None:
        """Open the way to another worker's memory behind what goes on; loads find it open then."""
        if self._closing is None and other._closing is None:
            self._relays.between(self._worker, other._worker)

    async def close(self) -> None:
        """Cancel transfers and unmap the memory. Returns when the driver has let go of it.

        Goes on when its caller is cancelled. May be called again.
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
        await self._relays.close(self._worker)
        await asyncio.wrap_future(self._admin.submit(self._worker.close))

    @contextmanager
    def _under_way(self, job: Job) -> Iterator[Job]:
        """``close`` ends the job."""
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
        """The group, the block ids and their host addresses; ValueError if something is wrong."""
        self._check_open()
        group = self._worker.groups.get(group_idx)
        if group is None:
            raise ValueError(
                f"group {group_idx} is not registered, {list(self._worker.groups)} are"
            )
        if len(ready_event) not in (0, _EVENT_HANDLE_BYTES):
            raise ValueError(f"an event handle has 64 bytes, this one has {len(ready_event)}")
        ids = np.asarray(block_ids, dtype=np.int64)
        return group, ids, self._hosts(group.planner.layout, ids, slot_offsets, skip_blocks)

    def _hosts(
        self, layout: GroupLayout, ids: I64, slot_offsets: Sequence[int], skip_blocks: int
    ) -> U64:
        slots = np.asarray(slot_offsets, dtype=np.int64)
        if not 0 <= skip_blocks < layout.blocks_per_chunk:
            raise ValueError(
                f"skip_blocks {skip_blocks}: a chunk has {layout.blocks_per_chunk} blocks"
            )
        needed = max(0, len(slots) * layout.blocks_per_chunk - skip_blocks)
        if len(ids) != needed:
            raise ValueError(
                f"{len(ids)} block ids: {len(slots)} chunks of {layout.blocks_per_chunk} blocks "
                f"less {skip_blocks} make {needed}"
            )
        if not needed:
            return np.zeros(0, dtype=np.uint64)
        if ids.min() < 0 or ids.max() >= layout.num_blocks:
            wrong = ids[(ids < 0) | (ids >= layout.num_blocks)][0]
            raise ValueError(f"block id {wrong}: {layout.num_blocks} blocks are registered")
        if slots.min() < 0 or slots.max() > len(self._pool_range) - layout.chunk_bytes:
            raise ValueError(f"slots at {slots.min()} to {slots.max()}: one is outside the pool")
        return block_hosts(slots + self._pool_range.start, layout, skip_blocks)


def _check_follower(
    follower: Follower, group_idx: int | None, layout: GroupLayout, ids: I64
) -> None:
    group = follower.worker.groups.get(group_idx)
    if group is None:
        raise ValueError(f"group {group_idx} of a follower is not registered")
    theirs = group.planner.layout
    if theirs.block_bytes != layout.block_bytes or ids.max(initial=0) >= theirs.num_blocks:
        raise ValueError(
            f"{theirs.num_blocks} blocks of {theirs.block_bytes} bytes of a follower, and block id "
            f"{ids.max(initial=0)} of {layout.block_bytes} bytes: they must hold the same"
        )

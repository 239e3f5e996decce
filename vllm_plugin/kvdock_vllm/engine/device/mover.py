"""Shared mode on GPUs: the worker's process copies as the server does in server mode.

The same code plans the copies and carries them out (``kvdock_server.transfer``), in this process's
own pace. An engine that computes holds the interpreter's lock for milliseconds, and each call of
the driver has to ask for it again. So the copies of a load are a handful of calls.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvdock import Session
from kvdock.types import Location
from kvdock_server.transfer.devices.block_transfer import BlockTransfer
from kvdock_server.transfer.devices.copy_streams import Direction
from kvdock_server.transfer.devices.device import Device, MappedGroup
from kvdock_server.transfer.devices.driver import Driver, load_driver
from kvdock_server.transfer.devices.lane import Job, TransferFailedError
from kvdock_server.transfer.plans.group_memory import BlockRegion, GroupMemory
from kvdock_server.transfer.plans.pieces import ENGINE_PACE
from kvdock_vllm.engine.copier import CopyStoppedError, HostBlocks, Stop, check_blocks
from kvdock_vllm.engine.device.pinning import PinnedMemory
from kvdock_vllm.engine.layout import GroupLayout
from kvdock_vllm.engine.transfers.shared import Mover

# How often a waiting thread looks whether the copy shall stop.
_LOOK_SECONDS = 0.01


class _AtOnce:
    """A copy may begin: who asked for it has waited for the engine."""

    def has_come(self) -> bool:
        return True

    def close(self) -> None:
        """Does nothing: nothing was opened."""


@dataclass(frozen=True, slots=True)
class _OpenPool:
    """One session's pool, and the device as it copies from and to that pool."""

    pinned: PinnedMemory
    device: Device
    groups: list[MappedGroup]

    def close(self) -> None:
        self.device.close()
        for group in self.groups:
            if group.kernel is not None:
                group.kernel.close()
        self.pinned.close()


class DeviceMover(Mover):
    """Copies blocks of one device. Loads never wait for stores."""

    def __init__(self, layouts: Sequence[GroupLayout], device_ordinal: int) -> None:
        self._layouts = layouts
        self._device_ordinal = device_ordinal
        self._lock = threading.Lock()
        self._pools: dict[Session, _OpenPool] = {}

    def open(self, session: Session) -> None:
        """Raises PoolUnmappable, CudaError, or CudaUnavailableError if there is no driver."""
        memory = [
            session.pool.array(Location(segment.segment_id, 0, segment.nbytes))
            for segment in session.pool.segments
        ]
        driver = load_driver()
        context = driver.retain_context(self._device_ordinal)
        pinned = PinnedMemory(memory, driver, context)
        try:
            device = Device(driver, self._device_ordinal, pinned, ENGINE_PACE)
            try:
                driver.set_current(context)
                groups = [device.planned(*_described(layout, driver)) for layout in self._layouts]
            except BaseException:
                device.close()
                raise
        except BaseException:
            pinned.close()
            raise
        with self._lock:
            self._pools[session] = _OpenPool(pinned, device, groups)

    def close(self, session: Session) -> None:
        with self._lock:
            pool = self._pools.pop(session)
        pool.close()

    def gather(
        self, session: Session, position: int, parts: Sequence[HostBlocks], stop: Stop
    ) -> None:
        self._copy(Direction.STORE, session, position, parts, stop)

    def scatter(
        self, session: Session, position: int, parts: Sequence[HostBlocks], stop: Stop
    ) -> None:
        self._copy(Direction.LOAD, session, position, parts, stop)

    def _copy(
        self,
        direction: Direction,
        session: Session,
        position: int,
        parts: Sequence[HostBlocks],
        stop: Stop,
    ) -> None:
        layout = self._layouts[position]
        for part in parts:
            check_blocks(part, layout)
        if stop():
            raise CopyStoppedError
        if not any(part.block_ids for part in parts):
            return
        ids = np.concatenate([np.array(part.block_ids, dtype=np.int64) for part in parts])
        hosts = np.concatenate([_addresses(part, layout.block_bytes) for part in parts])
        pool = self._pools[session]
        transfer = BlockTransfer(
            pool.device, direction, pool.groups[position], ids, hosts, _AtOnce()
        )
        _wait(pool.device.lanes[direction].submit(transfer), stop)


def _addresses(part: HostBlocks, block_bytes: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """Where each block lies on the host."""
    begin = part.host.ctypes.data
    return np.arange(begin, begin + len(part.host), block_bytes, dtype=np.uint64)


def _wait(job: Job, stop: Stop) -> None:
    """Waits until nothing of the job is under way. Raises CopyStoppedError if it was stopped,
    TransferFailedError if it failed.
    """
    try:
        while True:
            try:
                job.settled.result(_LOOK_SECONDS)
                return
            except TimeoutError:
                if stop():
                    break
    except TransferFailedError:
        raise
    except BaseException:  # Ctrl-C, for one
        _end(job)
        raise
    _end(job)
    raise CopyStoppedError


def _end(job: Job) -> None:
    job.cancel()
    job.settled.exception()


def _described(layout: GroupLayout, driver: Driver) -> tuple[GroupMemory, list[int]]:
    """A group as the planner wants it, and where its allocations begin."""
    bases: dict[int, int] = {}
    regions = []
    for region in layout.regions:
        base, _ = driver.allocation(region.address)
        number = bases.setdefault(base, len(bases))
        regions.append(
            BlockRegion(number, region.address - base, region.block_stride, region.page_bytes)
        )
    return GroupMemory(layout.num_blocks, 1, tuple(regions)), list(bases)

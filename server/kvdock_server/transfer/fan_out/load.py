"""A load that fills several workers' memory, for the event loop.

One worker leads the load, and others follow it. A follower gets its bytes from the leader's device
(a branch). If there is no path between the two devices, the follower gets its bytes from the pool,
by a transfer of its own (a job).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from kvdock_server.transfer.devices.block_transfer import (
    BlockTransfer,
    LeadersReadyEvent,
    ReadyEvent,
    StartCondition,
)
from kvdock_server.transfer.devices.copy_streams import Direction
from kvdock_server.transfer.devices.lane import Job, TransferFailedError
from kvdock_server.transfer.devices.mapped_memory import MappedMemory
from kvdock_server.transfer.fan_out.peer_path import PeerBranch, PeerPath
from kvdock_server.transfer.fan_out.transfer import FanOutTransfer
from kvdock_server.transfer.plans.arrays import I64, U64


@dataclass(frozen=True, slots=True)
class CopiedBytes:
    """What a load has copied, in bytes."""

    host_to_device: int = 0
    device_to_device: int = 0
    """Counted once for each follower that got its bytes from the leader's device."""


class LoadFollower:
    """One worker's share of one load that another worker leads. Made before the load."""

    def __init__(self, memory: MappedMemory, driver_threads: ThreadPoolExecutor) -> None:
        self.memory = memory
        self._driver_threads = driver_threads
        self.branch: PeerBranch | None = None
        self.job: Job | None = None
        """The load sets one of the two."""
        self._has_ended = False
        self._giving_up: asyncio.Task[None] | None = None
        self.failure: str | None = None
        """Why the worker has not got everything. Final when the load has ended."""

    @property
    def has_given_up(self) -> bool:
        return self._giving_up is not None

    async def give_up(self) -> None:
        """Take no further part in the load.

        When this has returned or been cancelled, the load does not touch the worker's memory any
        more. May be called again, and after the load.
        """
        if self._giving_up is None:
            self._giving_up = asyncio.create_task(self._give_up())
        await until_done(self._giving_up)
        self._giving_up.result()

    async def end(self, *, cancel: bool) -> None:
        """The leader's job has ended. Wait for the follower's own job, or ``cancel`` it."""
        if self.job is not None:
            if cancel:
                self.job.cancel()
            try:
                await until_settled(self.job)
            except TransferFailedError as error:
                self.failure = self.failure or str(error)
        elif self.branch is not None:
            self.failure = self.failure or self.branch.failure
        self._has_ended = True

    async def _give_up(self) -> None:
        if self._has_ended:
            return
        self.failure = "the reader gave up"
        if self.branch is not None:
            await asyncio.wrap_future(self._driver_threads.submit(self.branch.cut))
        if self.job is not None:
            self.job.cancel()
            settled = asyncio.wrap_future(self.job.settled)
            await asyncio.gather(settled, return_exceptions=True)


class FanOutLoad:
    """A load into the leader's memory and into its followers'."""

    def __init__(
        self,
        leader: MappedMemory,
        group_idx: int | None,
        ids: I64,
        hosts: U64,
        ready_event: bytes,
        deadline: float,
    ) -> None:
        """All workers load block ``ids[i]`` from host address ``hosts[i]``.

        Copying starts when the leader's ``ready_event`` is done (a 64-byte IPC handle, or empty).
        No copy starts after ``deadline`` (time.monotonic).
        """
        self._leader = leader
        self._group_idx = group_idx
        self._ids = ids
        self._hosts = hosts
        self._event = ReadyEvent(leader.events, ready_event)
        self._deadline = deadline
        self._followers: list[LoadFollower] = []

    def start(self, followers: Iterable[tuple[LoadFollower, PeerPath | None]]) -> Job:
        """Queue the load; the leader's own job. Each follower comes with the path to it."""
        branches, apart = [], []
        for follower, path in followers:
            self._followers.append(follower)
            if follower.has_given_up:
                continue
            if path is None:
                apart.append(follower)
            else:
                branches.append(PeerBranch(path, self._group_idx))
                follower.branch = branches[-1]
        leaders = self._transfer(self._leader, self._event, branches)
        job = self._leader.device.lanes[Direction.LOAD].submit(leaders, self._deadline)
        for follower in apart:
            own = self._transfer(follower.memory, LeadersReadyEvent(self._event))
            device = follower.memory.device
            follower.job = device.lanes[Direction.LOAD].submit(own, self._deadline)
        return job

    async def end(self, job: Job) -> CopiedBytes:
        """Wait for the leader's job, then for the followers.

        TransferFailedError if the leader's job fails. A follower keeps its failure itself.
        """
        succeeded = False
        try:
            await until_settled(job)
            succeeded = True
        finally:
            ends = [follower.end(cancel=not succeeded) for follower in self._followers]
            await asyncio.gather(*ends)
        nbytes = len(self._ids) * self._leader.groups[self._group_idx].planner.block_bytes
        filled = [follower for follower in self._followers if follower.failure is None]
        return CopiedBytes(
            host_to_device=nbytes * (1 + sum(follower.job is not None for follower in filled)),
            device_to_device=nbytes * sum(follower.branch is not None for follower in filled),
        )

    def _transfer(
        self, memory: MappedMemory, start: StartCondition, branches: Sequence[PeerBranch] = ()
    ) -> BlockTransfer:
        group, device = memory.groups[self._group_idx], memory.device
        if branches:
            return FanOutTransfer(device, group, self._ids, self._hosts, start, branches)
        return BlockTransfer(device, Direction.LOAD, group, self._ids, self._hosts, start)


async def until_settled(job: Job) -> None:
    """Wait for a job. TransferFailedError if it failed.

    A waiter that is cancelled cancels the job, and still waits until the job has settled: until
    then its memory is in use.
    """
    settled = asyncio.wrap_future(job.settled)
    try:
        await asyncio.shield(settled)
    except asyncio.CancelledError:
        job.cancel()
        try:
            await until_done(settled)
        finally:
            settled.exception()  # marks the error as seen: the job was cancelled
        raise


async def until_done(future: asyncio.Future[None]) -> None:
    """Wait for a future. A waiter that is cancelled still waits, and raises then."""
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError as error:
            cancelled = cancelled or error
    if cancelled is not None:
        raise cancelled

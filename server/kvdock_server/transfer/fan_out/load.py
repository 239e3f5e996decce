"""Loads that one worker leads and others follow, for the event loop."""

from __future__ import annotations

import asyncio
import enum
import logging
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from kvdock_server.transfer.devices.block_transfer import (
    BlockTransfer,
    ReadyEvent,
    Start,
    StartOfAnother,
)
from kvdock_server.transfer.devices.copy_streams import Direction
from kvdock_server.transfer.devices.device import WorkerMemory
from kvdock_server.transfer.devices.lane import Job, TransferFailedError
from kvdock_server.transfer.fan_out.peer_path import Branch, FanOut, NoRelayError, Relay
from kvdock_server.transfer.plans.arrays import I64, U64

logger = logging.getLogger(__name__)

_OPEN_SECONDS = 5.0
"""The first way of all may have to wait until its kernel is compiled."""


@dataclass(frozen=True, slots=True)
class Copied:
    """What a load has copied, in bytes."""

    host_to_device: int = 0
    device_to_device: int = 0
    """Counted for each worker that it was passed on to."""


class Way(enum.Enum):
    """Where a follower's bytes came from."""

    RELAY = enum.auto()
    POOL = enum.auto()


class Follower:
    """One worker's share of one load that another one leads. Made before the load.

    Its share comes from the leader's device (a branch) or, where that has no way to its own, from
    the pool by a transfer of its own (a job).
    """

    def __init__(self, worker: WorkerMemory, admin: ThreadPoolExecutor) -> None:
        self.worker = worker
        self._admin = admin
        self._branch: Branch | None = None
        self._job: Job | None = None
        self._has_ended = False
        self._giving_up: asyncio.Task[None] | None = None
        self.failure: str | None = None
        """Why the worker has not got everything. Final when the load has ended."""

    @property
    def has_given_up(self) -> bool:
        return self._giving_up is not None

    async def give_up(self) -> None:
        """Want nothing any more. Nothing touches the worker's memory for this load on return, nor
        when cancelled. May be called again, and after the load.
        """
        if self._giving_up is None:
            self._giving_up = asyncio.create_task(self._give_up())
        await to_its_end(self._giving_up)
        self._giving_up.result()

    # The rest is for the load.

    def follow_branch(self, branch: Branch) -> None:
        """Get what the leader's device passes on."""
        self._branch = branch

    def follow_job(self, job: Job) -> None:
        """Get a copy of one's own."""
        self._job = job

    async def end(self, *, cancel: bool) -> Way | None:
        """The leader's own job has ended, and with it the branch; the way that all bytes came."""
        way = None
        if self._job is not None:
            way = Way.POOL
            if cancel:
                self._job.cancel()
            try:
                await until_settled(self._job)
            except TransferFailedError as error:
                self.failure = self.failure or str(error)
        elif self._branch is not None:
            way = Way.RELAY
            self.failure = self.failure or self._branch.failure
        self._has_ended = True
        return way if self.failure is None else None

    async def _give_up(self) -> None:
        if self._has_ended:
            return
        self.failure = "the reader gave up"
        if self._branch is not None:
            await asyncio.wrap_future(self._admin.submit(self._branch.cut))
        if self._job is not None:
            self._job.cancel()
            settled = asyncio.wrap_future(self._job.settled)
            await asyncio.gather(settled, return_exceptions=True)


class Relays:
    """The ways from one worker's memory to another's, opened when first wanted."""

    def __init__(self, admin: ThreadPoolExecutor) -> None:
        self._admin = admin
        self._opened: dict[tuple[WorkerMemory, WorkerMemory], asyncio.Task[Relay | None]] = {}

    def between(self, sender: WorkerMemory, receiver: WorkerMemory) -> asyncio.Future[Relay | None]:
        """The way, None if there is none. ``close`` must not have been called for either."""
        opened = self._opened.get((sender, receiver))
        if opened is None:
            # At once, so that a close that comes before it is carried out knows of it.
            opened = asyncio.create_task(self._open(sender, receiver))
            self._opened[sender, receiver] = opened
        return asyncio.shield(opened)

    async def open_in_time(
        self, sender: WorkerMemory, receivers: Sequence[WorkerMemory], deadline: float
    ) -> list[Relay | None]:
        """The ways to several workers; None for those that there are not, or not yet.

        Waits for half of the time until ``deadline`` (time.monotonic) at most.
        """
        ways = [self.between(sender, receiver) for receiver in receivers]
        if ways:
            await asyncio.wait(ways, timeout=min(_OPEN_SECONDS, (deadline - time.monotonic()) / 2))
        return [way.result() if way.done() else None for way in ways]

    async def close(self, worker: WorkerMemory) -> None:
        """Close every way from a worker's memory and to it. Nothing may be under way there."""
        for pair in [pair for pair in self._opened if worker in pair]:
            # Both its workers may be closing.
            opened = self._opened.pop(pair, None)
            relay = await opened if opened is not None else None
            if relay is not None:
                await asyncio.wrap_future(self._admin.submit(relay.close))

    async def _open(self, sender: WorkerMemory, receiver: WorkerMemory) -> Relay | None:
        try:
            relay = await asyncio.wrap_future(self._admin.submit(Relay, sender, receiver))
        except NoRelayError as error:
            logger.info("each reader gets its own copy from the pool: %s", error)
            return None
        except Exception:
            logger.exception("each reader gets its own copy from the pool")
            return None
        logger.info("what %s loads goes on to %s", sender.device.uuid, receiver.device.uuid)
        return relay


class Load:
    """A load into one worker's memory, the leader's, and into its followers'."""

    def __init__(
        self,
        leader: WorkerMemory,
        group_idx: int | None,
        ids: I64,
        hosts: U64,
        ready_event: bytes,
        deadline: float,
    ) -> None:
        """Blocks ``ids`` from host addresses ``hosts``, as soon as the leader's event is done."""
        self._leader = leader
        self._group_idx = group_idx
        self._ids = ids
        self._hosts = hosts
        self._event = ReadyEvent(leader.ready_events, ready_event)
        self._deadline = deadline
        self._followers: list[Follower] = []

    def start(self, followers: Iterable[tuple[Follower, Relay | None]]) -> Job:
        """Queue it; the leader's own job. Followers come with the way to them."""
        branches, apart = [], []
        for follower, relay in followers:
            self._followers.append(follower)
            if follower.has_given_up:
                continue
            if relay is None:
                apart.append(follower)
            else:
                branches.append(Branch(relay, self._group_idx))
                follower.follow_branch(branches[-1])
        leaders = self._transfer(self._leader, self._event, branches)
        job = self._leader.device.submit(Direction.LOAD, leaders, self._deadline)
        for follower in apart:
            own = self._transfer(follower.worker, StartOfAnother(self._event))
            device = follower.worker.device
            follower.follow_job(device.submit(Direction.LOAD, own, self._deadline))
        return job

    async def end(self, job: Job) -> Copied:
        """Await the leader's job and then the others. TransferFailedError if the leader's fails."""
        succeeded = False
        try:
            await until_settled(job)
            succeeded = True
        finally:
            ends = [follower.end(cancel=not succeeded) for follower in self._followers]
            ways = await asyncio.gather(*ends)
        nbytes = len(self._ids) * self._leader.groups[self._group_idx].planner.block_bytes
        return Copied(
            host_to_device=nbytes * (1 + ways.count(Way.POOL)),
            device_to_device=nbytes * ways.count(Way.RELAY),
        )

    def _transfer(
        self, worker: WorkerMemory, start: Start, branches: Sequence[Branch] = ()
    ) -> BlockTransfer:
        group, device = worker.groups[self._group_idx], worker.device
        if branches:
            return FanOut(device, group, self._ids, self._hosts, start, branches)
        return BlockTransfer(device, Direction.LOAD, group, self._ids, self._hosts, start)


async def until_settled(job: Job) -> None:
    """Wait for a job. When cancelled, cancel it and still wait: its memory is in use till then."""
    settled = asyncio.wrap_future(job.settled)
    try:
        await asyncio.shield(settled)
    except asyncio.CancelledError:
        job.cancel()
        try:
            await to_its_end(settled)
        finally:
            settled.exception()  # seen: it says no more than that the job was cancelled
        raise


async def to_its_end(future: asyncio.Future[None]) -> None:
    """Wait for it to be done. Who is cancelled meanwhile hears of that only then."""
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError as error:
            cancelled = cancelled or error
    if cancelled is not None:
        raise cancelled

"""Retrieve in server mode: loads into the device memory of one reader, or of several.

Until a copy is over, the parts that it reads stay where they are: they are pinned, besides being
locked by the readers.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvdock_server.core import (
    MAX_KEYS,
    MAX_READERS,
    Core,
    LeaseRange,
    LockedShards,
    LockRange,
    Session,
)
from kvdock_server.errors import Reason, RequestError, invalid
from kvdock_server.service.block_copy import BlockCopy, deadline
from kvdock_server.service.chunk_status import ChunkStatus
from kvdock_server.service.fills import Fill, Fills
from kvdock_server.service.memory import RegisteredMemory
from kvdock_server.steps import at_once
from kvdock_server.transfer import (
    DeviceMemoryError,
    GroupMemory,
    LoadFollower,
    TransferFailedError,
)

logger = logging.getLogger(__name__)

DEFAULT_ASK_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class RetrieveCall:
    """What a Retrieve asks for. For ``also_fill`` see RetrieveRequest."""

    chunks: LeaseRange
    shard: int
    reader: int
    copy: BlockCopy
    also_fill: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class AwaitFillCall:
    """What an AwaitFill asks for. ``timeout_ms`` and ``deadline_ns`` are as in BlockCopy."""

    chunks: LeaseRange
    shard: int
    reader: int
    filled_by: int
    timeout_ms: int = 0
    deadline_ns: int = 0


class DeviceLoads:
    """Retrieve and AwaitFill, for sessions of server mode."""

    def __init__(self, core: Core, memory: RegisteredMemory) -> None:
        self._core = core
        self._memory = memory
        self._fills = Fills()

    async def load(self, session: Session, call: RetrieveCall) -> Sequence[ChunkStatus]:
        """Copy locked chunks to the reader's device; the status of each chunk."""
        until = call.copy.deadline(self._core.clock())
        if call.also_fill:
            await self._memory.wait_for(session, call.also_fill, until)
        # At once: the locks must not be freed before ``_copy`` pins the parts.
        locked = at_once(
            self._core.locate_in_steps(session, call.chunks, shard=call.shard, reader=call.reader)
        )
        named = self._named(session, call, locked)
        failed = [ChunkStatus.FAILED] * len(locked.shards)
        outcomes: dict[int, list[ChunkStatus]] = {}
        try:
            outcomes = await self._copy(session, call, locked, named, until)
        finally:
            for reader, fill in named.items():
                self._fills.settle(fill, outcomes.get(reader, failed))
        return outcomes[call.reader]

    async def _copy(
        self,
        session: Session,
        call: RetrieveCall,
        locked: LockedShards,
        named: Mapping[int, Fill],
        until: float,
    ) -> dict[int, list[ChunkStatus]]:
        """Copy for the caller and the readers in ``named``; each reader's status of each chunk.

        Frees all these readers' locks on the range, unless it raises a RequestError.
        """
        group_idx, shards = locked.range.group_idx, locked.located
        registration, layout = self._memory.of(session, locked.namespace, group_idx)
        blocks = call.copy.blocks(layout, len(locked.shards))
        self._check_named(session, named, layout, locked, int(blocks.max(initial=0)))
        readers = [call.reader, *(r for r, fill in named.items() if fill.reader is not None)]
        outcomes = {reader: [ChunkStatus.NOT_LOCKED] * len(locked.shards) for reader in readers}
        followers: dict[int, LoadFollower] = {}
        for reader, fill in named.items():
            if fill.reader is not None and locked.are_held_by(reader):
                theirs = self._memory.of(fill.reader, locked.namespace, group_idx)
                fill.follower = theirs.registration.follower()
                followers[reader] = fill.follower
        statuses = dict.fromkeys([call.reader, *followers], ChunkStatus.FAILED)
        with locked.reading(readers):
            try:
                if shards:
                    skipped = call.copy.skip_blocks if 0 in shards else 0
                    copied = await registration.retrieve(
                        group_idx,
                        blocks[list(shards)].ravel()[skipped:],
                        [shard.offset for shard in shards.values()],
                        skipped,
                        call.copy.ready_event,
                        until - self._core.clock(),
                        list(followers.values()),
                    )
                    self._core.counters.host_to_device_bytes += copied.host_to_device
                    self._core.counters.device_to_device_bytes += copied.device_to_device
                for reader in statuses:
                    if reader == call.reader or followers[reader].failure is None:
                        statuses[reader] = ChunkStatus.RETRIEVED
                        self._core.count_retrieved(list(shards.values()))
                    else:
                        logger.warning("reader %d: %s", reader, followers[reader].failure)
            except (TransferFailedError, DeviceMemoryError) as error:
                logger.warning("a load of %d chunks failed: %s", len(shards), error)
        for reader, status in statuses.items():
            for index in shards:
                outcomes[reader][index] = status
        return outcomes

    async def await_fill(self, session: Session, call: AwaitFillCall) -> Sequence[ChunkStatus]:
        """Wait for the leader's call to fill this reader; the status of each chunk."""
        chunks, leader = call.chunks, call.filled_by
        asked = _check_asked(session, call)
        until = deadline(call.timeout_ms, call.deadline_ns, self._core.clock())
        self._core.lease_namespace(session, chunks.lease_id)  # raises FOREIGN_LEASE
        try:
            await self._memory.wait_for(session, [leader], until)
        except asyncio.CancelledError:
            # The leader, which may come later, must not touch this reader's blocks.
            self._free(session, call)
            raise
        seconds = DEFAULT_ASK_SECONDS
        if math.isfinite(until):
            seconds = until - self._core.clock()
        # Raises FOREIGN_LEASE in any case. A lease that ended may have been ended by the leader.
        namespace = self._core.lease_namespace(session, chunks.lease_id)
        fill = self._fills.get(session, chunks)
        if fill is not None and fill.is_led:
            if fill.reader is not session:
                self._fills.forget(fill)
                raise _by_itself(call, "has left this reader to itself")
        elif not namespace:
            raise RequestError(
                Reason.UNKNOWN_LEASE,
                f"lease {chunks.lease_id} ended or is of an earlier epoch: look up again",
                lease_id=chunks.lease_id,
            )
        else:
            self._memory.of(session, namespace, chunks.group_idx)
            if self._memory.reader(session, leader, namespace, chunks.group_idx) is None:
                raise _by_itself(call, "has registered no memory for the group")
        fill = self._fills.ask(session, chunks)
        try:
            statuses = await fill.ask(seconds)
        finally:
            self._fills.forget(fill)
            self._free(session, call)
        failed = [ChunkStatus.FAILED] * asked
        if statuses is None:
            logger.warning(
                "reader %d of %s gave up: it was not filled within %.1f s",
                call.reader, session.engine_id, seconds,
            )  # fmt: skip
            return failed
        if fill.reader is not session:
            logger.warning(
                "reader %d of %s was not filled, another session of that name was: is engine_id "
                "%s that of two engines?",
                call.reader, session.engine_id, session.engine_id,
            )  # fmt: skip
            return failed
        return statuses

    def _free(self, session: Session, call: AwaitFillCall) -> None:
        """Free the reader's locks on the range."""
        chunks = call.chunks
        locks = LockRange(
            chunks.lease_id, chunks.first_chunk, chunks.end_chunk, call.reader, chunks.group_idx
        )
        # At once: a call that is cancelled does not come back for the rest.
        at_once(self._core.free_locks_in_steps(session, [locks]))

    def _named(self, session: Session, call: RetrieveCall, locked: LockedShards) -> dict[int, Fill]:
        """The shares of the readers in also_fill, by reader; RequestError if the list is wrong."""
        named = call.also_fill
        if len(named) >= MAX_READERS:
            raise invalid(
                f"{len(named)} readers in also_fill: at most {MAX_READERS - 1}",
                "also_fill",
                MAX_READERS - 1,
            )
        if call.reader in named or len(set(named)) != len(named):
            raise invalid(
                f"also_fill {', '.join(map(str, named[:8]))} of reader {call.reader}: each other "
                "reader once",
                "also_fill",
            )
        if max(named, default=0) >= locked.readers:
            raise invalid(
                f"reader {max(named)} in also_fill: the lease was given to {locked.readers} "
                "readers",
                "also_fill",
                locked.readers - 1,
            )
        group_idx = locked.range.group_idx
        return {
            reader: self._fills.lead(
                session.engine_id,
                reader,
                locked.range,
                self._memory.reader(session, reader, locked.namespace, group_idx),
            )
            for reader in named
        }

    def _check_named(
        self,
        session: Session,
        named: Mapping[int, Fill],
        layout: GroupMemory,
        locked: LockedShards,
        last_block: int,
    ) -> None:
        """RequestError unless each reader's memory has all blocks up to the caller's last."""
        for reader, fill in named.items():
            if fill.reader is None:
                continue
            if fill.reader.kv_worker_id != session.kv_worker_id:
                raise invalid(
                    f"reader {reader} in also_fill reads shard {fill.reader.kv_worker_id}, and "
                    f"the caller {session.kv_worker_id}: they must be the same"
                )
            _, theirs = self._memory.of(fill.reader, locked.namespace, locked.range.group_idx)
            if theirs.blocks_per_chunk != layout.blocks_per_chunk:
                raise invalid(
                    f"reader {reader} in also_fill has {theirs.blocks_per_chunk} blocks a chunk, "
                    f"and the caller {layout.blocks_per_chunk}: block ids must mean the same"
                )
            if last_block >= theirs.num_blocks:
                raise invalid(
                    f"block id {last_block}: reader {reader} in also_fill has registered "
                    f"{theirs.num_blocks} blocks"
                )


def _check_asked(session: Session, call: AwaitFillCall) -> int:
    """How many chunks are asked for; RequestError if a field of the call is wrong."""
    if (call.shard, call.reader) != (session.kv_worker_id, session.worker_id):
        raise invalid(
            f"shard {call.shard} and reader {call.reader}: this session may ask for "
            f"shard {session.kv_worker_id} as reader {session.worker_id} only"
        )
    if call.filled_by == call.reader:
        raise invalid(f"filled_by {call.filled_by}: that is the reader itself", "filled_by")
    first, end = call.chunks.first_chunk, call.chunks.end_chunk or 0
    if not 1 <= end - first <= MAX_KEYS:
        raise invalid(
            f"chunks {first} to {end}: from 1 to {MAX_KEYS}, those of the other reader's Retrieve",
            "end_chunk",
            first + MAX_KEYS,
        )
    return end - first


def _by_itself(call: AwaitFillCall, why: str) -> RequestError:
    return RequestError(
        Reason.DEVICE_MEMORY,
        f"reader {call.filled_by}, which is to fill reader {call.reader}, {why}: send a Retrieve "
        "for this reader alone",
    )

"""Retrieve in server mode: loads into one reader's device memory, or into several readers'."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence

from kvdock.v1 import cache_pb2 as pb
from kvdock.v1 import types_pb2 as types
from kvdock_server.core import MAX_KEYS, MAX_READERS, Core, LocatedShard
from kvdock_server.errors import Reason, RequestError, invalid
from kvdock_server.rpc import fields, verbs
from kvdock_server.rpc.fills import Fill, FillKey, Fills, Status
from kvdock_server.rpc.memory import RegisteredMemory
from kvdock_server.sessions import Session
from kvdock_server.transfer import (
    DeviceMemoryError,
    GroupMemory,
    LoadFollower,
    TransferFailedError,
)

logger = logging.getLogger(__name__)

DEFAULT_ASK_SECONDS = 30.0


class Loads:
    """Retrieve, for sessions of server mode."""

    def __init__(self, core: Core, memory: RegisteredMemory) -> None:
        self._core = core
        self._memory = memory
        self._fills = Fills()

    async def retrieve(self, session: Session, request: pb.RetrieveRequest) -> pb.RetrieveResponse:
        """Copy locked chunks to the reader's device, or tell what another's call did for it."""
        deadline = fields.deadline(request, self._core.clock())
        if request.HasField("filled_by"):
            await self._memory.wait_for(session, [request.filled_by], deadline)
            return await self._ask(session, request, deadline)
        if request.also_fill:
            await self._memory.wait_for(session, request.also_fill, deadline)
        group_idx = verbs.group_idx(request)
        located = self._core.locate(
            session,
            request.lease_id,
            group_idx,
            request.first_chunk,
            request.end_chunk,
            shard=request.kv_worker_id,
            reader=request.reader,
        )
        end = request.first_chunk + len(located)
        key = FillKey(request.lease_id, group_idx, request.first_chunk, end)
        named = self._named(session, request, key)
        failed = [types.CHUNK_STATUS_FAILED] * len(located)
        outcomes: dict[int, list[Status]] = {}
        try:
            outcomes = await self._load(session, request, key, located, named, deadline)
        finally:
            for reader, fill in named.items():
                statuses = outcomes.get(reader, failed)
                self._fills.settle(session.engine_id, reader, key, fill, statuses)
        return self._retrieved(outcomes[request.reader])

    async def _load(
        self,
        session: Session,
        request: pb.RetrieveRequest,
        key: FillKey,
        located: Sequence[LocatedShard | None],
        named: Mapping[int, Fill],
        deadline: float,
    ) -> dict[int, list[Status]]:
        """Copy for the caller and the readers it names; the status of each chunk for each reader.

        Frees the locks of all of them on the range, unless it raises a RequestError.
        """
        namespace = self._core.lease_namespace(session, key.lease_id)
        registration, layout = self._memory.of(session, namespace, key.group_idx)
        skip = request.skip_blocks
        blocks = fields.block_ids(request.block_ids, layout, len(located), skip_blocks=skip)
        event = fields.ready_event(request.ready_event)
        shards = {i: shard for i, shard in enumerate(located) if shard is not None}
        self._check_named(session, named, layout, key, int(blocks.max(initial=0)))
        readers = [request.reader, *(r for r, fill in named.items() if fill.reader is not None)]
        outcomes = {reader: [types.CHUNK_STATUS_NOT_LOCKED] * len(located) for reader in readers}
        locked = [key.first_chunk + index for index in shards]
        followers: dict[int, LoadFollower] = {}
        for reader, fill in named.items():
            held = self._core.holds(session, key.lease_id, key.group_idx, locked, reader)
            if fill.reader is not None and held:
                theirs, _ = self._memory.of(fill.reader, namespace, key.group_idx)
                fill.follower = theirs.follower()
                followers[reader] = fill.follower
        parts = [shard.part for shard in shards.values()]
        self._core.index.pin(parts)
        statuses = dict.fromkeys([request.reader, *followers], types.CHUNK_STATUS_FAILED)
        try:
            if shards:
                skipped = skip if 0 in shards else 0
                copied = await registration.retrieve(
                    key.group_idx,
                    blocks[list(shards)].ravel()[skipped:],
                    [shard.offset for shard in shards.values()],
                    skipped,
                    event,
                    deadline - self._core.clock(),
                    list(followers.values()),
                )
                self._core.counters.host_to_device_bytes += copied.host_to_device
                self._core.counters.device_to_device_bytes += copied.device_to_device
            for reader in statuses:
                if reader == request.reader or followers[reader].failure is None:
                    statuses[reader] = types.CHUNK_STATUS_RETRIEVED
                    self._core.count_retrieved(list(shards.values()))
                else:
                    logger.warning("reader %d: %s", reader, followers[reader].failure)
        except (TransferFailedError, DeviceMemoryError) as error:
            logger.warning("a load of %d chunks failed: %s", len(shards), error)
        finally:
            for part in parts:
                self._core.index.unpin(part)
            self._core.end_retrieve(session, *key, readers)
        for reader, status in statuses.items():
            for index in shards:
                outcomes[reader][index] = status
        return outcomes

    async def _ask(
        self, session: Session, request: pb.RetrieveRequest, deadline: float
    ) -> pb.RetrieveResponse:
        """Wait for what another reader's call does for this one."""
        key = _asked_for(session, request)
        seconds = DEFAULT_ASK_SECONDS
        if math.isfinite(deadline):
            seconds = deadline - self._core.clock()
        # FOREIGN_LEASE whatever else; a lease that ended is fine if the other call ended it.
        namespace = self._core.lease_namespace(session, key.lease_id)
        fill = self._fills.get(session, key)
        if fill is not None and fill.is_led:
            if fill.reader is not session:
                self._fills.forget(session.engine_id, session.worker_id, key, fill)
                raise _by_itself(request, "has left this reader to itself")
        elif not namespace:
            raise RequestError(
                Reason.UNKNOWN_LEASE,
                f"lease {key.lease_id} ended or is of an earlier epoch: look up again",
            )
        else:
            self._memory.of(session, namespace, key.group_idx)
            if self._memory.reader(session, request.filled_by, namespace, key.group_idx) is None:
                raise _by_itself(request, "has registered no memory for the group")
        fill = self._fills.ask(session, key)
        try:
            statuses = await fill.ask(seconds)
        finally:
            self._fills.forget(session.engine_id, session.worker_id, key, fill)
            self._core.end_retrieve(session, *key, [request.reader])
        if statuses is not None and fill.reader is not session:
            logger.warning(
                "reader %d of %s was not filled, another session of that name was: is engine_id "
                "%s that of two engines?",
                request.reader, session.engine_id, session.engine_id,
            )  # fmt: skip
            statuses = [types.CHUNK_STATUS_FAILED] * len(statuses)
        if statuses is None:
            logger.warning(
                "reader %d of %s gave up: it was not filled within %.1f s",
                request.reader, session.engine_id, seconds,
            )  # fmt: skip
            statuses = [types.CHUNK_STATUS_FAILED] * (key.end_chunk - key.first_chunk)
        return self._retrieved(statuses)

    def _retrieved(self, statuses: Sequence[Status]) -> pb.RetrieveResponse:
        return pb.RetrieveResponse(
            epoch=self._core.epoch, chunks=[pb.ChunkResult(status=status) for status in statuses]
        )

    def _named(
        self, session: Session, request: pb.RetrieveRequest, key: FillKey
    ) -> dict[int, Fill]:
        """The shares of the readers in also_fill; RequestError if the list is wrong."""
        named = request.also_fill
        if len(named) >= MAX_READERS:
            raise invalid(f"{len(named)} readers in also_fill: at most {MAX_READERS - 1}")
        if request.reader in named or len(set(named)) != len(named):
            raise invalid(
                f"also_fill {list(named[:8])} of reader {request.reader}: each other reader once"
            )
        readers = self._core.lease_readers(session, key.lease_id)
        if max(named, default=0) >= readers:
            raise invalid(
                f"reader {max(named)} in also_fill: the lease was given to {readers} readers"
            )
        namespace = self._core.lease_namespace(session, key.lease_id)
        return {
            reader: self._fills.lead(
                session.engine_id,
                reader,
                key,
                self._memory.reader(session, reader, namespace, key.group_idx),
            )
            for reader in named
        }

    def _check_named(
        self,
        session: Session,
        named: Mapping[int, Fill],
        layout: GroupMemory,
        key: FillKey,
        last_block: int,
    ) -> None:
        """RequestError unless the readers can get the caller's blocks."""
        namespace = self._core.lease_namespace(session, key.lease_id)
        for reader, fill in named.items():
            if fill.reader is None:
                continue
            if fill.reader.kv_worker_id != session.kv_worker_id:
                raise invalid(
                    f"reader {reader} in also_fill reads shard {fill.reader.kv_worker_id}, and "
                    f"the caller {session.kv_worker_id}: they must be the same"
                )
            _, theirs = self._memory.of(fill.reader, namespace, key.group_idx)
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


def _asked_for(session: Session, request: pb.RetrieveRequest) -> FillKey:
    """What a Retrieve with filled_by asks for; RequestError if a field is wrong."""
    if (request.kv_worker_id, request.reader) != (session.kv_worker_id, session.worker_id):
        raise invalid(
            f"shard {request.kv_worker_id} and reader {request.reader}: this session may ask for "
            f"shard {session.kv_worker_id} as reader {session.worker_id} only"
        )
    if request.filled_by == request.reader:
        raise invalid(f"filled_by {request.filled_by}: that is the reader itself")
    if request.block_ids or request.skip_blocks or request.ready_event or request.also_fill:
        raise invalid(
            "filled_by with block_ids, skip_blocks, ready_event or also_fill: those are for the "
            "reader that fills this one"
        )
    first, end = request.first_chunk, request.end_chunk
    if not 1 <= end - first <= MAX_KEYS:
        raise invalid(
            f"chunks [{first}, {end}): from 1 to {MAX_KEYS}; filled_by needs an end_chunk"
        )
    return FillKey(request.lease_id, verbs.group_idx(request), first, end)


def _by_itself(request: pb.RetrieveRequest, why: str) -> RequestError:
    return RequestError(
        Reason.DEVICE_MEMORY,
        f"reader {request.filled_by}, which is to fill reader {request.reader}, {why}: retrieve "
        "without filled_by",
    )

"""The verbs that may take as long as a copy takes: RegisterMemory, Store and Retrieve.

In server mode the server copies between its pool and the worker's device memory. Until such a copy
is over its memory stays put: slots that are filled are given back only then, and parts that are
read are pinned besides the caller's locks.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvdock.v1 import cache_pb2 as pb
from kvdock.v1 import session_pb2
from kvdock.v1 import types_pb2 as types
from kvdock_server.core import MAX_KEYS, MAX_READERS, Core, LocatedShard, check_session
from kvdock_server.errors import Reason, RequestError, invalid
from kvdock_server.index.index import Slot
from kvdock_server.rpc import verbs
from kvdock_server.rpc.fills import Fill, FillKey, Fills, Status
from kvdock_server.sessions import Mode, Role, Session
from kvdock_server.transfer import (
    BlockRegion,
    DeviceAllocation,
    DeviceMemoryError,
    Follower,
    GpuTransfers,
    GroupLayout,
    LayoutError,
    Registration,
    TransferFailedError,
)
from kvdock_server.transfer.plan import I64

logger = logging.getLogger(__name__)

DEFAULT_ASK_MS = 30_000
# By then the other workers of an engine have mostly registered, too.
SETTLED_SECONDS = 1.0
EVENT_HANDLE_BYTES = 64


@dataclass(frozen=True)
class WorkerMemory:
    """What a worker registered: its blocks, by group_idx, of one namespace."""

    namespace: str
    groups: dict[int | None, GroupLayout]
    registration: Registration


class Copies:
    """Copies made by the server, for all sessions."""

    def __init__(self, core: Core, transfers: GpuTransfers) -> None:
        self._core = core
        self._transfers = transfers
        self._memory: dict[Session, WorkerMemory] = {}
        self._fills = Fills()

    async def register_memory(
        self, session: Session | None, request: session_pb2.RegisterMemoryRequest
    ) -> session_pb2.RegisterMemoryResponse:
        """Open a worker's device memory, or agree on another way for its bytes."""
        if session is None or session.role is not Role.WORKER:
            raise invalid("only a worker's session has memory to register")
        if request.mode not in (0, *(mode.value for mode in Mode)):
            raise invalid(f"mode {request.mode} is none of the protocol's")
        memory = None
        reason = "the client asked for it"
        mode = Mode(request.mode) if request.mode else Mode.SHARED
        if mode is Mode.SERVER or (not request.mode and request.allocations):
            try:
                memory = await self._open(session, request)
                mode, reason = Mode.SERVER, memory.registration.description
            except DeviceMemoryError as error:
                if mode is Mode.SERVER:
                    raise RequestError(Reason.DEVICE_MEMORY, str(error)) from error
                reason = str(error)
            except LayoutError as error:
                raise invalid(str(error)) from error
        elif not request.mode:
            reason = "the client has no device memory to export"
        await self.release(session)
        if memory is not None:
            self._memory[session] = memory
            loop = asyncio.get_running_loop()
            loop.call_later(SETTLED_SECONDS, self._expect_followers, session)
        session.mode, session.mode_reason = mode, reason
        logger.info("worker %d of %s: %s mode: %s", session.worker_id, session.engine_id,
                    mode.name.lower(), reason)  # fmt: skip
        return session_pb2.RegisterMemoryResponse(
            epoch=self._core.epoch, mode=types.TransferMode.ValueType(mode.value), reason=reason
        )

    async def store(self, session: Session | None, request: pb.StoreRequest) -> pb.StoreResponse:
        """Copy chunks out of the session's device memory."""
        session = check_session(session, Mode.SERVER)
        memory, layout = self._layout(session, request.namespace, verbs.group_idx(request))
        blocks = _block_ids(request.block_ids, layout, len(request.keys), skip_blocks=0)
        event = _event(request.ready_event)
        outcomes = self._core.reserve(
            session,
            request.namespace,
            verbs.group_idx(request),
            session.kv_worker_id,
            request.parent_key,
            request.keys,
            verbs.event_data(self._core, request),
        )
        slots = {i: outcome for i, outcome in enumerate(outcomes) if isinstance(outcome, Slot)}
        statuses = [
            types.CHUNK_STATUS_FAILED
            if isinstance(outcome, Slot)
            else verbs.RESERVE_STATUS[outcome]
            for outcome in outcomes
        ]
        try:
            if slots:
                await memory.registration.store(
                    verbs.group_idx(request),
                    blocks[list(slots)].ravel(),
                    [slot.offset for slot in slots.values()],
                    event,
                    _seconds(request.timeout_ms),
                )
                self._core.counters.device_to_host_bytes += len(slots) * layout.chunk_bytes
            for index in list(slots):
                if self._core.seal(slots.pop(index)):
                    statuses[index] = types.CHUNK_STATUS_STORED
        except (TransferFailedError, DeviceMemoryError) as error:
            logger.warning("a store of %d chunks failed: %s", len(slots), error)
        finally:
            for slot in slots.values():
                self._core.give_back(slot)
        return pb.StoreResponse(epoch=self._core.epoch, statuses=statuses)

    async def retrieve(
        self, session: Session | None, request: pb.RetrieveRequest
    ) -> pb.RetrieveResponse:
        """Deliver locked chunks in the way of the session's mode."""
        if session is None or session.mode is not Mode.SERVER:
            if request.also_fill or request.HasField("filled_by"):
                check_session(session, Mode.SERVER)
            return verbs.retrieve_shared(self._core, session, request)
        if request.HasField("filled_by"):
            return await self._ask(session, request)
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
            outcomes = await self._load(session, request, key, located, named)
        finally:
            for reader, fill in named.items():
                statuses = outcomes.get(reader, failed)
                self._fills.settle(session.engine_id, reader, key, fill, statuses)
        return self._retrieved(outcomes[request.reader])

    async def release(self, session: Session) -> None:
        """End the session's copies and let go of its device memory."""
        memory = self._memory.pop(session, None)
        if memory is not None:
            await memory.registration.close()

    async def _load(
        self,
        session: Session,
        request: pb.RetrieveRequest,
        key: FillKey,
        located: Sequence[LocatedShard | None],
        named: Mapping[int, Fill],
    ) -> dict[int, list[Status]]:
        """Copy for the caller and the readers it names; the status of each chunk for each reader.

        Frees the locks of all of them on the range, unless it raises a RequestError.
        """
        namespace = self._core.lease_namespace(session, key.lease_id)
        memory, layout = self._layout(session, namespace, key.group_idx)
        skip = request.skip_blocks
        blocks = _block_ids(request.block_ids, layout, len(located), skip_blocks=skip)
        event = _event(request.ready_event)
        shards = {i: shard for i, shard in enumerate(located) if shard is not None}
        self._check_named(session, named, layout, key, int(blocks.max(initial=0)))
        readers = [request.reader, *(r for r, fill in named.items() if fill.reader is not None)]
        outcomes = {reader: [types.CHUNK_STATUS_NOT_LOCKED] * len(located) for reader in readers}
        locked = [key.first_chunk + index for index in shards]
        followers: dict[int, Follower] = {}
        for reader, fill in named.items():
            held = self._core.holds(session, key.lease_id, key.group_idx, locked, reader)
            if fill.reader is not None and held:
                fill.follower = self._memory[fill.reader].registration.follower()
                followers[reader] = fill.follower
        parts = [shard.part for shard in shards.values()]
        self._core.index.pin(parts)
        statuses = dict.fromkeys([request.reader, *followers], types.CHUNK_STATUS_FAILED)
        try:
            if shards:
                skipped = skip if 0 in shards else 0
                copied = await memory.registration.retrieve(
                    key.group_idx,
                    blocks[list(shards)].ravel()[skipped:],
                    [shard.offset for shard in shards.values()],
                    skipped,
                    event,
                    _seconds(request.timeout_ms),
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

    async def _ask(self, session: Session, request: pb.RetrieveRequest) -> pb.RetrieveResponse:
        """Wait for what another reader's call does for this one."""
        key = _asked_for(session, request)
        seconds = _seconds(request.timeout_ms or DEFAULT_ASK_MS)
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
            self._layout(session, namespace, key.group_idx)
            if self._reader(session, request.filled_by, namespace, key.group_idx) is None:
                raise _by_itself(request, "has registered no memory for the group")
        fill = self._fills.ask(session, key)
        try:
            statuses = await fill.ask(seconds)
        finally:
            self._fills.forget(session.engine_id, session.worker_id, key, fill)
            self._core.end_retrieve(session, *key, [request.reader])
        if statuses is None:
            logger.warning(
                "reader %d of %s gave up: it was not filled within %g s",
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
                f"also_fill {list(named)} of reader {request.reader}: each other reader once"
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
                self._reader(session, reader, namespace, key.group_idx),
            )
            for reader in named
        }

    def _check_named(
        self,
        session: Session,
        named: Mapping[int, Fill],
        layout: GroupLayout,
        key: FillKey,
        last_block: int,
    ) -> None:
        """RequestError unless the readers can get the caller's blocks."""
        for reader, fill in named.items():
            if fill.reader is None:
                continue
            if fill.reader.kv_worker_id != session.kv_worker_id:
                raise invalid(
                    f"reader {reader} in also_fill reads shard {fill.reader.kv_worker_id}, and "
                    f"the caller {session.kv_worker_id}: they must be the same"
                )
            theirs = self._memory[fill.reader].groups[key.group_idx]
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

    def _expect_followers(self, session: Session) -> None:
        """Open the ways from the reader likely to lead the others of its shard: the first."""
        if session not in self._memory:
            return
        registered = {
            worker.worker_id: memory.registration
            for worker, memory in self._memory.items()
            if (worker.engine_id, worker.kv_worker_id, memory.namespace)
            == (session.engine_id, session.kv_worker_id, self._memory[session].namespace)
        }
        leader = registered.pop(min(registered))
        for follower in registered.values():
            leader.expect_follower(follower)

    def _reader(
        self, session: Session, reader: int, namespace: str, group_idx: int | None
    ) -> Session | None:
        """The session of a reader of the same engine, if it has registered memory for the group."""
        for worker in reversed(self._memory):  # the latest first
            if (worker.engine_id, worker.worker_id) == (session.engine_id, reader):
                has_group = self._group(worker, namespace, group_idx) is not None
                return worker if has_group else None
        return None

    async def _open(
        self, session: Session, request: session_pb2.RegisterMemoryRequest
    ) -> WorkerMemory:
        space = self._core.index.space(request.namespace)
        groups: dict[int | None, GroupLayout] = {}
        for group in request.groups:
            group_idx = verbs.group_idx(group)
            layout = GroupLayout(
                group.num_blocks,
                group.blocks_per_chunk,
                tuple(
                    BlockRegion(
                        region.allocation, region.offset, region.block_stride, region.page_bytes
                    )
                    for region in group.regions
                ),
            )
            position = space.namespace.position(group_idx)
            shard_bytes = space.shard_bytes(position, session.kv_worker_id)
            if layout.chunk_bytes != shard_bytes:
                raise invalid(
                    f"group {group_idx}: {layout.blocks_per_chunk} blocks of {layout.block_bytes} "
                    f"bytes a chunk, but its shards have {shard_bytes} bytes"
                )
            groups[group_idx] = layout
        allocations = [
            DeviceAllocation(allocation.ipc_handle, allocation.bytes, allocation.device_uuid)
            for allocation in request.allocations
        ]
        registration = await self._transfers.register(allocations, groups)
        return WorkerMemory(request.namespace, groups, registration)

    def _layout(
        self, session: Session, namespace: str, group_idx: int | None
    ) -> tuple[WorkerMemory, GroupLayout]:
        layout = self._group(session, namespace, group_idx)
        if layout is None:
            raise RequestError(
                Reason.DEVICE_MEMORY,
                f"this session registered no memory for group {group_idx} of namespace "
                f"{namespace!r}: send register_memory first",
            )
        return self._memory[session], layout

    def _group(self, session: Session, namespace: str, group_idx: int | None) -> GroupLayout | None:
        """How a session's memory for a group lies, None if it registered none."""
        memory = self._memory.get(session)
        if memory is None or memory.namespace != namespace:
            return None
        return memory.groups.get(group_idx)


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


def _event(ipc_handle: bytes) -> bytes:
    """The handle of an event, or none; RequestError if it is no handle."""
    if len(ipc_handle) not in (0, EVENT_HANDLE_BYTES):
        raise invalid(f"ready_event of {len(ipc_handle)} bytes: {EVENT_HANDLE_BYTES}, or none")
    return ipc_handle


def _seconds(timeout_ms: int) -> float:
    return timeout_ms / 1000 if timeout_ms else float("inf")


def _block_ids(
    block_ids: Sequence[int], layout: GroupLayout, chunks: int, *, skip_blocks: int
) -> I64:
    """Block ids as (chunks, blocks a chunk), 0 for those to skip; RequestError if wrong."""
    per_chunk = layout.blocks_per_chunk
    if skip_blocks >= per_chunk:
        raise invalid(f"skip_blocks {skip_blocks}: a chunk has {per_chunk} blocks")
    needed = chunks * per_chunk - skip_blocks
    if len(block_ids) != needed:
        raise invalid(
            f"{len(block_ids)} block_ids: {chunks} chunks of {per_chunk} blocks less "
            f"{skip_blocks} make {needed}"
        )
    blocks = np.zeros(chunks * per_chunk, dtype=np.int64)
    blocks[skip_blocks:] = block_ids
    if blocks.max(initial=0) >= layout.num_blocks:
        raise invalid(f"block id {blocks.max()}: {layout.num_blocks} blocks are registered")
    return blocks.reshape(chunks, per_chunk)

"""The verbs that may take as long as a copy takes: RegisterMemory, Store and Retrieve.

In server mode the server copies between its pool and the worker's device memory. Until such a copy
is over its memory stays put: slots that are filled are given back only then, and parts that are
read are pinned besides the caller's locks.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvdock.v1 import cache_pb2 as pb
from kvdock.v1 import session_pb2
from kvdock.v1 import types_pb2 as types
from kvdock_server.core import Core, check_session
from kvdock_server.errors import Reason, RequestError, invalid
from kvdock_server.index.index import Slot
from kvdock_server.rpc import verbs
from kvdock_server.sessions import Mode, Role, Session
from kvdock_server.transfer import (
    BlockRegion,
    DeviceAllocation,
    DeviceMemoryError,
    GpuTransfers,
    GroupLayout,
    LayoutError,
    Registration,
    TransferFailedError,
)
from kvdock_server.transfer.plan import I64

logger = logging.getLogger(__name__)


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
                    request.ready_event,
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
            return verbs.retrieve_shared(self._core, session, request)
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
        namespace = self._core.lease_namespace(session, request.lease_id)
        memory, layout = self._layout(session, namespace, group_idx)
        skip = request.skip_blocks
        blocks = _block_ids(request.block_ids, layout, len(located), skip_blocks=skip)
        shards = {i: shard for i, shard in enumerate(located) if shard is not None}
        statuses = [types.CHUNK_STATUS_NOT_LOCKED] * len(located)
        parts = [shard.part for shard in shards.values()]
        self._core.index.pin(parts)
        try:
            if shards:
                skipped = skip if 0 in shards else 0
                await memory.registration.retrieve(
                    group_idx,
                    blocks[list(shards)].ravel()[skipped:],
                    [shard.offset for shard in shards.values()],
                    skipped,
                    request.ready_event,
                    _seconds(request.timeout_ms),
                )
                self._core.counters.host_to_device_bytes += (
                    len(shards) * layout.chunk_bytes - skipped * layout.block_bytes
                )
                self._core.count_retrieved(list(shards.values()))
            status = types.CHUNK_STATUS_RETRIEVED
        except (TransferFailedError, DeviceMemoryError) as error:
            logger.warning("a load of %d chunks failed: %s", len(shards), error)
            status = types.CHUNK_STATUS_FAILED
        finally:
            for part in parts:
                self._core.index.unpin(part)
            end = request.first_chunk + len(located)
            lock = (request.lease_id, request.first_chunk, end, request.reader, group_idx)
            self._core.free_locks(session, [lock])
        for index in shards:
            statuses[index] = status
        return pb.RetrieveResponse(
            epoch=self._core.epoch, chunks=[pb.ChunkResult(status=status) for status in statuses]
        )

    async def release(self, session: Session) -> None:
        """End the session's copies and let go of its device memory."""
        memory = self._memory.pop(session, None)
        if memory is not None:
            await memory.registration.close()

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
        memory = self._memory.get(session)
        if memory is None or memory.namespace != namespace or group_idx not in memory.groups:
            raise RequestError(
                Reason.DEVICE_MEMORY,
                f"this session registered no memory for group {group_idx} of namespace "
                f"{namespace!r}: send register_memory first",
            )
        return memory, memory.groups[group_idx]


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

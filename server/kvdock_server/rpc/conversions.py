"""Converts between messages and the values of the domain."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from kvdock.v1 import cache_pb2 as pb
from kvdock.v1 import session_pb2
from kvdock.v1 import types_pb2 as types
from kvdock_server.core import (
    MAX_CHUNK_TOKENS,
    MAX_KV_WORLD_SIZE,
    Core,
    Group,
    GroupKind,
    Keep,
    LeaseRange,
    LocatedShard,
    Mode,
    Namespace,
    Priority,
    Slot,
)
from kvdock_server.encoding import tag, varint
from kvdock_server.errors import group_name, invalid
from kvdock_server.service.block_copy import BlockCopy
from kvdock_server.service.chunk_status import ChunkStatus
from kvdock_server.service.loads import AwaitFillCall, RetrieveCall
from kvdock_server.service.memory import ExportedMemory
from kvdock_server.service.retrieve import RetrievedChunk
from kvdock_server.service.store import StoreCall
from kvdock_server.steps import Steps
from kvdock_server.transfer import BlockRegion, DeviceAllocation, GroupMemory, LayoutError

WithResults = TypeVar(
    "WithResults",
    pb.StoreResponse,
    pb.CommitResponse,
    pb.PutAdmission,
    pb.AwaitFillResponse,
    pb.RetrieveResponse,
)

MAX_EVENT_DATA_BYTES = 1 << 20
MAX_BLOCK_HASHES = MAX_CHUNK_TOKENS
"""Of one chunk: at most one for each token."""


def group_idx(message: Any) -> int | None:
    """The message's group_idx, None if it has none: that is not the same as 0."""
    return message.group_idx if message.HasField("group_idx") else None


def end_chunk(message: Any) -> int | None:
    """The message's end_chunk, None if it has none: the range goes to the end."""
    return message.end_chunk if message.HasField("end_chunk") else None


def status_to_proto(status: ChunkStatus) -> types.ChunkStatus.ValueType:
    """What became of a chunk, as messages carry it."""
    return types.ChunkStatus.ValueType(status.value)


def add_results(response: WithResults, statuses: Iterable[ChunkStatus]) -> WithResults:
    """The response, with a ChunkResult for each status in its ``chunks``.

    They are added encoded: 16,384 of them take half a millisecond so, and 8 as messages.
    """
    results = _encoded_results(tag(type(response), "chunks"))
    response.MergeFromString(b"".join([results[status] for status in statuses]))
    return response


@functools.cache
def _encoded_results(field: bytes) -> dict[ChunkStatus, bytes]:
    """A ChunkResult of each status, encoded as the field with this tag."""
    encoded = {}
    for status in ChunkStatus:
        result = pb.ChunkResult(status=status_to_proto(status)).SerializeToString()
        encoded[status] = field + varint(len(result)) + result
    return encoded


def retrieved(core: Core, chunks: Sequence[RetrievedChunk]) -> Steps[pb.RetrieveResponse]:
    response = pb.RetrieveResponse(epoch=core.epoch)
    if not any(chunk.shard for chunk in chunks):
        return add_results(response, [chunk.status for chunk in chunks])
    for status, shard in chunks:
        add_result(response, status, shard)
        yield
    return response


def add_result(
    response: pb.ReserveResponse | pb.RetrieveResponse,
    status: ChunkStatus,
    shard: LocatedShard | Slot | None,
) -> None:
    """Add a ChunkResult, with where the shard lies."""
    result = response.chunks.add(status=status_to_proto(status))
    if shard is not None:
        # Half the time of a Location that is made and copied.
        where = result.location
        where.offset, where.length = shard.offset, shard.nbytes


_PRIORITIES = {
    types.EVICTION_PRIORITY_LOW: Priority.LOW,
    types.EVICTION_PRIORITY_HIGH: Priority.HIGH,
}


def priority(request: Any) -> Priority:
    """How soon what the request stores is to be evicted. Its value was checked (limits.py)."""
    return _PRIORITIES.get(request.priority, Priority.NORMAL)


def wish(core: Core, request: Any) -> Keep | None:
    """The request's wish to keep what it names, None if it has none."""
    return (
        core.pins.wish(request.keep.pin, request.keep.ttl_ms) if request.HasField("keep") else None
    )


def store_call(core: Core, request: pb.StoreRequest) -> StoreCall:
    return StoreCall(
        request.namespace,
        group_idx(request),
        request.parent_key,
        request.keys,
        BlockCopy(
            block_ids=request.block_ids,
            ready_event=request.ready_event,
            timeout_ms=request.timeout_ms,
            deadline_ns=request.deadline_ns,
        ),
        event_data(core, request),
        wish(core, request),
        priority(request),
    )


def retrieve_call(request: pb.RetrieveRequest) -> RetrieveCall:
    return RetrieveCall(
        LeaseRange(request.lease_id, group_idx(request), request.first_chunk, end_chunk(request)),
        request.kv_worker_id,
        request.reader,
        BlockCopy(
            request.block_ids,
            request.skip_blocks,
            request.ready_event,
            request.timeout_ms,
            request.deadline_ns,
        ),
        request.also_fill,
    )


def await_fill_call(request: pb.AwaitFillRequest) -> AwaitFillCall:
    return AwaitFillCall(
        LeaseRange(request.lease_id, group_idx(request), request.first_chunk, request.end_chunk),
        request.kv_worker_id,
        request.reader,
        request.filled_by,
        request.timeout_ms,
        request.deadline_ns,
    )


def wanted_mode(request: session_pb2.RegisterMemoryRequest) -> Mode | None:
    """The mode that a RegisterMemory asks for, None if the server is to choose."""
    if request.mode not in (0, *(mode.value for mode in Mode)):
        raise invalid(f"mode {request.mode} is none of the protocol's", "mode")
    return Mode(request.mode) if request.mode else None


def exported_memory(request: session_pb2.RegisterMemoryRequest) -> ExportedMemory:
    """The memory that a RegisterMemory describes; RequestError if the description is wrong."""
    groups: dict[int | None, GroupMemory] = {}
    for group in request.groups:
        name = group_idx(group)
        if name in groups:
            raise invalid(f"{group_name(name)} is described twice: each group once", "groups")
        if group.blocks_per_chunk > MAX_CHUNK_TOKENS:
            raise invalid(
                f"blocks_per_chunk {group.blocks_per_chunk} of {group_name(name)}: at most "
                f"{MAX_CHUNK_TOKENS}, the most tokens that a chunk has",
                "blocks_per_chunk",
                MAX_CHUNK_TOKENS,
            )
        regions = tuple(
            BlockRegion(region.allocation, region.offset, region.block_stride, region.page_bytes)
            for region in group.regions
        )
        groups[name] = GroupMemory(group.num_blocks, group.blocks_per_chunk, regions)
    try:
        allocations = [
            DeviceAllocation(allocation.ipc_handle, allocation.bytes, allocation.device_uuid)
            for allocation in request.allocations
        ]
    except LayoutError as error:
        raise invalid(str(error)) from error
    return ExportedMemory(request.namespace, groups, allocations)


def event_data(core: Core, request: Any) -> list[bytes]:
    """The request's event data, one encoded message for each key; none without an event log.

    RequestError unless there is event data for every key or for none, or if one of it is too large.
    """
    given: Sequence[types.ChunkEventData] = request.event_data
    if given and len(given) != len(request.keys):
        raise invalid(
            f"{len(given)} event_data for {len(request.keys)} keys: one each, or none",
            "event_data",
            len(request.keys),
        )
    if core.events is None:
        return []
    encoded = []
    for index, data in enumerate(given):
        if len(data.block_hashes) > MAX_BLOCK_HASHES:
            raise invalid(
                f"event_data {index} with {len(data.block_hashes)} block_hashes: at most "
                f"{MAX_BLOCK_HASHES}",
                "block_hashes",
                MAX_BLOCK_HASHES,
            )
        encoded.append(data.SerializeToString())
        if len(encoded[-1]) > MAX_EVENT_DATA_BYTES:
            raise invalid(
                f"event_data {index} of {len(encoded[-1])} bytes: at most 1 MiB",
                "event_data",
                MAX_EVENT_DATA_BYTES,
            )
    return encoded


def namespace_from_proto(message: types.Namespace) -> Namespace:
    """The namespace. In it each group's shard_bytes has one number for each shard."""
    world = message.kv_world_size
    if not 1 <= world <= MAX_KV_WORLD_SIZE:
        raise invalid(
            f"kv_world_size {world}: from 1 to {MAX_KV_WORLD_SIZE}",
            "kv_world_size",
            MAX_KV_WORLD_SIZE,
        )
    groups = []
    for group in message.groups:
        if group.kind not in (kind.value for kind in GroupKind):
            raise invalid(
                f"kind {group.kind} of {group_name(group_idx(group))}: name what it needs", "kind"
            )
        sizes = tuple(group.shard_bytes)
        if len(sizes) == 1:
            sizes *= world
        if len(sizes) != world:
            raise invalid(
                f"{len(sizes)} shard_bytes of {group_name(group_idx(group))}: one, or "
                f"kv_world_size ({world}) of them",
                "shard_bytes",
                world,
            )
        groups.append(
            Group(
                group_idx(group),
                GroupKind(group.kind),
                group.window_tokens,
                sizes,
                group.attention_chunk_tokens,
            )
        )
    return Namespace(
        name=message.name,
        chunk_tokens=message.chunk_tokens,
        kv_world_size=world,
        groups=tuple(groups),
        labels=dict(message.labels),
    )


def namespace_to_proto(namespace: Namespace) -> types.Namespace:
    """The namespace. Where all shards of a group have one size, shard_bytes has one number."""
    message = types.Namespace(
        name=namespace.name,
        labels=dict(namespace.labels),
        chunk_tokens=namespace.chunk_tokens,
        kv_world_size=namespace.kv_world_size,
    )
    for group in namespace.groups:
        message.groups.add(
            group_idx=group.group_idx,
            kind=types.GroupKind.ValueType(group.kind.value),
            window_tokens=group.window_tokens,
            attention_chunk_tokens=group.attention_chunk_tokens,
            shard_bytes=(
                group.shard_bytes[:1] if len(set(group.shard_bytes)) == 1 else group.shard_bytes
            ),
        )
    return message

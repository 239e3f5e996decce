"""The verbs as functions from message to message.

CacheService and the session stream share them: ``VERBS`` has, for each kind of request that is
answered at once, the function that answers it, ``VERBS_IN_STEPS`` those for which others wait no
longer than for a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvdock.v1 import cache_pb2 as pb
from kvdock.v1 import types_pb2 as types
from kvdock_server.core import Core, check_session
from kvdock_server.errors import invalid
from kvdock_server.index.index import ReserveStatus, Slot
from kvdock_server.index.namespace import (
    MAX_CHUNK_TOKENS,
    MAX_KV_WORLD_SIZE,
    Group,
    GroupKind,
    Namespace,
)
from kvdock_server.sessions import Mode, Session
from kvdock_server.steps import Steps

MAX_EVENT_DATA_BYTES = 1 << 20
MAX_BLOCK_HASHES = MAX_CHUNK_TOKENS
"""Of one chunk: one for each token."""

RESERVE_STATUS = {
    ReserveStatus.RESERVED: types.CHUNK_STATUS_RESERVED,
    ReserveStatus.EXISTS: types.CHUNK_STATUS_EXISTS,
    ReserveStatus.NO_SPACE: types.CHUNK_STATUS_NO_SPACE,
    ReserveStatus.PARENT_MISSING: types.CHUNK_STATUS_PARENT_MISSING,
}


def register_namespace(
    core: Core, session: Session | None, request: pb.RegisterNamespaceRequest
) -> pb.RegisterNamespaceResponse:
    created = core.index.register(namespace_from_proto(request.namespace))
    return pb.RegisterNamespaceResponse(epoch=core.epoch, created=created)


def lookup(core: Core, session: Session | None, request: pb.LookupRequest) -> pb.LookupResponse:
    hit = core.lookup(
        session,
        request.namespace,
        list(request.keys),
        readers=request.readers,
        probe=request.probe,
        ttl_ms=request.ttl_ms,
    )
    response = pb.LookupResponse(
        epoch=core.epoch,
        hit_chunks=hit.chunks,
        lease_id=hit.lease.lease_id if hit.lease else 0,
    )
    if hit.spans:
        groups = core.index.space(request.namespace).namespace.groups
        for span in hit.spans:
            response.groups.add(
                group_idx=groups[span.position].group_idx,
                first_chunk=span.first,
                end_chunk=span.first + len(span.parts),
            )
    return response


def free_locks(
    core: Core, session: Session | None, request: pb.FreeLocksRequest
) -> Steps[pb.FreeLocksResponse]:
    released = yield from core.free_locks_in_steps(
        session,
        [
            (
                lock.lease_id,
                lock.first_chunk,
                lock.end_chunk,
                lock.reader if lock.HasField("reader") else None,
                group_idx(lock),
            )
            for lock in request.locks
        ],
    )
    return pb.FreeLocksResponse(epoch=core.epoch, released=released)


def reserve(
    core: Core, session: Session | None, request: pb.ReserveRequest
) -> Steps[pb.ReserveResponse]:
    session = check_session(session, Mode.SHARED)
    outcomes = yield from core.reserve_in_steps(
        session,
        request.namespace,
        group_idx(request),
        session.kv_worker_id,
        request.parent_key,
        request.keys,
        event_data(core, request),
    )
    response = pb.ReserveResponse(epoch=core.epoch)
    try:
        for outcome in outcomes:
            if isinstance(outcome, Slot):
                part = outcome.part
                nbytes = part.chunk.space.shard_bytes(part.position, outcome.shard)
                location = types.Location(offset=outcome.offset, length=nbytes)
                response.chunks.add(status=types.CHUNK_STATUS_RESERVED, location=location)
            else:
                response.chunks.add(status=RESERVE_STATUS[outcome])
            yield
    except BaseException:  # nobody awaits the answer any more
        core.give_back_all(outcome for outcome in outcomes if isinstance(outcome, Slot))
        raise
    reservation = core.open_reservation(session, outcomes)
    if reservation is not None:
        response.reservation_id = reservation.reservation_id
    return response


def commit(
    core: Core, session: Session | None, request: pb.CommitRequest
) -> Steps[pb.CommitResponse]:
    session = check_session(session, Mode.SHARED)
    sealed = yield from core.commit_in_steps(session, request.reservation_id, request.chunks)
    return pb.CommitResponse(
        epoch=core.epoch,
        statuses=[
            types.CHUNK_STATUS_STORED if stored else types.CHUNK_STATUS_FAILED for stored in sealed
        ],
    )


def abort(core: Core, session: Session | None, request: pb.AbortRequest) -> Steps[pb.AbortResponse]:
    session = check_session(session, Mode.SHARED)
    aborted = yield from core.abort_in_steps(session, request.reservation_id)
    return pb.AbortResponse(epoch=core.epoch, aborted=aborted)


def retrieve_shared(
    core: Core, session: Session | None, request: pb.RetrieveRequest
) -> Steps[pb.RetrieveResponse]:
    """Retrieve for clients that copy by themselves: where the chunks lie."""
    by_server = request.block_ids or request.skip_blocks or request.ready_event
    if by_server or request.also_fill or request.HasField("filled_by"):
        # Perhaps of a session that was of server mode a moment ago: nobody would copy.
        check_session(session, Mode.SERVER)
    located = yield from core.locate_in_steps(
        session,
        request.lease_id,
        group_idx(request),
        request.first_chunk,
        request.end_chunk,
        request.kv_worker_id,
        request.reader,
    )
    core.count_retrieved([shard for shard in located if shard is not None])
    response = pb.RetrieveResponse(epoch=core.epoch)
    for shard in located:
        if shard is None:
            response.chunks.add(status=types.CHUNK_STATUS_NOT_LOCKED)
        else:
            location = types.Location(offset=shard.offset, length=shard.nbytes)
            response.chunks.add(status=types.CHUNK_STATUS_RETRIEVED, location=location)
        yield
    return response


VERBS: dict[str, Callable[[Core, Session | None, Any], Any]] = {
    "register_namespace": register_namespace,
    "lookup": lookup,
}
VERBS_IN_STEPS: dict[str, Callable[[Core, Session | None, Any], Steps[Any]]] = {
    "free_locks": free_locks,
    "reserve": reserve,
    "commit": commit,
    "abort": abort,
    "retrieve": retrieve_shared,
}


def group_idx(message: Any) -> int | None:
    """The message's group_idx; absent and 0 are different."""
    return message.group_idx if message.HasField("group_idx") else None


def event_data(core: Core, request: Any) -> list[bytes]:
    """What the request tells about its chunks, encoded; nothing if no log wants to know.

    RequestError unless there is event data for every key or for none, or if it is too large.
    """
    given: Sequence[types.ChunkEventData] = request.event_data
    if given and len(given) != len(request.keys):
        raise invalid(f"{len(given)} event_data for {len(request.keys)} keys: one each, or none")
    if core.events is None:
        return []
    encoded = []
    for index, data in enumerate(given):
        if len(data.block_hashes) > MAX_BLOCK_HASHES:
            raise invalid(
                f"event_data {index} with {len(data.block_hashes)} block_hashes: at most "
                f"{MAX_BLOCK_HASHES}"
            )
        encoded.append(data.SerializeToString())
        if len(encoded[-1]) > MAX_EVENT_DATA_BYTES:
            raise invalid(f"event_data {index} of {len(encoded[-1])} bytes: at most 1 MiB")
    return encoded


def namespace_from_proto(message: types.Namespace) -> Namespace:
    """The namespace, its shard_bytes spread to one number a shard."""
    world = message.kv_world_size
    if not 1 <= world <= MAX_KV_WORLD_SIZE:
        raise invalid(f"kv_world_size {world}: from 1 to {MAX_KV_WORLD_SIZE}")
    groups = []
    for group in message.groups:
        if group.kind not in (kind.value for kind in GroupKind):
            raise invalid(f"kind {group.kind} of group {group_idx(group)}: name what it needs")
        sizes = tuple(group.shard_bytes)
        if len(sizes) == 1:
            sizes *= world
        if len(sizes) != world:
            raise invalid(
                f"{len(sizes)} shard_bytes of group {group_idx(group)}: one, or kv_world_size "
                f"({world}) of them"
            )
        groups.append(Group(group_idx(group), GroupKind(group.kind), group.window_tokens, sizes))
    return Namespace(
        name=message.name,
        chunk_tokens=message.chunk_tokens,
        kv_world_size=world,
        groups=tuple(groups),
        labels=dict(message.labels),
    )


def namespace_to_proto(namespace: Namespace) -> types.Namespace:
    """The namespace as it was registered, with one number a shard."""
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
            shard_bytes=(
                group.shard_bytes[:1] if len(set(group.shard_bytes)) == 1 else group.shard_bytes
            ),
        )
    return message

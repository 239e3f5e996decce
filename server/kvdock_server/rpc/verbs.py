"""The verbs as functions from message to message.

CacheService and the session stream share them. Some verbs are answered at once. Some are written in
steps, so that other calls wait no longer than for a step. And some wait themselves.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from kvdock.v1 import cache_pb2 as pb
from kvdock.v1 import session_pb2
from kvdock.v1 import types_pb2 as types
from kvdock_server.core import Core, LockRange, Mode, Session, Slot, check_session
from kvdock_server.errors import invalid
from kvdock_server.rpc.conversions import (
    add_result,
    add_results,
    await_fill_call,
    end_chunk,
    event_data,
    exported_memory,
    group_idx,
    namespace_from_proto,
    priority,
    retrieve_call,
    retrieved,
    store_call,
    wanted_mode,
    wish,
)
from kvdock_server.service.chunk_status import OF_RESERVE, ChunkStatus
from kvdock_server.service.retrieve import retrieve as retrieve_chunks
from kvdock_server.service.service import Service
from kvdock_server.service.store import store as store_chunks
from kvdock_server.service.turns import in_turns
from kvdock_server.steps import Steps

MAX_WAIT_MS = 600_000


def register_namespace(
    core: Core, session: Session | None, request: pb.RegisterNamespaceRequest
) -> pb.RegisterNamespaceResponse:
    created = core.index.register(namespace_from_proto(request.namespace))
    return pb.RegisterNamespaceResponse(epoch=core.epoch, created=created)


def lookup(core: Core, session: Session | None, request: pb.LookupRequest) -> pb.LookupResponse:
    if request.wait_ms > MAX_WAIT_MS:
        raise invalid(f"wait_ms {request.wait_ms}: at most {MAX_WAIT_MS}", "wait_ms", MAX_WAIT_MS)
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
    for group, first, end in hit.ranges:
        response.groups.add(group_idx=group, first_chunk=first, end_chunk=end)
    return response


def free_locks(
    core: Core, session: Session | None, request: pb.FreeLocksRequest
) -> Steps[pb.FreeLocksResponse]:
    released = yield from core.free_locks_in_steps(
        session,
        [
            LockRange(
                lock.lease_id,
                lock.first_chunk,
                end_chunk(lock),
                lock.reader if lock.HasField("reader") else None,
                group_idx(lock),
            )
            for lock in request.locks
        ],
    )
    return pb.FreeLocksResponse(
        epoch=core.epoch, freed=[pb.FreedLocks(released=count) for count in released]
    )


def reserve(
    core: Core, session: Session | None, request: pb.ReserveRequest
) -> Steps[pb.ReserveResponse]:
    session = check_session(session, Mode.SHARED)
    keep = wish(core, request)
    outcomes = yield from core.reserve_in_steps(
        session,
        request.namespace,
        group_idx(request),
        session.kv_worker_id,
        request.parent_key,
        request.keys,
        event_data(core, request),
        keep,
        priority(request),
    )
    response = pb.ReserveResponse(epoch=core.epoch, kept_chunks=keep.kept if keep else 0)
    with core.writing(outcomes) as writing:
        for outcome in outcomes:
            if isinstance(outcome, Slot):
                add_result(response, ChunkStatus.RESERVED, outcome)
            else:
                add_result(response, OF_RESERVE[outcome], None)
            yield
        response.reservation_id = core.open_reservation(session, writing)
    return response


def commit(
    core: Core, session: Session | None, request: pb.CommitRequest
) -> Steps[pb.CommitResponse]:
    session = check_session(session, Mode.SHARED)
    sealed = yield from core.reservations.commit_in_steps(
        session, request.reservation_id, request.chunks
    )
    return add_results(
        pb.CommitResponse(epoch=core.epoch),
        [ChunkStatus.STORED if stored else ChunkStatus.FAILED for stored in sealed],
    )


def abort(core: Core, session: Session | None, request: pb.AbortRequest) -> Steps[pb.AbortResponse]:
    session = check_session(session, Mode.SHARED)
    aborted = yield from core.reservations.abort_in_steps(session, request.reservation_id)
    return pb.AbortResponse(epoch=core.epoch, aborted=aborted)


async def register_memory(
    service: Service, session: Session | None, request: session_pb2.RegisterMemoryRequest
) -> session_pb2.RegisterMemoryResponse:
    if not request.namespace:
        raise invalid("namespace is empty: name the one whose groups the memory belongs to")
    wanted = wanted_mode(request)
    exports = wanted is Mode.SERVER or (wanted is None and request.allocations)
    exported = exported_memory(request) if exports else None
    mode, reason = await service.memory.register(session, wanted, exported)
    return session_pb2.RegisterMemoryResponse(
        epoch=service.core.epoch, mode=types.TransferMode.ValueType(mode.value), reason=reason
    )


async def store(
    service: Service, session: Session | None, request: pb.StoreRequest
) -> pb.StoreResponse:
    call = store_call(service.core, request)
    became = await store_chunks(service.core, service.memory, session, call)
    kept = call.keep.kept if call.keep else 0
    return add_results(pb.StoreResponse(epoch=service.core.epoch, kept_chunks=kept), became)


async def retrieve(
    service: Service, session: Session | None, request: pb.RetrieveRequest
) -> pb.RetrieveResponse:
    chunks = await retrieve_chunks(service.core, service.loads, session, retrieve_call(request))
    return await in_turns(retrieved(service.core, chunks))


async def await_fill(
    service: Service, session: Session | None, request: pb.AwaitFillRequest
) -> pb.AwaitFillResponse:
    session = check_session(session, Mode.SERVER)
    became = await service.loads.await_fill(session, await_fill_call(request))
    return add_results(pb.AwaitFillResponse(epoch=service.core.epoch), became)


_AT_ONCE: dict[str, Callable[[Core, Session | None, Any], Any]] = {
    "register_namespace": register_namespace,
    "lookup": lookup,
}
_IN_STEPS: dict[str, Callable[[Core, Session | None, Any], Steps[Any]]] = {
    "free_locks": free_locks,
    "reserve": reserve,
    "commit": commit,
    "abort": abort,
}
_WAITING: dict[str, Callable[[Service, Session | None, Any], Awaitable[Any]]] = {
    "register_memory": register_memory,
    "store": store,
    "retrieve": retrieve,
    "await_fill": await_fill,
}


async def answer(service: Service, session: Session | None, kind: str, request: Any) -> Any:
    """The answer to a request of a kind; RequestError if ``kind`` names no verb."""
    if kind in _AT_ONCE:
        return _AT_ONCE[kind](service.core, session, request)
    if kind in _IN_STEPS:
        return await in_turns(_IN_STEPS[kind](service.core, session, request))
    if kind in _WAITING:
        return await _WAITING[kind](service, session, request)
    raise invalid(f"{kind} may only be the first message of a session", kind)

"""CacheService: each verb as a call by itself, and the streams that carry bytes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc

from kvdock.v1 import cache_pb2 as pb
from kvdock.v1 import cache_pb2_grpc
from kvdock.v1 import types_pb2 as types
from kvdock_server.core import Core
from kvdock_server.encoding import tag, varint
from kvdock_server.errors import Reason, RequestError, invalid
from kvdock_server.index.index import Slot
from kvdock_server.pool.pool import Pool
from kvdock_server.rpc import limits, verbs
from kvdock_server.rpc.copies import Copies
from kvdock_server.rpc.status import STALL_SECONDS, Context, stalled, streaming, unary
from kvdock_server.service.turns import in_turns
from kvdock_server.sessions import Session

DEFAULT_MESSAGE_BYTES = 128 << 10
MIN_MESSAGE_BYTES = 1 << 10
MAX_MESSAGE_BYTES = 2 << 20

_GET_DATA = tag(pb.GetResponse, "data")
_SERVICE_NAME = pb.DESCRIPTOR.services_by_name["CacheService"].full_name


def add_cache_service(server: grpc.aio.Server, service: CacheService) -> None:
    """Serve CacheService."""
    get = grpc.unary_stream_rpc_method_handler(
        service.Get, request_deserializer=pb.GetRequest.FromString
    )
    cache_pb2_grpc.add_CacheServiceServicer_to_server(service, server)
    # Instead of the one just added, which encodes.
    server.add_registered_method_handlers(_SERVICE_NAME, {"Get": get})  # type: ignore[attr-defined]


class CacheService(cache_pb2_grpc.CacheServiceServicer):
    """See cache.proto."""

    def __init__(self, core: Core, pool: Pool, copies: Copies) -> None:
        self._core = core
        self._pool = pool
        self._copies = copies

    @unary
    async def RegisterNamespace(  # noqa: N802
        self, request: pb.RegisterNamespaceRequest, context: Context
    ) -> pb.RegisterNamespaceResponse:
        return verbs.register_namespace(self._core, None, request)

    @unary
    async def Lookup(self, request: pb.LookupRequest, context: Context) -> pb.LookupResponse:  # noqa: N802
        return verbs.lookup(self._core, self._session(request), request)

    @unary
    async def FreeLocks(  # noqa: N802
        self, request: pb.FreeLocksRequest, context: Context
    ) -> pb.FreeLocksResponse:
        return verbs.free_locks(self._core, self._session(request), request)

    @unary
    async def Reserve(self, request: pb.ReserveRequest, context: Context) -> pb.ReserveResponse:  # noqa: N802
        return await in_turns(verbs.reserve(self._core, self._session(request), request))

    @unary
    async def Commit(self, request: pb.CommitRequest, context: Context) -> pb.CommitResponse:  # noqa: N802
        return await in_turns(verbs.commit(self._core, self._session(request), request))

    @unary
    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:  # noqa: N802
        return await in_turns(verbs.abort(self._core, self._session(request), request))

    @unary
    async def Store(self, request: pb.StoreRequest, context: Context) -> pb.StoreResponse:  # noqa: N802
        return await self._copies.store(self._session(request), request)

    @unary
    async def Retrieve(self, request: pb.RetrieveRequest, context: Context) -> pb.RetrieveResponse:  # noqa: N802
        return await self._copies.retrieve(self._session(request), request)

    @streaming
    async def Put(  # noqa: N802
        self, requests: AsyncIterator[pb.PutRequest], context: Context
    ) -> AsyncIterator[pb.PutResponse]:
        request = await _next(requests)
        if request is None or request.WhichOneof("message") != "open":
            raise invalid("the first message of a Put must be open")
        opened = request.open
        limits.check(opened)
        outcomes = await in_turns(
            self._core.reserve_in_steps(
                None,
                opened.namespace,
                verbs.group_idx(opened),
                opened.kv_worker_id,
                opened.parent_key,
                opened.keys,
                verbs.event_data(self._core, opened),
            )
        )
        writing = {
            index: outcome for index, outcome in enumerate(outcomes) if isinstance(outcome, Slot)
        }
        try:
            async for response in self._receive(requests, opened, outcomes, writing):
                yield response
        finally:
            self._core.give_back_all(writing.values())

    async def _receive(
        self,
        requests: AsyncIterator[pb.PutRequest],
        opened: pb.PutOpen,
        outcomes: list[Any],
        writing: dict[int, Slot],
    ) -> AsyncIterator[pb.PutResponse]:
        """Admit, receive and seal; what is left in ``writing`` at the end was not completed."""
        space = self._core.index.space(opened.namespace)
        position = space.namespace.position(verbs.group_idx(opened))
        shard_bytes = space.shard_bytes(position, opened.kv_worker_id)
        statuses = [
            types.CHUNK_STATUS_RESERVED
            if isinstance(outcome, Slot)
            else verbs.RESERVE_STATUS[outcome]
            for outcome in outcomes
        ]
        yield pb.PutResponse(
            admission=pb.PutAdmission(
                epoch=self._core.epoch, statuses=statuses, shard_bytes=shard_bytes
            )
        )
        for index, status in enumerate(statuses):
            if status != types.CHUNK_STATUS_RESERVED:
                yield pb.PutResponse(result=pb.PutResult(chunk=index, status=status))
        received = dict.fromkeys(range(len(outcomes)), 0)
        while (request := await _next(requests)) is not None:
            if request.WhichOneof("message") != "data":
                raise invalid("every message of a Put but the first must be data")
            index, data = request.data.chunk, request.data.data
            if index not in received:
                raise invalid(f"chunk {index} of a Put of {len(outcomes)} chunks")
            if len(data) > MAX_MESSAGE_BYTES:
                raise invalid(f"{len(data)} bytes in a message: at most {MAX_MESSAGE_BYTES}")
            begin = received[index]
            received[index] = end = begin + len(data)
            if end > shard_bytes:
                raise RequestError(
                    Reason.WRONG_LENGTH,
                    f"{end} bytes or more for chunk {index}: a shard of this group has "
                    f"{shard_bytes}",
                )
            slot = writing.get(index)
            if slot is None:
                continue
            self._pool.view(slot.offset + begin, len(data))[:] = data
            if end == shard_bytes:
                sealed = self._core.seal(writing.pop(index))
                status = types.CHUNK_STATUS_STORED if sealed else types.CHUNK_STATUS_FAILED
                yield pb.PutResponse(result=pb.PutResult(chunk=index, status=status))
        for index in writing:
            failed = pb.PutResult(chunk=index, status=types.CHUNK_STATUS_FAILED)
            yield pb.PutResponse(result=failed)

    @streaming
    async def Get(self, request: pb.GetRequest, context: Context) -> AsyncIterator[bytes]:  # type: ignore[override]  # noqa: N802
        """Its responses are encoded already."""
        step = request.message_bytes or DEFAULT_MESSAGE_BYTES
        if not MIN_MESSAGE_BYTES <= step <= MAX_MESSAGE_BYTES:
            raise invalid(
                f"message_bytes {step}: from {MIN_MESSAGE_BYTES} to {MAX_MESSAGE_BYTES}, or 0 for "
                "128 KiB"
            )
        shards = self._core.readable(
            request.namespace, verbs.group_idx(request), request.kv_worker_id, request.keys
        )
        try:
            for index, shard in enumerate(shards):
                head = pb.GetResponse(
                    chunk=index, status=types.CHUNK_STATUS_RETRIEVED, shard_bytes=shard.nbytes
                ).SerializeToString()
                for begin in range(0, shard.nbytes, step):
                    nbytes = min(step, shard.nbytes - begin)
                    data = self._pool.view(shard.offset + begin, nbytes)
                    yield b"".join((head, _GET_DATA, varint(nbytes), data))
                    # A stream that is never full would keep every other call waiting.
                    await asyncio.sleep(0)
                self._core.count_retrieved([shard])
            if len(shards) < len(request.keys):
                yield pb.GetResponse(
                    chunk=len(shards), status=types.CHUNK_STATUS_NOT_FOUND
                ).SerializeToString()
        finally:
            self._core.done_reading(shards)

    def _session(self, request: Any) -> Session | None:
        if not request.session_token:
            return None
        session = self._core.sessions.with_token(request.session_token)
        session.last_seen = self._core.clock()
        return session


async def _next(requests: AsyncIterator[pb.PutRequest]) -> pb.PutRequest | None:
    """The client's next message, None at the end; RequestError (STALLED) if none comes."""
    try:
        async with asyncio.timeout(STALL_SECONDS):
            return await anext(requests, None)
    except TimeoutError:
        raise stalled("sent") from None

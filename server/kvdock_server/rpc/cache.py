"""CacheService: each verb as a call of its own, and the streams that carry bytes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

from kvdock.v1 import cache_pb2 as pb
from kvdock.v1 import cache_pb2_grpc
from kvdock.v1 import types_pb2 as types
from kvdock_server.core import Session
from kvdock_server.encoding import tag, varint
from kvdock_server.errors import invalid
from kvdock_server.rpc import limits, verbs
from kvdock_server.rpc.conversions import (
    add_results,
    event_data,
    group_idx,
    priority,
    status_to_proto,
    wish,
)
from kvdock_server.rpc.grpc_errors import STALL_SECONDS, Context, stalled, streaming, unary
from kvdock_server.service import inline
from kvdock_server.service.chunk_status import ChunkStatus
from kvdock_server.service.service import Service

DEFAULT_MESSAGE_BYTES = 128 << 10
MIN_MESSAGE_BYTES = 1 << 10
MAX_MESSAGE_BYTES = 2 << 20

_GET_DATA = tag(pb.GetResponse, "data")
_SERVICE_NAME = pb.DESCRIPTOR.services_by_name["CacheService"].full_name


def add_cache_service(server: grpc.aio.Server, service: CacheService) -> None:
    get = grpc.unary_stream_rpc_method_handler(
        service.Get, request_deserializer=pb.GetRequest.FromString
    )
    cache_pb2_grpc.add_CacheServiceServicer_to_server(service, server)
    # Takes the place of the Get just added, whose responses gRPC would encode.
    server.add_registered_method_handlers(_SERVICE_NAME, {"Get": get})  # type: ignore[attr-defined]


def _verb(kind: str) -> Callable[..., Awaitable[Any]]:
    @unary
    async def answer(self: CacheService, request: Any, context: Context) -> Any:
        return await verbs.answer(self._service, self._session(request), kind, request)

    return answer


class CacheService(cache_pb2_grpc.CacheServiceServicer):
    """See cache.proto."""

    RegisterNamespace = _verb("register_namespace")
    Lookup = _verb("lookup")
    FreeLocks = _verb("free_locks")
    Reserve = _verb("reserve")
    Commit = _verb("commit")
    Abort = _verb("abort")
    Store = _verb("store")
    Retrieve = _verb("retrieve")
    AwaitFill = _verb("await_fill")

    def __init__(self, service: Service) -> None:
        self._service = service
        self._core = service.core

    @streaming
    async def Put(  # noqa: N802
        self, requests: AsyncIterator[pb.PutRequest], context: Context
    ) -> AsyncIterator[pb.PutResponse]:
        request = await _next(requests)
        if request is None or request.WhichOneof("message") != "open":
            raise invalid("the first message of a Put must be open")
        opened = request.open
        limits.check(opened)
        keep = wish(self._core, opened)
        async with inline.put(
            self._core,
            self._service.pool,
            opened.namespace,
            group_idx(opened),
            opened.kv_worker_id,
            opened.parent_key,
            opened.keys,
            event_data(self._core, opened),
            keep,
            priority(opened),
        ) as put:
            admission = pb.PutAdmission(
                epoch=self._core.epoch,
                shard_bytes=put.shard_bytes,
                kept_chunks=keep.kept if keep else 0,
            )
            yield pb.PutResponse(admission=add_results(admission, put.statuses))
            for chunk, status in enumerate(put.statuses):
                if status is not ChunkStatus.RESERVED:
                    yield _put_result(chunk, status)
            while (request := await _next(requests)) is not None:
                if request.WhichOneof("message") != "data":
                    raise invalid("every message of a Put but the first must be data")
                chunk, data = request.data.chunk, request.data.data
                if len(data) > MAX_MESSAGE_BYTES:
                    raise invalid(
                        f"{len(data)} bytes in a message: at most {MAX_MESSAGE_BYTES}",
                        "data",
                        MAX_MESSAGE_BYTES,
                    )
                completed = put.write(chunk, data)
                if completed is not None:
                    yield _put_result(chunk, completed)
            for chunk in put.unfinished:
                yield _put_result(chunk, ChunkStatus.FAILED)

    @streaming
    async def Get(self, request: pb.GetRequest, context: Context) -> AsyncIterator[bytes]:  # type: ignore[override]  # noqa: N802
        """Answers with encoded responses."""
        step = request.message_bytes or DEFAULT_MESSAGE_BYTES
        if not MIN_MESSAGE_BYTES <= step <= MAX_MESSAGE_BYTES:
            raise invalid(
                f"message_bytes {step}: from {MIN_MESSAGE_BYTES} to {MAX_MESSAGE_BYTES}, or 0 for "
                "128 KiB",
                "message_bytes",
                MAX_MESSAGE_BYTES,
            )
        with self._core.reading(
            request.namespace, group_idx(request), request.kv_worker_id, request.keys
        ) as shards:
            for index, shard in enumerate(shards):
                head = pb.GetResponse(
                    chunk=index, status=types.CHUNK_STATUS_RETRIEVED, shard_bytes=shard.nbytes
                ).SerializeToString()
                for data in inline.pieces(self._core, self._service.pool, shard, step):
                    yield b"".join((head, _GET_DATA, varint(len(data)), data))
                    # As long as the client's stream takes all, only this lets other calls in.
                    await asyncio.sleep(0)
            if len(shards) < len(request.keys):
                yield pb.GetResponse(
                    chunk=len(shards), status=types.CHUNK_STATUS_NOT_FOUND
                ).SerializeToString()

    def _session(self, request: Any) -> Session | None:
        """The session that the request names, None if it names none; a sign of its life."""
        token = getattr(request, "session_token", b"")
        if not token:
            return None
        session = self._core.sessions.with_token(token)
        session.last_seen = self._core.clock()
        return session


def _put_result(chunk: int, status: ChunkStatus) -> pb.PutResponse:
    return pb.PutResponse(result=pb.PutResult(chunk=chunk, status=status_to_proto(status)))


async def _next(requests: AsyncIterator[pb.PutRequest]) -> pb.PutRequest | None:
    """The client's next message, None at the stream's end; RequestError (STALLED) if none comes."""
    try:
        async with asyncio.timeout(STALL_SECONDS):
            return await anext(requests, None)
    except TimeoutError:
        raise stalled("sent") from None

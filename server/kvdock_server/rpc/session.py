"""SessionService: one stream for each process, with all its requests and its signs of life."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

from kvdock.v1 import session_pb2 as pb
from kvdock.v1 import session_pb2_grpc
from kvdock.v1 import types_pb2 as types
from kvdock_server import __version__
from kvdock_server.core import sessions
from kvdock_server.encoding import first_message, read_varint
from kvdock_server.errors import Reason, RequestError, invalid
from kvdock_server.rpc import limits, verbs
from kvdock_server.rpc.decoding import MessageTooLargeError
from kvdock_server.rpc.features import MOST_FEATURE_CHARACTERS, features
from kvdock_server.rpc.grpc_errors import Context, abort, as_request_error, to_proto
from kvdock_server.service.service import Service
from kvdock_server.tiers.host.pool import Pool

logger = logging.getLogger(__name__)

_OPEN_SECONDS = 5.0
# With so many copies under way, the server reads no further request of the session.
_COPIES_AT_ONCE = 64
# Of a message without a known request at most so many fields are looked at. It can have more than a
# million, and looking at all of them would hold up every other client.
_MOST_FIELDS = 64
_ID_TAG = bytes([pb.SessionRequest.ID_FIELD_NUMBER << 3])
# Refused if nobody awaits the answer any more: it would grant something that somebody would have to
# give back. (Store and Retrieve have a deadline of their own.)
_NOT_WHEN_LATE = frozenset({"lookup", "reserve"})


class SessionService(session_pb2_grpc.SessionServiceServicer):
    """See session.proto."""

    def __init__(self, service: Service, pool: Pool, chunk_tokens: int) -> None:
        self._service = service
        self._core = service.core
        self._pool = pool
        self._chunk_tokens = chunk_tokens
        self._ending = asyncio.Event()

    async def Session(  # type: ignore[override]  # noqa: N802
        self, requests: AsyncIterator[pb.SessionRequest], context: Context
    ) -> None:
        try:
            first = await _first(requests)
            session = self._open(first)
        except Exception as error:
            await abort(context, as_request_error(error))
        stream = _SessionStream(self._service, session, context)
        try:
            await stream.write(pb.SessionResponse(id=first.id, open=self._opened(session)))
            await self._serve(stream, requests)
        finally:
            try:
                await stream.close()
            finally:
                self._core.close_session(session)
        if self._ending.is_set():
            await abort(context, RequestError(Reason.DRAINING, "the server has stopped"))

    def end_all(self) -> None:
        """End every session's stream, since the server is about to stop."""
        self._ending.set()

    async def _serve(
        self, stream: _SessionStream, requests: AsyncIterator[pb.SessionRequest]
    ) -> None:
        """Answer until the client ends the stream, or ``end_all`` is called."""
        serving = asyncio.create_task(stream.serve(requests))
        ending = asyncio.create_task(self._ending.wait())
        try:
            await asyncio.wait({serving, ending}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ending.cancel()
            serving.cancel()
        (ended,) = await asyncio.gather(serving, return_exceptions=True)
        if isinstance(ended, RequestError):
            raise ended  # a message that cannot be decoded
        if isinstance(ended, Exception):
            # Mostly a client that went away while it was being answered.
            logger.info("a session's stream broke: %r", ended)

    def _open(self, first: pb.SessionRequest) -> sessions.Session:
        if first.WhichOneof("request") != "open":
            raise invalid("the first message of a session must be open")
        request = first.open
        limits.check(request)
        if any(len(name) > MOST_FEATURE_CHARACTERS for name in request.features):
            raise invalid(
                f"a name in features of more than {MOST_FEATURE_CHARACTERS} characters",
                "features",
                MOST_FEATURE_CHARACTERS,
            )
        if request.role not in (role.value for role in sessions.Role):
            raise invalid(f"role {request.role}: say which part of the engine this is", "role")
        return self._core.open_session(
            engine_id=request.engine_id,
            role=sessions.Role(request.role),
            worker_id=request.worker_id,
            kv_worker_id=request.kv_worker_id,
            ttl_ms=request.ttl_ms,
            client=request.client,
        )

    def _opened(self, session: sessions.Session) -> pb.OpenResponse:
        segment = self._pool.segment
        return pb.OpenResponse(
            session_id=session.session_id,
            session_token=session.token,
            epoch=self._core.epoch,
            server_version=__version__,
            chunk_tokens=self._chunk_tokens,
            ttl_ms=round(session.ttl * 1000),
            segments=[
                types.Segment(shm_name=segment.shm_name, bytes=segment.nbytes, proof=segment.proof)
            ],
            guard=session.guard,
            event_log=self._core.events is not None,
            features=features(self._core),
        )


async def _first(requests: AsyncIterator[pb.SessionRequest]) -> pb.SessionRequest:
    try:
        async with asyncio.timeout(_OPEN_SECONDS):
            first = await anext(requests, None)
    except TimeoutError:
        raise RequestError(
            Reason.STALLED,
            f"no open within {_OPEN_SECONDS:g} s: it must be the first message of a session",
        ) from None
    if first is None:
        raise invalid("the stream ended before its first message, which must be open")
    return first


def _first_id(begin: bytes) -> int:
    """The id with which an encoded request begins, 0 if it begins with something else."""
    if begin[:1] != _ID_TAG:
        return 0
    found = read_varint(begin, 1)
    return 0 if found is None else found[0]


def _unknown(request: pb.SessionRequest) -> RequestError:
    """The error of a message without a request, or with one of a newer version of the protocol."""
    number = first_message(request.SerializeToString(), most_fields=_MOST_FIELDS)
    if number is None:
        return invalid(
            "the message has no request: set one of the fields of its oneof, for example heartbeat",
            "request",
        )
    return RequestError(
        Reason.UNKNOWN_REQUEST,
        f"request {number} is not known to this server ({__version__}): do without it; the "
        "server's features say what there is",
        request=number,
    )


class _SessionStream:
    def __init__(self, service: Service, session: sessions.Session, context: Context) -> None:
        self._service = service
        self._core = service.core
        self._session = session
        self._context = context
        self._write_lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._room = asyncio.Semaphore(_COPIES_AT_ONCE)

    async def serve(self, requests: AsyncIterator[pb.SessionRequest]) -> None:
        while True:
            try:
                request = await anext(requests)
            except StopAsyncIteration:
                return
            except MessageTooLargeError as error:
                self._session.last_seen = self._core.clock()
                await self.write(
                    pb.SessionResponse(id=_first_id(error.begin), error=to_proto(error))
                )
                continue
            kind = request.WhichOneof("request")
            if self._takes_time(kind):
                await self._wait_for_room()
                task = asyncio.create_task(self._answer(request, kind))
                self._tasks.add(task)
                task.add_done_callback(self._copied)
            else:
                await self._answer(request, kind)

    async def write(self, response: pb.SessionResponse) -> None:
        """Send one answer. Tasks of copies call this, too, while requests are read."""
        async with self._write_lock:
            response.answered_ms = self._now_ms()
            await self._context.write(response)

    async def close(self) -> None:
        """End the copies under way. Only then may the session's slots and locks be freed."""
        for task in self._tasks:
            task.cancel()
        try:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        finally:  # also if gRPC cancels this call, as it does when the client is gone
            await self._service.memory.release(self._session)

    def _takes_time(self, kind: str | None) -> bool:
        by_server = self._session.mode is sessions.Mode.SERVER
        if kind in ("retrieve", "await_fill"):
            return by_server
        return kind in ("store", "register_memory")

    async def _wait_for_room(self) -> None:
        self._session.is_held_up = self._room.locked()
        try:
            await self._room.acquire()
        finally:
            self._session.is_held_up = False
            self._session.last_seen = self._core.clock()

    def _copied(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._room.release()

    async def _answer(self, request: pb.SessionRequest, kind: str | None) -> None:
        response = pb.SessionResponse(id=request.id)
        try:
            self._check(request, kind)
            if kind == "heartbeat":
                response.heartbeat.epoch = self._core.epoch
            else:
                assert kind is not None  # or _check had raised
                message = getattr(request, kind)
                answer = await verbs.answer(self._service, self._session, kind, message)
                getattr(response, kind).CopyFrom(answer)
        except Exception as error:
            response.error.CopyFrom(to_proto(as_request_error(error)))
        await self.write(response)

    def _check(self, request: pb.SessionRequest, kind: str | None) -> None:
        """Note the sign of life. RequestError if the request must not be carried out.

        So it is if the session has expired, a list is too long, the request names another session,
        or nobody awaits the answer any more.
        """
        session = self._session
        session.refuse_if_expired()
        session.last_seen = self._core.clock()
        if kind is None:
            raise _unknown(request)
        message = getattr(request, kind)
        limits.check(message)
        if getattr(message, "session_token", b"") not in (b"", session.token):
            raise RequestError(
                Reason.UNKNOWN_SESSION,
                f"session_token is not that of session {session.session_id}, whose stream this is: "
                "leave it empty on a stream",
                session_id=session.session_id,
            )
        if kind in _NOT_WHEN_LATE and message.timeout_ms and request.sent_ms:
            late = self._now_ms() - request.sent_ms - message.timeout_ms
            if late > 0:
                raise RequestError(
                    Reason.TOO_LATE,
                    f"this {kind} was read {late} ms after the {message.timeout_ms} ms that its "
                    "client waits: nothing was done; the server or the client is overloaded",
                    limit=message.timeout_ms,
                )

    def _now_ms(self) -> int:
        """Milliseconds of the clock on which clients are told ``answered_ms``."""
        return int(self._core.clock() * 1000)

"""The protocol of a session stream, without I/O.

A SessionProtocol chooses what is sent next, matches answers to requests and knows when the session
is over. It has two faces, one for threads and one for asyncio. They send and receive the messages.
A face passes a handle with each request (its future), and gets the handle back with the answer.

A session is open until it expires or ends. It expires when the server takes the locks away because
it heard nothing for a TTL: the stream goes on (:meth:`SessionProtocol.expire`). It ends with its
stream (:meth:`SessionProtocol.end`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from google.protobuf.message import Message

from kvdock._clock import ServerClock
from kvdock._outbox import Outbox
from kvdock._verbs import check_size
from kvdock.errors import KVDockError, ServerError, SessionExpired, SessionLost, from_stream_error
from kvdock.v1 import cache_pb2, session_pb2

Handle = TypeVar("Handle")

MISSED_HEARTBEATS = 3
"""How many heartbeats in a row may go unanswered. One is sent every third of the TTL."""

_FIELD_OF_REQUEST: Mapping[type[Message], str] = {
    session_pb2.OpenRequest: "open",
    session_pb2.HeartbeatRequest: "heartbeat",
    cache_pb2.RegisterNamespaceRequest: "register_namespace",
    cache_pb2.LookupRequest: "lookup",
    cache_pb2.FreeLocksRequest: "free_locks",
    cache_pb2.ReserveRequest: "reserve",
    cache_pb2.CommitRequest: "commit",
    cache_pb2.AbortRequest: "abort",
    cache_pb2.StoreRequest: "store",
    cache_pb2.RetrieveRequest: "retrieve",
    cache_pb2.AwaitFillRequest: "await_fill",
    session_pb2.RegisterMemoryRequest: "register_memory",
}


@dataclass(slots=True)
class _Pending(Generic[Handle]):
    """A request without answer. ``sent`` is in seconds of this process's clock."""

    field: str
    handle: Handle
    sent: float


class SessionProtocol(Generic[Handle]):
    """One session stream. Not thread-safe: the face that uses it from several threads locks."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._server_clock = ServerClock()
        self._outbox = Outbox()
        self._next_id = 1
        self._pending: dict[int, _Pending[Handle]] = {}
        self._over: KVDockError | None = None

    @property
    def over(self) -> KVDockError | None:
        """Why no further request can succeed; None while the session is open."""
        return self._over

    def request(self, message: Message, handle: Handle) -> int:
        """Takes a message to send, and the handle that its answer will come with. Returns an id.

        Raises SessionLost or SessionExpired if the session is over, InvalidArgument if the message
        is too large, Overloaded if too many messages wait, TypeError if a session stream does not
        carry messages of this type.
        """
        if self._over is not None:
            raise again(self._over)
        field = _FIELD_OF_REQUEST.get(type(message))
        if field is None:
            raise TypeError(f"a session stream does not carry {type(message).__name__}")
        request_id = self._next_id
        now = self._clock()
        request = session_pb2.SessionRequest(id=request_id, sent_ms=self._server_clock.at(now))
        getattr(request, field).CopyFrom(message)
        self._outbox.put(request, check_size(request))
        self._next_id += 1
        self._pending[request_id] = _Pending(field, handle, now)
        return request_id

    @property
    def has_next(self) -> bool:
        """True if there is something to send now."""
        return self._outbox.is_ready

    def next_request(self) -> session_pb2.SessionRequest | None:
        """The stream message to send now, if there is one."""
        request = self._outbox.take()
        pending = None if request is None else self._pending.get(request.id)
        if pending is not None:
            pending.sent = self._clock()
        return request

    def give_up(self, request_id: int) -> None:
        """Nobody awaits the answer any more: a request that still waits need not be sent."""
        if self._outbox.drop(request_id):
            del self._pending[request_id]

    def response(
        self, message: session_pb2.SessionResponse
    ) -> tuple[Handle, Message | KVDockError] | None:
        """The handle of the request that this answers, and the answer. None if nobody asked."""
        pending = self._pending.pop(message.id, None)
        if pending is None:
            return None
        self._outbox.answered(message.id)
        self._server_clock.heard(message.answered_ms, pending.sent, self._clock())
        field, handle = pending.field, pending.handle
        answered = message.WhichOneof("response")
        if answered == "error":
            return handle, from_stream_error(message.error)
        if answered is None or answered != field:
            return handle, ServerError(f"the server answered {field} with {answered}")
        answer: Message = getattr(message, field)
        return handle, answer

    def expire(self, error: SessionExpired) -> bool:
        """Notes that the server let the session expire. True the first time."""
        first = self._over is None
        if first:
            self._over = again(error)
        return first

    def end(self, error: KVDockError) -> tuple[bool, list[Handle]]:
        """Notes that the stream ended.

        Returns whether the session was open until now, and the handles that will get no answer.
        """
        first = self._over is None
        if not isinstance(self._over, SessionLost):
            self._over = session_lost(error)
        handles = [pending.handle for pending in self._pending.values()]
        self._pending.clear()
        self._outbox.end()
        return first, handles


def session_lost(error: KVDockError) -> SessionLost:
    """The error of a session whose stream ended with ``error``."""
    if isinstance(error, SessionLost):
        return error
    lost = SessionLost(
        f"the session ended: {error.message}",
        code=error.code,
        reason=error.reason,
        metadata=error.metadata,
        retry_after=error.retry_after,
    )
    lost.__cause__ = error
    return lost


def again(error: KVDockError) -> KVDockError:
    """A copy of a kept error, to be raised.

    An error that is raised gets a traceback, which keeps all local variables on its way alive.
    """
    copy = type(error)(
        error.message,
        code=error.code,
        reason=error.reason,
        metadata=error.metadata,
        retry_after=error.retry_after,
    )
    copy.__cause__ = error.__cause__
    return copy


def undo(answer: Message) -> Message | None:
    """The request that gives back what an unwanted answer granted; None if it granted nothing."""
    if isinstance(answer, cache_pb2.LookupResponse) and answer.lease_id:
        return cache_pb2.FreeLocksRequest(locks=[cache_pb2.LockRange(lease_id=answer.lease_id)])
    if isinstance(answer, cache_pb2.ReserveResponse) and answer.reservation_id:
        return cache_pb2.AbortRequest(reservation_id=answer.reservation_id)
    return None

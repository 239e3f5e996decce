"""The protocol of a session stream, without I/O.

A SessionProtocol matches answers to requests and knows when the session is over. The two faces
move the messages and own the futures, which this module only holds as opaque handles.

States: open until :meth:`~SessionProtocol.expire` (the server took the locks away because it heard
nothing for a TTL; the stream goes on) or :meth:`~SessionProtocol.end` (the stream is gone).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Generic, TypeVar

from google.protobuf.message import Message

from kvdock._verbs import check_size
from kvdock.errors import KVDockError, ServerError, SessionExpired, SessionLost, from_stream_error
from kvdock.v1 import cache_pb2, session_pb2

Handle = TypeVar("Handle")

MISSED_HEARTBEATS = 3
"""Heartbeats in a row that may go unanswered. They are sent every third of the TTL."""

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
    session_pb2.RegisterMemoryRequest: "register_memory",
}


class SessionProtocol(Generic[Handle]):
    """One session stream. Not thread-safe: the face that uses it from several threads locks."""

    def __init__(self) -> None:
        self._next_id = 1
        self._pending: dict[int, tuple[str, Handle]] = {}
        self._over: KVDockError | None = None

    @property
    def over(self) -> KVDockError | None:
        """Why no further request can succeed; None while the session is open."""
        return self._over

    def request(self, message: Message, handle: Handle) -> session_pb2.SessionRequest:
        """The stream message that carries ``message``; its answer will come with ``handle``.

        Raises SessionLost or SessionExpired if the session is over, InvalidArgument if the message
        is too large, TypeError if a session stream does not carry its type.
        """
        if self._over is not None:
            raise again(self._over)
        field = _FIELD_OF_REQUEST.get(type(message))
        if field is None:
            raise TypeError(f"a session stream does not carry {type(message).__name__}")
        request_id = self._next_id
        request = session_pb2.SessionRequest(id=request_id)
        getattr(request, field).CopyFrom(message)
        check_size(request)
        self._next_id += 1
        self._pending[request_id] = (field, handle)
        return request

    def response(
        self, message: session_pb2.SessionResponse
    ) -> tuple[Handle, Message | KVDockError] | None:
        """Whose answer this is, and the answer. None if nobody asked."""
        field, handle = self._pending.pop(message.id, (None, None))
        if field is None or handle is None:
            return None
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
        handles = [handle for _, handle in self._pending.values()]
        self._pending.clear()
        return first, handles


def session_lost(error: KVDockError) -> SessionLost:
    """The error of a session whose stream ended with ``error``."""
    if isinstance(error, SessionLost):
        return error
    lost = SessionLost(f"the session ended: {error.message}", code=error.code, reason=error.reason)
    lost.__cause__ = error
    return lost


def again(error: KVDockError) -> KVDockError:
    """A copy to raise: one that is kept would keep its traceback, and with it all who waited."""
    copy = type(error)(error.message, code=error.code, reason=error.reason)
    copy.__cause__ = error.__cause__
    return copy


def undo(answer: Message) -> Message | None:
    """The request that gives back what an unwanted answer granted; None if it granted nothing."""
    if isinstance(answer, cache_pb2.LookupResponse) and answer.lease_id:
        return cache_pb2.FreeLocksRequest(locks=[cache_pb2.LockRange(lease_id=answer.lease_id)])
    if isinstance(answer, cache_pb2.ReserveResponse) and answer.reservation_id:
        return cache_pb2.AbortRequest(reservation_id=answer.reservation_id)
    return None

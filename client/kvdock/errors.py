"""Exceptions of the client, and the table of which server error becomes which exception.

A failed call raises a subclass of KVDockError. The server's reason decides which one
(``google.rpc.ErrorInfo`` of a unary call, ``Error`` of a session stream). Without a reason the
status code decides.
"""

# Callers write ``except kvdock.errors.Unavailable``: a suffix would repeat the module's name.
# ruff: noqa: N818

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from typing import ClassVar, NamedTuple

import grpc
from google.protobuf.message import DecodeError
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

from kvdock.printable import printable
from kvdock.v1 import types_pb2

ERROR_DOMAIN = "kvdock"

_DETAILS_KEY = "grpc-status-details-bin"

# grpc.aio tells no more than this, with INTERNAL, when the connection ends while it writes.
_AIO_WRITE_FAILED = "Internal error from Core"


class KVDockError(Exception):
    """Base of every error of this library.

    ``message`` says what happened and what to do. It is one printable line, whatever the server
    wrote. ``code`` is the gRPC status code. ``reason`` is the name of an ``ErrorReason`` of the
    protocol without its prefix, or empty. ``metadata`` says what the error is about, in the words
    of ``Error.metadata``. ``retry_after`` is after how many seconds the same call may succeed; None
    if waiting does not help.
    """

    default_code: ClassVar[grpc.StatusCode] = grpc.StatusCode.UNKNOWN

    def __init__(
        self,
        message: str,
        *,
        code: grpc.StatusCode | None = None,
        reason: str = "",
        metadata: Mapping[str, str] | None = None,
        retry_after: float | None = None,
    ) -> None:
        self.message = printable(message)
        super().__init__(self.message)
        self.code = code or self.default_code
        self.reason = reason
        self.metadata = dict(metadata or {})
        self.retry_after = retry_after


class Unavailable(KVDockError):
    """No server answers."""

    default_code = grpc.StatusCode.UNAVAILABLE


class Forked(Unavailable):
    """This process is a fork: its parent's client, or gRPC itself, cannot be used in it."""


class UntrustedServer(KVDockError):
    """Another user may be listening at the server's socket. Nothing was sent there."""

    default_code = grpc.StatusCode.PERMISSION_DENIED


class Draining(Unavailable):
    """The server is stopping and takes nothing new."""


class SessionLost(Unavailable):
    """The session's stream ended; everything it held is released. Open another session."""


class DeadlineExceeded(KVDockError):
    """The answer did not come in time.

    A session gives back what a late answer grants. Without a session nobody hears the answer: a
    lease that it grants to ``Client.lookup`` lives until its ttl is over.
    """

    default_code = grpc.StatusCode.DEADLINE_EXCEEDED


class InvalidArgument(KVDockError):
    """A value is out of its limits."""

    default_code = grpc.StatusCode.INVALID_ARGUMENT


class ChunkTooLarge(InvalidArgument):
    """No memory of this server could ever hold the chunk."""


class WrongLength(InvalidArgument):
    """The bytes have another length than the shard."""


class UnknownNamespace(KVDockError):
    """The namespace is not registered. Register it, then repeat the call."""

    default_code = grpc.StatusCode.NOT_FOUND


class NamespaceConflict(KVDockError):
    """The namespace was registered before with other contents."""

    default_code = grpc.StatusCode.FAILED_PRECONDITION


class UnknownSession(KVDockError):
    """No open session has this token."""

    default_code = grpc.StatusCode.NOT_FOUND


class SessionExpired(KVDockError):
    """The session was silent for longer than its TTL and lost its locks. Open another."""

    default_code = grpc.StatusCode.FAILED_PRECONDITION


class SessionRequired(KVDockError):
    """The call needs a session."""

    default_code = grpc.StatusCode.FAILED_PRECONDITION


class ForeignLease(KVDockError):
    """The lease belongs to another engine."""

    default_code = grpc.StatusCode.PERMISSION_DENIED


class UnknownLease(KVDockError):
    """The lease ended, or is of an earlier epoch."""

    default_code = grpc.StatusCode.NOT_FOUND


class UnknownReservation(KVDockError):
    """The reservation was committed or aborted, or its session ended."""

    default_code = grpc.StatusCode.NOT_FOUND


class ForeignReservation(KVDockError):
    """The reservation belongs to another session."""

    default_code = grpc.StatusCode.PERMISSION_DENIED


class WrongMode(KVDockError):
    """The session's transfer mode has no such call."""

    default_code = grpc.StatusCode.FAILED_PRECONDITION


class DeviceMemory(KVDockError):
    """Device memory could not be opened or is not registered."""

    default_code = grpc.StatusCode.FAILED_PRECONDITION


class TooLate(DeadlineExceeded):
    """The server read the request after its time was over, and did nothing."""


class Stalled(DeadlineExceeded):
    """Nothing happened on a stream for too long, and the server ended it."""


class TooManyNamespaces(KVDockError):
    """The server can register no more namespaces. Clear one that holds something."""

    default_code = grpc.StatusCode.RESOURCE_EXHAUSTED


class Overloaded(KVDockError):
    """Too many requests wait to be sent to the server. This one was not sent."""

    default_code = grpc.StatusCode.RESOURCE_EXHAUSTED


class UnknownRequest(KVDockError):
    """The server is older than this client, and does not know the request."""

    default_code = grpc.StatusCode.UNIMPLEMENTED


class MessageTooLarge(InvalidArgument):
    """A message has more bytes than the protocol allows. Name fewer chunks in one call."""

    default_code = grpc.StatusCode.RESOURCE_EXHAUSTED


class PinLimit(KVDockError):
    """Pins may not keep so much. Unpin something, or start the server with a larger pin_share."""

    default_code = grpc.StatusCode.RESOURCE_EXHAUSTED


class NoEventLog(KVDockError):
    """The server keeps no event log."""

    default_code = grpc.StatusCode.UNIMPLEMENTED


class PoolUnmappable(KVDockError):
    """This process cannot map the server's pool.

    The server is on another host, or has another /dev/shm, or the file is not the server's.
    """

    default_code = grpc.StatusCode.FAILED_PRECONDITION


class ServerError(KVDockError):
    """A fault of the server, or an error that this client does not know."""

    default_code = grpc.StatusCode.INTERNAL


CLASS_OF_REASON: dict[str, type[KVDockError]] = {
    "INVALID_ARGUMENT_VALUE": InvalidArgument,
    "UNKNOWN_NAMESPACE": UnknownNamespace,
    "NAMESPACE_CONFLICT": NamespaceConflict,
    "UNKNOWN_SESSION": UnknownSession,
    "SESSION_EXPIRED": SessionExpired,
    "SESSION_REQUIRED": SessionRequired,
    "FOREIGN_LEASE": ForeignLease,
    "UNKNOWN_LEASE": UnknownLease,
    "UNKNOWN_RESERVATION": UnknownReservation,
    "FOREIGN_RESERVATION": ForeignReservation,
    "CHUNK_TOO_LARGE": ChunkTooLarge,
    "WRONG_LENGTH": WrongLength,
    "WRONG_MODE": WrongMode,
    "DEVICE_MEMORY": DeviceMemory,
    "TOO_MANY_NAMESPACES": TooManyNamespaces,
    "STALLED": Stalled,
    "TOO_LATE": TooLate,
    "DRAINING": Draining,
    "NO_EVENT_LOG": NoEventLog,
    "MESSAGE_TOO_LARGE": MessageTooLarge,
    "PIN_LIMIT": PinLimit,
    "UNKNOWN_REQUEST": UnknownRequest,
    "INTERNAL": ServerError,
}

_CLASS_OF_CODE: dict[grpc.StatusCode, type[KVDockError]] = {
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.CANCELLED: Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.INVALID_ARGUMENT: InvalidArgument,
}

_CODE_OF_NUMBER: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}


def from_stream_error(error: types_pb2.Error) -> KVDockError:
    """The exception for the Error message of a session stream."""
    code = _CODE_OF_NUMBER.get(error.code, grpc.StatusCode.UNKNOWN)
    retry_after = error.retry_ms / 1000 if error.retry_ms else None
    return _make(code, error.message, _Details(error.reason, dict(error.metadata), retry_after))


def from_rpc_error(error: grpc.RpcError, server: str) -> KVDockError:
    """The exception for a failed call to the server at the address ``server``."""
    # The errors of both faces of gRPC have these methods, but their common base class does not.
    code: grpc.StatusCode = getattr(error, "code", lambda: grpc.StatusCode.UNKNOWN)()
    message: str = getattr(error, "details", lambda: None)() or f"call ended with {code.name}"
    told = _details(getattr(error, "trailing_metadata", lambda: None)())
    reason = told.reason
    if code is grpc.StatusCode.INTERNAL and message == _AIO_WRITE_FAILED and not reason:
        code, message = grpc.StatusCode.UNAVAILABLE, "the connection ended"
    if code is grpc.StatusCode.UNAVAILABLE and not reason:
        # gRPC's message has the address twice before the cause.
        message = unanswered(server, message.rpartition("error: ")[2]).message
    elif code is grpc.StatusCode.CANCELLED:
        # Only this side cancels. Where the caller's own limit cancelled, the error is another one.
        message = f"the call to {server} ended when its client was closed; make another client"
    elif code is grpc.StatusCode.DEADLINE_EXCEEDED and not reason:
        message = f"the server at {server} did not answer in time: {message}"
    return _make(code, message, told)


def unanswered(server: str, cause: str) -> Unavailable:
    """The error for a server that cannot be reached at ``server``."""
    return Unavailable(
        f"no KVDock server answers at {server}: {cause}. Start one with `kvdock serve`, or say "
        f"where it is with KVDOCK_ADDRESS"
    )


class _Details(NamedTuple):
    """What a server's error says for programs."""

    reason: str = ""
    metadata: Mapping[str, str] = {}
    retry_after: float | None = None


def _make(code: grpc.StatusCode, message: str, told: _Details) -> KVDockError:
    cls = CLASS_OF_REASON.get(told.reason) or _CLASS_OF_CODE.get(code, ServerError)
    return cls(message, code=code, **told._asdict())


def _details(trailing_metadata: Iterable[tuple[str, bytes]] | None) -> _Details:
    """What the details of a failed call say; nothing if they are not of our domain.

    A proxy may write them, too. What is no message of ours must not hide the call's own error.
    """
    info, retry = ErrorInfo(), RetryInfo()
    for key, value in trailing_metadata or ():
        if key != _DETAILS_KEY:
            continue
        with contextlib.suppress(DecodeError):
            for detail in Status.FromString(value).details:
                if not detail.Unpack(info):
                    detail.Unpack(retry)
    if info.domain != ERROR_DOMAIN:
        return _Details()
    delay = retry.retry_delay
    # By hand: a timedelta does not hold every duration.
    seconds = delay.seconds + delay.nanos / 1e9
    return _Details(info.reason, dict(info.metadata), seconds if seconds > 0 else None)

"""Errors of requests. ``rpc/`` turns them into gRPC status codes and details."""

from __future__ import annotations

from enum import Enum


class Code(Enum):
    """The gRPC status codes that the server uses, by their numbers."""

    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14


class Reason(Enum):
    """Why a request failed, for programs: code and number of an ``ErrorReason`` in types.proto."""

    INVALID_ARGUMENT_VALUE = Code.INVALID_ARGUMENT, 1
    CHUNK_TOO_LARGE = Code.INVALID_ARGUMENT, 2
    WRONG_LENGTH = Code.INVALID_ARGUMENT, 3
    UNKNOWN_NAMESPACE = Code.NOT_FOUND, 4
    UNKNOWN_LEASE = Code.NOT_FOUND, 5
    UNKNOWN_RESERVATION = Code.NOT_FOUND, 6
    UNKNOWN_SESSION = Code.NOT_FOUND, 7
    FOREIGN_LEASE = Code.PERMISSION_DENIED, 8
    FOREIGN_RESERVATION = Code.PERMISSION_DENIED, 9
    NAMESPACE_CONFLICT = Code.FAILED_PRECONDITION, 10
    SESSION_EXPIRED = Code.FAILED_PRECONDITION, 11
    SESSION_REQUIRED = Code.FAILED_PRECONDITION, 12
    WRONG_MODE = Code.FAILED_PRECONDITION, 13
    DEVICE_MEMORY = Code.FAILED_PRECONDITION, 14
    DRAINING = Code.UNAVAILABLE, 15
    INTERNAL = Code.INTERNAL, 16
    NO_EVENT_LOG = Code.UNIMPLEMENTED, 17
    TOO_MANY_NAMESPACES = Code.RESOURCE_EXHAUSTED, 18
    STALLED = Code.DEADLINE_EXCEEDED, 19
    TOO_LATE = Code.DEADLINE_EXCEEDED, 20
    UNKNOWN_REQUEST = Code.UNIMPLEMENTED, 21
    MESSAGE_TOO_LARGE = Code.RESOURCE_EXHAUSTED, 22
    PIN_LIMIT = Code.RESOURCE_EXHAUSTED, 23

    @property
    def code(self) -> Code:
        return self.value[0]

    @property
    def retry_ms(self) -> int:
        """After how long the same request may succeed; 0 if it will not by waiting alone."""
        return _RETRY_MS.get(self, 0)


# A server that stops is mostly started again. One that reads requests too late needs some time
# without new ones.
_RETRY_MS = {Reason.DRAINING: 1_000, Reason.TOO_LATE: 100}


class RequestError(Exception):
    """A request that cannot be served as it is. The request has changed nothing.

    The message tells what happened, which value, and what to do. ``metadata`` tells a program the
    same in the words of ``Error.metadata`` in types.proto: ``field``, ``limit``, ``namespace``...
    """

    def __init__(self, reason: Reason, message: str, **metadata: object) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.metadata = {
            key: str(value)[:_MOST_CHARACTERS] for key, value in metadata.items() if value != ""
        }


# Of one value in an error's metadata: a client reads no headers of more than 8 KiB.
_MOST_CHARACTERS = 256


def invalid(message: str, field: str = "", limit: int | str = "") -> RequestError:
    """The error for a field out of its limits, with the field's name and what it may be at most."""
    return RequestError(Reason.INVALID_ARGUMENT_VALUE, message, field=field, limit=limit)


def group_name(group_idx: int | None) -> str:
    """A group, as messages name it."""
    return "the group without group_idx" if group_idx is None else f"group {group_idx}"

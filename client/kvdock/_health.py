"""``grpc.health.v1`` as far as a client needs it.

Its two messages have one field each. Writing them out here spares a dependency, and a second
registration of the same file in protobuf's pool where that dependency is installed too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import grpc

from kvdock.errors import InvalidArgument, ServerError

CHECK = "/grpc.health.v1.Health/Check"

_SERVICE_FIELD = b"\x0a"  # field 1, length-delimited
_LONGEST_NAME = 127  # Its length is then one byte.
_STATUS_FIELD = b"\x08"  # field 1, varint
_STATUS_NAMES = ("UNKNOWN", "SERVING", "NOT_SERVING", "SERVICE_UNKNOWN")


def request(service: str) -> bytes:
    """Serialized HealthCheckRequest. ``service`` is shorter than 128 bytes, as names there are."""
    name = service.encode()
    if len(name) > _LONGEST_NAME:
        raise InvalidArgument(f"a service's name has at most {_LONGEST_NAME} bytes: {service!r}")
    return _SERVICE_FIELD + bytes([len(name)]) + name if name else b""


def status(response: bytes) -> str:
    """Name of the status in a serialized HealthCheckResponse."""
    if not response:
        return _STATUS_NAMES[0]
    if response[:1] != _STATUS_FIELD or response[1] >= len(_STATUS_NAMES):
        raise ValueError(f"not a HealthCheckResponse: {response.hex()}")
    return _STATUS_NAMES[response[1]]


@contextlib.contextmanager
def service_errors(service: str) -> Iterator[None]:
    """For the call: raises InvalidArgument if the server has no such service."""
    try:
        yield
    except ServerError as error:
        if error.code is not grpc.StatusCode.NOT_FOUND:
            raise
        raise InvalidArgument(f"the server has no service {service!r}") from error

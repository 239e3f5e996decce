"""``grpc.health.v1`` as far as a client needs it.

Its two messages have one field each. Encoding them here spares a dependency. It also keeps their
file from being registered twice in protobuf, where the package with its stubs is installed too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import grpc

from kvdock.errors import InvalidArgument, ServerError

CHECK = "/grpc.health.v1.Health/Check"

_SERVICE_FIELD = b"\x0a"  # field 1, length-delimited
_LONGEST_NAME = 127  # so that one byte holds the length
_STATUS_FIELD = b"\x08"  # field 1, varint
_STATUS_NAMES = ("UNKNOWN", "SERVING", "NOT_SERVING", "SERVICE_UNKNOWN")


def request(service: str) -> bytes:
    """Serialized HealthCheckRequest. Raises InvalidArgument for a name of 128 bytes or more."""
    name = service.encode()
    if len(name) > _LONGEST_NAME:
        raise InvalidArgument(f"a service's name has at most {_LONGEST_NAME} bytes: {service!r}")
    return _SERVICE_FIELD + bytes([len(name)]) + name if name else b""


def status(response: bytes) -> str:
    """Name of the status in a serialized HealthCheckResponse. Raises ValueError if it is none."""
    if not response:
        return _STATUS_NAMES[0]
    if response[:1] != _STATUS_FIELD or response[1] >= len(_STATUS_NAMES):
        raise ValueError(f"not a HealthCheckResponse: {response.hex()}")
    return _STATUS_NAMES[response[1]]


@contextlib.contextmanager
def service_errors(service: str) -> Iterator[None]:
    """Around the call: raises InvalidArgument if the server has no such service."""
    try:
        yield
    except ServerError as error:
        if error.code is not grpc.StatusCode.NOT_FOUND:
            raise
        raise InvalidArgument(f"the server has no service {service!r}") from error

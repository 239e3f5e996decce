"""Calls as data: the request message, and how its response is read. Nothing here does I/O.

What a function's arguments mean stands at the method of its name in :class:`kvdock.Client`. Verbs
that only a session has are in :mod:`kvdock._session_verbs`.
"""

from __future__ import annotations

import contextlib
import math
import os
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from google.protobuf.message import Message

from kvdock._version import __version__
from kvdock.channel import MAX_MESSAGE_BYTES
from kvdock.errors import InvalidArgument
from kvdock.types import (
    ChunkEventData,
    Evicted,
    Hit,
    Lease,
    Namespace,
    SessionRole,
)
from kvdock.v1 import admin_pb2, cache_pb2, session_pb2, types_pb2

# A year: waiting for much longer than that overflows some clocks.
_LONGEST_TIMEOUT = 365 * 86_400.0
_LONGEST_TIMEOUT_MS = 86_400_000

FEATURES: tuple[str, ...] = ()
"""What this client does beyond the first version of the protocol, in the protocol's names."""

Request = TypeVar("Request", bound=Message)
Response = TypeVar("Response", bound=Message)
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Call(Generic[Request, Response, Result]):
    """A request, and the function that turns its response into what the caller gets."""

    request: Request
    read: Callable[[Response], Result]


def check_size(message: Message) -> int:
    """The message's size in bytes. Raises InvalidArgument if the protocol allows no such size.

    gRPC would refuse such a message too, but would end the whole stream.
    """
    size = message.ByteSize()
    if size > MAX_MESSAGE_BYTES:
        raise InvalidArgument(
            f"{type(message).__name__} takes {size:,} bytes and a message at most "
            f"{MAX_MESSAGE_BYTES:,}: name fewer chunks in one call"
        )
    return size


@contextlib.contextmanager
def within_limits(call: str) -> Iterator[None]:
    """Raises InvalidArgument where protobuf raises, for a value that its field cannot hold."""
    try:
        yield
    except (ValueError, OverflowError) as error:
        raise InvalidArgument(f"{call} got a value that cannot be sent: {error}") from error


def limited(timeout: float) -> float:
    """``timeout``, at most a year, in seconds. Raises InvalidArgument for NaN."""
    if math.isnan(timeout):
        raise InvalidArgument("timeout is NaN: give a number of seconds")
    return min(timeout, _LONGEST_TIMEOUT)


def milliseconds(ttl: float | None) -> int:
    """``ttl`` seconds in milliseconds; 0 for None, which on the wire is the server's default."""
    if ttl is None:
        return 0
    if ttl <= 0:
        raise InvalidArgument(f"ttl is {ttl:g} s: give a positive number, or None for the default")
    return max(1, round(ttl * 1000))


@within_limits("session")
def open_session(
    engine_id: str | None,
    role: SessionRole | str,
    worker_id: int,
    kv_worker_id: int,
    ttl: float | None,
    client: str | None,
) -> session_pb2.OpenRequest:
    """The first message of a session. A role may be named in lower case."""
    if isinstance(role, str):
        names = [member.name.lower() for member in SessionRole if member]
        if role not in names:
            raise InvalidArgument(f"role {role!r} is none of {', '.join(names)}")
        role = SessionRole[role.upper()]
    return session_pb2.OpenRequest(
        engine_id=engine_id or f"tool-{uuid.uuid4()}",
        role=session_pb2.SessionRole.ValueType(role),
        worker_id=worker_id,
        kv_worker_id=kv_worker_id,
        ttl_ms=milliseconds(ttl),
        client=client or f"kvdock/{__version__} pid {os.getpid()}",
        features=FEATURES,
    )


@within_limits("register_namespace")
def register_namespace(
    namespace: Namespace,
) -> Call[cache_pb2.RegisterNamespaceRequest, cache_pb2.RegisterNamespaceResponse, bool]:
    return Call(
        cache_pb2.RegisterNamespaceRequest(namespace=namespace.to_proto()),
        lambda response: response.created,
    )


@within_limits("lookup")
def lookup(
    namespace: str,
    keys: Sequence[bytes],
    readers: int,
    probe: bool,
    *,
    ttl: float | None = None,
    timeout: float | None = None,
) -> Call[cache_pb2.LookupRequest, cache_pb2.LookupResponse, Hit]:
    return Call(
        cache_pb2.LookupRequest(
            namespace=namespace,
            keys=keys,
            readers=readers,
            probe=probe,
            ttl_ms=milliseconds(ttl),
            timeout_ms=0 if timeout is None else limit_ms(timeout),
        ),
        Hit.from_proto,
    )


@within_limits("free_locks")
def free_locks(
    lease: Lease | int, first: int, end: int | None, reader: int | None, group_idx: int | None
) -> Call[cache_pb2.FreeLocksRequest, cache_pb2.FreeLocksResponse, int]:
    locks = cache_pb2.LockRange(
        lease_id=lease_id(lease),
        first_chunk=first,
        end_chunk=end,
        reader=reader,
        group_idx=group_idx,
    )
    return Call(
        cache_pb2.FreeLocksRequest(locks=[locks]),
        lambda response: sum(freed.released for freed in response.freed),
    )


def status() -> Call[admin_pb2.StatusRequest, admin_pb2.StatusResponse, admin_pb2.StatusResponse]:
    return Call(admin_pb2.StatusRequest(), lambda response: response)


@within_limits("namespaces")
def list_namespaces(
    labels: Mapping[str, str] | None, name_prefix: str
) -> admin_pb2.ListNamespacesRequest:
    return admin_pb2.ListNamespacesRequest(labels=labels, name_prefix=name_prefix)


@within_limits("chunks")
def list_chunks(namespace: str, group_idx: int | None) -> admin_pb2.ListChunksRequest:
    return admin_pb2.ListChunksRequest(namespace=namespace, group_idx=group_idx)


@within_limits("clear")
def clear(
    namespace: str | None, everything: bool
) -> Call[admin_pb2.ClearRequest, admin_pb2.ClearResponse, int]:
    if (namespace is not None) == everything:
        raise InvalidArgument("clear takes either a namespace or all=True")
    request = (
        admin_pb2.ClearRequest(all=True)
        if namespace is None
        else admin_pb2.ClearRequest(namespace=namespace)
    )
    return Call(request, lambda response: response.parts)


@within_limits("evict")
def evict(
    nbytes: int | None, everything: bool
) -> Call[admin_pb2.EvictRequest, admin_pb2.EvictResponse, Evicted]:
    if (nbytes is not None) == everything:
        raise InvalidArgument("evict takes either a number of bytes or all=True")
    request = (
        admin_pb2.EvictRequest(all=True) if nbytes is None else admin_pb2.EvictRequest(bytes=nbytes)
    )
    return Call(request, lambda response: Evicted(response.parts, response.bytes))


def event_data_messages(
    event_data: Sequence[ChunkEventData] | None,
) -> list[types_pb2.ChunkEventData]:
    return [data.to_proto() for data in event_data or ()]


def limit_ms(seconds: float) -> int:
    """Milliseconds for a field in which 0 would mean no limit."""
    return min(math.ceil(max(seconds, 0.001) * 1000), _LONGEST_TIMEOUT_MS)


def lease_id(lease: Lease | int) -> int:
    return lease.id if isinstance(lease, Lease) else lease

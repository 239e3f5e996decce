"""A request with an enum value that the server does not know is refused.

The enum fields are found in the descriptors, so a new one is tested here as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from wire import DEADLINE, SHARD, Wire, WireSession, raises

from kvdock.v1 import (
    admin_pb2,
    cache_pb2,
    events_pb2,
    events_pb2_grpc,
    session_pb2,
    types_pb2,
)
from kvdock_server.errors import RequestError
from kvdock_server.rpc import limits

UNKNOWN = 99


def requests() -> Iterator[Descriptor]:
    """Every message that limits.check is given: for a stream of requests what is in each."""
    for file in (admin_pb2, cache_pb2, events_pb2, session_pb2):
        for service in file.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                if method.client_streaming:
                    (oneof,) = method.input_type.oneofs
                    yield from (field.message_type for field in oneof.fields)
                else:
                    yield method.input_type


def enum_paths(message: Descriptor) -> Iterator[list[FieldDescriptor]]:
    """The fields that lead to each enum field in a message, at any depth."""
    for field in message.fields:
        if field.enum_type is not None:
            yield [field]
        elif field.message_type is not None:
            for path in enum_paths(field.message_type):
                yield [field, *path]


PATHS = {
    ".".join([message.name, *(field.name for field in path)]): (message, path)
    for message in requests()
    for path in enum_paths(message)
}


def with_value(message: Descriptor, path: Sequence[FieldDescriptor], value: int) -> Message:
    request: Any = GetMessageClass(message)()
    if any(field.name == "keys" for field in message.fields):
        request.keys.append(bytes(32))  # there must be one
    inner = request
    for field in path[:-1]:
        inner = getattr(inner, field.name)
        if field.is_repeated:
            inner = inner.add()
    if path[-1].is_repeated:
        getattr(inner, path[-1].name).append(value)
    else:
        setattr(inner, path[-1].name, value)
    found: Message = request
    return found


def test_every_enum_of_a_request_is_found() -> None:
    assert set(PATHS) >= {
        "OpenRequest.role",
        "RegisterMemoryRequest.mode",
        "RegisterNamespaceRequest.namespace.groups.kind",
        "StreamKVEventsRequest.medium",
    }


@pytest.mark.parametrize("name", PATHS)
def test_an_unknown_value_is_refused_by_name(name: str) -> None:
    message, path = PATHS[name]
    enum = path[-1].enum_type
    for value in (UNKNOWN, -1, 2**31 - 1):
        with pytest.raises(RequestError, match=f"{path[-1].name} {value}: this server") as caught:
            limits.check(with_value(message, path, value))
        assert enum.values[1].name in caught.value.message
    for known in enum.values_by_number:
        limits.check(with_value(message, path, known))


def test_unknown_values_on_the_wire(wire: Wire) -> None:
    group = types_pb2.Group(kind=UNKNOWN, shard_bytes=[SHARD])  # type: ignore[arg-type]
    namespace = types_pb2.Namespace(name="new", chunk_tokens=16, kv_world_size=1, groups=[group])
    with raises(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_ARGUMENT_VALUE"):
        wire.cache.RegisterNamespace(
            cache_pb2.RegisterNamespaceRequest(namespace=namespace), timeout=DEADLINE
        )
    events = events_pb2_grpc.EventServiceStub(wire.channel)
    follow = events_pb2.StreamKVEventsRequest(medium=UNKNOWN)  # type: ignore[arg-type]
    with raises(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_ARGUMENT_VALUE"):
        list(events.StreamKVEvents(follow, timeout=DEADLINE))
    opening = session_pb2.OpenRequest(engine_id="e", role=UNKNOWN)  # type: ignore[arg-type]
    with raises(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_ARGUMENT_VALUE"):
        next(wire.sessions.Session(iter([session_pb2.SessionRequest(open=opening)])))
    session = WireSession(wire)
    memory = session_pb2.RegisterMemoryRequest(namespace="n", mode=UNKNOWN)  # type: ignore[arg-type]
    assert "mode 99" in session.error(register_memory=memory).message
    register = cache_pb2.RegisterNamespaceRequest(namespace=namespace)
    assert "kind 99" in session.error(register_namespace=register).message
    session.close()
    status = wire.status()
    assert (status.index.namespaces, status.sessions_total) == (1, 0)

"""An empty request does nothing, or only reads, or is refused.

A client sends one by accident: many libraries drop a field whose name is misspelt. Every request of
the protocol is found in its descriptors, so a new one is tested here as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from one_engine import KEYS, Engine
from wire import DEADLINE, SHARD, Wire, WireSession, key, raises

from kvdock.v1 import admin_pb2, cache_pb2, events_pb2, session_pb2, types_pb2
from kvdock_server.errors import RequestError
from kvdock_server.rpc import verbs

METHODS = {
    method.full_name.removeprefix("kvdock.v1."): method
    for file in (admin_pb2, cache_pb2, events_pb2, session_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
REQUESTS = [
    field.name for field in session_pb2.SessionRequest.DESCRIPTOR.oneofs_by_name["request"].fields
]


class Held(NamedTuple):
    """A server that holds something of every kind. ``is_unchanged`` compares it with the start."""

    wire: Wire
    scheduler: WireSession
    worker: WireSession
    before: list[Message]

    def assert_unchanged(self) -> None:
        assert contents(self.wire) == self.before


def contents(wire: Wire) -> list[Message]:
    """All that the server tells of what it has stored, locked, reserved and registered."""
    status = wire.status()
    status.ClearField("uptime_ms")
    status.counters.ClearField("lookups")
    listed = wire.admin.ListNamespaces(admin_pb2.ListNamespacesRequest(), timeout=DEADLINE)
    parts = wire.admin.ListChunks(admin_pb2.ListChunksRequest(namespace="n"), timeout=DEADLINE)
    return [status, *listed, *parts]


@pytest.fixture
def held(wire: Wire) -> Iterator[Held]:
    wire.put([key(1), key(2)], [bytes(SHARD)] * 2)
    scheduler = WireSession(wire, "SCHEDULER")
    worker = WireSession(wire)
    memory = session_pb2.RegisterMemoryRequest(namespace="n", mode=types_pb2.TRANSFER_MODE_INLINE)
    worker.ask(register_memory=memory)
    writer = WireSession(wire, worker_id=1)
    writer.ask(reserve=cache_pb2.ReserveRequest(namespace="n", keys=[key(3)]))
    lookup = cache_pb2.LookupRequest(namespace="n", keys=[key(1), key(2)], readers=2)
    scheduler.ask(lookup=lookup)
    wire.lookup([key(1)])
    yield Held(wire, scheduler, worker, contents(wire))
    for session in (writer, worker, scheduler):
        session.close()


def call(wire: Wire, method: MethodDescriptor, request: Message) -> list[Any]:
    """The answers to one request. RpcError if it is refused; a stream without end is cut off."""
    kind = f"{'stream' if method.client_streaming else 'unary'}_" + (
        "stream" if method.server_streaming else "unary"
    )
    path = f"/{method.containing_service.full_name}/{method.name}"
    stub = getattr(wire.channel, kind)(
        path,
        request_serializer=type(request).SerializeToString,
        response_deserializer=GetMessageClass(method.output_type).FromString,
    )
    answer = stub(iter([request]) if method.client_streaming else request, timeout=1.0)
    return list(answer) if method.server_streaming else [answer]


@pytest.mark.parametrize("name", METHODS)
def test_of_an_rpc(held: Held, name: str) -> None:
    method = METHODS[name]
    request = GetMessageClass(method.input_type)()
    try:
        call(held.wire, method, request)
    except grpc.RpcError as error:
        assert error.code() in {  # type: ignore[attr-defined]
            grpc.StatusCode.INVALID_ARGUMENT,
            grpc.StatusCode.NOT_FOUND,
            grpc.StatusCode.FAILED_PRECONDITION,
            grpc.StatusCode.UNIMPLEMENTED,  # no event log
        }, error
    held.assert_unchanged()


@pytest.mark.parametrize("role", ["scheduler", "worker"])
@pytest.mark.parametrize("kind", [*REQUESTS, None])
def test_of_a_session(held: Held, kind: str | None, role: str) -> None:
    session: WireSession = getattr(held, role)
    answer = session.ask(**({kind: {}} if kind else {}))
    if answer.WhichOneof("response") != "error":
        assert answer.WhichOneof("response") == kind
    else:
        assert answer.error.reason != "INTERNAL"
    held.assert_unchanged()


@pytest.mark.parametrize(
    "name",
    [
        name
        for name, method in METHODS.items()
        if "session_token" in method.input_type.fields_by_name
    ],
)
def test_of_an_rpc_that_names_a_session_only(held: Held, name: str) -> None:
    request = GetMessageClass(METHODS[name].input_type)()
    for session in (held.scheduler, held.worker):
        request.session_token = session.opened.session_token  # type: ignore[attr-defined]
        try:
            call(held.wire, METHODS[name], request)
        except grpc.RpcError as error:
            assert error.code() is not grpc.StatusCode.UNKNOWN  # type: ignore[attr-defined]
        held.assert_unchanged()


@pytest.mark.parametrize(
    ("name", "fields", "hint"),
    [
        ("AdminService.Clear", {}, "set namespace, or all to true"),
        ("AdminService.Clear", {"all": False}, "set namespace, or all to true"),
        ("AdminService.Evict", {}, "set bytes, or all to true"),
        ("AdminService.Evict", {"all": False}, "set bytes, or all to true"),
    ],
)
def test_a_refusal_says_what_to_set(
    held: Held, name: str, fields: dict[str, Any], hint: str
) -> None:
    request = GetMessageClass(METHODS[name].input_type)(**fields)
    with raises(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_ARGUMENT_VALUE") as caught:
        call(held.wire, METHODS[name], request)
    assert hint in caught.message
    held.assert_unchanged()


def test_an_empty_name_and_no_bytes_are_not_everything(held: Held) -> None:
    with raises(grpc.StatusCode.NOT_FOUND, "UNKNOWN_NAMESPACE"):
        held.wire.admin.Clear(admin_pb2.ClearRequest(namespace=""), timeout=DEADLINE)
    nothing = held.wire.admin.Evict(admin_pb2.EvictRequest(bytes=0), timeout=DEADLINE)
    assert nothing == admin_pb2.EvictResponse()
    held.assert_unchanged()


async def test_memory_stays_registered(engine: Engine) -> None:
    worker = engine.workers[0].session
    with pytest.raises(RequestError, match="namespace is empty: name the one whose groups"):
        await verbs.register_memory(engine.service, worker, session_pb2.RegisterMemoryRequest())
    lease = engine.lookup()
    assert await engine.lead(lease) == [types_pb2.CHUNK_STATUS_RETRIEVED] * len(KEYS)

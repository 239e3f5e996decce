"""A client knows before it relies on something, and newer clients do no harm."""

from __future__ import annotations

import queue
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from wire import DEADLINE, Wire, WireSession, key

import kvdock
from kvdock import errors
from kvdock.v1 import cache_pb2, session_pb2

OPEN = session_pb2.SessionRequest(
    id=1, open=session_pb2.OpenRequest(engine_id="e", role=session_pb2.SESSION_ROLE_TOOL)
)
UNKNOWN_FIELD = 1_000
# Field 1 (id) with 42, and field 1,000 with an empty message: tag 1,000 << 3 | 2 as a varint.
NEWER_REQUEST = b"\x08\x2a" + b"\xc2\x3e" + b"\x00"
# Field 1 with 43, a number in field 1,001, and no request: not a request of a kind unknown.
NO_REQUEST = b"\x08\x2b" + b"\xc8\x3e" + b"\x05"


@pytest.mark.parametrize("log", [False, True])
def test_the_server_says_what_it_does(start_server: Callable[..., Any], log: bool) -> None:
    server = start_server(*(["--event-log", "1MiB"] if log else []))
    wire = Wire(server.address)
    expected = ["event_log"] if log else []
    assert list(wire.status().features) == expected
    session = WireSession(wire, features=["a-name-of-the-future"])
    assert list(session.opened.features) == expected
    session.close()
    wire.channel.close()
    with kvdock.Client(server.address) as client, client.session() as ours:
        assert ours.info.features == set(expected)


@pytest.mark.parametrize("features", [["f"] * 65, ["f" * 65]])
def test_too_many_features_are_refused(wire: Wire, features: list[str]) -> None:
    opening = session_pb2.SessionRequest()
    opening.CopyFrom(OPEN)
    opening.open.features.extend(features)
    with pytest.raises(grpc.RpcError) as caught:
        list(wire.sessions.Session(iter([opening]), timeout=DEADLINE))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "features" in (caught.value.details() or "")


def test_a_request_of_a_newer_client_is_unimplemented_and_the_stream_goes_on(wire: Wire) -> None:
    requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    call = wire.channel.stream_stream(
        "/kvdock.v1.SessionService/Session",
        response_deserializer=session_pb2.SessionResponse.FromString,
    )
    answers = call(iter(requests.get, None), timeout=DEADLINE)

    def ask(message: bytes) -> session_pb2.SessionResponse:
        requests.put(message)
        answer: session_pb2.SessionResponse = next(answers)
        return answer

    assert ask(OPEN.SerializeToString()).HasField("open")
    unknown = ask(NEWER_REQUEST)
    assert unknown.id == 42
    assert (unknown.error.code, unknown.error.reason) == (12, "UNKNOWN_REQUEST")
    assert str(UNKNOWN_FIELD) in unknown.error.message
    assert dict(unknown.error.metadata) == {"request": str(UNKNOWN_FIELD)}
    assert type(errors.from_stream_error(unknown.error)) is errors.UnknownRequest

    empty = ask(NO_REQUEST)
    assert (empty.id, empty.error.reason) == (43, "INVALID_ARGUMENT_VALUE")
    assert "has no request" in empty.error.message

    again = ask(OPEN.SerializeToString())
    assert (again.id, again.error.reason) == (OPEN.id, "INVALID_ARGUMENT_VALUE")
    assert "open may only be the first message" in again.error.message

    # A field that this server does not know, in a request that it knows, does no harm.
    lookup = session_pb2.SessionRequest(
        id=44, lookup=cache_pb2.LookupRequest(namespace="n", keys=[key(1)])
    )
    assert ask(lookup.SerializeToString() + NEWER_REQUEST[2:]).HasField("lookup")
    requests.put(None)
    assert list(answers) == []


def test_a_call_that_no_server_knows_is_unimplemented(wire: Wire) -> None:
    """gRPC itself answers that, without a reason of ours."""
    with pytest.raises(grpc.RpcError) as caught:
        wire.channel.unary_unary("/kvdock.v1.CacheService/Newer")(b"", timeout=DEADLINE)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED

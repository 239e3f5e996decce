"""A client knows before it relies on something, and newer clients do no harm."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from wire import DEADLINE, Wire, WireSession, key

import kvdock
from kvdock import errors
from kvdock.v1 import cache_pb2, session_pb2
from kvdock_server.errors import Reason
from kvdock_server.rpc.session import _first_id, _unknown

OPEN = session_pb2.SessionRequest(
    id=1, open=session_pb2.OpenRequest(engine_id="e", role=session_pb2.SESSION_ROLE_TOOL)
)
UNKNOWN_FIELD = 1_000
# Field 1 (id) with 42, and field 1,000 with an empty message: tag 1,000 << 3 | 2 as a varint.
NEWER_REQUEST = b"\x08\x2a" + b"\xc2\x3e" + b"\x00"
# Field 1 with 43, a number in field 1,001, and no request: not a request of a kind unknown.
NO_REQUEST = b"\x08\x2b" + b"\xc8\x3e" + b"\x05"
# As many fields without a meaning as a message can hold, behind field 1 with 45.
MANY_FIELDS = b"\x08\x2d" + b"\xc8\x3e\x05" * 1_390_000


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

    many = ask(MANY_FIELDS)
    assert (many.id, many.error.reason) == (45, "INVALID_ARGUMENT_VALUE")

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


def test_many_fields_without_a_meaning_hold_up_nobody() -> None:
    request = session_pb2.SessionRequest.FromString(MANY_FIELDS)
    began = time.thread_time()
    assert _unknown(request).reason is Reason.INVALID_ARGUMENT_VALUE
    assert time.thread_time() - began < 0.1


@pytest.mark.parametrize(
    ("before", "number"),
    [
        (b"", 1_000),
        (b"\xc1\x3e" + bytes(8) + b"\xcd\x3e" + bytes(4) + b"\xc8\x3e\x80\x01", 1_000),
        (b"\xcb\x3e\xcc\x3e", None),
        (b"\xc8\x3e\x05" * 64, None),
    ],
    ids=["alone", "behind numbers", "behind a group", "behind too many"],
)
def test_the_number_of_a_request_of_a_newer_client(before: bytes, number: int | None) -> None:
    request = session_pb2.SessionRequest.FromString(before + NEWER_REQUEST)
    expected = {"field": "request"} if number is None else {"request": str(number)}
    assert _unknown(request).metadata == expected


@pytest.mark.parametrize(
    ("begin", "number"),
    [(b"\x08\x2a\x12", 42), (b"\x12\x00", 0), (b"\x08" + b"\x80" * 11 + bytes(4), 0), (b"", 0)],
)
def test_the_id_of_a_message_that_is_too_large(begin: bytes, number: int) -> None:
    assert _first_id(begin) == number


def test_a_call_that_no_server_knows_is_unimplemented(wire: Wire) -> None:
    """gRPC itself answers that, without a reason of ours."""
    with pytest.raises(grpc.RpcError) as caught:
        wire.channel.unary_unary("/kvdock.v1.CacheService/Newer")(b"", timeout=DEADLINE)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED

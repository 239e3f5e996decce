from typing import Any

import pytest
from google.protobuf.message import Message

from kvdock import _verbs
from kvdock._protocol import SessionProtocol, undo
from kvdock._session_verbs import SessionVerbs
from kvdock.errors import (
    InvalidArgument,
    ServerError,
    SessionExpired,
    SessionLost,
    Unavailable,
    UnknownLease,
)
from kvdock.v1 import admin_pb2, cache_pb2, session_pb2, types_pb2
from kvdock.v1.session_pb2 import SessionRequest

HEARTBEAT = session_pb2.HeartbeatRequest()


def sent(protocol: SessionProtocol[str], message: Message, handle: str) -> SessionRequest:
    """What the stream carries for a message that nothing waits before."""
    request_id = protocol.request(message, handle)
    request = protocol.next_request()
    assert request is not None
    assert request.id == request_id
    return request


def test_answers_find_their_requests_in_any_order() -> None:
    protocol: SessionProtocol[str] = SessionProtocol()
    first = sent(protocol, cache_pb2.LookupRequest(namespace="n"), "lookup")
    second = sent(protocol, HEARTBEAT, "heartbeat")
    assert first.lookup.namespace == "n"
    assert second.WhichOneof("request") == "heartbeat"

    answer = protocol.response(
        session_pb2.SessionResponse(id=second.id, heartbeat=session_pb2.HeartbeatResponse(epoch=5))
    )
    assert answer == ("heartbeat", session_pb2.HeartbeatResponse(epoch=5))
    answer = protocol.response(
        session_pb2.SessionResponse(id=first.id, lookup=cache_pb2.LookupResponse(hit_chunks=3))
    )
    assert answer == ("lookup", cache_pb2.LookupResponse(hit_chunks=3))


def test_an_error_becomes_its_exception() -> None:
    protocol: SessionProtocol[str] = SessionProtocol()
    request = sent(protocol, cache_pb2.RetrieveRequest(lease_id=1), "handle")

    settled = protocol.response(
        session_pb2.SessionResponse(
            id=request.id, error=types_pb2.Error(code=5, message="gone", reason="UNKNOWN_LEASE")
        )
    )

    assert settled is not None
    assert isinstance(settled[1], UnknownLease)
    assert settled[1].message == "gone"


def test_what_nobody_asked_or_of_another_kind_harms_nothing() -> None:
    protocol: SessionProtocol[str] = SessionProtocol()
    request = sent(protocol, HEARTBEAT, "handle")

    assert protocol.response(session_pb2.SessionResponse(id=999)) is None
    settled = protocol.response(
        session_pb2.SessionResponse(id=request.id, lookup=cache_pb2.LookupResponse())
    )
    assert settled is not None
    assert isinstance(settled[1], ServerError)
    assert protocol.response(session_pb2.SessionResponse(id=request.id)) is None


def test_the_end_gives_up_what_is_pending_and_refuses_what_comes() -> None:
    protocol: SessionProtocol[str] = SessionProtocol()
    protocol.request(HEARTBEAT, "a")
    protocol.request(HEARTBEAT, "b")

    assert protocol.end(Unavailable("died")) == (True, ["a", "b"])
    assert protocol.end(Unavailable("died again")) == (False, [])

    with pytest.raises(SessionLost, match="died") as refused:
        protocol.request(HEARTBEAT, "c")
    assert isinstance(refused.value.__cause__, Unavailable)


def test_an_expired_session_refuses_and_may_still_end() -> None:
    protocol: SessionProtocol[str] = SessionProtocol()
    protocol.request(HEARTBEAT, "a")

    assert protocol.expire(SessionExpired("silent"))
    assert not protocol.expire(SessionExpired("silent"))
    with pytest.raises(SessionExpired, match="silent"):
        protocol.request(HEARTBEAT, "b")
    # Its loss was told already.
    assert protocol.end(Unavailable("closed")) == (False, ["a"])


def test_a_message_over_the_limit_is_refused_before_it_kills_the_stream() -> None:
    protocol: SessionProtocol[str] = SessionProtocol()
    request = cache_pb2.LookupRequest(keys=[bytes(32)] * 130_000)

    with pytest.raises(InvalidArgument, match="fewer chunks"):
        protocol.request(request, "handle")
    assert protocol.end(Unavailable("x")) == (True, [])


def test_a_stream_carries_no_other_messages() -> None:
    with pytest.raises(TypeError, match="StatusRequest"):
        SessionProtocol[str]().request(admin_pb2.StatusRequest(), "handle")


def test_every_request_of_a_session_can_be_sent() -> None:
    oneof = session_pb2.SessionRequest.DESCRIPTOR.oneofs_by_name["request"]
    for field in oneof.fields:
        request = getattr(session_pb2.SessionRequest(), field.name)
        carried = sent(SessionProtocol[str](), type(request)(), "handle")
        assert carried.WhichOneof("request") == field.name


def test_undo_gives_back_locks_and_memory_and_nothing_else() -> None:
    assert undo(cache_pb2.LookupResponse(lease_id=4)) == cache_pb2.FreeLocksRequest(
        locks=[cache_pb2.LockRange(lease_id=4)]
    )
    assert undo(cache_pb2.ReserveResponse(reservation_id=5)) == cache_pb2.AbortRequest(
        reservation_id=5
    )
    assert undo(cache_pb2.LookupResponse()) is None
    assert undo(cache_pb2.ReserveResponse()) is None
    assert undo(session_pb2.HeartbeatResponse(epoch=1)) is None


class Requests(SessionVerbs):
    """Answers each verb with the request that it would send."""

    def _call(self, call: Any, timeout: float | None) -> Any:
        return call.request

    def submit(self, request: Message) -> Any:
        raise AssertionError("nothing is sent without waiting")

    def _seconds(self, timeout: float | None) -> float:
        return 1.0


def test_committing_no_chunks_is_not_committing_all() -> None:
    verbs = Requests()
    with pytest.raises(InvalidArgument, match="None for all"):
        verbs.commit(1, [])
    assert list(verbs.commit(1, None).chunks) == []


def test_a_role_has_a_name() -> None:
    opening = _verbs.open_session("engine", "worker", 2, 1, 1.5, "test")

    assert opening.role == session_pb2.SESSION_ROLE_WORKER
    assert (opening.ttl_ms, opening.worker_id, opening.kv_worker_id) == (1_500, 2, 1)
    with pytest.raises(InvalidArgument, match="scheduler, worker, tool"):
        _verbs.open_session("engine", "boss", 0, 0, None, None)

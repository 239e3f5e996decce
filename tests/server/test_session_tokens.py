"""A session's id is for everybody to see; what acts for the session is its token, a secret."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from wire import DEADLINE, SHARD, Wire, WireSession, key, raises

import kvdock
from kvdock.types import SessionInfo
from kvdock.v1 import admin_pb2, cache_pb2
from kvdock_server.core.sessions import Role, SessionTable
from kvdock_server.ids import new_id

Code = grpc.StatusCode


def reserve(session: WireSession) -> int:
    request = cache_pb2.ReserveRequest(namespace="n", keys=[key(1)])
    return session.ask(reserve=request).reserve.reservation_id


def as_token(session_id: int) -> list[bytes]:
    """What somebody might try who has seen the id."""
    return [
        str(session_id).encode(),
        session_id.to_bytes(16, "big"),
        session_id.to_bytes(16, "little"),
        f"{session_id:016x}".encode(),
        bytes(16),
    ]


def test_the_shown_id_acts_for_nobody(wire: Wire) -> None:
    """With the id alone somebody could return memory that its session was still writing to."""
    session = WireSession(wire)
    reservation = reserve(session)
    (shown,) = wire.status().sessions
    for request in (
        cache_pb2.LookupRequest(namespace="n", keys=[key(1)]),
        cache_pb2.FreeLocksRequest(),
        cache_pb2.ReserveRequest(namespace="n", keys=[key(2)]),
        cache_pb2.CommitRequest(reservation_id=reservation),
        cache_pb2.AbortRequest(reservation_id=reservation),
        cache_pb2.StoreRequest(namespace="n", keys=[key(2)]),
        cache_pb2.RetrieveRequest(),
    ):
        verb = getattr(wire.cache, type(request).__name__.removesuffix("Request"))
        for token in as_token(shown.session_id):
            request.session_token = token
            with raises(Code.NOT_FOUND, "UNKNOWN_SESSION") as caught:
                verb(request, timeout=DEADLINE)
            assert repr(token) not in caught.message
            assert token.hex() not in caught.message
    assert wire.status().pool.reserved_bytes == SHARD
    session.close()


def test_the_token_acts_for_its_session_until_that_ends(wire: Wire) -> None:
    session = WireSession(wire)
    token = session.opened.session_token
    assert len(token) == 16
    abort = cache_pb2.AbortRequest(reservation_id=reserve(session), session_token=token)
    assert wire.cache.Abort(abort, timeout=DEADLINE).aborted == 1
    session.close()
    with raises(Code.NOT_FOUND, "UNKNOWN_SESSION"):
        wire.cache.Abort(abort, timeout=DEADLINE)


def test_a_token_on_the_stream_of_another_session(wire: Wire) -> None:
    mine, other = WireSession(wire), WireSession(wire)
    lookup = cache_pb2.LookupRequest(
        namespace="n", keys=[key(1)], session_token=mine.opened.session_token
    )
    assert mine.ask(lookup=lookup).WhichOneof("response") == "lookup"
    error = other.error(lookup=lookup)
    assert (error.code, error.reason) == (Code.NOT_FOUND.value[0], "UNKNOWN_SESSION")
    mine.close()
    other.close()


def test_the_token_is_shown_nowhere(server: Any, wire: Wire) -> None:
    session = WireSession(wire)
    token = session.opened.session_token
    session.ask(lookup=cache_pb2.LookupRequest(namespace="n", keys=[b"short"], session_token=token))
    with pytest.raises(grpc.RpcError) as failed:
        wire.cache.Store(cache_pb2.StoreRequest(session_token=token), timeout=DEADLINE)
    held = SessionTable().open(
        0.0, engine_id="e", role=Role.TOOL, worker_id=0, kv_worker_id=0, ttl_ms=0, client=""
    )
    with kvdock.Client(server.address) as client, client.session() as mine:
        status = wire.admin.Status(admin_pb2.StatusRequest(), timeout=DEADLINE)
        shown = [
            (token, status.SerializeToString()),
            (token, repr(failed.value).encode()),
            (mine.info.token, status.SerializeToString()),
            (mine.info.token, repr(mine.info).encode()),
            (held.token, repr(held).encode()),
        ]
    session.close()
    server.stop()
    shown.append((token, server.log.encode()))
    for secret, text in shown:
        assert len(secret) == 16
        for form in (secret, repr(secret).encode(), repr(secret)[2:-1].encode()):
            assert form not in text
        assert secret.hex().encode() not in text


def test_ids_are_numbers_that_javascript_can_hold(wire: Wire) -> None:
    wire.put([key(1)], [bytes(SHARD)])
    session = WireSession(wire)
    lookup = cache_pb2.LookupRequest(namespace="n", keys=[key(1)])
    reservation = session.ask(
        reserve=cache_pb2.ReserveRequest(namespace="n", keys=[key(2)])
    ).reserve.reservation_id
    made = [
        session.opened.session_id,
        session.opened.epoch,
        session.ask(lookup=lookup).lookup.lease_id,
        reservation,
        *(new_id() for _ in range(100)),
    ]
    for number in made:
        assert 0 < number < 2**53
        assert int(float(number)) == number
    assert len(set(made)) == len(made)
    assert max(made) > 2**48  # random over all of it
    session.close()


def test_an_id_is_never_given_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = iter([0, 5, 7])
    monkeypatch.setattr("secrets.randbits", lambda bits: next(drawn))
    assert new_id(taken={5}) == 7


def test_the_client_is_told_its_token(server: Any) -> None:
    with kvdock.Client(server.address) as client, client.session() as session:
        assert isinstance(session.info, SessionInfo)
        assert len(session.info.token) == 16
        assert [entry.session_id for entry in client.status().sessions] == [session.id]

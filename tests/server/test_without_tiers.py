"""The fields for tiers: a server without them answers zeros, and clients ignore the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from wire import DEADLINE, SHARD, Wire, WireSession, key, raises

import kvdock
from kvdock._protocol import SessionProtocol
from kvdock.events import Index, Unknown
from kvdock.events.messages import message_from_proto
from kvdock.v1 import cache_pb2, events_pb2, events_pb2_grpc, session_pb2

Code = grpc.StatusCode


def test_a_lookup_that_would_wait_is_answered_as_any_other(wire: Wire) -> None:
    wire.put([key(1)], [bytes(SHARD)])
    session = WireSession(wire, "SCHEDULER")
    assert "tiers" not in session.opened.features
    keys = [key(1), key(2)]
    for lookup in (
        session.ask(
            lookup=cache_pb2.LookupRequest(namespace="n", keys=keys, wait_ms=600_000)
        ).lookup,
        wire.lookup(keys, wait_ms=1),
        wire.lookup(keys, wait_ms=1, probe=True),
    ):
        assert (lookup.hit_chunks, lookup.coming_chunks, lookup.coming_ms) == (1, 0, 0)
    miss = session.ask(lookup=cache_pb2.LookupRequest(namespace="n", keys=[key(2)], wait_ms=9))
    assert (miss.lookup.lease_id, miss.lookup.coming_chunks) == (0, 0)
    error = session.error(lookup=cache_pb2.LookupRequest(namespace="n", keys=keys, wait_ms=600_001))
    assert dict(error.metadata) == {"field": "wait_ms", "limit": "600000"}
    session.close()
    status = wire.status()
    assert ("tiers" in status.features, len(status.tiers)) == (False, 0)


def arrived() -> session_pb2.SessionResponse:
    return session_pb2.SessionResponse(
        arrived=session_pb2.Arrived(
            lease_id=5, hit_chunks=3, groups=[cache_pb2.GroupHit(end_chunk=3)], cut_short="late"
        ),
        answered_ms=1,
    )


# As arrived(), with a message that no client knows yet: field 101.
UNKNOWN_PUSH = session_pb2.SessionResponse.FromString(b"\xaa\x06\x02\x08\x01")


@pytest.mark.parametrize("pushed", [arrived(), UNKNOWN_PUSH])
def test_a_client_takes_no_notice_of_what_answers_nothing(
    pushed: session_pb2.SessionResponse,
) -> None:
    protocol: SessionProtocol[str] = SessionProtocol()
    request_id = protocol.request(cache_pb2.LookupRequest(namespace="n"), "handle")
    protocol.next_request()
    assert protocol.response(pushed) is None
    assert protocol.over is None
    answer = cache_pb2.LookupResponse(hit_chunks=1, lease_id=5, coming_chunks=2, coming_ms=7)
    settled = protocol.response(session_pb2.SessionResponse(id=request_id, lookup=answer))
    assert settled == ("handle", answer)
    assert kvdock.Hit.from_proto(answer).chunks == 1


@pytest.fixture
def stream(start_server: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """Opens a stream of events from a snapshot on, of a server that has one chunk."""
    server = start_server("--event-log", "1MiB")
    wire = Wire(server.address)
    wire.register()
    wire.put([key(1)], [bytes(SHARD)])
    events = events_pb2_grpc.EventServiceStub(wire.channel)

    def start(*localities: int) -> Any:
        request = events_pb2.StreamKVEventsRequest(
            snapshot=events_pb2.StartSnapshot(),
            localities=localities,  # type: ignore[arg-type]
        )
        return events.StreamKVEvents(request, timeout=DEADLINE)

    yield start
    wire.channel.close()


@pytest.mark.parametrize(("localities", "parts"), [((), 1), ((1,), 1), ((1, 2), 1), ((2,), 0)])
def test_all_parts_are_of_this_host(
    stream: Callable[..., Any], localities: tuple[int, ...], parts: int
) -> None:
    call = stream(*localities)
    piece = next(call).snapshot
    assert piece.last
    assert len(piece.stored) == parts
    for event in piece.stored:
        assert event.stored.medium == events_pb2.MEDIUM_CPU
        assert event.stored.locality in (0, events_pb2.LOCALITY_LOCAL)
    call.cancel()


@pytest.mark.parametrize("locality", [0, 3])
def test_a_locality_that_the_server_does_not_know_is_refused(
    stream: Callable[..., Any], locality: int
) -> None:
    with raises(Code.INVALID_ARGUMENT, "INVALID_ARGUMENT_VALUE"):
        next(stream(locality))


def test_a_reader_takes_no_notice_of_parts_elsewhere() -> None:
    """It does not ask for them. If they came all the same, they would look like those here."""
    index = Index()
    index.apply(
        message_from_proto(
            events_pb2.StreamKVEventsResponse(snapshot=events_pb2.SnapshotPiece(last=True))
        )
    )
    batch = events_pb2.EventBatch()
    for number, locality in enumerate((0, 1, 2, 9), 1):
        stored = batch.events.add(namespace="n", sequence=number).stored
        stored.key, stored.medium = key(min(locality, 1)), events_pb2.MEDIUM_STORAGE
        stored.locality = locality  # type: ignore[assignment]
    removed = batch.events.add(namespace="n", sequence=5).removed
    removed.key, removed.medium = key(1), events_pb2.MEDIUM_STORAGE
    removed.locality = events_pb2.LOCALITY_REMOTE
    message = message_from_proto(
        events_pb2.StreamKVEventsResponse(cursor=events_pb2.Cursor(sequence=5), batch=batch)
    )
    assert [type(event) is Unknown for event in message.events] == [False, False, True, True, True]  # type: ignore[union-attr]
    index.apply(message)
    assert {part.key for part in index} == {key(0), key(1)}

"""Which request goes next, and what the server's clock shows."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdock._clock import ServerClock
from kvdock._outbox import LOOKUPS_UNDER_WAY, Outbox
from kvdock.errors import Overloaded
from kvdock.v1 import cache_pb2
from kvdock.v1.session_pb2 import HeartbeatRequest, SessionRequest

LOOKUP, FREE = cache_pb2.LookupRequest(), cache_pb2.FreeLocksRequest()


def lookup(request_id: int) -> SessionRequest:
    return SessionRequest(id=request_id, lookup=LOOKUP)


def taken(outbox: Outbox) -> list[int]:
    """The ids of all that may be sent now."""
    ids = []
    while (request := outbox.take()) is not None:
        ids.append(request.id)
    return ids


def test_the_newest_lookup_goes_first_and_few_are_under_way() -> None:
    outbox = Outbox()
    for request_id in range(10):
        outbox.put(lookup(request_id), 1)
    newest = list(range(9, 9 - LOOKUPS_UNDER_WAY, -1))
    assert taken(outbox) == newest
    assert not outbox.is_ready
    outbox.put(lookup(10), 1)
    outbox.answered(newest[0])
    assert taken(outbox) == [10]


def test_all_else_keeps_its_order_and_does_not_wait_for_lookups() -> None:
    outbox = Outbox()
    for request_id in range(LOOKUPS_UNDER_WAY + 1):
        outbox.put(lookup(request_id), 1)
    assert len(taken(outbox)) == LOOKUPS_UNDER_WAY
    for request_id in (20, 21, 22):
        outbox.put(SessionRequest(id=request_id, free_locks=FREE), 1)
    assert taken(outbox) == [20, 21, 22]


def test_what_is_dropped_makes_room() -> None:
    outbox = Outbox()
    outbox.put(SessionRequest(id=1, reserve=cache_pb2.ReserveRequest()), 15 << 20)
    with pytest.raises(Overloaded):
        outbox.put(lookup(2), 1 << 20)
    outbox.put(SessionRequest(id=3, free_locks=FREE), 1 << 20)
    outbox.put(SessionRequest(id=4, heartbeat=HeartbeatRequest()), 1)
    assert outbox.drop(1)
    assert not outbox.drop(1)
    assert not outbox.drop(3)
    outbox.put(lookup(2), 1 << 20)
    assert taken(outbox) == [3, 4, 2]
    assert not outbox.drop(2)


@settings(deadline=None)
@given(st.data())
def test_a_lookup_is_sent_once_or_dropped_and_the_room_is_accounted_for(
    data: st.DataObject,
) -> None:
    outbox = Outbox()
    waiting: set[int] = set()
    under_way: set[int] = set()
    for request_id in range(60):
        match data.draw(st.sampled_from(["put", "take", "drop", "answer"])):
            case "put":
                outbox.put(lookup(request_id), 100)
                waiting.add(request_id)
            case "take":
                request = outbox.take()
                may_go = bool(waiting) and len(under_way) < LOOKUPS_UNDER_WAY
                assert (request is not None) == may_go
                if request is not None:
                    assert request.id == max(waiting)
                    waiting.remove(request.id)
                    under_way.add(request.id)
            case "drop" if waiting:
                dropped = data.draw(st.sampled_from(sorted(waiting)))
                assert outbox.drop(dropped)
                waiting.remove(dropped)
            case "answer" if under_way:
                answered = data.draw(st.sampled_from(sorted(under_way)))
                outbox.answered(answered)
                under_way.remove(answered)
        assert len(outbox) == len(waiting)
    outbox.end()
    assert outbox._nbytes == 0


class Sessions:
    """A client's clock and a server's, and the way between them. Seconds; the server's is ahead."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.known = ServerClock()
        self.now = 1_000.0
        self.ahead = self.random.uniform(-900, 900)

    def turn(self, request_seconds: float, answer_seconds: float) -> None:
        sent, self.now = self.now, self.now + request_seconds
        answered_ms = int((self.now + self.ahead) * 1000)
        self.now += answer_seconds
        self.known.heard(answered_ms, sent, self.now)

    @property
    def error_ms(self) -> float:
        """By how much the reckoned clock is ahead of the true one: what comes late counts less."""
        return self.known.at(self.now) - (self.now + self.ahead) * 1000


@pytest.mark.parametrize("seed", range(20))
def test_the_clock_is_as_good_as_the_fastest_request(seed: int) -> None:
    session = Sessions(seed)
    for _ in range(100):
        session.turn(session.random.expovariate(10), session.random.expovariate(10))
    session.turn(0.001, 0.2)
    assert -2 < session.error_ms < 3
    for _ in range(100):  # overload does not change what is known
        session.turn(session.random.uniform(0.1, 9), session.random.uniform(0, 0.1))
    assert -2 < session.error_ms < 3


@pytest.mark.parametrize("jump", [-60.0, 60.0])
def test_a_clock_that_stood_still_is_found_out_by_the_next_answer(jump: float) -> None:
    session = Sessions(1)
    session.turn(0.001, 0.001)
    session.ahead += jump
    session.turn(0.02, 0.03)
    assert -31 < session.error_ms < 21
    session.turn(0.001, 0.001)
    assert -3 < session.error_ms < 3


def test_clocks_of_different_speed_stay_together() -> None:
    for drift in (-1e-3, 1e-3):
        session = Sessions(2)
        for _ in range(500):
            session.ahead += 10 * drift
            session.now += 10
            session.turn(0.001, 0.001)
            assert -3 < session.error_ms < 3


def test_nothing_is_known_before_an_answer_tells_it() -> None:
    clock = ServerClock()
    assert clock.at(5.0) == 0
    clock.heard(0, 1.0, 2.0)  # a server that does not tell
    assert clock.at(5.0) == 0

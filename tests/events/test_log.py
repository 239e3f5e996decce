"""The log alone: numbers, limits, and what a reader at any place gets."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvdock_server.events import event
from kvdock_server.events.event import Event
from kvdock_server.events.log import Limits, Log


def make(nbytes: int = 1) -> Event:
    made = event.cleared("n")
    made.nbytes = nbytes
    return made


@given(
    sizes=st.lists(st.integers(1, 50), max_size=60),
    limits=st.builds(Limits, st.integers(1, 200), st.integers(1, 30)),
)
def test_whatever_the_place_a_reader_gets_all_later_events_or_hears_that_they_are_gone(
    sizes: list[int], limits: Limits
) -> None:
    log = Log(limits)
    for size in sizes:
        log.append(make(size))
        assert log.nbytes <= limits.nbytes
        assert len(log) <= limits.events
    assert log.last == len(sizes)
    kept = log.last - log.oldest
    assert kept == len(log)
    assert log.nbytes == sum(sizes[len(sizes) - kept :])
    if log.oldest:
        # No more is given up than must be.
        assert log.nbytes + sizes[log.oldest - 1] > limits.nbytes or len(log) == limits.events
    for place in range(log.last + 1):
        numbers = []
        cursor = place
        while cursor < log.last:
            events = log.read(cursor, most=7, most_bytes=90)
            if events is None:
                break
            assert len(events) == 1 or sum(one.nbytes for one in events) <= 90
            numbers += [one.number for one in events]
            cursor = numbers[-1]
        if place < log.oldest:
            assert log.read(place, 7, 90) is None
        else:
            assert numbers == list(range(place + 1, log.last + 1))


def test_memory_of_what_is_gone_is_given_back() -> None:
    log = Log(Limits(1 << 20, 100))
    for number in range(1, 20_001):
        log.append(make())
        if number % 97 == 0:
            found = log.read(max(number - 50, 0), 100, 100)
            assert found is not None
            assert [one.number for one in found] == list(range(max(number - 50, 0) + 1, number + 1))
    assert len(log._events) < 5_000


def test_an_event_that_does_not_fit_is_numbered_all_the_same() -> None:
    log = Log(Limits(10, 10))
    log.append(make(5))
    log.append(make(11))
    assert (log.last, log.oldest, len(log), log.nbytes) == (2, 2, 0, 0)
    assert log.read(1, 10, 10) is None
    assert log.read(2, 10, 10) == []

"""The log: the last events in order, numbered from 1, as many as its limits allow.

Readers keep their place themselves, as the number of the last event they have, and ask for what
comes after it. So appending costs the same whoever reads, and a reader that falls behind the limits
finds out when it asks: what it wanted is compacted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvdock_server.events.event import Event


@dataclass(frozen=True)
class Limits:
    """How much a log keeps, whichever is reached first."""

    nbytes: int
    events: int


class Log:
    """The log of one epoch."""

    def __init__(self, limits: Limits, unix_ms: Callable[[], int] | None = None) -> None:
        self.limits = limits
        self.nbytes = 0
        # Events that fell out stand at the head as None until they are worth cutting off.
        self._events: list[Event | None] = []
        self._gone = 0
        self._cut = 0
        self._unix_ms = unix_ms or (lambda: time.time_ns() // 1_000_000)

    def __len__(self) -> int:
        return len(self._events) - self._gone

    @property
    def last(self) -> int:
        """Number of the last event; 0 if nothing happened yet."""
        return self._cut + len(self._events)

    @property
    def oldest(self) -> int:
        """The oldest place from which a reader can go on: all later events are here."""
        return self._cut + self._gone

    def append(self, event: Event) -> None:
        """Number an event and put it at the end; the first ones go if there is no room."""
        event.number = self.last + 1
        event.unix_ms = self._unix_ms()
        self._events.append(event)
        self.nbytes += event.nbytes
        while self.nbytes > self.limits.nbytes or len(self) > self.limits.events:
            first = self._events[self._gone]
            assert first is not None
            self.nbytes -= first.nbytes
            self._events[self._gone] = None
            self._gone += 1
        if self._gone > 1_024 and self._gone > len(self):
            del self._events[: self._gone]
            self._cut += self._gone
            self._gone = 0

    def read(self, after: int, most: int, most_bytes: int) -> Sequence[Event] | None:
        """The events after that number, at least one if there are any; None if compacted."""
        if after < self.oldest:
            return None
        begin = after - self._cut
        events = self._events[begin : begin + most]
        nbytes = 0
        for count, event in enumerate(events):
            assert event is not None
            nbytes += event.nbytes
            if nbytes > most_bytes and count:
                return events[:count]  # type: ignore[return-value]  # none of them is None
        return events  # type: ignore[return-value]

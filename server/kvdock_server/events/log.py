"""The log: the last events in order, numbered from 1, as many as its limits allow.

A reader keeps the number of the last event that it has, and asks for the events after this number.
So appending costs the same however many read. A reader that falls behind the limits is told so when
it asks: the events that it wants are compacted.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvdock_server.events.event import Event

_WORTH_CUTTING: Final = 1_024


@dataclass(frozen=True)
class Limits:
    """How much a log keeps, whichever is reached first."""

    nbytes: int
    events: int


class Log:
    """The log of one epoch.

    ``last`` is the number of the last event, 0 if there was none yet. All events after ``oldest``
    are here, so a reader can go on from there or later.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.nbytes = 0
        self.last = 0
        self.oldest = 0
        # Event number n is at n - 1 - _cut. Events up to ``oldest`` are None until they are many
        # enough to be cut off.
        self._events: list[Event | None] = []
        self._cut = 0

    def __len__(self) -> int:
        return self.last - self.oldest

    def append(self, event: Event) -> None:
        """Number an event and put it at the end; the first events go if there is no room."""
        self.last = event.number = self.last + 1
        event.unix_ms = time.time_ns() // 1_000_000
        self._events.append(event)
        self.nbytes += event.nbytes
        limits = self.limits
        while self.nbytes > limits.nbytes or self.last - self.oldest > limits.events:
            self._drop_first()

    def read(self, after: int, most: int, most_bytes: int) -> Sequence[Event] | None:
        """The events after number ``after``; None if some of them are compacted.

        At most ``most`` events and ``most_bytes``, but at least one event if there are any.
        """
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

    def _drop_first(self) -> None:
        index = self.oldest - self._cut
        first = self._events[index]
        assert first is not None
        self.nbytes -= first.nbytes
        self._events[index] = None
        self.oldest += 1
        gone = index + 1
        if gone > _WORTH_CUTTING and 2 * gone > len(self._events):
            del self._events[:gone]
            self._cut = self.oldest

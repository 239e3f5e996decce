"""The log: the last events in order, numbered from 1, as many as its limits allow.

Readers keep their place themselves, as the number of the last event they have, and ask for what
comes after it. So appending costs the same whoever reads, and a reader that falls behind the limits
finds out when it asks: what it wanted is compacted.
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

    ``last`` is the number of the last event, 0 if nothing happened yet. ``oldest`` is the oldest
    place from which a reader can go on: all later events are here.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.nbytes = 0
        self.last = 0
        self.oldest = 0
        # Event number n is at n - 1 - _cut. Those up to oldest are None until it is worth cutting
        # them off.
        self._events: list[Event | None] = []
        self._cut = 0

    def __len__(self) -> int:
        return self.last - self.oldest

    def append(self, event: Event) -> None:
        """Number an event and put it at the end; the first ones go if there is no room."""
        self.last = event.number = self.last + 1
        event.unix_ms = time.time_ns() // 1_000_000
        self._events.append(event)
        self.nbytes += event.nbytes
        limits = self.limits
        while self.nbytes > limits.nbytes or self.last - self.oldest > limits.events:
            self._drop_first()

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

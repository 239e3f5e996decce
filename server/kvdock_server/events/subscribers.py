"""Readers of the log, each at its own pace.

A subscriber is a place in the log and nothing else. Publishing wakes the readers that wait, and
goes on. A reader that stops reading costs its transport's window and no more. Once the log has
moved past it, nothing is kept for it.

Each message to each reader takes time of the loop that also serves stores. So events are shown to
readers at once only after a quiet time, and otherwise every ``_PACE_SECONDS`` times the number of
readers. All events of that time come in one message, the same for all readers that keep up. So
readers take only a small, constant share of the loop, however many they are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from kvdock_server.events.event import Event
from kvdock_server.events.log import Log

_PACE_SECONDS: Final = 0.005
_LONGEST_PACE_SECONDS: Final = 0.05


@dataclass(eq=False)
class Subscriber:
    """One reader. It has every event up to ``cursor``, and has still to get ``snapshot``."""

    cursor: int
    snapshot: list[Event] | None


class Subscribers:
    """All readers of one log.

    ``shown`` is the number of the last event that they may read. The log has perhaps more already.
    """

    def __init__(self, log: Log) -> None:
        self.log = log
        self.shown = log.last
        self.closed = False
        self.compacted = 0
        self._members: set[Subscriber] = set()
        self._waiting: set[asyncio.Future[None]] = set()
        self._not_before = 0.0
        self._timer: asyncio.Handle | None = None

    def __len__(self) -> int:
        return len(self._members)

    @property
    def lag(self) -> int:
        """How many events the slowest reader is behind."""
        return max((self.log.last - member.cursor for member in self._members), default=0)

    def join(self, cursor: int, snapshot: list[Event] | None = None) -> Subscriber:
        """A new reader. All events so far are shown."""
        self.shown = self.log.last
        member = Subscriber(cursor, snapshot)
        self._members.add(member)
        return member

    def leave(self, member: Subscriber) -> None:
        self._members.discard(member)

    def wake(self) -> None:
        """An event was appended."""
        if self._members and self._timer is None:
            loop = asyncio.get_running_loop()
            if loop.time() < self._not_before:
                self._timer = loop.call_at(self._not_before, self._show)
            else:
                self._timer = loop.call_soon(self._show)

    async def news(self, cursor: int, seconds: float) -> bool:
        """Wait until an event after ``cursor`` is shown, or ``seconds``, or until the server stops.

        False if no event is shown.
        """
        if self.shown <= cursor and not self.closed:
            turn = asyncio.get_running_loop().create_future()
            self._waiting.add(turn)
            try:
                await asyncio.wait([turn], timeout=seconds)
            finally:
                self._waiting.discard(turn)
        return self.shown > cursor

    def drop_hopeless(self) -> None:
        """Drop the snapshots of readers that will be cut off, since their place is compacted."""
        for member in self._members:
            if member.cursor < self.log.oldest:
                member.snapshot = None

    def close(self) -> None:
        """Show every reader the rest of the log. Readers end then."""
        self.closed = True
        self._show()

    def _show(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        pace = min(_PACE_SECONDS * len(self._members), _LONGEST_PACE_SECONDS)
        self._not_before = asyncio.get_running_loop().time() + pace
        self.shown = self.log.last
        turns, self._waiting = self._waiting, set()
        self._wake_next(iter(turns))

    def _wake_next(self, turns: Iterator[asyncio.Future[None]]) -> None:
        """Wake readers one by one, with a round of the loop between two for other calls."""
        turn = next(turns, None)
        if turn is None:
            return
        if not turn.done():
            turn.set_result(None)
        asyncio.get_running_loop().call_soon(self._wake_next, turns)

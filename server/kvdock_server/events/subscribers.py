"""Readers of the log, each at its own pace.

A subscriber is a place in the log and nothing else: publishing wakes those who wait and goes on. A
reader that stops reading costs its transport's window and no more; once the log has moved past it,
so has everything that was kept for it.

Each message to each reader costs the one loop that also serves stores. So what happens is shown to
them at once after a quiet time, and otherwise every ``_PACE_SECONDS`` for each reader there is. All
that happened meanwhile comes in one message, the same for all who keep up, and however many they
are they never take more than a small, constant share of the loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Final

from kvdock_server.events.event import Event
from kvdock_server.events.log import Log

_PACE_SECONDS: Final = 0.005
_LONGEST_PACE_SECONDS: Final = 0.05


class Subscriber:
    """One reader. It has every event up to ``cursor``, and those in ``snapshot`` still to come."""

    def __init__(self, cursor: int, snapshot: list[Event] | None) -> None:
        self.cursor = cursor
        self.snapshot = snapshot


class Subscribers:
    """All readers of one log. What they may read ends at ``shown``, an event's number."""

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
        """A new reader. All that there is is shown."""
        self.shown = self.log.last
        member = Subscriber(cursor, snapshot)
        self._members.add(member)
        return member

    def leave(self, member: Subscriber) -> None:
        """The reader is gone."""
        self._members.discard(member)

    def wake(self) -> None:
        """Something happened."""
        if self._members and self._timer is None:
            loop = asyncio.get_running_loop()
            if loop.time() < self._not_before:
                self._timer = loop.call_at(self._not_before, self._show)
            else:
                self._timer = loop.call_soon(self._show)

    async def news(self, cursor: int, seconds: float) -> bool:
        """Wait until something is shown after that place, at most so long; False if nothing is.

        Also ends, with False, when the server stops.
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
        """Let go of snapshots whose readers will be told that they are compacted."""
        for member in self._members:
            if member.cursor < self.log.oldest:
                member.snapshot = None

    def close(self) -> None:
        """Let every reader have the rest, and end."""
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
        """Wake them one by one, with a round of the loop between them for other calls."""
        turn = next(turns, None)
        if turn is None:
            return
        if not turn.done():
            turn.set_result(None)
        asyncio.get_running_loop().call_soon(self._wake_next, turns)

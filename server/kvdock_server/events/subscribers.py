"""Readers of the log, each at its own pace.

A subscriber is a place in the log and nothing else: publishing wakes those who wait and goes on. A
reader that stops reading costs its transport's window and no more; once the log has moved past it,
so has everything that was kept for it.

Each message to each reader costs the one loop that also serves stores. So readers that keep up are
woken at once after a quiet time, and otherwise together, every ``_PACE_SECONDS`` for each reader
there is. What happens meanwhile comes in one message, the same for all of them, and however many
they are they never take more than a small, constant share of the loop.
"""

from __future__ import annotations

import asyncio
from typing import Final

from kvdock_server.events.event import Event
from kvdock_server.events.log import Log

_PACE_SECONDS: Final = 0.001
_LONGEST_PACE_SECONDS: Final = 0.05


class Subscriber:
    """One reader. It has every event up to ``cursor``, and those in ``snapshot`` still to come."""

    def __init__(self, cursor: int, snapshot: list[Event] | None) -> None:
        self.cursor = cursor
        self.snapshot = snapshot


class Subscribers:
    """All readers of one log."""

    def __init__(self, log: Log) -> None:
        self.log = log
        self.closed = False
        self.compacted = 0
        self._members: set[Subscriber] = set()
        self._waiting: set[asyncio.Future[None]] = set()
        self._not_before = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._members)

    @property
    def lag(self) -> int:
        """How many events the slowest reader is behind."""
        return max((self.log.last - member.cursor for member in self._members), default=0)

    def join(self, cursor: int, snapshot: list[Event] | None = None) -> Subscriber:
        """A new reader."""
        member = Subscriber(cursor, snapshot)
        self._members.add(member)
        return member

    def leave(self, member: Subscriber) -> None:
        """The reader is gone."""
        self._members.discard(member)

    def wake(self) -> None:
        """Something happened."""
        if self._waiting and self._timer is None:
            loop = asyncio.get_running_loop()
            if loop.time() < self._not_before:
                self._timer = loop.call_at(self._not_before, self._wake_all)
            else:
                self._wake_all()

    async def news(self, cursor: int, seconds: float) -> bool:
        """Wait until something happens after that place, at most so long; False if nothing does.

        Also ends, with False, when the server stops.
        """
        if self.log.last > cursor:
            return True
        if not self.closed:
            woken = asyncio.get_running_loop().create_future()
            self._waiting.add(woken)
            try:
                await asyncio.wait([woken], timeout=seconds)
            finally:
                self._waiting.discard(woken)
        return self.log.last > cursor

    def drop_hopeless(self) -> None:
        """Let go of snapshots whose readers will be told that they are compacted."""
        for member in self._members:
            if member.cursor < self.log.oldest:
                member.snapshot = None

    def close(self) -> None:
        """Let every reader have the rest, and end."""
        self.closed = True
        self._wake_all()

    def _wake_all(self) -> None:
        pace = min(_PACE_SECONDS * len(self._members), _LONGEST_PACE_SECONDS)
        self._not_before = asyncio.get_running_loop().time() + pace
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for future in self._waiting:
            if not future.done():
                future.set_result(None)
        self._waiting.clear()

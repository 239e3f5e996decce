"""Readers of the log, each at its own pace.

A subscriber is a place in the log and nothing else: publishing wakes those who wait and goes on. A
reader that stops reading costs its transport's window and no more; once the log has moved past it,
so has everything that was kept for it.

Each message to each reader costs the one loop that also serves stores. So a reader that keeps up
is served at once after a quiet time and otherwise at most every ``_PACE_SECONDS`` for each reader
there is: what happens meanwhile comes in one message, and all readers together never take more than
a small, constant share of the loop.
"""

from __future__ import annotations

import asyncio
import time
from typing import Final

from kvdock_server.events.event import Event
from kvdock_server.events.log import Log

_PACE_SECONDS: Final = 0.002
_LONGEST_PACE_SECONDS: Final = 0.1


class Subscriber:
    """One reader. It has every event up to ``cursor``, and those in ``snapshot`` still to come."""

    def __init__(self, group: Subscribers, cursor: int, snapshot: list[Event] | None) -> None:
        self.cursor = cursor
        self.snapshot = snapshot
        self._group = group
        self._served = 0.0

    async def more(self, seconds: float) -> bool:
        """Wait for events after the cursor, at most so long; False if none came."""
        pace = min(_PACE_SECONDS * len(self._group), _LONGEST_PACE_SECONDS)
        early = self._served + pace - time.monotonic()
        if early > 0:
            await asyncio.sleep(early)
        if self._group.log.last == self.cursor and not self._group.closed:
            await self._group.news(seconds)
        if self._group.log.last == self.cursor:
            return False
        self._served = time.monotonic()
        return True

    def leave(self) -> None:
        """The reader is gone."""
        self._group.members.discard(self)


class Subscribers:
    """All readers of one log."""

    def __init__(self, log: Log) -> None:
        self.log = log
        self.members: set[Subscriber] = set()
        self.closed = False
        self.compacted = 0
        self._waiting: set[asyncio.Future[None]] = set()

    def __len__(self) -> int:
        return len(self.members)

    @property
    def lag(self) -> int:
        """How many events the slowest reader is behind."""
        return max((self.log.last - member.cursor for member in self.members), default=0)

    def join(self, cursor: int, snapshot: list[Event] | None = None) -> Subscriber:
        """A new reader, who leaves by ``Subscriber.leave``."""
        member = Subscriber(self, cursor, snapshot)
        self.members.add(member)
        return member

    def wake(self) -> None:
        """Something happened."""
        if self._waiting:
            for future in self._waiting:
                if not future.done():
                    future.set_result(None)
            self._waiting.clear()

    async def news(self, seconds: float) -> None:
        """Wait until something happens, at most so long."""
        woken = asyncio.get_running_loop().create_future()
        self._waiting.add(woken)
        try:
            await asyncio.wait([woken], timeout=seconds)
        finally:
            self._waiting.discard(woken)

    def drop_hopeless(self) -> None:
        """Let go of snapshots whose readers will be told that they are compacted."""
        for member in self.members:
            if member.cursor < self.log.oldest:
                member.snapshot = None

    def close(self) -> None:
        """Let every reader have the rest, and end."""
        self.closed = True
        self.wake()

"""Where two calls about one share of a load meet: the one that copies, and the one that asks.

A Retrieve with also_fill, the leader's, copies for other readers, too; each of those sends one with
filled_by_another to hear what came of its share. Either may come first. A leader's outcome that
nobody asks for is kept for a while.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from kvdock.v1 import types_pb2 as types
from kvdock_server.sessions import Session
from kvdock_server.transfer import Follower

Status: TypeAlias = types.ChunkStatus.ValueType

KEPT_SECONDS = 60.0
MOST_KEPT = 256
"""Outcomes of one session that were not asked for."""


class FillKey(NamedTuple):
    """What both calls name alike."""

    lease_id: int
    group_idx: int | None
    first_chunk: int
    end_chunk: int


class Fill:
    """One reader's share of one load."""

    def __init__(self) -> None:
        self.outcome: asyncio.Future[Sequence[Status]] = asyncio.get_running_loop().create_future()
        """The status of each chunk, once the leader's call has ended."""
        self.follower: Follower | None = None
        """Set by the leader's call."""
        self.is_led = False
        self.asking = 0

    async def ask(self, seconds: float) -> Sequence[Status] | None:
        """The outcome. None if it does not come in time.

        Nothing touches the reader's memory for this load any more on return, nor when cancelled.
        """
        self.asking += 1
        try:
            async with asyncio.timeout(seconds):
                return await asyncio.shield(self.outcome)
        except TimeoutError:
            return self.outcome.result() if self.outcome.done() else None
        finally:
            self.asking -= 1
            if not self.outcome.done() and self.follower is not None:
                await self.follower.give_up()


class Fills:
    """The shares of all sessions. Each belongs to the session of its reader."""

    def __init__(self) -> None:
        self._fills: dict[Session, OrderedDict[FillKey, Fill]] = {}

    def lead(self, session: Session, key: FillKey) -> Fill:
        """The share, for the call that copies."""
        fill = self._of(session).get(key)
        if fill is None or fill.is_led:
            fill = self._add(session, key)
        fill.is_led = True
        return fill

    def settle(
        self, session: Session, key: FillKey, fill: Fill, statuses: Sequence[Status]
    ) -> None:
        """The call that copies has ended, for the reader with these statuses."""
        fill.outcome.set_result(statuses)
        asyncio.get_running_loop().call_later(KEPT_SECONDS, self.forget, session, key, fill)

    def ask(self, session: Session, key: FillKey) -> Fill:
        """The share, for the call that asks; ``forget`` must follow."""
        return self._of(session).get(key) or self._add(session, key)

    def is_led(self, session: Session, key: FillKey) -> bool:
        """True if there is or was a call that copies, and its outcome is kept."""
        fills = self._fills.get(session)
        return fills is not None and key in fills and fills[key].is_led

    def forget(self, session: Session, key: FillKey, fill: Fill) -> None:
        """The outcome has been told, or is not wanted any more."""
        fills = self._fills.get(session)
        if fills is not None and fills.get(key) is fill:
            del fills[key]
            if not fills:
                del self._fills[session]

    def end(self, session: Session) -> None:
        """Forget what is kept for a session."""
        self._fills.pop(session, None)

    def _of(self, session: Session) -> OrderedDict[FillKey, Fill]:
        return self._fills.setdefault(session, OrderedDict())

    def _add(self, session: Session, key: FillKey) -> Fill:
        fills = self._of(session)
        kept = [each for each, fill in fills.items() if fill.outcome.done() and not fill.asking]
        for oldest in kept[: max(0, len(kept) - MOST_KEPT + 1)]:
            del fills[oldest]
        fills[key] = fill = Fill()
        fills.move_to_end(key)
        return fill

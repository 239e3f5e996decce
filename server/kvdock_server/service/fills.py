"""Where two calls about one share of a load meet: the one that copies, and the one that asks.

A Retrieve with also_fill, the leader's, copies for other readers, too; each of those sends one with
filled_by to hear what came of its share. Both name the range alike. Either may come first. An
outcome that nobody asks for is kept for a while.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence

from kvdock_server.core import LeaseRange, Session
from kvdock_server.service.chunk_status import ChunkStatus
from kvdock_server.transfer import LoadFollower

KEPT_SECONDS = 60.0
MOST_KEPT = 256
"""Outcomes of one reader that were not asked for."""


class Fill:
    """One reader's share of one load."""

    def __init__(self) -> None:
        self.outcome: asyncio.Future[Sequence[ChunkStatus]] = (
            asyncio.get_running_loop().create_future()
        )
        """The status of each chunk, once the leader's call has ended."""
        self.is_led = False
        self.reader: Session | None = None
        """Whom the leader's call fills; None if the reader is left to itself."""
        self.follower: LoadFollower | None = None
        """Set by the leader's call for as long as it copies."""
        self.asking = 0

    async def ask(self, seconds: float) -> Sequence[ChunkStatus] | None:
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
    """The shares of all readers of all engines."""

    def __init__(self) -> None:
        self._fills: dict[tuple[str, int], OrderedDict[LeaseRange, Fill]] = {}

    def lead(
        self, engine_id: str, reader: int, chunks: LeaseRange, session: Session | None
    ) -> Fill:
        """The share, for the call that copies; ``session`` is the reader's, if it has memory."""
        fills = self._of(engine_id, reader)
        fill = fills.get(chunks)
        if fill is None or fill.is_led:
            fill = _add(fills, chunks)
        fill.is_led = True
        fill.reader = session
        return fill

    def settle(
        self,
        engine_id: str,
        reader: int,
        chunks: LeaseRange,
        fill: Fill,
        statuses: Sequence[ChunkStatus],
    ) -> None:
        """The call that copies has ended, for the reader with these statuses."""
        fill.outcome.set_result(statuses)
        loop = asyncio.get_running_loop()
        loop.call_later(KEPT_SECONDS, self.forget, engine_id, reader, chunks, fill)

    def get(self, session: Session, chunks: LeaseRange) -> Fill | None:
        """A reader's share, if one of the calls has come and is not forgotten."""
        fills = self._fills.get((session.engine_id, session.worker_id))
        return fills.get(chunks) if fills is not None else None

    def ask(self, session: Session, chunks: LeaseRange) -> Fill:
        """The share, for the call that asks; ``forget`` must follow."""
        fills = self._of(session.engine_id, session.worker_id)
        return fills.get(chunks) or _add(fills, chunks)

    def forget(self, engine_id: str, reader: int, chunks: LeaseRange, fill: Fill) -> None:
        """The outcome has been told, or is not wanted any more."""
        fills = self._fills.get((engine_id, reader))
        if fills is not None and fills.get(chunks) is fill:
            del fills[chunks]
            if not fills:
                del self._fills[engine_id, reader]

    def _of(self, engine_id: str, reader: int) -> OrderedDict[LeaseRange, Fill]:
        return self._fills.setdefault((engine_id, reader), OrderedDict())


def _add(fills: OrderedDict[LeaseRange, Fill], chunks: LeaseRange) -> Fill:
    kept = [each for each, fill in fills.items() if fill.outcome.done() and not fill.asking]
    for oldest in kept[: max(0, len(kept) - MOST_KEPT + 1)]:
        del fills[oldest]
    fills[chunks] = fill = Fill()
    fills.move_to_end(chunks)
    return fill

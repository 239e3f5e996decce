"""Where two calls about one reader's share of a load meet: one that copies, and one that asks.

The leader's Retrieve, with also_fill, copies for other readers, too. Each of those readers sends an
AwaitFill, to hear what came of its share. Both calls name the same range, and either
may come first. An outcome that nobody asks for is kept for a while.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from kvdock_server.core import LeaseRange, Session
from kvdock_server.service.chunk_status import ChunkStatus
from kvdock_server.transfer import LoadFollower

KEPT_SECONDS = 60.0
MOST_KEPT = 256
"""Of one reader's outcomes that nobody has asked for."""


class Fill:
    """One reader's share of one load: the chunks of a range."""

    def __init__(self, engine_id: str, reader: int, chunks: LeaseRange) -> None:
        self.owner = engine_id, reader
        self.chunks = chunks
        self.outcome: asyncio.Future[Sequence[ChunkStatus]] = (
            asyncio.get_running_loop().create_future()
        )
        """The status of each chunk, once the leader's call has ended."""
        self.is_led = False
        self.reader: Session | None = None
        """The session that the leader's call fills; None if the reader is left to itself."""
        self.follower: LoadFollower | None = None
        """Set by the leader's call for as long as it copies."""
        self.asking = 0

    async def ask(self, seconds: float) -> Sequence[ChunkStatus] | None:
        """Wait for the outcome; None if it does not come within ``seconds``.

        When this has returned or was cancelled, nothing of this load touches the reader's memory
        any more.
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
        self._fills: dict[tuple[str, int], dict[LeaseRange, Fill]] = {}

    def lead(
        self, engine_id: str, reader: int, chunks: LeaseRange, session: Session | None
    ) -> Fill:
        """The share, for the call that copies; ``session`` is the reader's, if it has memory."""
        fill = self._get(engine_id, reader, chunks)
        if fill is None or fill.is_led:
            fill = self._add(engine_id, reader, chunks)
        fill.is_led = True
        fill.reader = session
        return fill

    def settle(self, fill: Fill, statuses: Sequence[ChunkStatus]) -> None:
        """The call that copies has ended, with ``statuses`` for this reader's chunks."""
        fill.outcome.set_result(statuses)
        asyncio.get_running_loop().call_later(KEPT_SECONDS, self.forget, fill)

    def get(self, session: Session, chunks: LeaseRange) -> Fill | None:
        """A reader's share, if one of the calls has come and is not forgotten."""
        return self._get(session.engine_id, session.worker_id, chunks)

    def ask(self, session: Session, chunks: LeaseRange) -> Fill:
        """The share, for the call that asks; ``forget`` must follow."""
        reader = session.engine_id, session.worker_id
        return self._get(*reader, chunks) or self._add(*reader, chunks)

    def forget(self, fill: Fill) -> None:
        """The outcome was told, or is not wanted any more."""
        if self._get(*fill.owner, fill.chunks) is fill:
            fills = self._fills[fill.owner]
            del fills[fill.chunks]
            if not fills:
                del self._fills[fill.owner]

    def _get(self, engine_id: str, reader: int, chunks: LeaseRange) -> Fill | None:
        return self._fills.get((engine_id, reader), {}).get(chunks)

    def _add(self, engine_id: str, reader: int, chunks: LeaseRange) -> Fill:
        fills = self._fills.setdefault((engine_id, reader), {})
        kept = [each for each, fill in fills.items() if fill.outcome.done() and not fill.asking]
        for oldest in kept[: max(0, len(kept) - MOST_KEPT + 1)]:
            del fills[oldest]
        fills.pop(chunks, None)  # so that the new one comes last
        fills[chunks] = fill = Fill(engine_id, reader, chunks)
        return fill

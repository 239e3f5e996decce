"""Put and Get, whose bytes travel in messages: for clients that share no memory with the server.

Neither has a session.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager

from kvdock_server.core import Core, Keep, LocatedShard, Priority, ReserveStatus, Slot, Writing
from kvdock_server.errors import Reason, RequestError, invalid
from kvdock_server.service.chunk_status import OF_RESERVE, ChunkStatus
from kvdock_server.service.turns import in_turns
from kvdock_server.tiers.host.pool import Pool


class Put:
    """Shards of consecutive chunks whose bytes are coming.

    ``statuses`` has RESERVED for the chunks whose bytes are wanted. ``shard_bytes`` is the size of
    each shard.
    """

    def __init__(
        self, outcomes: Sequence[ReserveStatus | Slot], writing: Writing, pool: Pool, nbytes: int
    ) -> None:
        self.statuses = [
            ChunkStatus.RESERVED if isinstance(outcome, Slot) else OF_RESERVE[outcome]
            for outcome in outcomes
        ]
        self.shard_bytes = nbytes
        self._writing = writing
        self._pool = pool
        self._received = [0] * len(outcomes)

    @property
    def unfinished(self) -> list[int]:
        """The wanted chunks that still miss bytes."""
        return list(self._writing.open)

    def write(self, chunk: int, data: bytes) -> ChunkStatus | None:
        """Take the next bytes of a chunk, or drop them if they are not wanted.

        Returns what became of the chunk if ``data`` completes it, else None. RequestError if the
        Put has no such chunk, or if the chunk gets too many bytes.
        """
        if not 0 <= chunk < len(self._received):
            raise invalid(
                f"chunk {chunk} of a Put of {len(self._received)} chunks",
                "chunk",
                len(self._received) - 1,
            )
        begin = self._received[chunk]
        self._received[chunk] = end = begin + len(data)
        if end > self.shard_bytes:
            raise RequestError(
                Reason.WRONG_LENGTH,
                f"{end} bytes or more for chunk {chunk}: a shard of this group has "
                f"{self.shard_bytes}",
                limit=self.shard_bytes,
            )
        slot = self._writing.open.get(chunk)
        if slot is None:
            return None
        self._pool.view(slot.offset + begin, len(data))[:] = data
        if end < self.shard_bytes:
            return None
        return ChunkStatus.STORED if self._writing.seal(chunk) else ChunkStatus.FAILED


@asynccontextmanager
async def put(
    core: Core,
    pool: Pool,
    namespace: str,
    group_idx: int | None,
    shard: int,
    parent_key: bytes,
    keys: Sequence[bytes],
    event_data: Sequence[bytes],
    keep: Keep | None = None,
    priority: Priority = Priority.NORMAL,
) -> AsyncIterator[Put]:
    """Take one shard of chunks of a prompt; the arguments are as in ``Core.reserve_in_steps``."""
    outcomes = await in_turns(
        core.reserve_in_steps(
            None, namespace, group_idx, shard, parent_key, keys, event_data, keep, priority
        )
    )
    with core.writing(outcomes) as writing:
        yield Put(outcomes, writing, pool, core.shard_bytes(namespace, group_idx, shard))


def pieces(core: Core, pool: Pool, shard: LocatedShard, nbytes: int) -> Iterator[memoryview]:
    """A shard's bytes, at most ``nbytes`` at a time.

    When all pieces were taken, the shard counts as retrieved.
    """
    for begin in range(0, shard.nbytes, nbytes):
        yield pool.view(shard.offset + begin, min(nbytes, shard.nbytes - begin))
    core.count_retrieved([shard])

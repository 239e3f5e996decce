"""Retrieve: locked chunks, delivered in the way of the session's mode."""

from __future__ import annotations

from typing import NamedTuple

from kvdock_server.core import Core, LocatedShard, Mode, Session, check_session
from kvdock_server.service.chunk_status import ChunkStatus
from kvdock_server.service.loads import DeviceLoads, RetrieveCall
from kvdock_server.service.turns import in_turns
from kvdock_server.steps import Steps


class RetrievedChunk(NamedTuple):
    """What became of a chunk. ``shard`` tells a client that copies by itself where it lies."""

    status: ChunkStatus
    shard: LocatedShard | None = None


async def retrieve(
    core: Core, loads: DeviceLoads, session: Session | None, call: RetrieveCall
) -> list[RetrievedChunk]:
    """Deliver chunks; one answer for each."""
    if session is not None and session.mode is Mode.SERVER:
        return [RetrievedChunk(status) for status in await loads.load(session, call)]
    return await in_turns(locate(core, session, call))


def locate(core: Core, session: Session | None, call: RetrieveCall) -> Steps[list[RetrievedChunk]]:
    """Where chunks lie, for a client that copies by itself."""
    if call.copy.names_blocks or call.also_fill:
        # The client expects a copy, perhaps since its session was of server mode a moment ago.
        check_session(session, Mode.SERVER)  # raises
    locked = yield from core.locate_in_steps(
        session, call.chunks, shard=call.shard, reader=call.reader
    )
    core.count_retrieved(list(locked.located.values()))
    chunks = []
    for shard in locked.shards:
        status = ChunkStatus.NOT_LOCKED if shard is None else ChunkStatus.RETRIEVED
        chunks.append(RetrievedChunk(status, shard))
        yield
    return chunks

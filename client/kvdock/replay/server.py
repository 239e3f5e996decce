"""Plays a trace to a real server, so that its own policy is measured.

For each prompt the server is asked what it has, and is given what it lacks: Lookup, FreeLocks,
Reserve, Commit. No bytes are copied into the reserved memory.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Final

from kvdock.client import Client
from kvdock.errors import InvalidArgument
from kvdock.replay.simulation import Advance, Outcome, play
from kvdock.replay.trace import Trace
from kvdock.session import Session
from kvdock.types import Group, Namespace

SERVER: Final = "server"

_SLOT_BYTES: Final = 4096
"""The server's slots are multiples of this."""

_POLL_SECONDS: Final = 0.1


def sizes_of_server(client: Client, sizes: Sequence[int]) -> dict[int, int]:
    """The sizes that a server's pool can have, near the given ones, each with its bytes a chunk.

    The pool gets smaller by larger chunks. Raises InvalidArgument if it is too small for a size, or
    if the server holds anything: a replay would evict it.
    """
    status = client.status()
    if status.index.chunks:
        raise InvalidArgument(
            f"the server at {client.address} holds {status.index.chunks:,} chunks, which a replay "
            "would evict: start one for the replay alone"
        )
    total = status.pool.total_bytes
    if max(sizes) > total // _SLOT_BYTES:
        raise InvalidArgument(
            f"the pool of {total:,} bytes holds at most {total // _SLOT_BYTES:,} chunks: start the "
            f"server with --memory {-(-max(sizes) * _SLOT_BYTES >> 20)}MiB for {max(sizes):,}"
        )
    chunks = (total // size // _SLOT_BYTES * _SLOT_BYTES for size in sizes)
    return {total // chunk_bytes: chunk_bytes for chunk_bytes in chunks}


def replay_on_server(
    client: Client, trace: Trace, sizes: Mapping[int, int], advance: Advance
) -> list[Outcome]:
    """The server's outcome at each size of ``sizes_of_server``."""
    while (pool := client.status().pool).ready_bytes < pool.total_bytes:
        time.sleep(_POLL_SECONDS)
    outcomes = []
    for size, chunk_bytes in sizes.items():
        # A name of its own, since a server may remember what it evicted.
        name = f"replay-{secrets.token_hex(8)}"
        client.register_namespace(Namespace(name, 1, 1, (Group((chunk_bytes,)),)))
        try:
            with client.session("replay", role="worker", client="kvdock replay") as session:
                hits = play(_ServerPool(session, name), trace.prompts, advance)
        finally:
            client.clear(name)
        outcomes.append(Outcome(SERVER, size, hits))
    return outcomes


class _ServerPool:
    """A server's pool, used as a policy is."""

    def __init__(self, session: Session, namespace: str) -> None:
        self._session = session
        self._namespace = namespace

    def use(self, prompt: Sequence[int]) -> int:
        # A key may be any 32 bytes but zeros.
        keys = [(block + 1).to_bytes(32, "little") for block in prompt]
        hit = self._session.lookup(self._namespace, keys)
        if hit.lease is not None:
            self._session.free_locks(hit.lease)
        rest = keys[hit.chunks :]
        if rest:
            parent = keys[hit.chunks - 1] if hit.chunks else b""
            reservation = self._session.reserve(self._namespace, rest, parent=parent)
            if reservation.id:
                self._session.commit(reservation)
        return hit.chunks

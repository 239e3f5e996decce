"""Shards of a lease that are being read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from kvdock_server.core import Core
from kvdock_server.core.sessions import Session


class LeaseRange(NamedTuple):
    """The chunks [first_chunk, end_chunk) of one group of a lease."""

    lease_id: int
    group_idx: int | None
    first_chunk: int
    end_chunk: int


class LockedShards:
    """What one reader has locked of a range, of one shard.

    ``shards`` has the place of each chunk, None where the reader has no lock. ``range`` ends where
    they do. ``namespace`` is the name of the lease's, ``readers`` how many readers it was given to.
    """

    def __init__(
        self, core: Core, session: Session | None, asked: LeaseRange, *, shard: int, reader: int
    ) -> None:
        """RequestError if the lease ended, is another engine's, or has no such range."""
        self.shards = core.locate(session, *asked, shard=shard, reader=reader)
        self.range = asked._replace(end_chunk=asked.first_chunk + len(self.shards))
        self.located = {i: shard for i, shard in enumerate(self.shards) if shard is not None}
        """Those that are locked, by their number in the range."""
        self._core = core
        self._session = session
        lease = core.leases.get(asked.lease_id, session.engine_id if session else None)
        assert lease is not None  # else there was nothing to locate
        self._lease = lease
        self._position = lease.space.namespace.position(asked.group_idx)
        self.namespace = lease.space.namespace.name
        self.readers = lease.readers

    def are_held_by(self, reader: int) -> bool:
        """True if another reader has locked all of them as well."""
        if reader >= self.readers:
            return False
        locked = self._lease.spans[self._position]
        first = self.range.first_chunk - locked.span.first
        return all(locked.held[reader] >> (first + index) & 1 for index in self.located)

    @contextmanager
    def reading(self, readers: Sequence[int]) -> Iterator[None]:
        """Keep the shards where they are. In the end the locks of ``readers`` are free."""
        parts = [shard.part for shard in self.located.values()]
        self._core.index.pin(parts)
        try:
            yield
        finally:
            for part in parts:
                self._core.index.unpin(part)
            self._core.end_retrieve(self._session, *self.range, readers)

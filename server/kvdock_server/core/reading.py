"""Shards that are being read: where they lie, and that they stay there meanwhile."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple

from kvdock_server.core.leases import Lease, LeaseTable, set_bits
from kvdock_server.core.ranges import LeaseRange
from kvdock_server.errors import invalid
from kvdock_server.index.chunk import NO_SLOT, Part
from kvdock_server.index.index import Index
from kvdock_server.steps import Steps, at_once

MAX_KEYS: Final = 16_384

_SHARDS_A_STEP: Final = 64


class LocatedShard(NamedTuple):
    """Where a shard lies in the pool. ``offset`` and ``nbytes`` are in bytes."""

    part: Part
    offset: int
    nbytes: int


@contextmanager
def pinned(index: Index, shards: Iterable[LocatedShard]) -> Iterator[None]:
    """Keep shards where they are until the block ends."""
    parts = [shard.part for shard in shards]
    index.pin(parts)
    try:
        yield
    finally:
        index.unpin(parts)


class LockedShards:
    """The shards that one reader has locked in a range of a lease.

    ``shards`` has one entry for each chunk of the range, None where the reader has no lock.
    ``located`` has only the locked shards, by the chunk's number in the range. ``range`` is the
    range with its end. ``readers`` is how many readers the lease was given to.
    """

    def __init__(
        self,
        leases: LeaseTable,
        lease: Lease,
        chunks: LeaseRange,
        shards: Sequence[LocatedShard | None],
        held: int,
    ) -> None:
        """``held`` has the reader's locks on the range, as bits of the lease's span."""
        self.shards = shards
        self.located = {i: shard for i, shard in enumerate(shards) if shard is not None}
        self.range = chunks
        self.namespace = lease.space.namespace.name
        self.readers = lease.readers
        self._leases = leases
        self._lease = lease
        self._position = lease.space.namespace.position(chunks.group_idx)
        self._held = held

    def are_held_by(self, reader: int) -> bool:
        """True if another reader has locked all of them as well."""
        if reader >= self.readers:
            return False
        return not self._held & ~self._lease.spans[self._position].held[reader]

    @contextmanager
    def reading(self, readers: Sequence[int]) -> Iterator[None]:
        """Keep the shards where they are. When the block ends, free the locks of ``readers``."""
        try:
            with pinned(self._leases.index, self.located.values()):
                yield
        finally:
            # At once: a call that is cancelled does not come back for the rest.
            at_once(
                self._leases.release_in_steps(
                    self._lease,
                    self.range.first_chunk,
                    self.range.end_chunk,
                    readers=readers,
                    position=self._position,
                )
            )


def locate_in_steps(
    leases: LeaseTable, lease: Lease, chunks: LeaseRange, *, shard: int, reader: int
) -> Steps[LockedShards]:
    """Where the locked shards of a range lie, by the locks that are held at the first step.

    RequestError if the lease has no such shard, reader or group, or if the range is too long.
    """
    namespace = lease.space.namespace
    position = namespace.position(chunks.group_idx)
    nbytes = lease.space.shard_bytes(position, shard)
    if reader >= lease.readers:
        raise invalid(
            f"reader {reader}: the lease was given to {lease.readers} readers",
            "reader",
            lease.readers - 1,
        )
    locked = lease.spans[position]
    parts, span_first = locked.span.parts, locked.span.first
    first, end = chunks.first_chunk, chunks.end_chunk
    if end is None:
        end = span_first + len(parts)
    if end - first > MAX_KEYS:
        raise invalid(f"{end - first} chunks: at most {MAX_KEYS}", "end_chunk", first + MAX_KEYS)
    held = locked.held[reader] & locked.bits(first, end)
    if held:
        leases.note_copying(lease, reader)
    located: list[LocatedShard | None] = [None] * (end - first)
    for index in set_bits(held):
        offset = parts[index].slots[shard]
        if offset != NO_SLOT:  # else the part was freed between two steps
            located[span_first + index - first] = LocatedShard(parts[index], offset, nbytes)
        if index % _SHARDS_A_STEP == 0:
            yield
    return LockedShards(leases, lease, chunks._replace(end_chunk=end), located, held)

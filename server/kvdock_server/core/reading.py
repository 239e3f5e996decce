"""Shards that are being read: where they lie, and that they stay there meanwhile."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple

from kvdock_server.core.leases import Lease, LeaseTable
from kvdock_server.core.ranges import LeaseRange
from kvdock_server.errors import invalid
from kvdock_server.index.chunk import NO_SLOT, Part
from kvdock_server.index.index import Index
from kvdock_server.steps import Steps

MAX_KEYS: Final = 16_384

_SHARDS_A_STEP: Final = 64


class LocatedShard(NamedTuple):
    """Where a shard lies in the pool."""

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
        for part in parts:
            index.unpin(part)


class LockedShards:
    """What one reader has locked of a range, of one shard.

    ``shards`` has the place of each chunk, None where the reader has no lock; ``located`` has those
    that are locked, by their number in the range. ``range`` ends where they do.
    """

    def __init__(
        self,
        leases: LeaseTable,
        lease: Lease,
        chunks: LeaseRange,
        shards: Sequence[LocatedShard | None],
    ) -> None:
        self.shards = shards
        self.located = {i: shard for i, shard in enumerate(shards) if shard is not None}
        self.range = chunks._replace(end_chunk=chunks.first_chunk + len(shards))
        self.namespace = lease.space.namespace.name
        self.readers = lease.readers
        """How many readers the lease was given to."""
        self._leases = leases
        self._lease = lease
        self._position = lease.space.namespace.position(chunks.group_idx)

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
        try:
            with pinned(self._leases.index, self.located.values()):
                yield
        finally:
            self._leases.release(
                self._lease,
                self.range.first_chunk,
                self.range.end_chunk,
                readers=readers,
                position=self._position,
            )


def locate(
    leases: LeaseTable, lease: Lease, chunks: LeaseRange, *, shard: int, reader: int
) -> Steps[LockedShards]:
    """Where the locked shards of a range lie, by the locks that are held at the first step.

    RequestError if the lease has no such shard, reader, group or range.
    """
    namespace = lease.space.namespace
    if shard >= namespace.kv_world_size:
        raise invalid(f"kv_worker_id {shard}: below {namespace.kv_world_size}")
    if reader >= lease.readers:
        raise invalid(f"reader {reader}: the lease was given to {lease.readers} readers")
    position = namespace.position(chunks.group_idx)
    locked = lease.spans[position]
    span_end = locked.span.first + len(locked.span.parts)
    first, end = chunks.first_chunk, chunks.end_chunk or span_end
    if not first < end:
        raise invalid(f"chunks [{first}, {end}): the range is empty")
    if end - first > MAX_KEYS:
        raise invalid(f"{end - first} chunks: at most {MAX_KEYS}")
    nbytes = lease.space.shard_bytes(position, shard)
    located: list[LocatedShard | None] = [None] * (end - first)
    low, high = max(first, locked.span.first), min(end, span_end)
    held = locked.held[reader] >> (low - locked.span.first)
    if held & ((1 << max(high - low, 0)) - 1):
        lease.copying.add(reader)
    # Text is the fastest way to walk the bits of a long integer.
    for chunk, bit in zip(range(low, high), reversed(f"{held:b}"), strict=False):
        part = locked.span.parts[chunk - locked.span.first]
        if bit == "1" and part.slots[shard] != NO_SLOT:  # none if it was freed meanwhile
            located[chunk - first] = LocatedShard(part, part.slots[shard], nbytes)
        if chunk % _SHARDS_A_STEP == 0:
            yield
    return LockedShards(leases, lease, chunks, located)

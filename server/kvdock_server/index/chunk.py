"""Chunks and their parts: plain records, made small since a server holds a million of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from kvdock_server.index.index import Space

NO_SLOT: Final = -1


class Chunk:
    """A run of tokens under one key. It stays known while it has parts or children."""

    __slots__ = ("children", "key", "parent", "parts", "space")

    def __init__(self, space: Space, key: bytes, parent: Chunk | None) -> None:
        self.space = space
        self.key = key
        self.parent = parent
        self.children = 0
        self.parts: list[Part | None] = [None] * len(space.namespace.groups)


class Part:
    """One group's share of a chunk: the unit of visibility, locking and eviction.

    ``slots`` has the pool offset of each sealed shard, NO_SLOT for the others; ``writing`` has a
    bit for each shard that is being written. ``pins`` counts what keeps the memory in place: the
    locks of leases and the copies under way. A detached part was removed from the index while
    pinned or written to; its memory goes with the last pin or writer.
    """

    __slots__ = (
        "chunk",
        "detached",
        "last_used",
        "pins",
        "position",
        "queued",
        "slots",
        "visible",
        "writing",
    )

    def __init__(self, chunk: Chunk, position: int, kv_world_size: int) -> None:
        self.chunk = chunk
        self.position = position
        self.slots = [NO_SLOT] * kv_world_size
        self.writing = 0
        self.pins = 0
        self.last_used = 0
        self.visible = False
        self.detached = False
        self.queued = False

    def lacks(self, shard: int) -> bool:
        """True if the shard is neither sealed nor being written."""
        return self.slots[shard] == NO_SLOT and not self.writing >> shard & 1

    @property
    def sealed_shards(self) -> int:
        """How many shards are complete."""
        return len(self.slots) - self.slots.count(NO_SLOT)

    @property
    def is_empty(self) -> bool:
        """True if no shard is sealed or being written."""
        return not self.writing and self.sealed_shards == 0

"""Chunks and their parts: plain records, made small since a server holds a million of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from kvdock_server.index.namespace_index import NamespaceIndex

NO_SLOT: Final = -1


class Chunk:
    """A run of tokens under one key. It stays known while it has parts or children.

    Children are linked to one another: a set of them in every chunk would double the index.
    """

    __slots__ = ("_first_child", "_next", "_previous", "key", "parent", "parts", "space")

    def __init__(self, space: NamespaceIndex[Chunk], key: bytes, parent: Chunk | None) -> None:
        self.space = space
        self.key = key
        self.parent = parent
        self.parts: list[Part | None] = [None] * len(space.namespace.groups)
        self._first_child: Chunk | None = None
        self._previous: Chunk | None = None
        self._next: Chunk | None = None
        if parent is not None:
            self._next = parent._first_child
            if self._next is not None:
                self._next._previous = self
            parent._first_child = self

    @property
    def has_children(self) -> bool:
        """True if a known chunk extends this one."""
        return self._first_child is not None

    def children(self) -> Iterator[Chunk]:
        """The known chunks that extend this one."""
        child = self._first_child
        while child is not None:
            yield child
            child = child._next

    def unlink(self) -> None:
        """Take the chunk out of its parent's children."""
        if self._previous is not None:
            self._previous._next = self._next
        elif self.parent is not None:
            self.parent._first_child = self._next
        if self._next is not None:
            self._next._previous = self._previous
        self._previous = self._next = None


class Part:
    """One group's share of a chunk: the unit of visibility, locking and eviction.

    ``slots`` has the pool offset of each sealed shard, NO_SLOT for the others; ``writing`` has a
    bit for each shard that is being written. ``pins`` counts what keeps the memory in place: the
    leases that lock it and the copies under way. A detached part was removed from the index while
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

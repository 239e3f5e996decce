"""What the index keeps of one namespace.

The module of chunks imports this one, so the type of a chunk is a parameter here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from kvdock_server.errors import invalid
from kvdock_server.index.namespace import Namespace

ChunkT = TypeVar("ChunkT")


@dataclass(eq=False)
class Cursor(Generic[ChunkT]):
    """The chunk with which a walk through a namespace goes on; None at the end."""

    at: ChunkT | None


@dataclass
class Usage:
    """Memory of a namespace. Cleared chunks count until their memory is free."""

    sealed_bytes: int = 0


class NamespaceIndex(Generic[ChunkT]):
    """A registered namespace and its chunks, in the order in which they were first reserved.

    ``first_child`` begins the linked list of the chunks that extend no other. If ``is_cleared``,
    another NamespaceIndex has taken the place of this one, and the chunks here are being removed.
    """

    def __init__(self, namespace: Namespace) -> None:
        self.namespace = namespace
        self.chunks: dict[bytes, ChunkT] = {}
        self.first_child: ChunkT | None = None
        self.cursors: list[Cursor[ChunkT]] = []
        self.is_cleared = False
        self.visible_parts = 0
        self.usage = Usage()

    @property
    def sealed_bytes(self) -> int:
        """Bytes of its sealed shards."""
        return self.usage.sealed_bytes

    def clear(self) -> NamespaceIndex[ChunkT]:
        """Mark this one as cleared; the empty one that takes its place."""
        self.is_cleared = True
        successor: NamespaceIndex[ChunkT] = NamespaceIndex(self.namespace)
        successor.usage = self.usage
        return successor

    def shard_bytes(self, position: int, shard: int) -> int:
        """Size of one shard; RequestError if there is no such shard, or its size is not known."""
        group = self.namespace.groups[position]
        if shard >= len(group.shard_bytes):
            raise invalid(
                f"kv_worker_id {shard}: namespace {self.namespace.name!r} has "
                f"{len(group.shard_bytes)} shards"
            )
        size = group.shard_bytes[shard]
        if not size:
            raise invalid(
                f"namespace {self.namespace.name!r}: the size of shard {shard} of group "
                f"{group.group_idx} is not known: register the namespace with its shard_bytes"
            )
        return size

"""Lists the parts of a namespace, for operators."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass

from kvdock_server.index.chunk import NO_SLOT, NamespaceIndex, Part, all_chunks


@dataclass(frozen=True, slots=True)
class ListedPart:
    """One part as it is now.

    ``parent_key`` is empty for a prompt's first chunk. ``nbytes`` counts sealed shards, and
    ``pins`` the pins that keep it.
    """

    key: bytes
    parent_key: bytes
    group_idx: int | None
    sealed_shards: int
    nbytes: int
    locks: int
    visible: bool
    pins: int


def list_parts(
    space: NamespaceIndex, only: int | None = None
) -> Generator[list[ListedPart] | None, None, None]:
    """The parts of each chunk in turn. Chunks may come and go meanwhile.

    ``only`` is the position of one group, None for all.

    After a clear of the namespace comes None, and then the end. Close the generator if you do not
    read it to its end.
    """
    with closing(all_chunks(space)) as chunks:
        for chunk in chunks:
            if space.is_cleared:
                yield None
                return
            parts = chunk.parts if only is None else chunk.parts[only : only + 1]
            yield [_listed(space, part) for part in parts if part is not None]


def _listed(space: NamespaceIndex, part: Part) -> ListedPart:
    group = space.namespace.groups[part.position]
    sizes = zip(group.shard_bytes, part.slots, strict=True)
    return ListedPart(
        key=part.chunk.key,
        parent_key=part.chunk.parent.key if part.chunk.parent else b"",
        group_idx=group.group_idx,
        sealed_shards=part.sealed_shards,
        nbytes=sum(size for size, offset in sizes if offset != NO_SLOT),
        locks=part.pins,
        visible=part.visible,
        pins=len(space.kept.get(part, ())),
    )

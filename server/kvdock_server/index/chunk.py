"""Chunks, their parts, the namespaces that hold them, and the pins that keep them.

Chunks and parts are plain records, kept small because a server holds a million of them.
"""

from __future__ import annotations

from array import array
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import InitVar, dataclass, field
from typing import Final

from kvdock_server.errors import group_name, invalid
from kvdock_server.index.namespace import GroupKind, Namespace

NO_SLOT: Final = -1


class Chunk:
    """A run of tokens under one key. It stays known while it has parts or children.

    The children of a chunk are a linked list, from ``first_child`` on. A set in every chunk would
    double the memory of the index.
    """

    __slots__ = ("_next", "_previous", "first_child", "key", "parent", "parts", "space")

    def __init__(self, space: NamespaceIndex, key: bytes, parent: Chunk | None) -> None:
        self.space = space
        self.key = key
        self.parent = parent
        self.parts: list[Part | None] = [None] * len(space.namespace.groups)
        self.first_child: Chunk | None = None
        self._previous: Chunk | None = None
        self._next = self._above.first_child
        if self._next is not None:
            self._next._previous = self
        self._above.first_child = self

    @property
    def _above(self) -> Chunk | NamespaceIndex:
        return self.space if self.parent is None else self.parent

    @property
    def is_known(self) -> bool:
        """True if the index has this chunk."""
        return not self.space.is_cleared and self.space.chunks.get(self.key) is self

    @property
    def in_use(self) -> bool:
        """True if somebody reads or writes one of its parts, or a pin keeps one."""
        kept = self.space.kept
        # No any(), which would take three times as long: eviction asks several times for each part.
        for part in self.parts:
            if part is not None and (part.pins or part.writing or (kept and part in kept)):
                return True
        return False

    @property
    def last_used(self) -> int:
        """The latest use of any of its parts; 0 if it has none."""
        return max((part.last_used for part in self.parts if part is not None), default=0)

    def inherit_uses(self, parts: Sequence[Part]) -> None:
        """Who used these parts of a chunk that extends this one used this one's parts, too."""
        last_used = max(part.last_used for part in parts)
        used_again = any(part.used_again for part in parts)
        for mine in self.parts:
            if mine is not None:
                mine.last_used = max(mine.last_used, last_used)
                mine.used_again = mine.used_again or used_again

    def children(self) -> Iterator[Chunk]:
        """The known chunks that extend this one."""
        child = self.first_child
        while child is not None:
            yield child
            child = child._next

    def next_in_tree(self, *, skip_children: bool = False) -> Chunk | None:
        """The next chunk of the namespace, parents before children; None after the last one.

        ``skip_children``: leave out all that extends this chunk.
        """
        if self.first_child is not None and not skip_children:
            return self.first_child
        chunk: Chunk | None = self
        while chunk is not None:
            if chunk._next is not None:
                return chunk._next
            chunk = chunk.parent
        return None

    def unlink(self) -> None:
        """Take the chunk out of its parent's children."""
        for cursor in self.space.cursors:
            if cursor.at is self:
                cursor.at = self.next_in_tree(skip_children=True)
        if self._previous is not None:
            self._previous._next = self._next
        elif self._above.first_child is self:
            self._above.first_child = self._next
        if self._next is not None:
            self._next._previous = self._previous
        self._previous = self._next = None


@dataclass(slots=True, eq=False, repr=False)
class Part:
    """One group's share of a chunk: the unit of visibility, locking and eviction.

    ``slots`` has the pool offset of each sealed shard, and NO_SLOT for the others. ``writing`` has
    a bit for each shard that is being written. ``pins`` counts what keeps the memory in place: the
    leases that lock the part, and the copies under way. A ``detached`` part has left the index; its
    memory is freed with its last pin or writer. ``queued``: an eviction policy has the part.

    ``last_used`` is no time: it counts the bytes that were stored before the use. ``used_again``:
    a lookup has hit the part, though perhaps not the last one that did (see ``Index.touch``).
    """

    chunk: Chunk
    position: int
    kv_world_size: InitVar[int]
    slots: array[int] = field(init=False)
    writing: int = 0
    pins: int = 0
    last_used: int = 0
    visible: bool = False
    detached: bool = False
    queued: bool = False
    used_again: bool = False

    def __post_init__(self, kv_world_size: int) -> None:
        # An array and no list, since the garbage collector looks through every list.
        self.slots = array("q", [NO_SLOT]) * kv_world_size

    @property
    def is_gone(self) -> bool:
        """True if the part has left the index, or its namespace was cleared."""
        return self.detached or self.chunk.space.is_cleared

    @property
    def is_full_attention(self) -> bool:
        """True if its group needs all chunks of a prompt."""
        groups = self.chunk.space.namespace.groups
        return groups[self.position].kind is GroupKind.FULL_ATTENTION

    @property
    def is_evictable(self) -> bool:
        """True if nobody uses or keeps the part, and no known chunk needs it as its prefix."""
        chunk = self.chunk
        space = chunk.space
        if not self.visible or self.pins or space.is_cleared or (space.kept and self in space.kept):
            return False
        return (chunk.first_child is None and not chunk.in_use) or not self.is_full_attention

    @property
    def priority(self) -> int:
        """How many fillings of the pool later than at ``last_used`` it counts as used: -1, 0 or 1.

        Low priority (-1) ends when a lookup hits the part.
        """
        priorities = self.chunk.space.priorities
        if not priorities:
            return 0
        priority = priorities.get(self, 0)
        return 0 if priority < 0 and self.used_again else priority

    def lacks(self, shard: int) -> bool:
        """True if the shard is neither sealed nor being written."""
        return self.slots[shard] == NO_SLOT and not self.writing >> shard & 1

    @property
    def sealed_shards(self) -> int:
        return len(self.slots) - self.slots.count(NO_SLOT)

    @property
    def is_empty(self) -> bool:
        """True if no shard is sealed or being written."""
        return not self.writing and self.sealed_shards == 0


@dataclass(eq=False)
class Cursor:
    """The chunk with which a walk through a namespace goes on; None at the end."""

    at: Chunk | None


@dataclass
class Usage:
    """Memory of a namespace. Cleared chunks count until their memory is free."""

    sealed_bytes: int = 0


class NamespaceIndex:
    """A registered namespace and its chunks, in the order in which they were first reserved.

    ``first_child`` begins the linked list of the chunks that extend no other. If ``is_cleared``,
    another NamespaceIndex has taken the place of this one, and the chunks here are being removed.

    ``kept`` has the pins of each part that is not evicted because of them. Few parts are kept, so
    no part has room for it.
    """

    def __init__(self, namespace: Namespace) -> None:
        self.namespace = namespace
        self.chunks: dict[bytes, Chunk] = {}
        self.first_child: Chunk | None = None
        self.cursors: list[Cursor] = []
        self.is_cleared = False
        # A lookup walks these, by group: nothing else about a chunk is looked at but its part.
        self.visible: list[dict[bytes, Part]] = [{} for _ in namespace.groups]
        self.kept: dict[Part, tuple[Pin, ...]] = {}
        self.kept_bytes = 0
        self.priorities: dict[Part, int] = {}  # of those that are not 0
        self.usage = Usage()

    @property
    def visible_parts(self) -> int:
        """How many parts are visible."""
        return sum(map(len, self.visible))

    @property
    def sealed_bytes(self) -> int:
        """Bytes of its sealed shards."""
        return self.usage.sealed_bytes

    def clear(self) -> NamespaceIndex:
        """Mark this one as cleared; the empty one that takes its place."""
        self.is_cleared = True
        successor = NamespaceIndex(self.namespace)
        successor.usage = self.usage
        return successor

    def shard_bytes(self, position: int, shard: int) -> int:
        """Size of one shard; RequestError if there is no such shard, or its size is not known."""
        group = self.namespace.groups[position]
        if shard >= len(group.shard_bytes):
            raise invalid(
                f"kv_worker_id {shard}: namespace {self.namespace.name!r} has "
                f"{len(group.shard_bytes)} shards",
                "kv_worker_id",
                len(group.shard_bytes) - 1,
            )
        size = group.shard_bytes[shard]
        if not size:
            raise invalid(
                f"namespace {self.namespace.name!r}: the size of shard {shard} of "
                f"{group_name(group.group_idx)} is not known: register the namespace with its "
                "shard_bytes",
                "shard_bytes",
            )
        return size


@dataclass(eq=False)
class Pin:
    """The parts that are kept under one name in one namespace.

    ``until`` has for each part when it is let go, ``due`` the parts by this time. ``nbytes`` are at
    the size of slots. ``is_released``: the pin is over. ``calls`` counts the calls that go on to
    use the pin. ``only`` is this pin in a tuple, for the parts that no other pin keeps.
    """

    space: NamespaceIndex
    name: str
    until: dict[Part, float] = field(default_factory=dict)
    due: dict[float, dict[Part, None]] = field(default_factory=dict)
    nbytes: int = 0
    is_released: bool = False
    calls: int = 0
    only: tuple[Pin, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.only = (self,)

    def add(self, part: Part, until: float) -> None:
        self.until[part] = until
        self.due.setdefault(until, {})[part] = None

    def remove(self, part: Part) -> None:
        until = self.until.pop(part)
        bucket = self.due[until]
        del bucket[part]
        if not bucket:
            del self.due[until]


def all_chunks(space: NamespaceIndex) -> Generator[Chunk, None, None]:
    """All chunks of a namespace, parents before children. Chunks may come and go meanwhile."""
    cursor = Cursor(space.first_child)
    space.cursors.append(cursor)
    try:
        while (chunk := cursor.at) is not None:
            cursor.at = chunk.next_in_tree()
            yield chunk
    finally:
        space.cursors.remove(cursor)


def with_descendants(roots: Iterable[Chunk]) -> Iterator[Chunk]:
    """The chunks ``roots`` and all that extend them, each once.

    With one root, parents come before children. Lazy, since a chunk may have all others of its
    namespace below it.
    """
    found: set[Chunk] = set()
    waiting = [iter(roots)]
    while waiting:
        chunk = next(waiting[-1], None)
        if chunk is None:
            waiting.pop()
        elif chunk not in found:
            found.add(chunk)
            yield chunk
            waiting.append(chunk.children())

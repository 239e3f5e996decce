"""From what happens in the index to events.

Announced is what a lookup could find: a part of a full-attention group once it and all parts before
it are visible, so that a reader never has to keep a child whose parent it does not know. A part
whose parent is late (another rank, another session) waits for it here. Parts of other groups need
no parent and are announced when they become visible.

The index removes no full-attention part that has something under it, except by clearing all; so
what is announced stays a forest, and the order of announcing has parents before children at any
time. That makes a snapshot: the events that announced what is there now, in their order.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvdock_server.events import event
from kvdock_server.events.event import Event, RemovedPart, StoredPart
from kvdock_server.events.log import Log
from kvdock_server.events.subscribers import Subscribers
from kvdock_server.index.chunk import Chunk, Part
from kvdock_server.index.index import ReserveStatus, Slot
from kvdock_server.index.namespace import Group, GroupKind
from kvdock_server.index.namespace_index import NamespaceIndex


class _Told:
    """What is known of one namespace's parts."""

    __slots__ = ("announced", "data", "waiting")

    def __init__(self) -> None:
        self.announced: dict[Part, Event] = {}
        # Visible parts of a full-attention group, by the part that must be announced before them:
        # named by chunk and position, since it may be stored anew meanwhile.
        self.waiting: dict[tuple[Chunk, int], dict[Part, None]] = {}
        self.data: dict[Part, bytes] = {}

    @property
    def is_empty(self) -> bool:
        """True if nothing is known of any part."""
        return not (self.announced or self.data or self.waiting)

    def forget(self, part: Part) -> Event | None:
        """Forget a part; the event that announced it, if it was announced."""
        self.data.pop(part, None)
        announced = self.announced.pop(part, None)
        before = _before(part)
        if announced is None and before in self.waiting:
            siblings = self.waiting[before]
            siblings.pop(part, None)
            if not siblings:
                del self.waiting[before]
        return announced


class Publisher:
    """Watches an index and appends to the log what readers are to know."""

    def __init__(self, epoch: int, log: Log) -> None:
        self.epoch = epoch
        self.log = log
        self.subscribers = Subscribers(log)
        self._told: dict[NamespaceIndex[Chunk], _Told] = {}
        self._cleared: dict[NamespaceIndex[Chunk], _Told] = {}

    def describe(self, outcomes: Sequence[ReserveStatus | Slot], data: Sequence[bytes]) -> None:
        """Note what a store tells about the chunks that it reserved, one encoded message each."""
        for outcome, one in zip(outcomes, data, strict=True):
            if isinstance(outcome, Slot) and not outcome.part.is_gone:
                self._of(outcome.part.chunk.space).data.setdefault(outcome.part, one)

    def snapshot(self, namespaces: Sequence[str] = ()) -> list[Event]:
        """The events by which all that can be found now was announced, parents first."""
        return [
            announced
            for space, told in self._told.items()
            if not namespaces or space.namespace.name in namespaces
            for announced in told.announced.values()
        ]

    # What the index tells

    def stored(self, part: Part) -> None:
        """A part became visible."""
        told = self._of(part.chunk.space)
        before = _before(part)
        if before is not None:
            chunk, position = before
            if chunk.parts[position] not in told.announced:
                told.waiting.setdefault(before, {})[part] = None
                return
        self._announce(told, part)
        if not told.waiting:
            return
        ready = [part]
        while ready:
            part = ready.pop()
            for child in told.waiting.pop((part.chunk, part.position), ()):
                self._announce(told, child)
                ready.append(child)

    def removed(self, part: Part) -> None:
        """A part left the index, visible or not."""
        space = part.chunk.space
        told = self._cleared.get(space) if space.is_cleared else self._told.get(space)
        if told is None:
            return
        announced = told.forget(part)
        if not space.is_cleared:
            if announced is not None:
                gone = RemovedPart(part.chunk.key, _group(part), announced)
                self._append(event.removed(space.namespace.name, gone))
        elif told.is_empty:
            del self._cleared[space]

    def cleared(self, space: NamespaceIndex[Chunk]) -> None:
        """All parts of a namespace are invisible from now on, and leave the index one by one."""
        told = self._told.pop(space, None)
        if told is None or told.is_empty:
            return
        if told.announced:
            self._append(event.cleared(space.namespace.name))
        self._cleared[space] = told

    def _announce(self, told: _Told, part: Part) -> None:
        chunk = part.chunk
        announced = event.stored(
            chunk.space.namespace.name,
            StoredPart(
                chunk.key,
                chunk.parent.key if chunk.parent is not None else b"",
                _group(part),
                told.data.pop(part, b""),
            ),
        )
        told.announced[part] = announced
        self._append(announced)

    def _append(self, new: Event) -> None:
        self.log.append(new)
        self.subscribers.wake()

    def _of(self, space: NamespaceIndex[Chunk]) -> _Told:
        told = self._told.get(space)
        if told is None:
            told = self._told[space] = _Told()
        return told


def _group(part: Part) -> Group:
    return part.chunk.space.namespace.groups[part.position]


def _before(part: Part) -> tuple[Chunk, int] | None:
    """What must be announced before the part: chunk and position, or None."""
    parent = part.chunk.parent
    if parent is None or _group(part).kind is not GroupKind.FULL_ATTENTION:
        return None
    return parent, part.position

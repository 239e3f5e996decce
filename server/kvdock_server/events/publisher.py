"""Turns what happens in the index into events.

A part of a full-attention group is announced once it and all parts before it are visible. So a
reader never gets a child whose parent it does not know. A part whose parent is late waits here. For
example, one engine is still writing a prompt's first chunk, when another engine, which found the
first chunk reserved, has written the second one. Parts of other groups need no parent, and are
announced when they become visible. A part is announced on each medium for itself.

The index removes no full-attention part that has children, except by clearing a namespace. So among
the announced parts, parents always come before children. A snapshot is the events that announced
the parts that are there now, in their order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence, Set

from kvdock_server.events import event, wire
from kvdock_server.events.event import Event, Medium, RemovedPart, StoredPart
from kvdock_server.events.log import Log
from kvdock_server.events.subscribers import Subscribers
from kvdock_server.index.chunk import Chunk, NamespaceIndex, Part
from kvdock_server.index.index import ReserveStatus, Slot
from kvdock_server.index.namespace import Group, GroupKind
from kvdock_server.steps import Backlog, Steps


class _MediumParts:
    """What is known of one namespace's parts on one medium."""

    def __init__(self) -> None:
        self.announced: dict[Part, Event] = {}
        # Visible parts of a full-attention group, by the parent that must be announced before them.
        # A key is the parent's chunk and position, since the parent may be stored anew meanwhile.
        self.waiting: dict[tuple[Chunk, int], dict[Part, None]] = {}


class _NamespaceParts:
    """What is known of one namespace's parts."""

    def __init__(self) -> None:
        self.media = {medium: _MediumParts() for medium in Medium}
        # What stores told of parts in the pool that are announced nowhere yet.
        self.data: dict[Part, bytes] = {}

    def data_of(self, part: Part) -> bytes:
        """What a store told of a part that is to be announced, perhaps on a second medium."""
        if (data := self.data.pop(part, None)) is not None:
            return data
        for there in self.media.values():
            if (announced := there.announced.get(part)) is not None:
                return wire.event_data(announced).SerializeToString()
        return b""

    def forget_all(self) -> Steps[None]:
        """Forget everything."""
        for there in self.media.values():
            while there.announced:
                there.announced.popitem()
                yield
            while there.waiting:
                there.waiting.popitem()
                yield
        while self.data:
            self.data.popitem()
            yield


class Publisher:
    """Watches an index, and appends events to the log."""

    def __init__(self, epoch: int, log: Log, backlog: Backlog) -> None:
        self.epoch = epoch
        self.log = log
        self._backlog = backlog
        self.subscribers = Subscribers(log)
        self._known: defaultdict[NamespaceIndex, _NamespaceParts] = defaultdict(_NamespaceParts)

    def describe(self, outcomes: Sequence[ReserveStatus | Slot], data: Sequence[bytes]) -> None:
        """Note what a store tells of the chunks that it reserved: an encoded message for each."""
        for outcome, one in zip(outcomes, data, strict=True):
            if isinstance(outcome, Slot) and not outcome.part.is_gone:
                self._known[outcome.part.chunk.space].data.setdefault(outcome.part, one)

    def snapshot(self, namespaces: Set[str] = frozenset()) -> list[Event]:
        """The events that announced the parts that can be found now, parents first."""
        return [
            announced
            for space, known in self._known.items()
            if not namespaces or space.namespace.name in namespaces
            for there in known.media.values()
            for announced in there.announced.values()
        ]

    # The index calls these for the pool.

    def stored(self, part: Part, medium: Medium = Medium.CPU) -> None:
        """A part became visible on a medium."""
        known = self._known[part.chunk.space]
        there = known.media[medium]
        parent = _awaited_parent(part)
        if parent is not None:
            chunk, position = parent
            if chunk.parts[position] not in there.announced:
                there.waiting.setdefault(parent, {})[part] = None
                return
        self._announce(known, part, medium)
        if not there.waiting:
            return
        ready = [part]
        while ready:
            part = ready.pop()
            for child in there.waiting.pop((part.chunk, part.position), ()):
                self._announce(known, child, medium)
                ready.append(child)

    def removed(self, part: Part, medium: Medium = Medium.CPU) -> None:
        """A part is gone from a medium, visible or not."""
        space = part.chunk.space
        if space.is_cleared:
            return
        known = self._known.get(space)
        if known is None:
            return
        if medium is Medium.CPU:
            known.data.pop(part, None)
        there = known.media[medium]
        announced = there.announced.pop(part, None)
        if announced is not None:
            gone = RemovedPart(part.chunk.key, _group(part), announced)
            self._append(event.removed(space.namespace.name, medium, gone))
            return
        parent = _awaited_parent(part)
        if parent in there.waiting:
            siblings = there.waiting[parent]
            siblings.pop(part, None)
            if not siblings:
                del there.waiting[parent]

    def cleared(self, space: NamespaceIndex) -> None:
        """All parts of a namespace are invisible from now on, and leave the index one by one."""
        known = self._known.pop(space, None)
        if known is None:
            return
        if any(there.announced for there in known.media.values()):
            self._append(event.cleared(space.namespace.name))
        self._backlog.add(known.forget_all())

    def _announce(self, known: _NamespaceParts, part: Part, medium: Medium) -> None:
        chunk = part.chunk
        announced = event.stored(
            chunk.space.namespace.name,
            medium,
            StoredPart(
                chunk.key,
                chunk.parent.key if chunk.parent is not None else b"",
                _group(part),
                known.data_of(part),
            ),
        )
        known.media[medium].announced[part] = announced
        self._append(announced)

    def _append(self, new: Event) -> None:
        self.log.append(new)
        self.subscribers.wake()


def _group(part: Part) -> Group:
    return part.chunk.space.namespace.groups[part.position]


def _awaited_parent(part: Part) -> tuple[Chunk, int] | None:
    """The parent that must be announced before the part: its chunk and position. Or None."""
    parent = part.chunk.parent
    if parent is None or _group(part).kind is not GroupKind.FULL_ATTENTION:
        return None
    return parent, part.position

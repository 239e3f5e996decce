"""A mirror of what a server has announced: pure, without I/O."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from kvdock.events.messages import (
    Batch,
    Cleared,
    Compacted,
    Cursor,
    Event,
    Filter,
    Medium,
    Message,
    PartId,
    Progress,
    Removed,
    SnapshotPiece,
    Stored,
    Unknown,
)


class OutOfStepError(Exception):
    """A message does not follow from the ones before. The next request is for a snapshot."""


class Index:
    """What a server has announced and not removed: all of it, or what a filter lets through.

    A part is here once for each medium on which it is.

    Not thread-safe: let one thread apply and read, or lock around both.
    """

    def __init__(self, only: Filter | None = None) -> None:
        self.only = only or Filter()
        self._cursor: Cursor | None = None
        self._parts: dict[str, dict[PartId, Stored]] = {}
        # The snapshot that is being received, and for when it will be true.
        self._coming: dict[str, dict[PartId, Stored]] = {}
        self._coming_cursor: Cursor | None = None

    def __len__(self) -> int:
        return sum(map(len, self._parts.values()))

    def __contains__(self, part: PartId) -> bool:
        return part in self._parts.get(part.namespace, ())

    def __iter__(self) -> Iterator[Stored]:
        """Every part there is, on each medium parents before children."""
        for parts in self._parts.values():
            yield from parts.values()

    @property
    def cursor(self) -> Cursor | None:
        """For when the index is true; None if only a snapshot can tell."""
        return self._cursor

    def parts(self, namespace: str) -> Mapping[PartId, Stored]:
        """The parts of one namespace, on each medium parents before children."""
        return self._parts.get(namespace, {})

    def prefix(
        self,
        namespace: str,
        keys: Sequence[bytes],
        group_idx: int | None = None,
        medium: Medium = Medium.UNSPECIFIED,
    ) -> int:
        """How many of a prompt's chunks, from the first on, have a part of that group there.

        UNSPECIFIED: on any medium, each part on its own.
        """
        parts = self._parts.get(namespace, {})
        media = (medium,) if medium else tuple(Medium)
        for count, key in enumerate(keys):
            if not any(PartId(namespace, key, group_idx, one) in parts for one in media):
                return count
        return len(keys)

    @property
    def start(self) -> Cursor | str:
        """Where the next stream must begin, with the same filter: the cursor, or ``"snapshot"``."""
        return "snapshot" if self._cursor is None else self._cursor

    def apply(self, message: Message) -> list[Stored | Removed]:
        """Take in the next message, and tell what changed, in an order in which parents come first
        and go last. After a snapshot that is the difference to what was there before it.

        Raises OutOfStepError if the message cannot be the next one.
        """
        try:
            match message:
                case Batch():
                    return self._batch(message)
                case SnapshotPiece():
                    return self._piece(message)
                case Progress():
                    self._check(message.cursor)
                    self._cursor = message.cursor
                case Compacted():
                    self._cursor = None
        except OutOfStepError:
            self._cursor = None
            raise
        return []

    def forget(self) -> list[Removed]:
        """Take it that everything is gone, for example when a server does not come back."""
        sequence = self._cursor.sequence if self._cursor else 0
        gone = [_gone(part, sequence) for part in reversed(list(self))]
        self._parts = {}
        self._cursor = None
        return gone

    def _check(self, cursor: Cursor) -> None:
        now = self._cursor
        if now is None or cursor.epoch != now.epoch or cursor.sequence < now.sequence:
            raise OutOfStepError(f"a message of {cursor} after {now}")

    def _batch(self, batch: Batch) -> list[Stored | Removed]:
        self._check(batch.cursor)
        assert self._cursor is not None
        number = self._cursor.sequence
        changes: list[Stored | Removed] = []
        for event in batch.events:
            if event.sequence <= number or (self.only.is_all and event.sequence != number + 1):
                raise OutOfStepError(f"event {event.sequence} after event {number}")
            number = event.sequence
            changes += self._apply(event)
        if number > batch.cursor.sequence:
            raise OutOfStepError(f"event {number} in a batch up to {batch.cursor.sequence}")
        self._cursor = batch.cursor
        return changes

    def _apply(self, event: Event) -> list[Stored] | list[Removed]:
        parts = self._parts.setdefault(event.namespace, {})
        match event:
            case Stored():
                if event.id in parts:
                    raise OutOfStepError(f"event {event.sequence} stores what is there: {event.id}")
                parts[event.id] = event
                return [event]
            case Removed():
                if parts.pop(event.id, None) is None:
                    raise OutOfStepError(f"event {event.sequence} removes what is not: {event.id}")
                return [event]
            case Cleared():
                gone = [_gone(part, event.sequence) for part in reversed(parts.values())]
                del self._parts[event.namespace]
                return gone
            case Unknown():
                return []

    def _piece(self, piece: SnapshotPiece) -> list[Stored | Removed]:
        if self._coming_cursor != piece.cursor:
            # Another snapshot than the one that was cut off.
            self._coming, self._coming_cursor = {}, piece.cursor
        for part in piece.stored:
            self._coming.setdefault(part.namespace, {})[part.id] = part
        if not piece.last:
            return []
        before, self._parts, self._coming = self._parts, self._coming, {}
        self._cursor, self._coming_cursor = piece.cursor, None
        anew = self._told_anew(before)
        changes: list[Stored | Removed] = [
            _gone(part, piece.cursor.sequence)
            for parts in before.values()
            for part in reversed(parts.values())
            if part.id in anew or part.id not in self
        ]
        changes += [
            part
            for part in self
            if part.id in anew or part.id not in before.get(part.namespace, ())
        ]
        return changes

    def _told_anew(self, before: Mapping[str, Mapping[PartId, Stored]]) -> set[PartId]:
        """Parts that stayed but are removed and stored: they differ, or their parent does, without
        which nobody can have them meanwhile."""
        anew: set[PartId] = set()
        for part in self:
            old = before.get(part.namespace, {}).get(part.id)
            parent = PartId(part.namespace, part.parent_key, part.group_idx, part.medium)
            if old is not None and (old != part or parent in anew):
                anew.add(part.id)
        return anew


def _gone(part: Stored, sequence: int) -> Removed:
    hashes = tuple(part.data.block_hashes) if part.data else ()
    return Removed(sequence, part.namespace, part.key, hashes, part.medium, part.group_idx)

"""A mirror of what a server has announced, without I/O."""

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
    """A message cannot follow the ones before. The next request must be for a snapshot."""


class Index:
    """The parts that a server has announced and not removed, as far as a filter lets them through.

    A part is listed once for each medium that holds it. Not thread-safe: let one thread apply and
    read, or lock around both.
    """

    def __init__(self, only: Filter | None = None) -> None:
        self.only = only or Filter()
        self._cursor: Cursor | None = None
        self._parts: dict[str, dict[PartId, Stored]] = {}
        # The snapshot that is being received, and the cursor for which it is true.
        self._coming: dict[str, dict[PartId, Stored]] = {}
        self._coming_cursor: Cursor | None = None

    def __len__(self) -> int:
        return sum(map(len, self._parts.values()))

    def __contains__(self, part: PartId) -> bool:
        return part in self._parts.get(part.namespace, ())

    def __iter__(self) -> Iterator[Stored]:
        """Every part. On each medium parents come before children."""
        for parts in self._parts.values():
            yield from parts.values()

    @property
    def cursor(self) -> Cursor | None:
        """The place in the log for which the index is true; None if it needs a snapshot."""
        return self._cursor

    def parts(self, namespace: str) -> Mapping[PartId, Stored]:
        """The parts of one namespace. On each medium parents come before children."""
        return self._parts.get(namespace, {})

    def prefix(
        self,
        namespace: str,
        keys: Sequence[bytes],
        group_idx: int | None = None,
        medium: Medium = Medium.UNSPECIFIED,
    ) -> int:
        """How many of a prompt's chunks, from the first on, have a part of the group on the medium.

        UNSPECIFIED: each part may be on any medium.
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
        """Takes in the next message. Returns what changed: parents are stored first, removed last.

        After a snapshot the changes are the difference to the parts before it. Raises
        OutOfStepError if the message cannot be the next one.
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
        """Removes everything, for example when a server does not come back."""
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
            if event.sequence <= number:  # what is between was not for this reader
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
            # A new snapshot, after another one was cut off.
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
        """Parts that a snapshot keeps, but that are told as removed and stored.

        They differ from before, or their parent does: while a parent is gone, so are its children.
        """
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

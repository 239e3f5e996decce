"""The messages of the event stream as plain values, and the request for the stream."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, NamedTuple

from kvdock._verbs import within_limits
from kvdock.errors import InvalidArgument
from kvdock.types import ChunkEventData, GroupKind, ProtocolEnum
from kvdock.v1 import events_pb2 as pb

PROGRESS_INTERVAL: Final = 10.0
"""Seconds after which a quiet server gives a sign of life."""

MISSED_SIGNS: Final = 3
"""How many progress intervals without a message make a server count as lost."""


class Medium(ProtocolEnum):
    """Where bytes are. The names are vLLM's."""

    UNSPECIFIED = pb.MEDIUM_UNSPECIFIED
    GPU = pb.MEDIUM_GPU
    CPU = pb.MEDIUM_CPU
    STORAGE = pb.MEDIUM_STORAGE


@dataclass(frozen=True, slots=True)
class Cursor:
    """A place in a server's log: after the event with this number, in this life of the server."""

    epoch: int
    sequence: int

    def __str__(self) -> str:
        return f"{self.epoch}:{self.sequence}"

    @classmethod
    def parse(cls, text: str) -> Cursor:
        """From EPOCH:SEQUENCE. Raises InvalidArgument."""
        epoch, _, sequence = text.partition(":")
        if not (epoch.isdecimal() and sequence.isdecimal()):
            raise InvalidArgument(f"{text!r} is no cursor: write EPOCH:SEQUENCE")
        return cls(int(epoch), int(sequence))

    def to_proto(self) -> pb.Cursor:
        return pb.Cursor(epoch=self.epoch, sequence=self.sequence)

    @classmethod
    def from_proto(cls, message: pb.Cursor) -> Cursor:
        return cls(message.epoch, message.sequence)


class PartId(NamedTuple):
    """Names one part on one medium. ``group_idx`` None and 0 are different."""

    namespace: str
    key: bytes
    group_idx: int | None
    medium: Medium


@dataclass(frozen=True, slots=True)
class Stored:
    """A part can be found on a medium."""

    sequence: int = field(compare=False)
    namespace: str
    key: bytes
    parent_key: bytes
    """Key of the chunk it extends; empty for a first chunk."""
    data: ChunkEventData | None
    """What the storing engine told about the part; None if nothing."""
    medium: Medium
    group_idx: int | None
    kind: GroupKind
    window_tokens: int

    @property
    def id(self) -> PartId:
        """Which part, and where."""
        return PartId(self.namespace, self.key, self.group_idx, self.medium)


@dataclass(frozen=True, slots=True)
class Removed:
    """A part is gone from a medium. It may still be on another."""

    sequence: int = field(compare=False)
    namespace: str
    key: bytes
    block_hashes: tuple[bytes, ...]
    """As they were announced."""
    medium: Medium
    group_idx: int | None

    @property
    def id(self) -> PartId:
        """Which part, and where."""
        return PartId(self.namespace, self.key, self.group_idx, self.medium)


@dataclass(frozen=True, slots=True)
class Cleared:
    """All parts of a namespace are gone from all media."""

    sequence: int = field(compare=False)
    namespace: str


@dataclass(frozen=True, slots=True)
class Unknown:
    """An event that only newer clients know. It counts as an event, and changes nothing here."""

    sequence: int = field(compare=False)
    namespace: str


Event = Stored | Removed | Cleared | Unknown


@dataclass(frozen=True, slots=True)
class Batch:
    """Events, and the cursor after them."""

    cursor: Cursor
    unix_ms: int
    """When the last event happened."""
    events: tuple[Event, ...]


@dataclass(frozen=True, slots=True)
class SnapshotPiece:
    """Some of the parts that were there at the cursor. Over all pieces parents precede children."""

    cursor: Cursor
    stored: tuple[Stored, ...]
    last: bool


@dataclass(frozen=True, slots=True)
class Progress:
    """Everything up to the cursor was sent."""

    cursor: Cursor


@dataclass(frozen=True, slots=True)
class Compacted:
    """The log does not reach back to the place asked for. The stream ended: ask for a snapshot."""

    cursor: Cursor
    oldest: Cursor
    """The oldest place from which a reader could resume."""


Message = Batch | SnapshotPiece | Progress | Compacted


def message_from_proto(message: pb.StreamKVEventsResponse) -> Message:
    """Reads a message of the stream."""
    cursor = Cursor.from_proto(message.cursor)
    match message.WhichOneof("message"):
        case "batch":
            batch = message.batch
            return Batch(cursor, batch.unix_ms, tuple(map(_event, batch.events)))
        case "snapshot":
            piece = message.snapshot
            parts = [event for event in map(_event, piece.stored) if isinstance(event, Stored)]
            return SnapshotPiece(cursor, tuple(parts), piece.last)
        case "compacted":
            return Compacted(cursor, Cursor.from_proto(message.compacted.oldest))
        case _:
            # A message that only newer servers know has a cursor as well.
            return Progress(cursor)


_KNOWN_MEDIA: Final = frozenset(pb.Medium.values())
# Only these are asked for. Parts elsewhere would look like those here.
_OF_THIS_HOST: Final = (pb.LOCALITY_UNSPECIFIED, pb.LOCALITY_LOCAL)


def _is_known(part: pb.BlockStored | pb.BlockRemoved) -> bool:
    return part.medium in _KNOWN_MEDIA and part.locality in _OF_THIS_HOST


def _event(event: pb.Event) -> Event:
    match event.WhichOneof("event"):
        # Media that only newer clients know would all look alike here, so their events are skipped.
        case "stored" if _is_known(event.stored):
            return _stored(event)
        case "removed" if _is_known(event.removed):
            gone = event.removed
            return Removed(
                event.sequence,
                event.namespace,
                gone.key,
                tuple(gone.block_hashes),
                Medium(gone.medium),
                gone.group_idx if gone.HasField("group_idx") else None,
            )
        case "cleared":
            return Cleared(event.sequence, event.namespace)
        case _:
            return Unknown(event.sequence, event.namespace)


def _stored(event: pb.Event) -> Stored:
    part = event.stored
    return Stored(
        event.sequence,
        event.namespace,
        part.key,
        part.parent_key,
        ChunkEventData.from_proto(part.data) if part.HasField("data") else None,
        Medium(part.medium),
        part.group_idx if part.HasField("group_idx") else None,
        GroupKind(part.kind),
        part.window_tokens,
    )


@dataclass(frozen=True, slots=True)
class Filter:
    """Which events a reader wants; by default all."""

    namespaces: tuple[str, ...] = ()
    group_idx: int | None = None
    """Only parts of this group. None: all parts, also those without group."""
    medium: Medium = Medium.UNSPECIFIED


@within_limits("events")
def stream_request(
    start: Cursor | str, only: Filter, progress_interval: float
) -> pb.StreamKVEventsRequest:
    """The request for a stream that starts at a cursor, ``"now"`` or ``"snapshot"``."""
    request = pb.StreamKVEventsRequest(
        namespaces=only.namespaces,
        group_idx=only.group_idx,
        medium=pb.Medium.ValueType(only.medium),
        progress_interval_ms=round(progress_interval * 1000),
    )
    if not request.progress_interval_ms:
        # On the wire 0 means the server's own interval, but the client must know the interval.
        raise InvalidArgument(f"progress_interval is {progress_interval:g} s: give at least 0.1")
    if isinstance(start, Cursor):
        request.after.CopyFrom(start.to_proto())
    elif start == "snapshot":
        request.snapshot.SetInParent()
    elif start == "now":
        request.now.SetInParent()
    else:
        raise InvalidArgument(f"start {start!r}: a Cursor, 'now' or 'snapshot'")
    return request

"""Events in the protocol's encoding.

An event is encoded once, for all readers and for snapshots. It contains what its store told, as it
came. A message to a reader is joined from encoded events (encoding.py), and is the same as protobuf
would write.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from kvdock.v1 import events_pb2 as pb
from kvdock.v1 import types_pb2 as types
from kvdock_server.encoding import tag, varint
from kvdock_server.events.event import Event, RemovedPart, StoredPart
from kvdock_server.index.namespace import GroupKind

_BATCH: Final = tag(pb.StreamKVEventsResponse, "batch")
_SNAPSHOT: Final = tag(pb.StreamKVEventsResponse, "snapshot")
_PROGRESS: Final = tag(pb.StreamKVEventsResponse, "progress")
_COMPACTED: Final = tag(pb.StreamKVEventsResponse, "compacted")
_BATCH_EVENT: Final = tag(pb.EventBatch, "events")
_SNAPSHOT_EVENT: Final = tag(pb.SnapshotPiece, "stored")
_STORED: Final = tag(pb.Event, "stored")
_STORED_DATA: Final = tag(pb.BlockStored, "data")


def batch(epoch: int, cursor: int, unix_ms: int, events: Sequence[Event]) -> bytes:
    """A StreamKVEventsResponse with these events."""
    body = pb.EventBatch(unix_ms=unix_ms).SerializeToString() + _repeated(_BATCH_EVENT, events)
    return _response(epoch, cursor, _BATCH, body)


def snapshot(epoch: int, cursor: int, events: Sequence[Event], *, last: bool) -> bytes:
    """A StreamKVEventsResponse with a piece of a snapshot."""
    body = _repeated(_SNAPSHOT_EVENT, events) + pb.SnapshotPiece(last=last).SerializeToString()
    return _response(epoch, cursor, _SNAPSHOT, body)


def progress(epoch: int, cursor: int) -> bytes:
    """A StreamKVEventsResponse that tells the cursor only."""
    return _response(epoch, cursor, _PROGRESS, pb.Progress().SerializeToString())


def compacted(epoch: int, cursor: int, oldest: int) -> bytes:
    """A StreamKVEventsResponse that ends a stream whose reader is too far behind."""
    body = pb.Compacted(oldest=pb.Cursor(epoch=epoch, sequence=oldest)).SerializeToString()
    return _response(epoch, cursor, _COMPACTED, body)


def _response(epoch: int, cursor: int, field: bytes, body: bytes) -> bytes:
    place = pb.StreamKVEventsResponse(cursor=pb.Cursor(epoch=epoch, sequence=cursor))
    return place.SerializeToString() + field + varint(len(body)) + body


def _repeated(prefix: bytes, events: Sequence[Event]) -> bytes:
    return prefix.join([b"", *[event.wire or _encode(event) for event in events]])


def _encode(event: Event) -> bytes:
    """The event's length and encoding, which the event keeps."""
    medium = event.medium or 0
    match event.content:
        case StoredPart(key, parent_key, group, data):
            begin = pb.BlockStored(key=key, parent_key=parent_key).SerializeToString()
            told = _STORED_DATA + varint(len(data)) + data if data else b""
            where = _stored_where(medium, group.group_idx, group.kind, group.window_tokens)
            what = begin + told + where
            thing = _STORED + varint(len(what)) + what
        case RemovedPart(key, group, announced):
            removed = pb.BlockRemoved(
                key=key,
                block_hashes=event_data(announced).block_hashes,
                medium=pb.Medium.ValueType(medium),
                group_idx=group.group_idx,
            )
            thing = pb.Event(removed=removed).SerializeToString()
        case None:
            thing = pb.Event(cleared=pb.AllBlocksCleared()).SerializeToString()
    number = pb.Event(sequence=event.number).SerializeToString()
    encoded = _namespace(event.namespace) + thing + number
    event.wire = varint(len(encoded)) + encoded
    event.content = None
    return event.wire


@lru_cache(1_024)
def _namespace(name: str) -> bytes:
    return pb.Event(namespace=name).SerializeToString()


@lru_cache(1_024)
def _stored_where(medium: int, group_idx: int | None, kind: GroupKind, window_tokens: int) -> bytes:
    """The fields that are the same for all parts of a group on one medium."""
    return pb.BlockStored(
        medium=pb.Medium.ValueType(medium),
        group_idx=group_idx,
        kind=types.GroupKind.ValueType(kind.value),
        window_tokens=window_tokens,
    ).SerializeToString()


def event_data(announced: Event) -> types.ChunkEventData:
    """What a stored event, encoded or not, told of its part."""
    if isinstance(announced.content, StoredPart):
        return types.ChunkEventData.FromString(announced.content.data)
    encoded = announced.wire or b""
    begin = next(index for index, byte in enumerate(encoded) if byte < 0x80) + 1
    return pb.Event.FromString(encoded[begin:]).stored.data

"""Events as the protocol has them.

A message to a reader is put together from events that were encoded before, once for all readers and
for snapshots too. This is what protobuf itself would write: the fields of a message one after
another, each of them a tag, a length and the encoded value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvdock.v1 import events_pb2 as pb
from kvdock.v1 import types_pb2 as types
from kvdock_server.encoding import tag, varint
from kvdock_server.events.event import Event, RemovedPart, StoredPart

_BATCH: Final = tag(pb.StreamKVEventsResponse, "batch")
_SNAPSHOT: Final = tag(pb.StreamKVEventsResponse, "snapshot")
_BATCH_EVENT: Final = tag(pb.EventBatch, "events")
_SNAPSHOT_EVENT: Final = tag(pb.SnapshotPiece, "stored")


def batch(epoch: int, cursor: int, unix_ms: int, events: Sequence[Event]) -> bytes:
    """A StreamKVEventsResponse with these events."""
    body = pb.EventBatch(unix_ms=unix_ms).SerializeToString() + _repeated(_BATCH_EVENT, events)
    return _response(epoch, cursor) + _BATCH + varint(len(body)) + body


def snapshot(epoch: int, cursor: int, events: Sequence[Event], *, last: bool) -> bytes:
    """A StreamKVEventsResponse with a piece of a snapshot."""
    body = _repeated(_SNAPSHOT_EVENT, events) + pb.SnapshotPiece(last=last).SerializeToString()
    return _response(epoch, cursor) + _SNAPSHOT + varint(len(body)) + body


def progress(epoch: int, cursor: int) -> bytes:
    """A StreamKVEventsResponse that says that nothing happened."""
    response = pb.StreamKVEventsResponse(
        cursor=pb.Cursor(epoch=epoch, sequence=cursor), progress=pb.Progress()
    )
    return response.SerializeToString()


def compacted(epoch: int, cursor: int, oldest: int) -> bytes:
    """A StreamKVEventsResponse that ends a stream whose reader is too far behind."""
    response = pb.StreamKVEventsResponse(
        cursor=pb.Cursor(epoch=epoch, sequence=cursor),
        compacted=pb.Compacted(oldest=pb.Cursor(epoch=epoch, sequence=oldest)),
    )
    return response.SerializeToString()


def _response(epoch: int, cursor: int) -> bytes:
    return pb.StreamKVEventsResponse(
        cursor=pb.Cursor(epoch=epoch, sequence=cursor)
    ).SerializeToString()


def _repeated(tag: bytes, events: Sequence[Event]) -> bytes:
    return tag.join([b"", *[event.wire or _encode(event) for event in events]])


def _encode(event: Event) -> bytes:
    """The event's length and encoding, which stay with it."""
    message = _message(event).SerializeToString()
    event.wire = varint(len(message)) + message
    event.content = None
    return event.wire


def _message(event: Event) -> pb.Event:
    message = pb.Event(namespace=event.namespace, sequence=event.number)
    match event.content:
        case StoredPart(key, parent_key, group, data):
            stored = message.stored
            stored.key = key
            stored.parent_key = parent_key
            stored.medium = pb.MEDIUM_CPU
            if group.group_idx is not None:
                stored.group_idx = group.group_idx
            stored.kind = types.GroupKind.ValueType(group.kind.value)
            stored.window_tokens = group.window_tokens
            if data:
                stored.data.ParseFromString(data)
        case RemovedPart(key, group, announced):
            removed = message.removed
            removed.key = key
            removed.medium = pb.MEDIUM_CPU
            if group.group_idx is not None:
                removed.group_idx = group.group_idx
            removed.block_hashes.extend(_block_hashes(announced))
        case None:
            message.cleared.SetInParent()
    return message


def _block_hashes(announced: Event) -> Sequence[bytes]:
    """What a stored event, encoded or not, told of its blocks."""
    if isinstance(announced.content, StoredPart):
        return types.ChunkEventData.FromString(announced.content.data).block_hashes
    encoded = announced.wire or b""
    begin = next(index for index, byte in enumerate(encoded) if byte < 0x80) + 1
    return pb.Event.FromString(encoded[begin:]).stored.data.block_hashes

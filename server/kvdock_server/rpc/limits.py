"""How many entries the lists of a request may have, and which values its enums.

This is checked before any entry is looked at. Every entry costs time, and a message of 4 MiB can
hold two million of them: enough to hold up the event loop, and every other client, for seconds.
``MOST`` has every list of every request. A test compares it with the protocol. Enum fields are
found in the descriptors. A request with a value that this server does not know asks for something
unknown, and is refused.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

from google.protobuf.message import Message

from kvdock_server.core import (
    MAX_GROUPS,
    MAX_KEYS,
    MAX_KV_WORLD_SIZE,
    MAX_LABELS,
    MAX_LOCK_RANGES,
    MAX_READERS,
)
from kvdock_server.errors import invalid
from kvdock_server.rpc.features import MOST_FEATURES

MAX_REGIONS = 4_096
"""Pieces of a block, over all groups: a dozen for each layer of the deepest models."""
MAX_ALLOCATIONS = 4_096
MAX_NAMESPACES = 4_096
"""The most that a server knows."""

_PACKAGE = "kvdock.v1."


class Limit(NamedTuple):
    """How many entries of one field a whole message may have. ``most`` None: checked elsewhere."""

    least: int
    most: int | None


_KEYS = Limit(1, MAX_KEYS)
_EVENT_DATA = Limit(0, MAX_KEYS)
# One for each block of the keys: GroupMemory.block_ids checks their number before it looks at them.
_BLOCK_IDS = Limit(0, None)

MOST: dict[str, Limit] = {
    "CommitRequest.chunks": Limit(0, MAX_KEYS),
    "FreeLocksRequest.locks": Limit(0, MAX_LOCK_RANGES),
    "GetRequest.keys": _KEYS,
    "Group.shard_bytes": Limit(0, MAX_GROUPS * MAX_KV_WORLD_SIZE),
    "GroupMemory.regions": Limit(0, MAX_REGIONS),
    "ListNamespacesRequest.labels": Limit(0, MAX_LABELS),
    "LookupRequest.keys": _KEYS,
    "Namespace.groups": Limit(1, MAX_GROUPS),
    "Namespace.labels": Limit(0, MAX_LABELS),
    "OpenRequest.features": Limit(0, MOST_FEATURES),
    "PinRequest.keys": _KEYS,
    "PutOpen.event_data": _EVENT_DATA,
    "PutOpen.keys": _KEYS,
    "RegisterMemoryRequest.allocations": Limit(0, MAX_ALLOCATIONS),
    "RegisterMemoryRequest.groups": Limit(0, MAX_GROUPS),
    "ReserveRequest.event_data": _EVENT_DATA,
    "ReserveRequest.keys": _KEYS,
    "RetrieveRequest.also_fill": Limit(0, MAX_READERS - 1),
    "RetrieveRequest.block_ids": _BLOCK_IDS,
    "StoreRequest.block_ids": _BLOCK_IDS,
    "StoreRequest.event_data": _EVENT_DATA,
    "StoreRequest.keys": _KEYS,
    "StreamKVEventsRequest.localities": Limit(0, 8),
    "StreamKVEventsRequest.namespaces": Limit(0, MAX_NAMESPACES),
}

# What a client does with more.
_NEXT_WITH_PARENT = "; send the rest in another call, with the last key of this one as parent_key"
_KEYS_HINTS = {
    "GetRequest.keys": "; send the rest in another call",
    "LookupRequest.keys": "; if all of these are a hit, look up the next in another call",
    "PinRequest.keys": "; pin the rest in another call",
    "PutOpen.keys": _NEXT_WITH_PARENT,
    "ReserveRequest.keys": _NEXT_WITH_PARENT,
    "StoreRequest.keys": _NEXT_WITH_PARENT,
}

OPAQUE = frozenset({"ChunkEventData"})
"""Messages whose lists are not looked into: they are kept encoded, and conversions.py limits their
bytes.
"""


def check(message: Message) -> None:
    """RequestError (INVALID_ARGUMENT) if a list has a wrong length, or an enum an unknown value."""
    counts: Counter[str] = Counter()
    level = [message]
    while level:
        deeper: list[Message] = []
        for one in level:
            for field in _fields(one.DESCRIPTOR):
                value = getattr(one, field.name)
                if field.is_list:
                    counts[field.label] += len(value)
                    _compare(field.label, counts[field.label])
                    if field.is_deep:
                        deeper.extend(value)
                elif field.is_deep and one.HasField(field.name):
                    deeper.append(value)
                if field.known is not None:
                    _check_known(field, value if field.is_list else [value])
        level = deeper


def _compare(label: str, count: int) -> None:
    least, most = MOST[label]
    if most is not None and not least <= count <= most:
        name = label.partition(".")[2]
        hint = _KEYS_HINTS.get(label, "")
        raise invalid(f"{count} {name}: from {least} to {most}{hint}", name, most)


def _check_known(field: _Field, values: Iterable[int]) -> None:
    known = field.known or {}
    for value in values:
        if value not in known:
            raise invalid(
                f"{field.name} {value}: this server knows no such value, only "
                f"{', '.join(known.values())}",
                field.name,
            )


class _Field(NamedTuple):
    """A field to look at: a list, an enum, or a message with such fields in it.

    ``is_deep``: the field holds messages with fields to look at. ``known``: the names of the enum's
    values, None for a field of another kind.
    """

    name: str
    label: str
    is_list: bool
    is_deep: bool
    known: dict[int, str] | None


@functools.cache
def _fields(descriptor: Any) -> tuple[_Field, ...]:
    """The fields of a message that are to be looked at."""
    found = []
    for field in descriptor.fields:
        inner = field.message_type
        is_map = inner is not None and inner.GetOptions().map_entry
        is_deep = inner is not None and not is_map and bool(_fields(inner))
        known = None
        if field.enum_type is not None:
            known = {value.number: value.name for value in field.enum_type.values}
        if field.is_repeated or is_deep or known:
            label = field.full_name.removeprefix(_PACKAGE)
            found.append(_Field(field.name, label, field.is_repeated, is_deep, known))
    return () if descriptor.name in OPAQUE else tuple(found)

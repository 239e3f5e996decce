"""One event: what happened to one part, or to a whole namespace.

An event is encoded when the first reader wants it. So a log that nobody reads costs next to
nothing. The encoding then takes the place of ``content``. The event that announced a part also
stands for the part in snapshots, so that what a store told of the part is kept once.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Final, NamedTuple

from kvdock_server.index.namespace import Group

# Upper bound of the memory of an event beside its ``data``: the object, its numbers and keys, its
# place in the log, and what the encoding adds.
_OVERHEAD_BYTES: Final = 640


class Medium(IntEnum):
    """Where the bytes of a part are. The values are the protocol's."""

    CPU = 2
    STORAGE = 3


class StoredPart(NamedTuple):
    """A part that can be found from now on. ``data`` is an encoded ChunkEventData, or empty."""

    key: bytes
    parent_key: bytes
    group: Group
    data: bytes


class RemovedPart(NamedTuple):
    """A part that cannot be found any more, and the event that announced it."""

    key: bytes
    group: Group
    announced: Event


@dataclass(slots=True, eq=False)
class Event:
    """``content`` is None if the whole namespace was cleared, in every group and on every medium.

    The log sets ``number`` and ``unix_ms``. ``wire`` is the encoded event, once it was wanted. From
    then on ``content`` is None in any case.
    """

    namespace: str
    group: Group | None
    medium: Medium | None
    content: StoredPart | RemovedPart | None
    nbytes: int
    number: int = 0
    unix_ms: int = 0
    wire: bytes | None = None


def stored(namespace: str, medium: Medium, part: StoredPart) -> Event:
    """A part can be found on a medium from now on."""
    return Event(namespace, part.group, medium, part, _OVERHEAD_BYTES + len(part.data))


def removed(namespace: str, medium: Medium, part: RemovedPart) -> Event:
    """A part is gone from a medium. The event that announced it lives as long as this one."""
    return Event(namespace, part.group, medium, part, _OVERHEAD_BYTES + part.announced.nbytes)


def cleared(namespace: str) -> Event:
    """Everything of a namespace is gone."""
    return Event(namespace, None, None, None, _OVERHEAD_BYTES)

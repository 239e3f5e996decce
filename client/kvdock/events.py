"""The event stream of a server, and a mirror of what it has.

What every router must write is here: :class:`Index` holds the parts that a server has, and a
:class:`Follower` keeps it so, through lost connections, restarts of the server, and having fallen
behind::

    index = Index()
    for update in Follower(index, "unix:///run/kvdock/kvdock.sock"):
        ...  # index.prefix(namespace, keys), update.changes

:class:`AsyncFollower` does the same in an event loop. ``Client.events`` is the stream by itself.

An Index is pure: feed it the messages of streams that began at its ``start``, and it equals what
the server had announced at its ``cursor``, exactly. A follower may be stopped between any two
messages and another one go on with the same Index.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Final, NamedTuple, Self

from kvdock.errors import InvalidArgument, KVDockError, NoEventLog
from kvdock.types import ChunkEventData, GroupKind
from kvdock.v1 import events_pb2 as pb

if TYPE_CHECKING:
    from kvdock.aio.client import Client as AsyncClient
    from kvdock.client import Client

_log = logging.getLogger(__name__)

PROGRESS_INTERVAL: Final = 10.0
"""Seconds after which a quiet server gives a sign of life."""

MISSED_SIGNS: Final = 3
"""After so many intervals without any message the server counts as lost."""

_FIRST_DELAY: Final = 0.1
_LONGEST_DELAY: Final = 2.0


class Medium(IntEnum):
    """Where bytes are. The names are vLLM's."""

    UNSPECIFIED = pb.MEDIUM_UNSPECIFIED
    GPU = pb.MEDIUM_GPU
    CPU = pb.MEDIUM_CPU
    STORAGE = pb.MEDIUM_STORAGE

    @classmethod
    def _missing_(cls, value: object) -> Medium:
        return cls.UNSPECIFIED


@dataclass(frozen=True, slots=True)
class Cursor:
    """A place in a server's log: after the event of that number, in that life of the server."""

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
        """The message."""
        return pb.Cursor(epoch=self.epoch, sequence=self.sequence)

    @classmethod
    def from_proto(cls, message: pb.Cursor) -> Cursor:
        """Reads a message."""
        return cls(message.epoch, message.sequence)


class PartId(NamedTuple):
    """Names one part. ``group_idx`` None and 0 are different."""

    namespace: str
    key: bytes
    group_idx: int | None


@dataclass(frozen=True, slots=True)
class Stored:
    """A part can be found."""

    sequence: int = field(compare=False)
    namespace: str
    key: bytes
    parent_key: bytes
    """Key of the chunk it extends; empty for a first chunk."""
    data: ChunkEventData | None
    """What the storing engine told of it; None if it told nothing."""
    medium: Medium
    group_idx: int | None
    kind: GroupKind
    window_tokens: int

    @property
    def id(self) -> PartId:
        """Which part."""
        return PartId(self.namespace, self.key, self.group_idx)


@dataclass(frozen=True, slots=True)
class Removed:
    """A part cannot be found any more."""

    sequence: int = field(compare=False)
    namespace: str
    key: bytes
    block_hashes: tuple[bytes, ...]
    """As they were announced."""
    medium: Medium
    group_idx: int | None

    @property
    def id(self) -> PartId:
        """Which part."""
        return PartId(self.namespace, self.key, self.group_idx)


@dataclass(frozen=True, slots=True)
class Cleared:
    """No part of the namespace can be found any more."""

    sequence: int = field(compare=False)
    namespace: str


Event = Stored | Removed | Cleared


@dataclass(frozen=True, slots=True)
class Batch:
    """Events, and the cursor after them."""

    cursor: Cursor
    unix_ms: int
    """When the last of them happened."""
    events: tuple[Event, ...]


@dataclass(frozen=True, slots=True)
class SnapshotPiece:
    """Some of what was there at the cursor, parents before children across all pieces."""

    cursor: Cursor
    stored: tuple[Stored, ...]
    last: bool


@dataclass(frozen=True, slots=True)
class Progress:
    """Everything up to the cursor was sent."""

    cursor: Cursor


@dataclass(frozen=True, slots=True)
class Compacted:
    """The wanted place is gone and the stream has ended: ask for a snapshot."""

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
            return SnapshotPiece(cursor, tuple(map(_stored, piece.stored)), piece.last)
        case "compacted":
            return Compacted(cursor, Cursor.from_proto(message.compacted.oldest))
        case _:
            # What a newer server adds to the protocol has a cursor as well.
            return Progress(cursor)


def _event(event: pb.Event) -> Event:
    match event.WhichOneof("event"):
        case "stored":
            return _stored(event)
        case "removed":
            gone = event.removed
            return Removed(
                event.sequence,
                event.namespace,
                gone.key,
                tuple(gone.block_hashes),
                Medium(gone.medium),
                gone.group_idx if gone.HasField("group_idx") else None,
            )
        case _:
            return Cleared(event.sequence, event.namespace)


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
    """What a reader wants to hear of; by default everything."""

    namespaces: tuple[str, ...] = ()
    group_idx: int | None = None
    """Only parts of this group. None: of all, also those without group."""
    medium: Medium = Medium.UNSPECIFIED

    @property
    def is_all(self) -> bool:
        """True if it lets everything through."""
        return self == Filter()


def stream_request(
    start: Cursor | str, only: Filter, progress_interval: float
) -> pb.StreamKVEventsRequest:
    """The request for a stream from a cursor, ``"now"`` or ``"snapshot"``."""
    request = pb.StreamKVEventsRequest(
        namespaces=only.namespaces,
        group_idx=only.group_idx,
        medium=pb.Medium.ValueType(only.medium),
        progress_interval_ms=round(progress_interval * 1000),
    )
    if isinstance(start, Cursor):
        request.after.CopyFrom(start.to_proto())
    elif start == "snapshot":
        request.snapshot.SetInParent()
    elif start == "now":
        request.now.SetInParent()
    else:
        raise InvalidArgument(f"start {start!r}: a Cursor, 'now' or 'snapshot'")
    return request


class OutOfStepError(Exception):
    """A message does not follow from the ones before. The next request is for a snapshot."""


class Index:
    """What a server has announced and not removed: all of it, or what a filter lets through.

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
        """Every part there is, parents before children."""
        for parts in self._parts.values():
            yield from parts.values()

    @property
    def cursor(self) -> Cursor | None:
        """For when the index is true; None if only a snapshot can tell."""
        return self._cursor

    def parts(self, namespace: str) -> Mapping[PartId, Stored]:
        """The parts of one namespace, parents before children."""
        return self._parts.get(namespace, {})

    def prefix(self, namespace: str, keys: Sequence[bytes], group_idx: int | None = None) -> int:
        """How many of a prompt's chunks, from the first on, have a part of that group."""
        parts = self._parts.get(namespace, {})
        for count, key in enumerate(keys):
            if PartId(namespace, key, group_idx) not in parts:
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
        changes: list[Stored | Removed] = [
            _gone(part, piece.cursor.sequence)
            for parts in before.values()
            for part in reversed(parts.values())
            if self.parts(part.namespace).get(part.id) != part
        ]
        changes += [part for part in self if before.get(part.namespace, {}).get(part.id) != part]
        return changes


def _gone(part: Stored, sequence: int) -> Removed:
    hashes = tuple(part.data.block_hashes) if part.data else ()
    return Removed(sequence, part.namespace, part.key, hashes, part.medium, part.group_idx)


@dataclass(frozen=True, slots=True)
class Update:
    """What a follower learned."""

    changes: Sequence[Stored | Removed]
    """What changed in the index; empty after a mere sign of life."""
    lost: KVDockError | None = None
    """Why there is no connection now; the follower goes on trying. None: there is one."""


class _Attempts:
    """How long to wait before the next attempt, and which failures are final."""

    def __init__(self) -> None:
        self._delay = _FIRST_DELAY

    def succeeded(self) -> None:
        self._delay = _FIRST_DELAY

    def failed(self, error: KVDockError) -> float:
        """Seconds to wait. Raises the error if another attempt would fail as well."""
        if isinstance(error, NoEventLog | InvalidArgument):
            raise error
        delay, self._delay = self._delay, min(2 * self._delay, _LONGEST_DELAY)
        return delay


def _apply(index: Index, message: Message) -> Update | None:
    """None if the stream is of no more use."""
    try:
        return Update(index.apply(message))
    except OutOfStepError as error:
        _log.warning("the event stream is out of step, taking a snapshot: %s", error)
        return None


class Follower:
    """Keeps an index equal to a server. Iterating does the work, on the thread that iterates.

    It has a connection of its own, so that a reader that is slow holds up nobody else's calls. An
    Update comes at least every ``progress_interval`` seconds while there is a connection. The
    iteration ends with :meth:`close`, which may be called on any thread. Raises NoEventLog if the
    server keeps no log.
    """

    def __init__(
        self,
        index: Index,
        address: str | None = None,
        *,
        progress_interval: float = PROGRESS_INTERVAL,
    ) -> None:
        from kvdock.client import Client

        self.index = index
        self._client: Client = Client(address)
        self._progress_interval = progress_interval
        self._closed = threading.Event()

    def __iter__(self) -> Iterator[Update]:
        attempts = _Attempts()
        while not self._closed.is_set():
            delay = _FIRST_DELAY
            messages = self._client.events(
                self.index.start, only=self.index.only, progress_interval=self._progress_interval
            )
            try:
                for message in messages:
                    attempts.succeeded()
                    update = _apply(self.index, message)
                    if update is None:
                        break
                    yield update
            except KVDockError as error:
                if self._closed.is_set():
                    return
                delay = attempts.failed(error)
                yield Update((), error)
            finally:
                messages.close()
            self._closed.wait(delay)

    def close(self) -> None:
        """Ends the iteration and the connection."""
        self._closed.set()
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class AsyncFollower:
    """As :class:`Follower`, in an event loop; make it there."""

    def __init__(
        self,
        index: Index,
        address: str | None = None,
        *,
        progress_interval: float = PROGRESS_INTERVAL,
    ) -> None:
        from kvdock.aio.client import Client

        self.index = index
        self._client: AsyncClient = Client(address)
        self._progress_interval = progress_interval
        self._closed = False

    async def __aiter__(self) -> AsyncIterator[Update]:
        attempts = _Attempts()
        while not self._closed:
            delay = _FIRST_DELAY
            messages = self._client.events(
                self.index.start, only=self.index.only, progress_interval=self._progress_interval
            )
            try:
                async for message in messages:
                    attempts.succeeded()
                    update = _apply(self.index, message)
                    if update is None:
                        break
                    yield update
            except KVDockError as error:
                if self._closed:
                    return
                delay = attempts.failed(error)
                yield Update((), error)
            finally:
                await messages.aclose()
            await asyncio.sleep(delay)

    async def close(self) -> None:
        """Ends the iteration and the connection."""
        self._closed = True
        await self._client.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

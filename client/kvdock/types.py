"""The values that calls take and return. They are frozen and independent of protobuf.

``to_proto`` makes the protocol's message of a value, ``from_proto`` the value of a message. Sizes
and offsets are in bytes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import accumulate
from typing import NamedTuple, Self

from kvdock.errors import InvalidArgument
from kvdock.event_data import ChunkEventData as ChunkEventData
from kvdock.pin import Keep as Keep
from kvdock.pin import PinStatus as PinStatus
from kvdock.pin import Unpinned as Unpinned
from kvdock.v1 import admin_pb2, cache_pb2, session_pb2, types_pb2


class ProtocolEnum(IntEnum):
    """An enumeration of the protocol, with a member UNSPECIFIED.

    A newer server may know values that this client does not: they are read as UNSPECIFIED.
    """

    @classmethod
    def _missing_(cls, value: object) -> Self:
        return cls(0)


class TransferMode(ProtocolEnum):
    """How the bytes of one session's chunks move."""

    UNSPECIFIED = types_pb2.TRANSFER_MODE_UNSPECIFIED
    SERVER = types_pb2.TRANSFER_MODE_SERVER
    SHARED = types_pb2.TRANSFER_MODE_SHARED
    INLINE = types_pb2.TRANSFER_MODE_INLINE


class GroupKind(ProtocolEnum):
    """What a KV-cache group needs of the past."""

    UNSPECIFIED = types_pb2.GROUP_KIND_UNSPECIFIED
    FULL_ATTENTION = types_pb2.GROUP_KIND_FULL_ATTENTION
    SLIDING_WINDOW = types_pb2.GROUP_KIND_SLIDING_WINDOW
    RECURRENT_STATE = types_pb2.GROUP_KIND_RECURRENT_STATE
    CHUNKED_LOCAL_ATTENTION = types_pb2.GROUP_KIND_CHUNKED_LOCAL_ATTENTION


class ChunkStatus(ProtocolEnum):
    """Outcome for one chunk of a call.

    UNSPECIFIED is what this client does not know: a failure, nothing was stored or delivered.
    """

    UNSPECIFIED = types_pb2.CHUNK_STATUS_UNSPECIFIED
    STORED = types_pb2.CHUNK_STATUS_STORED
    RESERVED = types_pb2.CHUNK_STATUS_RESERVED
    EXISTS = types_pb2.CHUNK_STATUS_EXISTS
    NO_SPACE = types_pb2.CHUNK_STATUS_NO_SPACE
    PARENT_MISSING = types_pb2.CHUNK_STATUS_PARENT_MISSING
    RETRIEVED = types_pb2.CHUNK_STATUS_RETRIEVED
    NOT_FOUND = types_pb2.CHUNK_STATUS_NOT_FOUND
    NOT_LOCKED = types_pb2.CHUNK_STATUS_NOT_LOCKED
    FAILED = types_pb2.CHUNK_STATUS_FAILED


_CHUNK_STATUSES: dict[int, ChunkStatus] = {int(status): status for status in ChunkStatus}


def chunk_status(value: int) -> ChunkStatus:
    """``ChunkStatus(value)``, in a fraction of the time: a call has one for each chunk."""
    return _CHUNK_STATUSES.get(value, ChunkStatus.UNSPECIFIED)


class EvictionPriority(ProtocolEnum):
    """How soon chunks are evicted, beside others that were last used at the same time."""

    UNSPECIFIED = types_pb2.EVICTION_PRIORITY_UNSPECIFIED
    LOW = types_pb2.EVICTION_PRIORITY_LOW
    NORMAL = types_pb2.EVICTION_PRIORITY_NORMAL
    HIGH = types_pb2.EVICTION_PRIORITY_HIGH

    def to_proto(self) -> types_pb2.EvictionPriority.ValueType:
        return types_pb2.EvictionPriority.ValueType(self)


NORMAL_PRIORITY = EvictionPriority.UNSPECIFIED


class SessionRole(ProtocolEnum):
    """The part of an engine that a session stands for."""

    UNSPECIFIED = session_pb2.SESSION_ROLE_UNSPECIFIED
    SCHEDULER = session_pb2.SESSION_ROLE_SCHEDULER
    WORKER = session_pb2.SESSION_ROLE_WORKER
    TOOL = session_pb2.SESSION_ROLE_TOOL


@dataclass(frozen=True, slots=True)
class Group:
    """One KV-cache group of a namespace."""

    shard_bytes: tuple[int, ...]
    """One size for all shards, or one for each; 0 where a size is not known yet."""
    kind: GroupKind = GroupKind.FULL_ATTENTION
    group_idx: int | None = None
    """The engine's index; None means that the engine has no groups, which is not group 0."""
    window_tokens: int = 0
    """Of SLIDING_WINDOW, the current token included; 0 for every other kind."""
    attention_chunk_tokens: int = 0
    """Of CHUNKED_LOCAL_ATTENTION: tokens of a piece, of which a token sees only its own; 0 for
    every other kind."""

    def to_proto(self) -> types_pb2.Group:
        return types_pb2.Group(
            group_idx=self.group_idx,
            kind=types_pb2.GroupKind.ValueType(self.kind),
            window_tokens=self.window_tokens,
            attention_chunk_tokens=self.attention_chunk_tokens,
            shard_bytes=self.shard_bytes,
        )

    @classmethod
    def from_proto(cls, message: types_pb2.Group) -> Group:
        return cls(
            kind=GroupKind(message.kind),
            group_idx=_group_idx(message),
            window_tokens=message.window_tokens,
            attention_chunk_tokens=message.attention_chunk_tokens,
            shard_bytes=tuple(message.shard_bytes),
        )


@dataclass(frozen=True, slots=True)
class Namespace:
    """Everything that must be equal for KV bytes to be interchangeable."""

    name: str
    """Identity: 1 to 256 printable ASCII characters without space."""
    chunk_tokens: int
    kv_world_size: int
    """How many shards a part has."""
    groups: tuple[Group, ...]
    labels: Mapping[str, str] = field(default_factory=dict)
    """For listings; not part of the identity."""

    def to_proto(self) -> types_pb2.Namespace:
        return types_pb2.Namespace(
            name=self.name,
            labels=self.labels,
            chunk_tokens=self.chunk_tokens,
            kv_world_size=self.kv_world_size,
            groups=[group.to_proto() for group in self.groups],
        )

    @classmethod
    def from_proto(cls, message: types_pb2.Namespace) -> Namespace:
        return cls(
            name=message.name,
            chunk_tokens=message.chunk_tokens,
            kv_world_size=message.kv_world_size,
            groups=tuple(Group.from_proto(group) for group in message.groups),
            labels=dict(message.labels),
        )


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of the server's host memory that clients of the same host may map."""

    segment_id: int
    shm_name: str
    """POSIX shared-memory name, with its leading slash."""
    nbytes: int
    proof: bytes = field(default=b"", repr=False)
    """The bytes that end the file, after its ``nbytes``, if it is the pool of this server."""

    @classmethod
    def from_proto(cls, message: types_pb2.Segment) -> Segment:
        return cls(message.segment_id, message.shm_name, message.bytes, message.proof)


class Location(NamedTuple):
    """Where one shard lies in the pool."""

    segment_id: int
    offset: int
    length: int

    @classmethod
    def from_proto(cls, message: types_pb2.Location) -> Location:
        return cls(message.segment_id, message.offset, message.length)


@dataclass(frozen=True, slots=True)
class Lease:
    """Names the locks that a Lookup took. Plain data: it may be pickled and sent to a worker."""

    id: int
    epoch: int
    """Of the server that granted it."""


@dataclass(frozen=True, slots=True)
class GroupHit:
    """The chunks [first_chunk, end_chunk) of one group that a hit needs, and that are locked."""

    group_idx: int | None
    first_chunk: int
    end_chunk: int


@dataclass(frozen=True, slots=True)
class Hit:
    """Answer to a Lookup."""

    epoch: int
    chunks: int
    """How many of the prompt's chunks, from the first on, can be loaded; 0 is a miss."""
    lease: Lease | None
    """None if nothing was locked: a miss or a probe."""
    groups: tuple[GroupHit, ...]

    @classmethod
    def from_proto(cls, message: cache_pb2.LookupResponse) -> Hit:
        return cls(
            epoch=message.epoch,
            chunks=message.hit_chunks,
            lease=Lease(message.lease_id, message.epoch) if message.lease_id else None,
            groups=tuple(
                GroupHit(_group_idx(group), group.first_chunk, group.end_chunk)
                for group in message.groups
            ),
        )


class ChunkResult(NamedTuple):
    """Outcome for one chunk of a call."""

    status: ChunkStatus
    location: Location | None
    """Where its bytes belong (RESERVED) or lie (RETRIEVED in shared mode); else None."""

    @classmethod
    def from_proto(cls, message: cache_pb2.ChunkResult) -> ChunkResult:
        return cls(
            chunk_status(message.status),
            Location.from_proto(message.location) if message.HasField("location") else None,
        )


@dataclass(frozen=True, slots=True)
class Reservation:
    """Answer to a Reserve."""

    id: int
    """For Commit and Abort; 0 if nothing was reserved."""
    epoch: int
    chunks: tuple[ChunkResult, ...]
    """One for each key: RESERVED, EXISTS, NO_SPACE or PARENT_MISSING."""
    pieces: tuple[tuple[int, int], ...] = ()
    """If it took several requests, of each the id and the number of chunks; ``id`` is the first."""
    kept_chunks: int = 0
    """How many of the chunks, from the first on, are kept as was asked."""

    @property
    def ids(self) -> tuple[int, ...]:
        """The ids of all that is reserved, for whoever sends Commit or Abort by itself."""
        every = [number for number, _ in self.pieces] or [self.id]
        return tuple(number for number in every if number)

    @classmethod
    def joined(cls, made: Sequence[Reservation]) -> Reservation:
        """One of several, whose chunks follow one another."""
        ids = [one.id for one in made if one.id]
        return cls(
            ids[0] if ids else 0,
            made[0].epoch,
            tuple(chunk for one in made for chunk in one.chunks),
            tuple((one.id, len(one.chunks)) for one in made),
            sum(one.kept_chunks for one in made),
        )

    def by_piece(self, chunks: Sequence[int] | None) -> dict[int, list[tuple[int, int]] | None]:
        """For each id in ``pieces`` the chunks of these: place in ``chunks``, index of its own.

        ``chunks`` None is all, and so is each None in the result. Raises InvalidArgument for a
        chunk that was not reserved.
        """
        if chunks is None:
            return dict.fromkeys(self.ids)
        ends = list(accumulate(count for _, count in self.pieces))
        wanted: dict[int, list[tuple[int, int]] | None] = {}
        for place, chunk in enumerate(chunks):
            at = bisect_right(ends, chunk)
            if not 0 <= chunk < len(self.chunks) or not self.pieces[at][0]:
                raise InvalidArgument(f"chunk {chunk} was not reserved")
            number, count = self.pieces[at]
            own = wanted.setdefault(number, [])
            assert own is not None
            own.append((place, chunk - (ends[at] - count)))
        return wanted

    @classmethod
    def from_proto(cls, message: cache_pb2.ReserveResponse) -> Reservation:
        return cls(
            message.reservation_id,
            message.epoch,
            tuple(ChunkResult.from_proto(chunk) for chunk in message.chunks),
            kept_chunks=message.kept_chunks,
        )


@dataclass(frozen=True, slots=True)
class DeviceAllocation:
    """One whole allocation of device memory."""

    ipc_handle: bytes
    """64-byte CUDA IPC memory handle."""
    nbytes: int
    device_uuid: bytes
    """16 bytes."""

    def to_proto(self) -> session_pb2.DeviceAllocation:
        return session_pb2.DeviceAllocation(
            ipc_handle=self.ipc_handle, bytes=self.nbytes, device_uuid=self.device_uuid
        )


@dataclass(frozen=True, slots=True)
class BlockRegion:
    """One contiguous piece of every block: that of block b is at ``offset + b * block_stride``."""

    allocation: int
    """Index into the allocations."""
    offset: int
    """Of block 0's piece, from the beginning of the allocation."""
    block_stride: int
    page_bytes: int

    def to_proto(self) -> session_pb2.BlockRegion:
        return session_pb2.BlockRegion(
            allocation=self.allocation,
            offset=self.offset,
            block_stride=self.block_stride,
            page_bytes=self.page_bytes,
        )


@dataclass(frozen=True, slots=True)
class GroupMemory:
    """How the blocks of one group lie in device memory."""

    group_idx: int | None
    num_blocks: int
    blocks_per_chunk: int
    regions: tuple[BlockRegion, ...]
    """In the order in which the host keeps them."""

    def to_proto(self) -> session_pb2.GroupMemory:
        return session_pb2.GroupMemory(
            group_idx=self.group_idx,
            num_blocks=self.num_blocks,
            blocks_per_chunk=self.blocks_per_chunk,
            regions=[region.to_proto() for region in self.regions],
        )


@dataclass(frozen=True, slots=True)
class MemoryRegistration:
    """What the server decided about a worker's memory."""

    epoch: int
    mode: TransferMode
    reason: str
    """Why this mode, for a log line."""

    @classmethod
    def from_proto(cls, message: session_pb2.RegisterMemoryResponse) -> MemoryRegistration:
        return cls(message.epoch, TransferMode(message.mode), message.reason)


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """What the server told when the session opened."""

    id: int
    """The session's public name, as Status shows it."""
    token: bytes = field(repr=False)
    """Whoever has it can act for the session in calls outside the session's stream."""
    epoch: int
    server_version: str
    chunk_tokens: int
    """The chunk size that engines of this host should use."""
    ttl: float
    """Seconds of silence after which the session expires."""
    segments: tuple[Segment, ...]
    guard: int
    """The byte of each segment's file that a client keeps locked while it maps the file."""
    event_log: bool = False
    """True if the server keeps an event log, and so has a use for event data."""
    features: frozenset[str] = frozenset()
    """What the server does that not every server does, as ``OpenResponse.features`` names it."""

    @classmethod
    def from_proto(cls, message: session_pb2.OpenResponse) -> SessionInfo:
        return cls(
            id=message.session_id,
            token=message.session_token,
            epoch=message.epoch,
            server_version=message.server_version,
            chunk_tokens=message.chunk_tokens,
            ttl=message.ttl_ms / 1000,
            segments=tuple(Segment.from_proto(segment) for segment in message.segments),
            guard=message.guard,
            event_log=message.event_log,
            features=frozenset(message.features),
        )


@dataclass(frozen=True, slots=True)
class NamespaceStatus:
    """One namespace and what is in it."""

    namespace: Namespace
    parts: int
    """How many are visible."""
    nbytes: int
    """Size of all their shards."""

    @classmethod
    def from_proto(cls, message: admin_pb2.NamespaceStatus) -> NamespaceStatus:
        return cls(Namespace.from_proto(message.namespace), message.parts, message.bytes)


@dataclass(frozen=True, slots=True)
class PartStatus:
    """One group's share of one chunk."""

    key: bytes
    parent_key: bytes
    """Key of the chunk it extends; empty for a first chunk."""
    group_idx: int | None
    sealed_shards: int
    nbytes: int
    """Size of the sealed shards."""
    locks: int
    visible: bool
    pins: int = 0
    """How many pins keep it."""

    @classmethod
    def from_proto(cls, message: admin_pb2.PartStatus) -> PartStatus:
        return cls(
            key=message.key,
            parent_key=message.parent_key,
            group_idx=_group_idx(message),
            sealed_shards=message.sealed_shards,
            nbytes=message.bytes,
            locks=message.locks,
            visible=message.visible,
            pins=message.pins,
        )


@dataclass(frozen=True, slots=True)
class Evicted:
    """What an Evict dropped."""

    parts: int
    nbytes: int


def _group_idx(
    message: types_pb2.Group | cache_pb2.GroupHit | admin_pb2.PartStatus,
) -> int | None:
    return message.group_idx if message.HasField("group_idx") else None

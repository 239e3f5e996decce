"""Namespaces and their KV-cache groups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from kvdock_server.errors import Reason, RequestError, group_name, invalid

MAX_NAME_BYTES = 256
MAX_LABELS = 32
MAX_CHUNK_TOKENS = 65_536
MAX_KV_WORLD_SIZE = 256
MAX_GROUPS = 64


class GroupKind(Enum):
    """Which earlier tokens the next token needs. The values are the protocol's."""

    FULL_ATTENTION = 1
    SLIDING_WINDOW = 2
    RECURRENT_STATE = 3
    CHUNKED_LOCAL_ATTENTION = 4


@dataclass(frozen=True)
class Group:
    """One KV-cache group. ``shard_bytes`` has the size of each shard, 0 if not known yet."""

    group_idx: int | None
    kind: GroupKind
    window_tokens: int
    shard_bytes: tuple[int, ...]
    attention_chunk_tokens: int = 0

    def needed_chunks(self, hit_chunks: int, chunk_tokens: int) -> int:
        """How many chunks before a hit's end the group needs."""
        if self.kind is GroupKind.FULL_ATTENTION:
            return hit_chunks
        if self.kind is GroupKind.RECURRENT_STATE:
            return min(1, hit_chunks)
        if self.kind is GroupKind.CHUNKED_LOCAL_ATTENTION:
            return -(-(hit_chunks * chunk_tokens % self.attention_chunk_tokens) // chunk_tokens)
        # The next token sees itself and window_tokens - 1 before it. At least one chunk, so that
        # a hit always locks something.
        return min(hit_chunks, max(1, -(-(self.window_tokens - 1) // chunk_tokens)))


@dataclass(frozen=True)
class Namespace:
    """Everything that must be equal for KV bytes to be interchangeable, as the server sees it."""

    name: str
    chunk_tokens: int
    kv_world_size: int
    groups: tuple[Group, ...]
    labels: Mapping[str, str] = field(default_factory=dict, compare=False)

    def validate(self) -> None:
        """Raise RequestError if a field is out of its limits."""
        name = self.name
        if not 1 <= len(name) <= MAX_NAME_BYTES or not all("!" <= char <= "~" for char in name):
            raise invalid(
                f"namespace name {name[:80]!r}: use 1 to {MAX_NAME_BYTES} printable ASCII "
                "characters without space",
                "name",
                MAX_NAME_BYTES,
            )
        if len(self.labels) > MAX_LABELS:
            raise invalid(f"{len(self.labels)} labels: at most {MAX_LABELS}", "labels", MAX_LABELS)
        for key, value in self.labels.items():
            if len(key.encode()) > 256 or len(value.encode()) > 256:
                raise invalid(
                    f"label {key[:80]!r}: at most 256 bytes for key and value each", "labels", 256
                )
        if not 1 <= self.chunk_tokens <= MAX_CHUNK_TOKENS:
            raise invalid(
                f"chunk_tokens {self.chunk_tokens}: from 1 to {MAX_CHUNK_TOKENS}",
                "chunk_tokens",
                MAX_CHUNK_TOKENS,
            )
        if not 1 <= self.kv_world_size <= MAX_KV_WORLD_SIZE:
            raise invalid(
                f"kv_world_size {self.kv_world_size}: from 1 to {MAX_KV_WORLD_SIZE}",
                "kv_world_size",
                MAX_KV_WORLD_SIZE,
            )
        if not 1 <= len(self.groups) <= MAX_GROUPS:
            raise invalid(
                f"{len(self.groups)} groups: from 1 to {MAX_GROUPS}", "groups", MAX_GROUPS
            )
        indexes = [group.group_idx for group in self.groups]
        if len(set(indexes)) != len(indexes):
            named = ", ".join(map(group_name, indexes))
            raise invalid(f"{named}: all must be different", "group_idx")
        if None in indexes and len(indexes) > 1:
            raise invalid(
                "a group without group_idx must be the only one: give each its index", "group_idx"
            )
        for group in self.groups:
            is_window = group.kind is GroupKind.SLIDING_WINDOW
            if is_window != (group.window_tokens > 0):
                raise invalid(
                    f"window_tokens {group.window_tokens} of {group_name(group.group_idx)}: at "
                    "least 1 for SLIDING_WINDOW, 0 for every other kind",
                    "window_tokens",
                )
            is_local = group.kind is GroupKind.CHUNKED_LOCAL_ATTENTION
            if is_local != (group.attention_chunk_tokens > 0):
                raise invalid(
                    f"attention_chunk_tokens {group.attention_chunk_tokens} of "
                    f"{group_name(group.group_idx)}: at least 1 for CHUNKED_LOCAL_ATTENTION, 0 for "
                    "every other kind",
                    "attention_chunk_tokens",
                )

    def position(self, group_idx: int | None) -> int:
        """Position of a group in ``groups``; RequestError if the namespace has no such group."""
        for position, group in enumerate(self.groups):
            if group.group_idx == group_idx:
                return position
        asked = "no group_idx was given" if group_idx is None else f"group {group_idx} is not there"
        known = ", ".join(group_name(group.group_idx) for group in self.groups)
        raise invalid(f"{asked}: namespace {self.name!r} has {known}", "group_idx")

    def merged(self, other: Namespace) -> Namespace:
        """This namespace with the shard sizes that only ``other`` knows.

        Raises RequestError (NAMESPACE_CONFLICT) if the two contradict each other.
        """

        def conflict(what: str, known: object, given: object) -> RequestError:
            return RequestError(
                Reason.NAMESPACE_CONFLICT,
                f"namespace {self.name!r} is registered with {what} {known}, not {given}: what "
                "differs must be part of the name",
                namespace=self.name,
            )

        if other.chunk_tokens != self.chunk_tokens:
            raise conflict("chunk_tokens", self.chunk_tokens, other.chunk_tokens)
        if other.kv_world_size != self.kv_world_size:
            raise conflict("kv_world_size", self.kv_world_size, other.kv_world_size)
        if [g.group_idx for g in other.groups] != [g.group_idx for g in self.groups]:
            raise conflict("groups", len(self.groups), len(other.groups))
        groups = []
        for mine, theirs in zip(self.groups, other.groups, strict=True):
            label = f"{group_name(mine.group_idx)}:"
            if (mine.kind, mine.window_tokens, mine.attention_chunk_tokens) != (
                theirs.kind,
                theirs.window_tokens,
                theirs.attention_chunk_tokens,
            ):
                raise conflict(label, mine.kind.name, theirs.kind.name)
            sizes = []
            for known, given in zip(mine.shard_bytes, theirs.shard_bytes, strict=True):
                if known and given and known != given:
                    raise conflict(f"{label} shard_bytes", known, given)
                sizes.append(known or given)
            groups.append(replace(mine, shard_bytes=tuple(sizes)))
        return replace(self, groups=tuple(groups))

"""What a scheduler tells its workers to load and to store, and what they report.

All of it is pickled between processes.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvdock.types import ChunkEventData, EvictionPriority, Keep


@dataclass(frozen=True, slots=True)
class GroupPages:
    """How one worker keeps the blocks of one group."""

    block_bytes: int
    pages: tuple[str, ...]
    """Describes the layers' pages. Pages of equal text have interchangeable bytes."""


@dataclass(frozen=True, slots=True)
class Target:
    """The namespace and server process that loads and stores concern."""

    epoch: int
    namespace: str
    chunk_tokens: int
    event_log: bool = False
    """The server keeps a log of events."""


@dataclass(frozen=True, slots=True)
class GroupLoad:
    """Fills blocks of one group with its parts of chunks [first_chunk, end_chunk) of a hit."""

    position: int
    """Index of the group among the model's groups."""
    group_idx: int | None
    """The group's name on the server. None if the model has only one group."""
    first_chunk: int
    end_chunk: int
    skip_blocks: int
    """Blocks of the first part that are not loaded: the engine has them or does not need them."""
    block_ids: tuple[int, ...]
    """The blocks to fill, after the skipped ones. The last part may be cut short."""
    lease_id: int
    """The lease of the hit; 0 if there is none."""


@dataclass(frozen=True, slots=True)
class LoadSpec:
    """Loads the hit of one request."""

    request_id: str
    groups: tuple[GroupLoad, ...]
    """Only groups that have something to load."""
    all_or_nothing: bool
    """If one block fails, all do."""
    target: Target | None
    """None: the hit has become void, so the load fails."""

    @property
    def block_ids(self) -> frozenset[int]:
        """All blocks to fill."""
        return frozenset(block for group in self.groups for block in group.block_ids)


@dataclass(frozen=True, slots=True)
class GroupStore:
    """Stores one group's parts of consecutive chunks of a request."""

    position: int
    """Index of the group among the model's groups."""
    group_idx: int | None
    """The group's name on the server. None if the model has only one group."""
    first_chunk: int
    parent: bytes
    """Key of the chunk before the first; empty for a prompt's first."""
    keys: tuple[bytes, ...]
    block_ids: tuple[int, ...]
    """Blocks of all parts, chunk by chunk."""
    event_data: tuple[ChunkEventData, ...] = ()
    """What events tell of each chunk; empty if the server keeps no events."""
    keep: Keep | None = None
    """How the request wants the chunks to be kept from eviction, if it does."""
    priority: EvictionPriority = EvictionPriority.NORMAL


@dataclass(frozen=True, slots=True)
class StoreSpec:
    """Stores what became complete of one request."""

    job_id: int
    request_id: str
    groups: tuple[GroupStore, ...]
    """Only groups that have something to store; at least one."""
    target: Target

    @property
    def first_chunk(self) -> int:
        """First chunk of any group."""
        return min(group.first_chunk for group in self.groups)


@dataclass(slots=True)
class StoreOutcome:
    """What some workers did with one store."""

    workers: int
    """How many workers are done."""
    refused_from: int | None
    """First chunk, counted from the prompt's beginning, that one of them could not store."""

    def joined(self, other: StoreOutcome) -> StoreOutcome:
        """The outcome of both's workers."""
        refused = [chunk for chunk in (self.refused_from, other.refused_from) if chunk is not None]
        return StoreOutcome(self.workers + other.workers, min(refused, default=None))

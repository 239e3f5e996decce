"""What a scheduler tells its workers to load and to store, and what they tell back.

All of it is pickled between processes.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvdock.types import ChunkEventData


@dataclass(frozen=True, slots=True)
class GroupPages:
    """How one worker keeps the blocks of one group."""

    block_bytes: int
    pages: tuple[str, ...]
    """Describes the layers' pages: equal text, interchangeable bytes."""


@dataclass(frozen=True, slots=True)
class Target:
    """Which namespace of which server process a step's loads and stores concern."""

    epoch: int
    namespace: str
    chunk_tokens: int
    event_log: bool = False
    """The server keeps a log of events."""


@dataclass(frozen=True, slots=True)
class GroupLoad:
    """Fill the blocks of one group with its parts of chunks [first_chunk, end_chunk) of a hit."""

    position: int
    """Which of the model's groups."""
    group_idx: int | None
    """The same as the server is told it: None if the model has only one group."""
    first_chunk: int
    end_chunk: int
    skip_blocks: int
    """Blocks of the first part that are not wanted: the engine has them, or needs none there."""
    block_ids: tuple[int, ...]
    """The engine's blocks to fill, from there on. The last part's may be fewer than it has."""
    lease_id: int
    """Of the hit; 0 if there is none."""


@dataclass(frozen=True, slots=True)
class LoadSpec:
    """Load the hit of one request."""

    request_id: str
    groups: tuple[GroupLoad, ...]
    """Those that have something to load."""
    all_or_nothing: bool
    """If one block fails, all do."""
    target: Target | None
    """None: the server was lost since the hit was promised, so that the load fails."""

    @property
    def block_ids(self) -> frozenset[int]:
        """All blocks to fill."""
        return frozenset(block for group in self.groups for block in group.block_ids)


@dataclass(frozen=True, slots=True)
class GroupStore:
    """Store one group's parts of consecutive chunks of a request."""

    position: int
    """Which of the model's groups."""
    group_idx: int | None
    """The same as the server is told it: None if the model has only one group."""
    first_chunk: int
    parent: bytes
    """Key of the chunk before the first; empty for a prompt's first."""
    keys: tuple[bytes, ...]
    block_ids: tuple[int, ...]
    """Blocks of all parts, chunk by chunk."""
    event_data: tuple[ChunkEventData, ...] = ()
    """What events are to tell of each chunk; empty if nobody keeps them."""


@dataclass(frozen=True, slots=True)
class StoreSpec:
    """Store what became complete of one request."""

    job_id: int
    request_id: str
    groups: tuple[GroupStore, ...]
    """Those that have something to store; at least one."""
    target: Target

    @property
    def first_chunk(self) -> int:
        """First chunk of which something is to be stored."""
        return min(group.first_chunk for group in self.groups)


@dataclass(slots=True)
class StoreOutcome:
    """How far the workers got with one job."""

    workers: int
    """How many are done with it."""
    refused_from: int | None
    """First chunk, counted from the prompt's beginning, that some worker could not store."""

    def joined(self, other: StoreOutcome) -> StoreOutcome:
        """Of the workers of both."""
        refused = [chunk for chunk in (self.refused_from, other.refused_from) if chunk is not None]
        return StoreOutcome(self.workers + other.workers, min(refused, default=None))

"""What the scheduler half tells the workers in each step, and what they tell back.

All of it is pickled between processes by vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvdock.types import ChunkEventData


@dataclass(frozen=True, slots=True)
class GroupPages:
    """How one worker keeps the blocks of one group."""

    block_bytes: int
    pages: tuple[str, ...]
    """Describes the layers' pages: equal text, interchangeable bytes."""


@dataclass(frozen=True)
class WorkerDescription(KVConnectorHandshakeMetadata):
    """What a worker knows of its KV cache and the scheduler does not. Sent once, at the start."""

    worker_id: int
    groups: tuple[GroupPages, ...]
    use_mla: bool
    """Of its ``ParallelStrategy``: vLLM tells the scheduler of a group's first layer only."""


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
    """Of the hit; 0 if it is void."""


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


@dataclass
class StepMetadata(KVConnectorMetadata):
    """Everything for one step."""

    news: Target | None = None
    """What later loads and stores will concern, told once, as soon as it is known."""
    overwritten: list[int] = field(default_factory=list)
    """Stores, by job_id, whose blocks others will write into in this step."""
    loads: list[LoadSpec] = field(default_factory=list)
    stores: list[StoreSpec] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    """Finished requests whose blocks vLLM holds until each worker reports them once."""
    has_forward: bool = True
    """False in a step that only moves bytes."""
    has_waiting: bool = False
    """Requests wait, perhaps for the blocks of finished ones."""


@dataclass(slots=True)
class StoreOutcome:
    """How far the workers got with one job."""

    workers: int
    """How many are done with it."""
    refused_from: int | None
    """First chunk, counted from the prompt's beginning, that some worker could not store."""


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    """What the workers finished since their last report."""

    stores: dict[int, StoreOutcome] = field(default_factory=dict)
    descriptions: tuple[WorkerDescription, ...] = ()
    """In a worker's first report. vLLM's handshake is earlier, but serves only one connector."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        """The report of both."""
        assert isinstance(other, WorkerReport)
        stores = dict(self.stores)
        for job_id, theirs in other.stores.items():
            ours = stores.get(job_id)
            stores[job_id] = theirs if ours is None else _both(ours, theirs)
        return WorkerReport(stores, self.descriptions + other.descriptions)


def _both(one: StoreOutcome, other: StoreOutcome) -> StoreOutcome:
    refused = [chunk for chunk in (one.refused_from, other.refused_from) if chunk is not None]
    return StoreOutcome(one.workers + other.workers, min(refused, default=None))

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

from kvdock_vllm.engine.specs import GroupPages, LoadSpec, StoreOutcome, StoreSpec, Target


@dataclass(frozen=True)
class WorkerDescription(KVConnectorHandshakeMetadata):
    """What a worker knows of its KV cache and the scheduler does not. Sent once, at the start."""

    worker_id: int
    groups: tuple[GroupPages, ...]
    use_mla: bool
    """Of its ``ParallelStrategy``: vLLM tells the scheduler of a group's first layer only."""


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
            stores[job_id] = theirs if ours is None else ours.joined(theirs)
        return WorkerReport(stores, self.descriptions + other.descriptions)

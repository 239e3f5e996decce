"""What the scheduler's half tells the workers in each step, and what they report.

vLLM pickles all of it to send it between processes.
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
    """What only a worker knows of its KV cache. Sent once, at the start."""

    worker_id: int
    groups: tuple[GroupPages, ...]
    use_mla: bool
    """As in ``ParallelStrategy``. The scheduler sees only the first layer of each group."""


@dataclass
class StepMetadata(KVConnectorMetadata):
    """What the workers do in one step."""

    news: Target | None = None
    """Target of later loads and stores. Told once, as soon as it is known."""
    overwritten: list[int] = field(default_factory=list)
    """job_ids of stores whose blocks this step gives to others, who write to them."""
    loads: list[LoadSpec] = field(default_factory=list)
    stores: list[StoreSpec] = field(default_factory=list)
    """Of blocks that are complete after this step."""
    last_stores: list[StoreSpec] = field(default_factory=list)
    """Of finished requests' blocks, which earlier steps completed."""
    of_finished: list[int] = field(default_factory=list)
    """job_ids of stores whose request has finished. Their blocks are held until they end."""
    has_forward: bool = True
    """False in a step without computation."""
    has_waiting: bool = False
    """True if requests wait, perhaps for blocks of finished ones."""
    in_doubt: int = 0
    """Not 0 if other connectors fill blocks in this step. The report of the step says it again."""


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    """What the workers did since their last report."""

    stores: dict[int, StoreOutcome] = field(default_factory=dict)
    descriptions: tuple[WorkerDescription, ...] = ()
    """In a worker's first report. vLLM's earlier handshake reaches only one connector."""
    in_doubt: int = 0
    """As in the step's metadata."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        """One report of both."""
        assert isinstance(other, WorkerReport)
        stores = dict(self.stores)
        for job_id, theirs in other.stores.items():
            ours = stores.get(job_id)
            stores[job_id] = theirs if ours is None else ours.joined(theirs)
        descriptions = self.descriptions + other.descriptions
        return WorkerReport(stores, descriptions, max(self.in_doubt, other.in_doubt))

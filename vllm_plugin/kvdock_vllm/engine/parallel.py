"""Ranks: which worker holds which shard, which stores it and which read it.

This is decided once and passed whole. Nothing else in the connector calculates with ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class ParallelStrategy:
    """One worker's place in its engine. The scheduler's is that of worker 0.

    The workers of an engine are numbered so that the ranks of a tensor-parallel group are
    neighbours. With multi-head latent attention (MLA) tensor parallelism does not divide the KV
    cache: every rank of a group holds the same bytes, so a group has one shard, which its first
    rank stores and which every rank reads. Table for ``tensor_size=4, pipeline_size=2``::

        worker_id                       0   1   2   3   4   5   6   7
        pipeline_rank   worker_id // 4  0   0   0   0   1   1   1   1
        tensor_rank     worker_id % 4   0   1   2   3   0   1   2   3

        without MLA: kv_world_size 8, one reader a shard
          kv_worker_id                  0   1   2   3   4   5   6   7
          stores                        x   x   x   x   x   x   x   x

        with MLA: kv_world_size 2, four readers a shard
          kv_worker_id  worker_id // 4  0   0   0   0   1   1   1   1
          stores                        x   .   .   .   x   .   .   .
          filled_by                     .   0   0   0   .   4   4   4

    Raises ValueError, naming the sizes, for a combination that is not supported.
    """

    use_mla: bool
    """All ranks of a tensor-parallel group hold the same bytes."""
    tensor_size: int
    pipeline_size: int
    worker_id: int
    """Rank in the engine. Data parallelism makes engines, not ranks."""
    prefill_context_size: int = 1
    decode_context_size: int = 1
    data_size: int = 1
    """Engines that compute their steps together (mixture of experts); otherwise 1."""

    def __post_init__(self) -> None:
        for name in ("tensor", "pipeline", "prefill_context", "decode_context"):
            size = getattr(self, f"{name}_size")
            if size < 1:
                raise ValueError(f"{name}_parallel_size is {size}: it must be at least 1")
            # Context parallelism spreads tokens over ranks: each has a part of a block id's blocks.
            if size > 1 and name.endswith("context"):
                raise ValueError(
                    f"KVDock does not support {name}_parallel_size={size}: run with 1, or without "
                    f"the KVDock connector"
                )
        if not 0 <= self.worker_id < self.world_size:
            raise ValueError(
                f"worker {self.worker_id} is not in an engine of tensor_parallel_size="
                f"{self.tensor_size} and pipeline_parallel_size={self.pipeline_size}, whose "
                f"workers are 0 to {self.world_size - 1}"
            )

    @property
    def world_size(self) -> int:
        """Workers of the engine. Each of them loads, under a lock of its own."""
        return self.tensor_size * self.pipeline_size

    @property
    def steps_alone(self) -> bool:
        """Whether a step without computation keeps nobody else from computing. With pipeline stages
        other steps are under way; with ``data_size`` other engines wait.
        """
        return self.pipeline_size == 1 and self.data_size == 1

    @property
    def tensor_rank(self) -> int:
        return self.worker_id % self.tensor_size

    @property
    def pipeline_rank(self) -> int:
        return self.worker_id // self.tensor_size

    @property
    def is_first_tp_rank(self) -> bool:
        """First of its tensor-parallel group. Each pipeline stage has one group."""
        return self.tensor_rank == 0

    @property
    def readers_per_shard(self) -> int:
        """Workers that read the same shard."""
        return self.tensor_size if self.use_mla else 1

    @property
    def kv_world_size(self) -> int:
        """Shards of a part."""
        return self.world_size // self.readers_per_shard

    @property
    def kv_worker_id(self) -> int:
        """The shard that this worker stores or reads."""
        return self.worker_id // self.readers_per_shard

    @property
    def filled_by(self) -> int | None:
        """The worker whose loads also fill this one's blocks. None: this worker loads itself."""
        first = self.kv_worker_id * self.readers_per_shard
        return first if first != self.worker_id else None

    @property
    def fills(self) -> tuple[int, ...]:
        """The other workers whose blocks this worker's loads fill."""
        if self.filled_by is not None:
            return ()
        return tuple(range(self.worker_id + 1, self.worker_id + self.readers_per_shard))

    @property
    def stores(self) -> bool:
        """Whether this worker stores its shard. Every worker loads."""
        return self.is_first_tp_rank or not self.use_mla

    def as_workers_say(self, use_mla: Iterable[bool]) -> ParallelStrategy:
        """The scheduler's strategy, corrected by its workers: it knows only one layer of each
        group.

        Raises ValueError if the workers differ, for instance where only the last stage has a draft
        model.
        """
        found = set(use_mla)
        if len(found) != 1:
            raise ValueError(
                "on some workers every layer is of multi-head latent attention, on others not "
                f"(pipeline_parallel_size={self.pipeline_size}): KVDock does not support a model "
                "of which some stages divide their KV cache and others do not"
            )
        return replace(self, use_mla=found.pop())

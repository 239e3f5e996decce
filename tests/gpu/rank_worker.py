"""A `kv_worker` that is one rank of an engine whose ranks read the same shard.

TEST_DEVICE says which of the visible devices is its own; the first, if it is not set.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
import kv_worker

from kvdock import Client, Group, Namespace, SessionRole


class RankWorker(kv_worker.Worker):
    """Every method is an order."""

    def device_uuid(self) -> bytes:
        """Of the device that has the cache."""
        allocations, _ = self.export(1)
        return bytes(allocations[0].device_uuid)

    def poison(self) -> None:
        """Overwrite the whole cache."""
        for tensor in self.tensors:
            tensor.view(torch.uint8).fill_(0xA5)
        torch.cuda.synchronize()

    def poison_blocks(self, ids: list[int]) -> None:
        """Overwrite some blocks."""
        index = torch.tensor(ids, device="cuda")
        for tensor in self.tensors:
            tensor.view(torch.uint8)[index] = 0xA5
        torch.cuda.synchronize()

    def join(self, address: str, engine: str, rank: int, blocks_per_chunk: int) -> str:
        """Open a session and hand the cache over; the transfer mode. Rank 0 schedules, too."""
        self.namespace = f"namespace-of-{engine}"
        allocations, groups = self.export(blocks_per_chunk)
        chunk_bytes = blocks_per_chunk * sum(region.page_bytes for region in groups[0].regions)
        client = Client(address, timeout=30)
        client.register_namespace(Namespace(self.namespace, 256, 1, (Group((chunk_bytes,)),)))
        if rank == 0:
            self.scheduler = client.session(engine, role=SessionRole.SCHEDULER)
        self.rank = rank
        self.session = client.session(engine, role=SessionRole.WORKER, worker_id=rank)
        return self.session.register_memory(self.namespace, allocations, groups).mode.name

    def lookup(self, keys: list[bytes], readers: int) -> int:
        """A lease on all of the chunks."""
        hit = self.scheduler.lookup(self.namespace, keys, readers=readers)
        assert hit.lease is not None
        assert hit.chunks == len(keys)
        return hit.lease.id

    def lead(
        self, lease: int, ids: list[int], skip_blocks: int, others: list[int], event: bytes = b""
    ) -> list[str]:
        """Retrieve for this rank and others; the status of each chunk."""
        results = self.session.retrieve(
            lease,
            reader=self.rank,
            block_ids=ids,
            skip_blocks=skip_blocks,
            ready_event=event or self.events.record()[1],
            also_fill=others,
        )
        return [result.status.name for result in results]

    def ask(self, lease: int, chunks: int) -> list[str]:
        """What came of another rank's Retrieve for this one; the status of each chunk."""
        statuses = self.session.await_fill(lease, 0, chunks, filled_by=0, reader=self.rank)
        return [status.name for status in statuses]


if __name__ == "__main__":
    torch.cuda.set_device(int(os.environ.get("TEST_DEVICE", "0")))
    kv_worker.main(RankWorker)

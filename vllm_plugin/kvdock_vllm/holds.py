"""Blocks that windows are about to leave behind, kept back while a store still reads them.

Of what a window leaves behind vLLM caches almost nothing by itself, and what it does not cache it
gives out first, mostly in the same step. A store that has not read it by then loses the part for
good, and with it every hit whose windows reach over that part.

So for the step in which a window leaves them such blocks are counted as used once more, and after
it they go to the end of vLLM's queue of free blocks. They are free then, and are given out when
all others have been. A store that is slower even than that is ended, as any is whose blocks are
given out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock


class Holds:
    """The holds of one engine. Used by the scheduler's thread."""

    def __init__(self) -> None:
        self._pool: BlockPool | None = None
        self._held: dict[int, list[KVCacheBlock]] = {}

    @property
    def job_ids(self) -> Set[int]:
        """The stores of which blocks are held."""
        return self._held.keys()

    def bind(self, pool: BlockPool) -> None:
        """Takes vLLM's pool. One that cannot put blocks at the end of its queue is not used."""
        if hasattr(pool, "unpin_blocks"):
            self._pool = pool

    def renew(self, leaving: Mapping[int, Sequence[int]]) -> None:
        """Between two steps: holds for the next one what ``leaving`` names, the ids of blocks by
        the store that reads them, and nothing else any more.

        At most half as many as are free, so that the next step has enough without them.
        """
        for job_id in list(self._held):
            self.release(job_id)
        if self._pool is None:
            return
        most = self._pool.get_num_free_blocks() // 2
        for job_id, block_ids in leaving.items():
            blocks = [self._pool.blocks[block_id] for block_id in block_ids]
            # What is free already stays where it is in the queue.
            used = [block for block in blocks if block.ref_cnt > 0]
            if not 0 < len(used) <= most:
                continue
            most -= len(used)
            self._pool.touch(used)
            self._held[job_id] = used

    def release(self, job_id: int) -> None:
        """Nobody reads a store's blocks any more, or their step is over."""
        blocks = self._held.pop(job_id, None)
        if blocks:
            assert self._pool is not None
            self._pool.unpin_blocks(blocks, _not_our_concern)


def _not_our_concern(block: KVCacheBlock) -> None:
    """A block has been given out: the step's metadata tells of that."""

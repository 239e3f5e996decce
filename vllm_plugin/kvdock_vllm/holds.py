"""Holds: blocks that vLLM keeps back for one step, since a store still reads them.

A sliding window moves along its request with each token. When no later token can see any token of a
block, the window has left the block behind: vLLM takes the block from the request and frees it.

vLLM caches almost none of these blocks. It gives uncached blocks out first, mostly in the same
step. A store that has not read a block by then loses its part for good, and with the part every hit
whose window reaches over it.

So a block that a store reads gets one more reference for the step in which a window leaves it
behind. After the step it goes to the end of vLLM's queue of free blocks, so it is given out last. A
store that is even slower is ended, like every store whose blocks are given out. A recurrent state
is left behind in the same way.

Some engines zero blocks that they give out before any store can be ended. There a store keeps all
its blocks until it has ended.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock


class Holds:
    """The holds of one engine. Used by the scheduler's thread."""

    def __init__(self) -> None:
        self._pool: BlockPool | None = None
        self._held: dict[int, list[KVCacheBlock]] = {}  # by job_id
        self._kept: dict[int, list[KVCacheBlock]] = {}  # by job_id

    def bind(self, pool: BlockPool) -> None:
        """Takes vLLM's pool, unless its version cannot put blocks at the end of its queue."""
        if hasattr(pool, "unpin_blocks"):
            self._pool = pool

    def renew(self, leaving: Mapping[int, Sequence[int]]) -> None:
        """Ends all holds and begins those of the next step. Called between two steps.

        ``leaving`` has the ids of blocks to hold, by the job_id of the store that reads them. At
        most half of the free blocks' number is held, so that the next step has enough.
        """
        for job_id in list(self._held):
            self._unpin(self._held.pop(job_id))
        if self._pool is None:
            return
        most = self._pool.get_num_free_blocks() // 2
        for job_id, block_ids in leaving.items():
            blocks = [self._pool.blocks[block_id] for block_id in block_ids]
            # A block that is free already keeps its place in the queue.
            used = [block for block in blocks if block.ref_cnt > 0]
            if not 0 < len(used) <= most:
                continue
            most -= len(used)
            self._pool.touch(used)
            self._held[job_id] = used

    def keep(self, job_id: int, block_ids: Collection[int]) -> bool:
        """Keeps blocks that a request has until their store is released. False if too many are kept
        already: vLLM must have as many free blocks as are kept.
        """
        if self._pool is None:
            return False
        kept = sum(map(len, self._kept.values()))
        if kept + len(block_ids) > self._pool.get_num_free_blocks():
            return False
        blocks = [self._pool.blocks[block_id] for block_id in block_ids]
        self._pool.touch(blocks)
        self._kept[job_id] = blocks
        return True

    def release(self, job_id: int) -> None:
        """A store has ended: ends the hold on its blocks, if there is one."""
        for holds in (self._held, self._kept):
            self._unpin(holds.pop(job_id, []))

    def _unpin(self, blocks: Sequence[KVCacheBlock]) -> None:
        if blocks:
            assert self._pool is not None
            self._pool.unpin_blocks(blocks, _not_our_concern)


def _not_our_concern(block: KVCacheBlock) -> None:
    """Called by vLLM when it gives out a block. The step's metadata tells of it already."""

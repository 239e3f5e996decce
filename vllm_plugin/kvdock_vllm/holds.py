"""Holds: blocks that vLLM keeps back, since a store still reads them.

When a request ends, its last tokens are not stored yet. vLLM could keep all of its blocks until
they are, and a waiting request would get them some 30 ms later. So vLLM frees the blocks at once,
and those few that a store still reads have one more reference until the store ends.

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
        self._puts_last = False
        # By job_id.
        self._of_windows: dict[int, list[KVCacheBlock]] = {}
        self._until_stored: dict[int, list[KVCacheBlock]] = {}

    def __len__(self) -> int:
        """How many stores have blocks held."""
        return len(self._of_windows.keys() | self._until_stored.keys())

    def bind(self, pool: BlockPool) -> None:
        """Takes vLLM's pool. Not every version's pool can put a block at the end of its queue:
        then windows' blocks are not held.
        """
        self._pool = pool
        self._puts_last = hasattr(pool, "unpin_blocks")

    def hold_finished(self, reading: Mapping[int, Sequence[int]]) -> None:
        """Holds blocks of a finished request until :meth:`release`. Called before vLLM frees the
        request's blocks.

        ``reading`` has the ids of those that are still the request's, by the job_id of the store
        that reads them.
        """
        for job_id, block_ids in reading.items():
            self._hold_until_stored(job_id, block_ids)

    def admit(self, job_id: int, block_ids: Collection[int]) -> bool:
        """Holds blocks that a request has until :meth:`release`. False if too many are held
        already: vLLM must have as many free blocks as are held.
        """
        if self._pool is None:
            return False
        held = sum(map(len, self._until_stored.values()))
        if held + len(block_ids) > self._pool.get_num_free_blocks():
            return False
        self._hold_until_stored(job_id, block_ids)
        return True

    def renew(self, leaving: Mapping[int, Sequence[int]]) -> None:
        """Ends windows' holds and begins those of the next step. Called between two steps.

        ``leaving`` has the ids of blocks to hold, by the job_id of the store that reads them. At
        most half of the free blocks' number is held, so that the next step has enough.
        """
        for job_id in list(self._of_windows):
            self._release_windows(job_id)
        if self._pool is None or not self._puts_last:
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
            self._of_windows[job_id] = used

    def release(self, job_id: int) -> None:
        """A store has ended: ends the holds on its blocks, if there are any."""
        self._release_windows(job_id)
        blocks = self._until_stored.pop(job_id, None)
        if blocks:
            assert self._pool is not None
            # As vLLM frees a request's: the end of the prompt is given out first.
            self._pool.free_blocks(reversed(blocks))

    def _hold_until_stored(self, job_id: int, block_ids: Collection[int]) -> None:
        if self._pool is not None:
            blocks = [self._pool.blocks[block_id] for block_id in block_ids]
            self._pool.touch(blocks)
            self._until_stored.setdefault(job_id, []).extend(blocks)

    def _release_windows(self, job_id: int) -> None:
        blocks = self._of_windows.pop(job_id, None)
        if blocks:
            assert self._pool is not None
            self._pool.unpin_blocks(blocks, _not_our_concern)


def _not_our_concern(block: KVCacheBlock) -> None:
    """Called by vLLM when it gives out a block. The step's metadata tells of it already."""

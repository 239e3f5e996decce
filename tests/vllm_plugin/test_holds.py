"""Which blocks vLLM gives out while a store reads what a window left, or a finished request."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.v1.core.block_pool import BlockPool

from kvdock_vllm.holds import Holds

puts_last = pytest.mark.skipif(
    not hasattr(BlockPool, "unpin_blocks"),
    reason="this version of vLLM cannot put blocks at the end of its queue",
)

STORE, OTHER = 1, 2


@pytest.fixture
def pool() -> BlockPool:
    """vLLM's own, of 20 blocks, the null block besides."""
    return BlockPool(num_gpu_blocks=21, enable_caching=True, hash_block_size=16)


@pytest.fixture
def holds(pool: BlockPool) -> Holds:
    holds = Holds()
    holds.bind(pool)
    return holds


def take(pool: BlockPool, count: int) -> list[Any]:
    return list(pool.get_new_blocks(count))


def ids(blocks: list[Any]) -> list[int]:
    return [block.block_id for block in blocks]


@puts_last
def test_without_holds_what_a_window_left_behind_is_given_out_first(pool: BlockPool) -> None:
    read = take(pool, 3)
    pool.free_blocks(read)
    assert ids(take(pool, 3)) == ids(read)


@puts_last
def test_what_is_read_is_given_out_last(pool: BlockPool, holds: Holds) -> None:
    read = take(pool, 3)
    holds.renew({STORE: ids(read)})
    pool.free_blocks(read)
    assert not set(ids(take(pool, 3))) & set(ids(read))
    holds.renew({STORE: ids(read)})
    assert [block.ref_cnt for block in read] == [0, 0, 0], "what was left behind is held no more"
    assert pool.get_num_free_blocks() == 17
    assert not set(ids(take(pool, 14))) & set(ids(read))
    assert ids(take(pool, 3)) == ids(read)


@puts_last
def test_what_a_window_did_not_leave_yet_stays_its_requests(pool: BlockPool, holds: Holds) -> None:
    read = take(pool, 3)
    for _ in range(3):
        holds.renew({STORE: ids(read)})
        assert [block.ref_cnt for block in read] == [2, 2, 2]
    holds.release(STORE)
    holds.release(STORE)
    assert [block.ref_cnt for block in read] == [1, 1, 1]
    assert pool.get_num_free_blocks() == 17


@puts_last
def test_no_more_than_half_of_what_is_free_is_held(pool: BlockPool, holds: Holds) -> None:
    read, other = take(pool, 4), take(pool, 4)
    take(pool, 4)
    holds.renew({STORE: ids(read), OTHER: ids(other)})
    assert [block.ref_cnt for block in read + other] == [2, 2, 2, 2, 1, 1, 1, 1]
    take(pool, 1)
    holds.renew({STORE: ids(read), OTHER: ids(other)[:3]})
    assert [block.ref_cnt for block in read + other] == [1, 1, 1, 1, 2, 2, 2, 1]


def test_of_a_finished_request_only_what_is_read_is_kept(pool: BlockPool, holds: Holds) -> None:
    blocks = take(pool, 6)
    read = blocks[3:5]
    holds.hold_finished({STORE: ids(read), OTHER: ids(read[1:])})
    pool.free_blocks(reversed(blocks))
    assert pool.get_num_free_blocks() == 18
    holds.renew({})
    given = take(pool, 18)
    assert not set(ids(given)) & set(ids(read))
    holds.release(STORE)
    assert [block.ref_cnt for block in read] == [0, 1]
    holds.release(OTHER)
    holds.release(OTHER)
    assert len(holds) == 0
    assert sorted(ids(take(pool, 2))) == sorted(ids(read))


def test_without_a_pool_nothing_is_held() -> None:
    holds = Holds()
    holds.renew({STORE: [1, 2]})
    holds.hold_finished({STORE: [1, 2]})
    holds.release(STORE)
    assert len(holds) == 0

"""When one model's chunks displace another's, little of the pool is lost on the way."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
from displacement import (
    GIB,
    LLAMA_8B,
    MIB,
    PAIRS,
    QWEN3_14B,
    Model,
    Pair,
    core_of,
    share_of_fresh,
)

from kvdock_server.core import LeaseRange
from kvdock_server.index.index import Slot
from kvdock_server.index.namespace import Group, GroupKind, Namespace
from kvdock_server.steps import at_once

POOL = 4 * GIB


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.name)
@pytest.mark.parametrize("prompt_chunks", [1, 64])
def test_the_second_model_gets_what_it_would_get_in_a_fresh_pool(
    pair: Pair, prompt_chunks: int
) -> None:
    assert share_of_fresh(pair, prompt_chunks) >= 0.95


def test_what_is_in_use_stays_and_the_rest_of_the_pool_is_not_lost() -> None:
    core = core_of(POOL)
    prompts = Model(core, "first", LLAMA_8B, 8).store(POOL)
    leases = [core.lookup(None, "first", keys).lease for keys in prompts[::4]]
    located = [
        at_once(core.locate_in_steps(None, LeaseRange(lease.lease_id), shard=0, reader=0)).shards
        for lease in leases
        if lease is not None
    ]
    assert len(located) == len(prompts[::4])
    second = Model(core, "second", QWEN3_14B, 8)
    second.store(2 * POOL)
    assert located == [
        at_once(core.locate_in_steps(None, LeaseRange(lease.lease_id), shard=0, reader=0)).shards
        for lease in leases
        if lease is not None
    ]
    in_use = sum(len(keys) for keys in prompts[::4]) * LLAMA_8B
    # The ends of the gaps between what is in use hold no full window.
    assert second.bytes >= 0.85 * (POOL - in_use)


def test_what_was_stored_between_others_chunks_is_moved_together_once_they_are_unused() -> None:
    pool = 8 * GIB
    fresh = Model(core_of(pool), "second", QWEN3_14B, 1)
    fresh.store(pool)
    core = core_of(pool)
    prompts = Model(core, "first", LLAMA_8B, 1).store(pool)
    leases = [core.lookup(None, "first", keys).lease for keys in prompts[::6]]  # in each third slab
    second = Model(core, "second", QWEN3_14B, 1)
    second.store(2 * pool)
    assert second.bytes < 0.6 * fresh.bytes
    for lease in leases:
        assert lease is not None
        at_once(core.leases.release_in_steps(lease))
    second.store(4 * pool)
    assert second.bytes >= 0.95 * fresh.bytes


def test_a_model_that_is_used_keeps_what_it_uses_beside_one_that_stores_much() -> None:
    core = core_of(POOL)
    used = Model(core, "used", LLAMA_8B, 8).store(POOL // 4)
    other = Model(core, "other", QWEN3_14B, 8)
    for _ in range(16):
        other.store(POOL // 8)
        for keys in used:
            lease = core.lookup(None, "used", keys).lease
            assert lease is not None
            assert at_once(core.leases.release_in_steps(lease)) == len(keys)
    assert other.bytes >= 0.9 * (POOL - POOL // 4)


def test_a_reserve_gets_all_that_can_be_emptied() -> None:
    core = core_of(64 * MIB, slab=MIB)
    prompts = Model(core, "first", MIB // 4, 1).store(64 * MIB)
    for (key,) in prompts[: -4 * 28 : 4]:  # one in each slab but for the last 28
        assert core.lookup(None, "first", [key]).lease
    Model(core, "second", MIB, 34).store(MIB)
    assert core.index.space("second").visible_parts == 28


def test_room_for_any_shard_is_made_of_chunks_whose_shards_differ_in_size() -> None:
    core = core_of(64 * MIB, slab=4 * MIB)
    group = Group(None, GroupKind.FULL_ATTENTION, 0, (MIB, 3 * MIB))
    core.index.register(Namespace("n", 16, 2, (group,)))

    def store(number: int, shard: int) -> bool:
        (outcome,) = at_once(
            core.reserve_in_steps(None, "n", None, shard, b"", [(number + 1).to_bytes(32, "big")])
        )
        return isinstance(outcome, Slot) and core.seal(outcome)

    for number in range(16):
        assert store(number, 0)
        assert store(number, 1)
    # In each run of the small slots something is in use, so that none of them can be emptied.
    for number in range(0, 16, 4):
        assert core.lookup(None, "n", [(number + 1).to_bytes(32, "big")]).lease
    for first in range(16, 40, 4):
        for shard in (1, 0):
            assert all(store(number, shard) for number in range(first, first + 4)), (first, shard)

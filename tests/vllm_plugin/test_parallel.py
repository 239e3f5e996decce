"""Ranks: written out, so that no exchange of // and % can pass."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MLAAttentionSpec,
    UniformTypeKVCacheSpecs,
)

from kvdock_vllm.engine.parallel import ParallelStrategy
from kvdock_vllm.vllm_parallel import parallel_strategy

SIZES = list(itertools.product((1, 2, 4, 8), (1, 2, 4)))


def ranks(tensor: int, pipeline: int, *, mla: bool) -> list[ParallelStrategy]:
    return [ParallelStrategy(mla, tensor, pipeline, worker) for worker in range(tensor * pipeline)]


def test_the_table_of_four_by_two_without_mla() -> None:
    table = ranks(4, 2, mla=False)
    assert [r.tensor_rank for r in table] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert [r.pipeline_rank for r in table] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [r.kv_worker_id for r in table] == [0, 1, 2, 3, 4, 5, 6, 7]
    assert [r.is_first_tp_rank for r in table] == [True, False, False, False] * 2
    assert all(r.stores for r in table)
    assert {(r.filled_by, r.fills) for r in table} == {(None, ())}
    assert {(r.world_size, r.kv_world_size, r.readers_per_shard) for r in table} == {(8, 8, 1)}


def test_the_table_of_four_by_two_with_mla() -> None:
    table = ranks(4, 2, mla=True)
    assert [r.tensor_rank for r in table] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert [r.pipeline_rank for r in table] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [r.kv_worker_id for r in table] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [r.stores for r in table] == [True, False, False, False] * 2
    assert [r.filled_by for r in table] == [None, 0, 0, 0, None, 4, 4, 4]
    assert [r.fills for r in table] == [(1, 2, 3), (), (), (), (5, 6, 7), (), (), ()]
    assert {(r.world_size, r.kv_world_size, r.readers_per_shard) for r in table} == {(8, 2, 4)}


def test_the_table_of_two_by_four_with_mla() -> None:
    # Sizes exchanged: what mixes up the two sizes passes one of these tables at most.
    table = ranks(2, 4, mla=True)
    assert [r.tensor_rank for r in table] == [0, 1] * 4
    assert [r.pipeline_rank for r in table] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [r.kv_worker_id for r in table] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [r.stores for r in table] == [True, False] * 4
    assert [r.filled_by for r in table] == [None, 0, None, 2, None, 4, None, 6]
    assert [r.fills for r in table] == [(1,), (), (3,), (), (5,), (), (7,), ()]
    assert {(r.world_size, r.kv_world_size, r.readers_per_shard) for r in table} == {(8, 4, 2)}


@pytest.mark.parametrize(("tensor", "pipeline"), SIZES)
@pytest.mark.parametrize("mla", [False, True])
def test_every_shard_is_stored_once_and_read_by_all_who_hold_it(
    tensor: int, pipeline: int, mla: bool
) -> None:
    table = ranks(tensor, pipeline, mla=mla)
    stored = [r.kv_worker_id for r in table if r.stores]
    assert stored == list(range(table[0].kv_world_size))
    for shard in stored:
        readers = [r for r in table if r.kv_worker_id == shard]
        assert len(readers) == table[0].readers_per_shard
        # A shard is of one pipeline stage; with MLA it is the stage's only one.
        assert len({r.pipeline_rank for r in readers}) == 1
        # One loads for all.
        (leader,) = (r for r in readers if r.filled_by is None)
        assert leader.stores
        assert [leader.worker_id, *leader.fills] == [r.worker_id for r in readers]
        assert all(r.filled_by == leader.worker_id for r in readers if r is not leader)
        if mla:
            assert [r.tensor_rank for r in readers] == list(range(tensor))
    assert [(r.pipeline_rank, r.tensor_rank) for r in table] == list(
        itertools.product(range(pipeline), range(tensor))
    )


def config(
    tensor: int = 1, pipeline: int = 1, rank: int = 0, world: int | None = None, **more: int
) -> Any:
    parallel = SimpleNamespace(
        tensor_parallel_size=tensor,
        pipeline_parallel_size=pipeline,
        prefill_context_parallel_size=1,
        decode_context_parallel_size=1,
        world_size=tensor * pipeline if world is None else world,
        rank=rank,
    )
    vars(parallel).update(more)
    return SimpleNamespace(parallel_config=parallel)


def caches(*specs: Any) -> KVCacheConfig:
    return KVCacheConfig(8, [], [KVCacheGroupSpec([f"layer.{i}"], s) for i, s in enumerate(specs)])


GQA = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
MLA = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("specs", "mla"),
    [
        ([GQA], False),
        ([MLA], True),
        ([MLA, MLA], True),
        ([MLA, GQA], False),
        ([UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"a": MLA, "b": MLA})], True),
        ([UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"a": MLA, "b": GQA})], False),
    ],
)
def test_mla_is_what_every_layer_says(specs: list[Any], mla: bool) -> None:
    strategy = parallel_strategy(config(2), caches(*specs), is_worker=False)
    assert strategy.use_mla is mla


def test_a_worker_takes_its_rank_within_its_engine() -> None:
    # Data parallelism comes first in vLLM's order: rank 13 of engines of 4 x 2 is 5 in the second.
    strategy = parallel_strategy(config(4, 2, rank=13), caches(GQA), is_worker=True)
    assert strategy.worker_id == 5
    scheduler = parallel_strategy(config(4, 2, rank=13), caches(GQA), is_worker=False)
    assert scheduler.worker_id == 0


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (config(2, decode_context_parallel_size=2), "decode_context_parallel_size=2"),
        (
            config(1, world=2, prefill_context_parallel_size=2),
            "prefill_context_parallel_size=2",
        ),
        (config(2, 2, world=8), "vLLM runs 8 workers"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(wrong: Any, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        parallel_strategy(wrong, caches(GQA), is_worker=False)


def test_a_worker_outside_its_engine_is_refused() -> None:
    with pytest.raises(ValueError, match="worker 4 is not in an engine"):
        ParallelStrategy(use_mla=False, tensor_size=2, pipeline_size=2, worker_id=4)

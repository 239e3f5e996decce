"""Sparse latent attention (DeepSeek V3.2 and V4): several caches of a layer, with vLLM's own specs.

V3.2 keeps an indexer's keys beside each layer's latent vectors. V4 compresses four tokens into one
state or 128 into one, and keeps the states of its compressors and the last tokens as windows. The
specs are those that vLLM's layers make, grouped and laid out by vLLM. Their kernels need a GPU.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from simkit import ASK, C, StartEngine, extra, prompt, status
from simulator import Layers
from vllm import EngineArgs
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.v1.kv_cache_interface import KVCacheSpec, MLAAttentionSpec

from kvdock.types import GroupKind
from kvdock_vllm.engine.copier import Copier, HostBlocks
from kvdock_vllm.engine.groups import fitting_chunk_tokens
from kvdock_vllm.vllm_groups import UnsupportedModelError, group_shapes
from kvdock_vllm.vllm_layout import group_layout
from kvdock_vllm.vllm_parallel import parallel_strategy

try:
    planning: Any = importlib.import_module("vllm.v1.core.kv_cache_planning")
except ImportError:  # before vLLM 0.33
    planning = importlib.import_module("vllm.v1.core.kv_cache_utils")

pytestmark = pytest.mark.skipif(
    "tokens_per_state" not in {field.name for field in dataclasses.fields(MLAAttentionSpec)},
    reason="this version of vLLM describes compressed caches in another way",
)

NUM_BLOCKS = 5
HEAD = 512
FULL, WINDOW = GroupKind.FULL_ATTENTION, GroupKind.SLIDING_WINDOW


@contextmanager
def config_of(model: Path, block_tokens: int) -> Iterator[VllmConfig]:
    """The configuration of an engine whose blocks hold all layers."""
    config = EngineArgs(
        model=str(model), skip_tokenizer_init=True, max_model_len=2048, dtype="float32"
    ).create_engine_config()
    config.cache_config.block_size = block_tokens
    config.cache_config.cache_dtype = "fp8_ds_mla"
    config.cache_config.kv_cache_layout = "BLHNC"
    with set_current_vllm_config(config):
        yield config


def v32_specs(config: VllmConfig, layers: int) -> dict[str, KVCacheSpec]:
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention
    from vllm.model_executor.models.deepseek_v2 import DeepseekV32IndexerCache

    attention: Any = SimpleNamespace(
        kv_cache_dtype="fp8_ds_mla",
        head_size=576,
        sliding_window=None,
        indexer=object(),
        non_causal_multi_token_decode=False,
        topk_buffer_width=2048,
    )
    specs: dict[str, KVCacheSpec] = {}
    for layer in range(layers):
        name = f"layers.{layer}.attn"
        specs[name] = MLAAttention.get_kv_cache_spec(attention, config)
        indexer: Any = DeepseekV32IndexerCache(
            head_dim=132,
            dtype=torch.uint8,
            prefix=f"{name}.indexer",
            cache_config=config.cache_config,
        )
        specs[f"{name}.indexer"] = indexer.get_kv_cache_spec(config)
    return specs


def v4_specs(config: VllmConfig, ratios: list[int]) -> dict[str, KVCacheSpec]:
    """``ratios``: for each layer, how many tokens become one state. 1: it has only a window."""
    from vllm.models.deepseek_v4.attention import DeepseekV4Attention, DeepseekV4IndexerCache
    from vllm.models.deepseek_v4.compressor import CompressorStateCache
    from vllm.v1.attention.backends.mla.sparse_swa import DeepseekV4SWACache

    made: dict[str, Any] = {}
    for layer, ratio in enumerate(ratios):
        name = f"layers.{layer}.attn"
        made[name] = SimpleNamespace(
            compress_ratio=ratio,
            kv_cache_dtype="fp8_ds_mla",
            head_dim=HEAD,
            kv_cache_torch_dtype=torch.uint8,
        )
        made[f"{name}.swa"] = DeepseekV4SWACache(
            HEAD, 128, torch.uint8, f"{name}.swa", config.cache_config
        )
        if ratio > 1:
            overlap = 2 if ratio == 4 else 1
            made[f"{name}.state"] = CompressorStateCache(
                2 * overlap * HEAD, torch.float32, ratio, f"{name}.state"
            )
        if ratio == 4:
            made[f"{name}.index"] = DeepseekV4IndexerCache(
                132, torch.uint8, f"{name}.index", config.cache_config, ratio
            )
            made[f"{name}.index.state"] = CompressorStateCache(
                4 * 128, torch.float32, ratio, f"{name}.index.state"
            )
    specs = {
        name: (
            DeepseekV4Attention.get_kv_cache_spec(one, config)
            if isinstance(one, SimpleNamespace)
            else one.get_kv_cache_spec(config)
        )
        for name, one in made.items()
    }
    return {name: spec for name, spec in specs.items() if spec is not None}


def laid_out(config: VllmConfig, specs: dict[str, KVCacheSpec]) -> tuple[Any, Any]:
    """vLLM's groups with their place in memory, and its view of each layer, on filled memory."""
    from vllm.v1.kv_cache_interface import create_kv_cache_views

    groups = planning.get_kv_cache_groups(config, specs)
    layout = config.cache_config.get_resolved_kv_cache_layout()
    block_bytes = planning._get_kv_cache_bytes_per_block(groups, layout)
    cache = planning.get_kv_cache_config_from_groups(config, groups, NUM_BLOCKS * block_bytes)
    assert cache.num_blocks == NUM_BLOCKS
    memory = np.random.default_rng(1).integers(0, 256, NUM_BLOCKS * block_bytes, np.uint8)
    raw = torch.from_numpy(memory).view(torch.int8)
    views: dict[str, torch.Tensor] = {}
    for tensor in cache.kv_cache_tensors:
        made = create_kv_cache_views(raw, specs[tensor.layers[0]], NUM_BLOCKS, layout, tensor)
        views |= dict(zip(tensor.layers, made, strict=True))
    return cache, views


def check_bytes(cache: Any, views: Mapping[str, torch.Tensor]) -> None:
    """What is gathered of a block is each layer's page, and scattering it writes nothing else."""
    for group in cache.kv_cache_groups:
        layout = group_layout(group, views, NUM_BLOCKS)
        pages = [
            views[name][3].contiguous().view(torch.uint8).flatten() for name in group.layer_names
        ]
        host = np.zeros(layout.block_bytes, np.uint8)
        Copier(layout).gather([HostBlocks([3], host)], lambda: False)
        assert host.tobytes() == b"".join(page.numpy().tobytes() for page in pages)
        before = {name: view.clone().view(torch.uint8) for name, view in views.items()}
        Copier(layout).scatter([HostBlocks([1], host)], lambda: False)
        for name in group.layer_names:
            now = views[name].view(torch.uint8)
            assert torch.equal(now[1], before[name][3])
            assert torch.equal(now[2:], before[name][2:])


def test_v32_has_one_group_of_latent_vectors_and_indexers_keys(model: Path) -> None:
    with config_of(model, 64) as config:
        cache, views = laid_out(config, v32_specs(config, 3))
        (shape,) = group_shapes(cache, "v3.2")
        assert (shape.group_idx, shape.kind, shape.block_tokens) == (None, FULL, 64)
        assert len(shape.layer_names) == 6
        layout = group_layout(cache.kv_cache_groups[0], views, NUM_BLOCKS)
        assert layout.block_bytes == 3 * 64 * (656 + 132)
        check_bytes(cache, views)


def test_v4_has_groups_of_states_and_windows(model: Path) -> None:
    with config_of(model, 256) as config:
        cache, views = laid_out(config, v4_specs(config, [1, 4, 128, 4, 128]))
        shapes = group_shapes(cache, "v4")
        assert {(s.kind, s.block_tokens, s.window_tokens) for s in shapes} == {
            (FULL, 256, 0),
            (WINDOW, 64, 128),
            (WINDOW, 4, 8),
            (WINDOW, 8, 128),
        }
        # A hit ends where blocks of all groups end, and so compressed states.
        chunk = fitting_chunk_tokens(32, shapes)
        assert chunk == 256
        parts = {(s.block_tokens, s.part_blocks(chunk)) for s in shapes}
        assert parts == {(256, 1), (64, 2), (4, 2), (8, 16)}
        check_bytes(cache, views)


@pytest.mark.parametrize("version", ["v3.2", "v4"])
def test_tensor_parallel_ranks_hold_the_same(model: Path, version: str) -> None:
    with config_of(model, 256) as config:
        specs = v32_specs(config, 2) if version == "v3.2" else v4_specs(config, [1, 4, 128])
        cache, _ = laid_out(config, specs)
        assert parallel_strategy(config, cache, is_worker=False).use_mla


def test_caches_that_a_prefix_does_not_determine_are_refused_by_name(model: Path) -> None:
    interface = pytest.importorskip("vllm.v1.kv_cache_interface")
    if not hasattr(interface, "CircularBufferSpec"):
        pytest.skip("not in this vLLM")
    ring = interface.CircularBufferSpec(
        block_size=8, num_kv_heads=1, head_size=512, head_size_v=0, dtype=torch.float32
    )
    cache = SimpleNamespace(kv_cache_groups=[interface.KVCacheGroupSpec(["layers.0.ring"], ring)])
    with pytest.raises(UnsupportedModelError, match=r"v4\.1.*CircularBufferSpec"):
        group_shapes(cache, "v4.1")  # type: ignore[arg-type]


def test_groups_as_of_v4_under_vllms_scheduler(start_engine: StartEngine, kvdock: Any) -> None:
    """Their windows and blocks, scaled to the simulator's chunks, on two equal ranks."""
    groups = (Layers(64), Layers(16, window=32), Layers(4, window=8), Layers(8, window=32))
    arguments: dict[str, Any] = {"groups": groups, "mla": True, "tensor_size": 2, "num_blocks": 400}
    cold = start_engine(**arguments).generate(prompt(5 * C + 9), max_tokens=2 * C)
    assert status(kvdock).counters.stored_shards == 4 * 7
    for tokens in (3 * C + 1, 5 * C + 9):
        warm = start_engine(**arguments).generate(
            prompt(5 * C + 9)[:tokens], max_tokens=2 * C, kv_transfer_params=ASK
        )
        assert extra(warm) == tokens // C * C
    assert warm.tokens == cold.tokens

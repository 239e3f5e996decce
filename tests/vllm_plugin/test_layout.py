"""From vLLM's tensors and specs to regions and groups."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from kv_tensors import by_vllm_layout
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from kvdock_vllm.copier import Copier, Part
from kvdock_vllm.layout import (
    UnsupportedLayoutError,
    fitting_chunk_tokens,
    group_layout,
    group_shapes,
    page_order,
)


def test_outer_order_does_not_matter_to_the_host_but_inner_order_does() -> None:
    def order(layout: KVCacheLayout) -> tuple[str, bytes]:
        cache = by_vllm_layout(layout, 2, 4, heads=2, tokens=3, width=4, pad=0)
        values = torch.arange(2 * 4 * 2 * 3 * 4, dtype=torch.float32).to(torch.bfloat16)
        for layer, value in zip(cache.layers, values.view(2, 4, 2, 3, 4), strict=True):
            layer.copy_(value)
        host = np.zeros(cache.layout.block_bytes, np.uint8)
        Copier(cache.layout).gather([Part([2], host)], lambda: False)
        return page_order(cache.layers[0], 4), host.tobytes()

    heads_first = [KVCacheLayout.LBHNC, KVCacheLayout.LHBNC, KVCacheLayout.BLHNC]
    heads_first.append(KVCacheLayout.BHLNC)
    tokens_first = [KVCacheLayout.LBNHC, KVCacheLayout.BLNHC]
    assert len({order(layout) for layout in heads_first}) == 1
    assert len({order(layout) for layout in tokens_first}) == 1
    assert order(KVCacheLayout.LBHNC) != order(KVCacheLayout.LBNHC)
    assert order(KVCacheLayout.LBHNC)[0] == "bfloat16[d1=2,d2=3,d3=4]"


def spec(tokens: int = 4, heads: int = 2, width: int = 8, **more: Any) -> FullAttentionSpec:
    return FullAttentionSpec(
        block_size=tokens, num_kv_heads=heads, head_size=width, dtype=torch.float16, **more
    )


def test_layers_that_show_the_same_memory_count_once() -> None:
    tensor = torch.zeros(6, 2, 4, 16, dtype=torch.float16)
    group = KVCacheGroupSpec(["a", "b", "a.shared"], spec())
    caches = {"a": tensor, "a.shared": tensor, "b": torch.zeros_like(tensor)}
    layout = group_layout(group, caches, 6)
    assert len(layout.regions) == 2
    assert [text.split(":")[0] for text in layout.pages] == ["a", "b"]
    assert layout.block_bytes == 2 * spec().page_size_bytes


def test_layers_of_one_group_may_have_pages_of_their_own() -> None:
    wide = spec(width=16)
    group = KVCacheGroupSpec(
        ["a", "b"],
        UniformTypeKVCacheSpecs(block_size=4, kv_cache_specs={"a": spec(), "b": wide}),
    )
    caches = {
        "a": torch.zeros(6, 2, 4, 16, dtype=torch.float16),
        "b": torch.zeros(6, 2, 4, 32, dtype=torch.float16),
    }
    layout = group_layout(group, caches, 6)
    assert [r.page_bytes for r in layout.regions] == [spec().page_size_bytes, wide.page_size_bytes]


@pytest.mark.parametrize(
    ("caches", "message"),
    [
        ({}, "no KV cache for layer a"),
        ({"a": torch.zeros(6, 2, 4, 8, dtype=torch.float16)}, "spec says 256 bytes a block"),
        ({"a": torch.zeros(7, 2, 4, 16, dtype=torch.float16)}, "does not consist of 6 blocks"),
        (
            {"a": torch.zeros(2, 4, 16, dtype=torch.float16).expand(6, 2, 4, 16)[:, :1]},
            "spec says",
        ),
        (
            {"a": torch.zeros(6, 4, 16, dtype=torch.float16)[:, None].expand(6, 2, 4, 16)},
            "overlap",
        ),
    ],
)
def test_a_tensor_that_is_not_what_its_spec_says_is_refused(
    caches: dict[str, torch.Tensor], message: str
) -> None:
    with pytest.raises(UnsupportedLayoutError, match=message):
        group_layout(KVCacheGroupSpec(["a"], spec()), caches, 6)


def one_group(kv_spec: Any) -> KVCacheConfig:
    return KVCacheConfig(6, [], [KVCacheGroupSpec(["a"], kv_spec)])


def sink() -> Any:
    return SinkFullAttentionSpec(
        block_size=4, num_kv_heads=2, head_size=8, dtype=torch.float16, sink_len=4
    )


def local() -> Any:
    return ChunkedLocalAttentionSpec(
        block_size=4, num_kv_heads=2, head_size=8, dtype=torch.float16, attention_chunk_size=64
    )


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (sink, "SinkFullAttentionSpec"),
        (local, "ChunkedLocalAttentionSpec"),
        (lambda: spec(non_causal=True), "non-causally"),
    ],
)
def test_caches_with_rules_of_their_own_are_refused_by_name(
    make: Callable[[], Any], named: str
) -> None:
    with pytest.raises(UnsupportedLayoutError, match=named):
        group_shapes(one_group(make()))


def test_several_groups_are_refused() -> None:
    two = KVCacheConfig(6, [], [KVCacheGroupSpec(["a"], spec()), KVCacheGroupSpec(["b"], spec())])
    with pytest.raises(UnsupportedLayoutError, match="2 KV-cache groups"):
        group_shapes(two)


def test_mla_and_windows_treated_as_full_attention_are_taken() -> None:
    latent = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
    assert group_shapes(one_group(latent))[0].block_tokens == 16
    assert group_shapes(one_group(spec(sliding_window=64)))[0].block_tokens == 4


@pytest.mark.parametrize(
    ("wanted", "block", "chunk"), [(256, 16, 256), (256, 128, 256), (256, 96, 288), (1, 32, 32)]
)
def test_chunks_consist_of_whole_blocks(wanted: int, block: int, chunk: int) -> None:
    shapes = group_shapes(one_group(spec(tokens=block)))
    assert fitting_chunk_tokens(wanted, shapes) == chunk
    assert math.gcd(chunk, block) == block

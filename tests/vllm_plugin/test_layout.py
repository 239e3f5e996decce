"""From vLLM's tensors and specs to regions and groups."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from kv_tensors import by_vllm_layout
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheGroupSpec,
    UniformTypeKVCacheSpecs,
)

from kvdock_vllm.engine.copier import Copier, HostBlocks
from kvdock_vllm.engine.layout import UnsupportedLayoutError
from kvdock_vllm.engine.tensor_regions import page_order
from kvdock_vllm.vllm_layout import group_layout


def test_outer_order_does_not_matter_to_the_host_but_inner_order_does() -> None:
    def order(layout: str) -> tuple[str, bytes]:
        cache = by_vllm_layout(layout, 2, 4, heads=2, tokens=3, width=4, pad=0)
        values = torch.arange(2 * 4 * 2 * 3 * 4, dtype=torch.float32).to(torch.bfloat16)
        for layer, value in zip(cache.layers, values.view(2, 4, 2, 3, 4), strict=True):
            layer.copy_(value)
        host = np.zeros(cache.layout.block_bytes, np.uint8)
        Copier(cache.layout).gather([HostBlocks([2], host)], lambda: False)
        return page_order(cache.layers[0], 4), host.tobytes()

    heads_first = ["LBHNC", "LHBNC", "BLHNC", "BHLNC"]
    tokens_first = ["LBNHC", "BLNHC"]
    assert len({order(layout) for layout in heads_first}) == 1
    assert len({order(layout) for layout in tokens_first}) == 1
    assert order("LBHNC") != order("LBNHC")
    assert order("LBHNC")[0] == "bfloat16[d1=2,d2=3,d3=4]"


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

"""Regions and copies against a model that reads elements one by one, for every layout of vLLM's."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
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

from kvdock_vllm.copier import Copier, CopyStoppedError, runs, stacks
from kvdock_vllm.layout import (
    GroupLayout,
    Region,
    UnsupportedLayoutError,
    fitting_chunk_tokens,
    group_layout,
    group_shapes,
    layer_regions,
    page_order,
)


@dataclass
class Cache:
    """Layers of one group, with random contents."""

    layers: list[torch.Tensor]
    num_blocks: int
    page_bytes: int
    memory: torch.Tensor

    @property
    def layout(self) -> GroupLayout:
        regions = itertools.chain(*(layer_regions(t, self.num_blocks) for t in self.layers))
        return GroupLayout(self.num_blocks, tuple(regions), ())

    def block(self, block_id: int) -> bytes:
        """A block as the host keeps it, read element by element."""
        return b"".join(page(layer, self.num_blocks, block_id) for layer in self.layers)


def page(layer: torch.Tensor, num_blocks: int, block_id: int) -> bytes:
    """A layer's page: its elements in the order in which they lie in memory."""
    if layer.dim() == 5 and layer.shape[0] == 2 and layer.stride(0) > layer.stride(1):
        return page(layer[0], num_blocks, block_id) + page(layer[1], num_blocks, block_id)
    split = layer.shape[0] // num_blocks
    block = layer[block_id * split : (block_id + 1) * split]
    places = itertools.product(*(range(size) for size in block.shape))
    # Dimensions from the outermost in memory: within a page that is the order of addresses.
    order = sorted(range(block.dim()), key=lambda d: block.stride(d), reverse=True)
    elements = sorted(places, key=lambda place: [place[d] for d in order])
    return b"".join(
        block[place].reshape(1).view(torch.uint8).numpy().tobytes() for place in elements
    )


def filled(nbytes: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(nbytes).integers(0, 256, nbytes, dtype=np.uint8))


def by_vllm_layout(
    layout: KVCacheLayout, layers: int, blocks: int, heads: int, tokens: int, width: int, pad: int
) -> Cache:
    """One allocation for all layers in one of vLLM 0.32's layouts, somewhere inside the memory."""
    sizes = {"L": layers, "B": blocks, "H": heads, "N": tokens, "C": width}
    names = list("LBHNC")
    strides: dict[str, int] = {}
    step = 1
    for dim in reversed(layout.value):
        strides[names[dim]] = step
        step *= sizes[names[dim]]
        if strides.keys() == {"H", "N", "C"}:
            step += pad
    memory = filled(2 * (step + 3)).view(torch.bfloat16)
    view = torch.as_strided(
        memory, [sizes[n] for n in names], [strides[n] for n in names], storage_offset=3
    )
    return Cache(list(view), blocks, 2 * heads * tokens * width, memory)


def by_token_split(layers: int, blocks: int, split: int, tokens: int, width: int) -> Cache:
    """The kernel's blocks are smaller than the manager's."""
    memory = filled(4 * layers * blocks * split * tokens * width).view(torch.float32)
    views = memory.view(layers, blocks * split, 1, tokens, width)
    return Cache(list(views), blocks, 4 * split * tokens * width, memory)


def keys_before_values(layers: int, blocks: int, tokens: int, heads: int, width: int) -> Cache:
    """vLLM up to 0.25: (2, blocks, tokens, heads, width), one tensor a layer."""
    page_bytes = 2 * 2 * tokens * heads * width
    memory = filled(layers * blocks * page_bytes).view(torch.float16)
    views = memory.view(layers, 2, blocks, tokens, heads, width)
    return Cache(list(views), blocks, page_bytes, memory)


def mla(layers: int, blocks: int, tokens: int, width: int, gap: int) -> Cache:
    """(blocks, tokens, width) with padding behind each block."""
    stride = tokens * width + gap
    memory = filled(layers * blocks * stride)
    views = [
        torch.as_strided(memory, (blocks, tokens, width), (stride, width, 1), n * blocks * stride)
        for n in range(layers)
    ]
    return Cache(views, blocks, tokens * width, memory)


def small(most: int) -> st.SearchStrategy[int]:
    return st.integers(1, most)


caches = st.one_of(
    st.builds(
        by_vllm_layout,
        st.sampled_from(list(KVCacheLayout)),
        layers=small(3),
        blocks=st.integers(2, 5),
        heads=small(3),
        tokens=small(4),
        width=small(4),
        pad=st.sampled_from([0, 0, 5]),
    ),
    st.builds(by_token_split, small(3), st.integers(2, 4), st.integers(1, 3), small(3), small(3)),
    st.builds(keys_before_values, small(3), st.integers(2, 4), small(3), small(3), small(3)),
    st.builds(mla, small(3), st.integers(2, 5), small(4), small(4), st.integers(0, 9)),
)


def never() -> bool:
    return False


@settings(deadline=None, max_examples=150)
@given(cache=caches, data=st.data())
def test_gather_reads_exactly_the_pages_and_scatter_writes_exactly_them(
    cache: Cache, data: st.DataObject
) -> None:
    ids = st.integers(0, cache.num_blocks - 1)
    block_ids = data.draw(st.lists(ids, min_size=1, max_size=cache.num_blocks, unique=True))
    layout = cache.layout
    assert layout.block_bytes == cache.page_bytes * len(cache.layers)
    copier = Copier(layout)
    host = np.zeros(len(block_ids) * layout.block_bytes, np.uint8)

    copier.gather(block_ids, host, never)
    assert host.tobytes() == b"".join(cache.block(block_id) for block_id in block_ids)

    # Into other blocks, of which nothing else may change.
    targets = data.draw(st.permutations(range(cache.num_blocks)))[: len(block_ids)]
    before = [cache.block(block_id) for block_id in range(cache.num_blocks)]
    outside = _outside(cache)
    copier.scatter(host, targets, never)
    for block_id, old in enumerate(before):
        wanted = before[block_ids[targets.index(block_id)]] if block_id in targets else old
        assert cache.block(block_id) == wanted
    assert _outside(cache) == outside


def _outside(cache: Cache) -> bytes:
    """The memory that belongs to no page: padding, and what lies before the first layer."""
    memory = cache.memory.view(torch.uint8).numpy()
    free = np.ones(len(memory), bool)
    for region in cache.layout.regions:
        for block_id in range(cache.num_blocks):
            start = region.address - memory.ctypes.data + block_id * region.block_stride
            free[start : start + region.page_bytes] = False
    return bytes(memory[free])


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 30), max_size=30),
    st.integers(1, 8),
)
def test_runs_are_the_blocks_in_order_and_never_too_long(ids: list[int], longest: int) -> None:
    found = list(runs(ids, longest))
    assert [first + i for _, first, count in found for i in range(count)] == ids
    assert [index for index, _, _ in found] == list(
        itertools.accumulate([0, *(count for _, _, count in found)][:-1])
    )[: len(found)]
    assert all(count <= longest for _, _, count in found)


def test_evenly_spaced_layers_are_one_copy() -> None:
    layers = [Region(1000 + n * 4096, 64, 64) for n in range(32)]
    (stack,) = stacks(layers)
    assert (stack.count, stack.pitch, stack.column) == (32, 4096, 0)
    assert [s.count for s in stacks([*layers, Region(10_000_000, 64, 64)])] == [32, 1]
    # Downwards is no even spacing, and neither is another size.
    assert [s.count for s in stacks([layers[1], layers[0], Region(5000, 64, 32)])] == [1, 1, 1]


def test_outer_order_does_not_matter_to_the_host_but_inner_order_does() -> None:
    def order(layout: KVCacheLayout) -> tuple[str, bytes]:
        cache = by_vllm_layout(layout, 2, 4, heads=2, tokens=3, width=4, pad=0)
        values = torch.arange(2 * 4 * 2 * 3 * 4, dtype=torch.float32).to(torch.bfloat16)
        for layer, value in zip(cache.layers, values.view(2, 4, 2, 3, 4), strict=True):
            layer.copy_(value)
        host = np.zeros(cache.layout.block_bytes, np.uint8)
        Copier(cache.layout).gather([2], host, never)
        return page_order(cache.layers[0], 4), host.tobytes()

    heads_first = [KVCacheLayout.LBHNC, KVCacheLayout.LHBNC, KVCacheLayout.BLHNC]
    heads_first.append(KVCacheLayout.BHLNC)
    tokens_first = [KVCacheLayout.LBNHC, KVCacheLayout.BLNHC]
    assert len({order(layout) for layout in heads_first}) == 1
    assert len({order(layout) for layout in tokens_first}) == 1
    assert order(KVCacheLayout.LBHNC) != order(KVCacheLayout.LBNHC)
    assert order(KVCacheLayout.LBHNC)[0] == "bfloat16[d1=2,d2=3,d3=4]"


def test_a_copy_stops_between_pieces() -> None:
    cache = mla(1, 5, tokens=1024, width=4096, gap=0)
    copier = Copier(cache.layout)
    host = np.zeros(5 * cache.page_bytes, np.uint8)
    asked = iter([False, False, True])
    with pytest.raises(CopyStoppedError):
        copier.gather([0, 1, 2, 3, 4], host, lambda: next(asked))
    written = host.reshape(5, -1).any(axis=1)
    assert written.any()
    assert not written.all()


@pytest.mark.parametrize(
    ("block_ids", "nbytes", "message"),
    [
        ([0, 7], 2 * 12, "not all below 2"),
        ([-1, 0], 2 * 12, "not all below"),
        ([0], 11, "12 bytes"),
    ],
)
def test_copies_outside_the_cache_are_refused(
    block_ids: list[int], nbytes: int, message: str
) -> None:
    copier = Copier(mla(1, 2, tokens=3, width=4, gap=0).layout)
    with pytest.raises(ValueError, match=message):
        copier.gather(block_ids, np.zeros(nbytes, np.uint8), never)


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

"""KV caches in every layout of vLLM's, and what their blocks' bytes are.

A cache says the same thing twice, by independent means: ``layout`` in regions and strides, as the
connector describes it; ``block`` by reading elements one by one.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st

from kvdock_vllm.engine.layout import GroupLayout
from kvdock_vllm.engine.tensor_regions import layer_regions


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


LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
"""Names of vLLM 0.32's: the order of layers, blocks, heads, tokens and elements in memory."""


def filled(nbytes: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(nbytes).integers(0, 256, nbytes, dtype=np.uint8))


def by_vllm_layout(
    layout: str, layers: int, blocks: int, heads: int, tokens: int, width: int, pad: int
) -> Cache:
    """One allocation for all layers in one of vLLM 0.32's layouts, somewhere inside the memory."""
    sizes = {"L": layers, "B": blocks, "H": heads, "N": tokens, "C": width}
    strides: dict[str, int] = {}
    step = 1
    for name in reversed(layout):
        strides[name] = step
        step *= sizes[name]
        if strides.keys() == {"H", "N", "C"}:
            step += pad
    memory = filled(2 * (step + 3)).view(torch.bfloat16)
    view = torch.as_strided(
        memory, [sizes[n] for n in "LBHNC"], [strides[n] for n in "LBHNC"], storage_offset=3
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
        st.sampled_from(LAYOUTS),
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


def outside(cache: Cache) -> bytes:
    """The memory that belongs to no page: padding, and what lies before the first layer."""
    memory = cache.memory.view(torch.uint8).numpy()
    free = np.ones(len(memory), bool)
    for region in cache.layout.regions:
        for block_id in range(cache.num_blocks):
            start = region.address - memory.ctypes.data + block_id * region.block_stride
            free[start : start + region.page_bytes] = False
    return bytes(memory[free])

"""The KV-cache layouts that engines use, as NumPy arrays, and what a block's bytes are in each.

A case says the same thing twice, by independent means: ``layout`` in regions and strides, as a
worker describes it; and ``block_view(arrays, block)`` by indexing the arrays as the engine does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvdock_server.transfer.plans.group_memory import BlockRegion, GroupMemory

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Case:
    """One layout over allocations of ``allocation_bytes`` each.

    ``pages(arrays, block)`` lists the block's pages, views of the arrays in the host's order.
    """

    layout: GroupMemory
    allocation_bytes: list[int]
    pages: Callable[[list[Bytes], int], list[Bytes]]


def kv_first(layers: int, blocks: int, half: int, chunk: int, pad: int) -> Case:
    """(2, B, page) a layer, each in an allocation of its own behind ``pad`` bytes."""
    regions = [
        BlockRegion(layer, pad + kv * blocks * half, half, half)
        for layer in range(layers)
        for kv in range(2)
    ]

    def pages(arrays: list[Bytes], block: int) -> list[Bytes]:
        tensors = [a[pad : pad + 2 * blocks * half].reshape(2, blocks, half) for a in arrays]
        return [tensor[kv, block] for tensor in tensors for kv in range(2)]

    size = pad + 2 * blocks * half + 5
    return Case(GroupMemory(blocks, chunk, tuple(regions)), [size] * layers, pages)


def kv_first_one_allocation(layers: int, blocks: int, half: int, chunk: int, pad: int) -> Case:
    """(2, B, page) a layer, all in one allocation with a gap of ``pad`` after each."""
    tensor_bytes = 2 * blocks * half + pad
    regions = [
        BlockRegion(0, layer * tensor_bytes + kv * blocks * half, half, half)
        for layer in range(layers)
        for kv in range(2)
    ]

    def pages(arrays: list[Bytes], block: int) -> list[Bytes]:
        tensors = arrays[0].reshape(layers, tensor_bytes)[:, : 2 * blocks * half]
        return [tensor.reshape(2, blocks, half)[kv, block] for tensor in tensors for kv in range(2)]

    return Case(GroupMemory(blocks, chunk, tuple(regions)), [layers * tensor_bytes], pages)


def block_first(layers: int, blocks: int, page: int, chunk: int, pad: int) -> Case:
    """(B, 2, page / 2) or (B, H, N, 2D): one page a block and layer, layers apart, MLA alike."""
    regions = [BlockRegion(layer, pad, page, page) for layer in range(layers)]

    def pages(arrays: list[Bytes], block: int) -> list[Bytes]:
        return [a[pad : pad + blocks * page].reshape(blocks, page)[block] for a in arrays]

    return Case(GroupMemory(blocks, chunk, tuple(regions)), [pad + blocks * page] * layers, pages)


def layer_major(layers: int, blocks: int, page: int, chunk: int, pad: int) -> Case:
    """All layers in one allocation, layers outermost, each padded."""
    layer_bytes = blocks * page + pad
    regions = [BlockRegion(0, layer * layer_bytes, page, page) for layer in range(layers)]

    def pages(arrays: list[Bytes], block: int) -> list[Bytes]:
        tensors = arrays[0].reshape(layers, layer_bytes)[:, : blocks * page]
        return [tensor.reshape(blocks, page)[block] for tensor in tensors]

    return Case(GroupMemory(blocks, chunk, tuple(regions)), [layers * layer_bytes], pages)


def block_major(layers: int, blocks: int, page: int, chunk: int, pad: int) -> Case:
    """All layers in one allocation, blocks outermost; ``pad`` bytes after each block."""
    stride = layers * page + pad
    regions = [BlockRegion(0, layer * page, stride, page) for layer in range(layers)]

    def pages(arrays: list[Bytes], block: int) -> list[Bytes]:
        return list(arrays[0].reshape(blocks, stride)[block, : layers * page].reshape(layers, page))

    return Case(GroupMemory(blocks, chunk, tuple(regions)), [blocks * stride], pages)


def permuted(layers: int, blocks: int, page: int, chunk: int, pad: int) -> Case:
    """Block-major with padded pages, and the layers registered in another order than they lie."""
    page_stride = page + pad
    order = np.random.default_rng(layers).permutation(layers)
    stride = layers * page_stride
    regions = [BlockRegion(0, int(layer) * page_stride, stride, page) for layer in order]

    def pages(arrays: list[Bytes], block: int) -> list[Bytes]:
        rows = arrays[0].reshape(blocks, layers, page_stride)[block, :, :page]
        return [rows[layer] for layer in order]

    return Case(GroupMemory(blocks, chunk, tuple(regions)), [blocks * stride], pages)


def kernel_blocks(layers: int, blocks: int, page: int, chunk: int, pad: int) -> Case:
    """Three kernel blocks to each block that the engine's manager counts."""
    kernel_page = page
    tensor_shape = (blocks * 3, kernel_page)
    regions = [BlockRegion(layer, pad, 3 * kernel_page, 3 * kernel_page) for layer in range(layers)]

    def pages(arrays: list[Bytes], block: int) -> list[Bytes]:
        size = blocks * 3 * kernel_page
        tensors = [a[pad : pad + size].reshape(tensor_shape) for a in arrays]
        return [t[3 * block : 3 * block + 3].reshape(-1) for t in tensors]

    size = pad + blocks * 3 * kernel_page
    return Case(GroupMemory(blocks, chunk, tuple(regions)), [size] * layers, pages)


def unequal_pages(layers: int, blocks: int, page: int, chunk: int, pad: int) -> Case:
    """Latent pages and narrow index pages in turn (132 beside 576 wide), layers apart."""
    narrow = page // 4 + 1
    sizes = [page if layer % 2 == 0 else narrow for layer in range(layers)]
    regions = [BlockRegion(layer, pad, size, size) for layer, size in enumerate(sizes)]

    def pages(arrays: list[Bytes], block: int) -> list[Bytes]:
        return [
            a[pad : pad + blocks * size].reshape(blocks, size)[block]
            for a, size in zip(arrays, sizes, strict=True)
        ]

    return Case(
        GroupMemory(blocks, chunk, tuple(regions)), [pad + blocks * size for size in sizes], pages
    )


def unequal_one_allocation(layers: int, blocks: int, page: int, chunk: int, pad: int) -> Case:
    """Every other layer narrower, in two sizes, all in one allocation at one pitch."""
    sizes = [(page, page // 2 + 1, page, page // 3 + 1)[layer % 4] for layer in range(layers)]
    return _one_pitch(sizes, blocks, chunk, pad)


def narrow_last(layers: int, blocks: int, page: int, chunk: int, pad: int) -> Case:
    """All layers alike but the last, in one allocation at one pitch."""
    return _one_pitch([page] * (layers - 1) + [page // 5 + 1], blocks, chunk, pad)


def _one_pitch(sizes: list[int], blocks: int, chunk: int, pad: int) -> Case:
    layers, page = len(sizes), max(sizes)
    room = blocks * page + pad + blocks
    regions = [BlockRegion(0, layer * room, page, size) for layer, size in enumerate(sizes)]

    def pages(arrays: list[Bytes], block: int) -> list[Bytes]:
        rows = arrays[0].reshape(layers, room)
        return [
            row[: blocks * page].reshape(blocks, page)[block, :size]
            for row, size in zip(rows, sizes, strict=True)
        ]

    return Case(GroupMemory(blocks, chunk, tuple(regions)), [layers * room], pages)


def two_strides(layers: int, blocks: int, page: int, chunk: int, pad: int) -> Case:
    """Equal pages in one allocation, layers at one pitch, but every third has its blocks padded."""
    strides = [page + (pad + 2 if layer % 3 == 2 else 0) for layer in range(layers)]
    room = blocks * (page + pad + 2)
    regions = [BlockRegion(0, layer * room, stride, page) for layer, stride in enumerate(strides)]

    def pages(arrays: list[Bytes], block: int) -> list[Bytes]:
        rows = arrays[0].reshape(layers, room)
        return [
            row[: blocks * stride].reshape(blocks, stride)[block, :page]
            for row, stride in zip(rows, strides, strict=True)
        ]

    return Case(GroupMemory(blocks, chunk, tuple(regions)), [layers * room], pages)


def interleaved(layers: int, blocks: int, page: int, chunk: int, pad: int) -> Case:
    """Two sets of layers interleaved: they touch in block 0, and drift apart from there."""
    regions = [BlockRegion(0, 0, 4 * page, page), BlockRegion(0, page, 8 * page, page)]

    def pages(arrays: list[Bytes], block: int) -> list[Bytes]:
        rows = arrays[0].reshape(-1, page)
        return [rows[4 * block], rows[1 + 8 * block]]

    return Case(GroupMemory(blocks, chunk, tuple(regions)), [8 * blocks * page], pages)


CASES: dict[str, Callable[[int, int, int, int, int], Case]] = {
    "K/V first, layers apart": kv_first,
    "K/V first, one allocation": kv_first_one_allocation,
    "block first, layers apart": block_first,
    "layer-major, one allocation": layer_major,
    "block-major": block_major,
    "permuted, padded pages": permuted,
    "kernel blocks": kernel_blocks,
    "unequal pages, layers apart": unequal_pages,
    "unequal pages, one allocation": unequal_one_allocation,
    "narrow last layer, one allocation": narrow_last,
    "two strides, one allocation": two_strides,
    "interleaved": interleaved,
}
"""Each is called with layers, blocks, bytes of a page, blocks of a chunk and bytes of padding."""

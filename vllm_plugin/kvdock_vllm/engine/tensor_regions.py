"""From a layer's tensor to byte regions, without guessing.

A tensor's shape says little about its memory: strides are permuted, layers share one allocation, a
manager's block may be several of the kernel's, keys and values may be apart. So only strides are
trusted. A block of a layer is divided into its contiguous pieces, outermost dimension first. Each
piece becomes a region.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvdock_vllm.engine.layout import Region, UnsupportedLayoutError

if TYPE_CHECKING:
    import torch


def layer_regions(tensor: torch.Tensor, num_blocks: int) -> tuple[Region, ...]:
    """The contiguous pieces that form one block of a layer.

    Raises UnsupportedLayoutError if the tensor does not consist of ``num_blocks`` blocks.
    """
    halves = _halves(tensor, num_blocks)
    if halves is not None:
        return tuple(itertools.chain(*(layer_regions(half, num_blocks) for half in halves)))
    block_stride, dims = _block_dims(tensor, num_blocks)
    piece = tensor.element_size()
    while dims and dims[-1].stride == piece:
        piece *= dims.pop().size
    if any(dim.stride < piece for dim in dims):
        raise UnsupportedLayoutError(
            f"KV-cache tensor of shape {tuple(tensor.shape)}, strides {tensor.stride()}: its "
            f"elements overlap"
        )
    offsets = (
        sum(index * dim.stride for index, dim in zip(place, dims, strict=True))
        for place in itertools.product(*(range(dim.size) for dim in dims))
    )
    base = tensor.data_ptr()
    return tuple(Region(base + offset, block_stride, piece) for offset in offsets)


def page_order(tensor: torch.Tensor, num_blocks: int) -> str:
    """The order of a page's elements: its dimensions from the outermost, with sizes. ``d0`` are the
    kernel's blocks within one of the manager's.
    """
    halves = _halves(tensor, num_blocks)
    if halves is not None:
        return f"2x({page_order(halves[0], num_blocks)})"
    _, dims = _block_dims(tensor, num_blocks)
    inside = ",".join(f"d{dim.index}={dim.size}" for dim in dims)
    return f"{str(tensor.dtype).removeprefix('torch.')}[{inside}]"


@dataclass(frozen=True, slots=True)
class _Dim:
    index: int
    size: int
    stride: int
    """Bytes."""


def _block_dims(tensor: torch.Tensor, num_blocks: int) -> tuple[int, list[_Dim]]:
    """Bytes from block to block, and a block's dimensions from the outermost in memory."""
    if tensor.dim() < 1 or tensor.shape[0] == 0 or tensor.shape[0] % num_blocks:
        raise UnsupportedLayoutError(
            f"KV-cache tensor of shape {tuple(tensor.shape)} does not consist of {num_blocks} "
            f"blocks"
        )
    element = tensor.element_size()
    # The kernel may have smaller blocks than the manager, which then follow one another.
    split = tensor.shape[0] // num_blocks
    sizes: Sequence[int] = (split, *tensor.shape[1:])
    strides = [stride * element for stride in tensor.stride()]
    dims = [
        _Dim(index, size, stride)
        for index, (size, stride) in enumerate(zip(sizes, strides, strict=True))
        if size > 1
    ]
    dims.sort(key=lambda dim: dim.stride, reverse=True)
    return strides[0] * split, dims


def _halves(tensor: torch.Tensor, num_blocks: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Keys and values, if they are apart: (2, blocks, ...) with all keys before all values.

    Hybrids of attention and recurrent layers have this shape with blocks outermost: strides decide.
    """
    apart = (
        tensor.dim() == 5
        and tensor.shape[0] == 2
        and tensor.shape[1] % num_blocks == 0
        and tensor.stride(0) > tensor.stride(1)
    )
    return (tensor[0], tensor[1]) if apart else None

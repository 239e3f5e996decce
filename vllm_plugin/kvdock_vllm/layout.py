"""From vLLM's KV-cache tensors to byte regions, without guessing.

A tensor's shape says little about its memory: strides are permuted, layers share one allocation,
a manager's block may be several of the kernel's, keys and values may be apart. So only strides are
trusted. A block of a layer is taken apart into its contiguous pieces, outermost dimension first,
and each piece becomes a region: the piece of block b begins at ``address + b * block_stride``.

The host keeps a block as its regions one after the other. That order depends on the order of
dimensions *inside* a page, which goes into the namespace, and not on how layers and blocks lie
around it: engines that differ only in the latter share.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec


class UnsupportedLayoutError(ValueError):
    """The model's KV cache has a form that is not supported; the message names it."""


@dataclass(frozen=True, slots=True)
class Region:
    """One contiguous piece of every block, in bytes."""

    address: int
    """Where the piece of block 0 begins."""
    block_stride: int
    page_bytes: int


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """Where the blocks of one group lie in this process, and in which order the host keeps them."""

    num_blocks: int
    regions: tuple[Region, ...]
    pages: tuple[str, ...]
    """For each layer its name, bytes a page, element type and order of dimensions."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all of its regions."""
        return sum(region.page_bytes for region in self.regions)


def group_layout(
    group: KVCacheGroupSpec, kv_caches: Mapping[str, torch.Tensor], num_blocks: int
) -> GroupLayout:
    """Regions of all layers of a group, in the group's order of layers.

    ``kv_caches`` are vLLM's tensors by layer. Layers that show the same memory count once. Raises
    UnsupportedLayoutError if a tensor does not hold what its layer's spec says.
    """
    group_spec: Any = group.kv_cache_spec
    per_layer: Mapping[str, KVCacheSpec] = getattr(group_spec, "kv_cache_specs", None) or {}
    regions: dict[Region, None] = {}
    pages: list[str] = []
    for name in group.layer_names:
        if name not in kv_caches:
            raise UnsupportedLayoutError(f"vLLM registered no KV cache for layer {name}")
        spec: Any = per_layer.get(name, group_spec)
        tensor = kv_caches[name]
        page_bytes = getattr(spec, "unpadded_page_size_bytes", spec.page_size_bytes)
        found = layer_regions(tensor, num_blocks)
        if (held := sum(region.page_bytes for region in found)) != page_bytes:
            raise UnsupportedLayoutError(
                f"layer {name}: vLLM's spec says {page_bytes} bytes a block, its tensor of shape "
                f"{tuple(tensor.shape)}, strides {tensor.stride()} and {num_blocks} blocks has "
                f"{held}"
            )
        if all(region in regions for region in found):
            continue
        regions.update(dict.fromkeys(found))
        pages.append(f"{name}:{page_bytes}:{page_order(tensor, num_blocks)}")
    return GroupLayout(num_blocks, tuple(regions), tuple(pages))


def layers_of_blocks(
    tensor: torch.Tensor, attn_backend: Any, kv_cache_config: KVCacheConfig
) -> dict[str, torch.Tensor]:
    """Each layer's own view of a tensor that holds whole blocks, all layers of one together.

    ``attn_backend`` is vLLM's class, which knows the order of such a tensor's dimensions. Raises
    UnsupportedLayoutError if it does not have as many layers as the model.
    """
    try:
        order = attn_backend.get_kv_cache_stride_order(include_num_layers_dimension=True)
    except (AttributeError, NotImplementedError):
        order = tuple(range(tensor.dim()))  # as vLLM does
    layers = tensor.permute(*(order.index(dim) for dim in range(tensor.dim())))
    owners: list[Any] = list(kv_cache_config.kv_cache_tensors)
    if len(layers) != len(owners):
        raise UnsupportedLayoutError(
            f"KV-cache tensor of shape {tuple(tensor.shape)} in the order {tuple(order)} has "
            f"{len(layers)} layers, and the model {len(owners)}"
        )
    return {
        name: layer for owner, layer in zip(owners, layers, strict=True) for name in owner.shared_by
    }


def layer_regions(tensor: torch.Tensor, num_blocks: int) -> tuple[Region, ...]:
    """The contiguous pieces that together are one block of a layer.

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
    """In which order a page's elements are kept: dimensions from the outermost, with sizes.

    ``d0`` are the kernel's blocks within one of the manager's.
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
    # A kernel may have smaller blocks than the manager, which then lie one after the other.
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
    """Keys and values, where they are apart: (2, blocks, ...) with all keys before all values.

    Hybrids of attention and recurrent layers have the same shape with blocks outermost, so the
    strides decide.
    """
    apart = (
        tensor.dim() == 5
        and tensor.shape[0] == 2
        and tensor.shape[1] % num_blocks == 0
        and tensor.stride(0) > tensor.stride(1)
    )
    return (tensor[0], tensor[1]) if apart else None

"""Turns vLLM's KV-cache tensors into the layout of a group."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvdock_vllm.engine.layout import GroupLayout, Region, UnsupportedLayoutError
from kvdock_vllm.engine.tensor_regions import layer_regions, page_order

if TYPE_CHECKING:
    import torch
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec


def group_layout(
    group: KVCacheGroupSpec, kv_caches: Mapping[str, torch.Tensor], num_blocks: int
) -> GroupLayout:
    """The regions of all layers of a group, in the group's order of layers.

    ``kv_caches`` are vLLM's tensors by layer name. Layers that share their memory count once.
    Raises UnsupportedLayoutError if a tensor does not hold what its layer's spec says.
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
        page_bytes = _page_bytes(spec)
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
        order = _state_order(spec) or page_order(tensor, num_blocks)
        pages.append(f"{name}:{page_bytes}:{order}")
    return GroupLayout(num_blocks, tuple(regions), tuple(pages))


def _page_bytes(spec: Any) -> int:
    """Bytes of a layer's page, without what pads it to the size of other layers' pages."""
    if _is_state(spec):
        return int(spec.real_page_size_bytes)
    return int(getattr(spec, "unpadded_page_size_bytes", spec.page_size_bytes))


def _state_order(spec: Any) -> str:
    """What a state's page consists of: tensors of which vLLM shows only the bytes. Empty if the
    layer has no state.
    """
    if not _is_state(spec):
        return ""
    parts = ",".join(
        f"{str(dtype).removeprefix('torch.')}{list(shape)}"
        for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)
    )
    return f"{spec.mamba_type.name}({parts})"


def _is_state(spec: Any) -> bool:
    from vllm.v1.kv_cache_interface import MambaSpec

    return isinstance(spec, MambaSpec)


def layers_of_blocks(
    tensor: torch.Tensor, attn_backend: Any, kv_cache_config: KVCacheConfig
) -> dict[str, torch.Tensor]:
    """Each layer's own view of a tensor in which each block holds all layers.

    ``attn_backend`` is vLLM's class, which knows the order of the tensor's dimensions. Raises
    UnsupportedLayoutError if the tensor does not have as many layers as the model.
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

"""What the connector asks of vLLM's layout on GPUs, and what it makes of vLLM 0.26's answer."""

from __future__ import annotations

import importlib.util
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvdock_vllm import connector
from kvdock_vllm.connector import KVDockConnector
from kvdock_vllm.engine.layout import UnsupportedLayoutError
from kvdock_vllm.engine.tensor_regions import layer_regions
from kvdock_vllm.vllm_layout import layers_of_blocks

LAYERS, BLOCKS, HEADS, TOKENS, WIDTH = 3, 5, 2, 4, 8
SIZES = (LAYERS, BLOCKS, HEADS, TOKENS, WIDTH)


def backend(order: tuple[int, ...] | None) -> Any:
    """As vLLM's attention backends: where each dimension of a tensor in memory comes from."""

    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        assert include_num_layers_dimension
        if order is None:
            raise NotImplementedError
        return order

    return SimpleNamespace(get_kv_cache_stride_order=get_kv_cache_stride_order)


def config(names: list[str]) -> Any:
    return SimpleNamespace(kv_cache_tensors=[SimpleNamespace(shared_by=[name]) for name in names])


@pytest.mark.parametrize(
    ("order", "pieces"), [((1, 0, 3, 2, 4), 1), ((1, 2, 0, 3, 4), HEADS), (None, 1)]
)
def test_each_layer_is_found_in_a_tensor_of_whole_blocks(
    order: tuple[int, ...] | None, pieces: int
) -> None:
    # The element at (layer, block, head, token, dim) of this has its own value.
    logical = torch.arange(LAYERS * BLOCKS * HEADS * TOKENS * WIDTH).view(SIZES)
    allocated = logical.permute(order or (0, 1, 2, 3, 4)).contiguous()
    names = [f"layer.{n}" for n in range(LAYERS)]
    found = layers_of_blocks(allocated, backend(order), config(names))
    assert list(found) == names
    for layer, tensor in enumerate(found.values()):
        assert torch.equal(tensor, logical[layer])
        assert len(layer_regions(tensor, BLOCKS)) == pieces


def test_another_number_of_layers_is_refused() -> None:
    with pytest.raises(UnsupportedLayoutError, match="has 3 layers, and the model 2"):
        layers_of_blocks(torch.zeros(SIZES), backend(None), config(["a", "b"]))


def test_blocks_in_one_piece_are_preferred_on_cuda_only(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm_config: Any = None
    unmade = KVDockConnector.__new__(KVDockConnector)
    assert not unmade.prefer_cross_layer_blocks
    assert KVDockConnector.get_required_kvcache_layout(vllm_config) is None
    monkeypatch.setattr(connector, "_on_cuda", lambda: True)
    assert unmade.prefer_cross_layer_blocks
    known = importlib.util.find_spec("vllm.v1.kv_cache_layout") is not None
    asked = KVDockConnector.get_required_kvcache_layout(vllm_config)
    assert asked == ("BLNHC" if known else None)
    # Versions before 0.32 know other names.
    monkeypatch.setitem(sys.modules, "vllm.v1.kv_cache_layout", None)
    assert KVDockConnector.get_required_kvcache_layout(vllm_config) is None

"""What is planned between two devices, carried out on arrays: the named blocks and nothing else."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdock_server.transfer.plans.group_memory import BlockRegion, GroupMemory
from kvdock_server.transfer.plans.peer_planner import PeerPlanner
from kvdock_server.transfer.plans.pieces import Rectangles, Segments
from kvdock_server.transfer.plans.planner import Planner

sys.path.insert(0, str(Path(__file__).parent))
import kv_layouts
from test_planner import DEVICE_BASE, KINDS, Ids, Memory, block_ids, runs_of

FAR_BASE = 1 << 42
NOTHING = np.zeros(0, np.uint8)


class FarMemory(Memory):
    """The other device, at addresses of its own."""

    @property
    def bases(self) -> list[int]:
        return [FAR_BASE - DEVICE_BASE + base for base in super().bases]


def one_region(nbytes: int, blocks: int, pad: int) -> kv_layouts.Case:
    """A block in one piece, with ``pad`` bytes after it: whatever the other side's pieces are."""
    stride = nbytes + pad
    layout = GroupMemory(blocks, 1, (BlockRegion(0, 0, stride, nbytes),))

    def pages(arrays: list[kv_layouts.Bytes], block: int) -> list[kv_layouts.Bytes]:
        return [arrays[0][block * stride : block * stride + nbytes]]

    return kv_layouts.Case(layout, [blocks * stride], pages)


def case_of(name: str, layers: int, blocks: int, page: int, pad: int) -> kv_layouts.Case:
    """With ``page`` bytes a layer, where all layers are alike."""
    parts = {"K/V first, layers apart": 2, "K/V first, one allocation": 2, "kernel blocks": 3}
    return kv_layouts.CASES[name](layers, blocks, page // parts.get(name, 1), 1, pad)


def check(
    source: kv_layouts.Case, target: kv_layouts.Case, ids: Ids
) -> tuple[Segments, Rectangles]:
    rng = np.random.default_rng(2)
    near = Memory([rng.integers(0, 256, n, np.uint8) for n in source.allocation_bytes], NOTHING)
    far = FarMemory([rng.integers(0, 256, n, np.uint8) for n in target.allocation_bytes], NOTHING)
    expected = [array.copy() for array in far.device]
    for block in ids.tolist():
        block_bytes = np.concatenate(source.pages(near.device, block))
        at = 0
        for page in target.pages(expected, block):
            page[:] = block_bytes[at : at + len(page)]
            at += len(page)
    planner = PeerPlanner(
        Planner(source.layout, near.bases).regions, Planner(target.layout, far.bases).regions
    )
    segments, rectangles = planner.plan(ids)
    assert len(segments) + len(rectangles) == planner.count(ids)
    assert segments.total_bytes + rectangles.total_bytes == len(ids) * source.layout.block_bytes
    for copies in (segments, rectangles):
        for here, there, nbytes in runs_of(copies):
            far.device_bytes(there, nbytes)[:] = near.device_bytes(here, nbytes)
    for rows, pitch, memory in (
        (rectangles.device, rectangles.device_pitch, near),
        (rectangles.host, rectangles.host_pitch, far),
    ):
        spans = (rectangles.height - np.uint64(1)) * pitch + rectangles.width
        for address, span in zip(rows.tolist(), spans.tolist(), strict=True):
            memory.device_bytes(address, span)  # fails unless it is within one allocation
    for array, wanted in zip(far.device, expected, strict=True):
        np.testing.assert_array_equal(array, wanted)
    return segments, rectangles


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_any_two_layouts_of_the_same_bytes(data: st.DataObject) -> None:
    names = sorted(kv_layouts.CASES)
    layers, blocks = data.draw(st.integers(1, 17)), data.draw(st.integers(1, 40))
    page = data.draw(st.sampled_from([6, 96]))
    source, other = (
        case_of(data.draw(st.sampled_from(names)), layers, blocks, page, data.draw(pads))
        for pads in (st.sampled_from([0, 3]), st.sampled_from([0, 16]))
    )
    target = other
    if other.layout.block_bytes != source.layout.block_bytes:
        target = one_region(source.layout.block_bytes, blocks, data.draw(st.sampled_from([0, 5])))
    if data.draw(st.booleans()):
        source, target = target, source
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    count = data.draw(st.integers(1, blocks))
    check(source, target, block_ids(data.draw(st.sampled_from(KINDS)), blocks, count, rng))


ALIKE = [
    "K/V first, layers apart",
    "K/V first, one allocation",
    "block first, layers apart",
    "layer-major, one allocation",
    "block-major",
    "permuted, padded pages",
    "kernel blocks",
    "two strides, one allocation",
]


@pytest.mark.parametrize("kind", KINDS)
def test_every_two_of_the_layouts_whose_layers_are_alike(kind: str) -> None:
    for source, target in itertools.product(ALIKE, ALIKE):
        ids = block_ids(kind, 40, 33, np.random.default_rng(0))
        check(case_of(source, 13, 40, 96, 3), case_of(target, 13, 40, 96, 0), ids)


def test_few_copies_where_the_layouts_allow() -> None:
    run, scattered = np.arange(8, 24), np.arange(32, 0, -2)
    large = 65536

    def count(name: str, ids: Ids) -> tuple[int, int]:
        case = case_of(name, 13, 40, large, 0)
        return tuple(map(len, check(case, case, ids)))

    assert count("block-major", run) == (1, 0)
    assert count("block-major", scattered) == (16, 0)
    assert count("block first, layers apart", run) == (13, 0)
    assert count("block first, layers apart", scattered) == (16 * 13, 0)
    # The distance from layer to layer is on both sides the same, or other on both.
    padded = case_of("layer-major, one allocation", 32, 40, 4096, 3)
    plain = case_of("layer-major, one allocation", 32, 40, 4096, 0)
    assert tuple(map(len, check(padded, plain, scattered))) == (0, 16)

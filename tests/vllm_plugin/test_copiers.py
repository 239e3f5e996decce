"""Copies against a model that reads elements one by one, for every layout of vLLM's.

The device copier runs on a CPU here, where it differs by its streams only.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_tensors import Cache, caches, mla, outside

from kvdock_vllm.engine.copier import Copier, CopyStoppedError, HostBlocks, runs, stacks
from kvdock_vllm.engine.device.pinning import PIECE_BYTES, cut
from kvdock_vllm.engine.device.staged_copier import DeviceCopier, Staging
from kvdock_vllm.engine.layout import GroupLayout, Region

Copy = Callable[[list[HostBlocks], Callable[[], bool]], None]
CPU = torch.device("cpu")


def never() -> bool:
    return False


def host_copies(layout: GroupLayout) -> tuple[Copy, Copy]:
    copier = Copier(layout)
    return copier.gather, copier.scatter


def device_copies(
    layout: GroupLayout, blocks_a_piece: int = 2, direct_bytes: int = 1 << 20
) -> tuple[Copy, Copy]:
    staging_bytes = blocks_a_piece * layout.block_bytes
    copier = DeviceCopier(layout, CPU, staging_bytes, direct_bytes)
    staging = Staging(CPU, staging_bytes)
    return (
        lambda parts, stop: copier.gather(parts, staging, stop),
        lambda parts, stop: copier.scatter(parts, staging, stop),
    )


ways = st.one_of(
    st.just(host_copies),
    st.builds(
        lambda blocks, direct: partial(device_copies, blocks_a_piece=blocks, direct_bytes=direct),
        st.integers(1, 6),
        st.sampled_from([1, 16, 1 << 20]),
    ),
)


@settings(deadline=None, max_examples=300)
@given(cache=caches, way=ways, data=st.data())
def test_gather_reads_exactly_the_pages_and_scatter_writes_exactly_them(
    cache: Cache, way: Callable[[GroupLayout], tuple[Copy, Copy]], data: st.DataObject
) -> None:
    ids = st.integers(0, cache.num_blocks - 1)
    block_ids = data.draw(st.lists(ids, min_size=1, max_size=cache.num_blocks, unique=True))
    middle = data.draw(st.integers(0, len(block_ids)))
    layout = cache.layout
    assert layout.block_bytes == cache.page_bytes * len(cache.layers)
    gather, scatter = way(layout)
    host = np.zeros((len(block_ids), layout.block_bytes), np.uint8)

    def parts(blocks: list[int]) -> list[HostBlocks]:
        return [
            HostBlocks(blocks[:middle], host[:middle].ravel()),
            HostBlocks(blocks[middle:], host[middle:].ravel()),
        ]

    gather(parts(block_ids), never)
    assert host.tobytes() == b"".join(cache.block(block_id) for block_id in block_ids)

    # Into other blocks, of which nothing else may change.
    targets = data.draw(st.permutations(range(cache.num_blocks)))[: len(block_ids)]
    before = [cache.block(block_id) for block_id in range(cache.num_blocks)]
    around = outside(cache)
    scatter(parts(targets), never)
    for block_id, old in enumerate(before):
        wanted = before[block_ids[targets.index(block_id)]] if block_id in targets else old
        assert cache.block(block_id) == wanted
    assert outside(cache) == around


each_way = pytest.mark.parametrize(
    "way", [host_copies, device_copies, partial(device_copies, direct_bytes=1)]
)


@each_way
def test_a_copy_stops_between_pieces(way: Callable[[GroupLayout], tuple[Copy, Copy]]) -> None:
    cache = mla(1, 5, tokens=1024, width=4096, gap=0)
    gather, _ = way(cache.layout)
    host = np.zeros(5 * cache.page_bytes, np.uint8)
    asked = iter([False, False, True])
    with pytest.raises(CopyStoppedError):
        gather([HostBlocks([0, 1, 2, 3, 4], host)], lambda: next(asked))
    written = host.reshape(5, -1).any(axis=1)
    assert written.any()
    assert not written.all()


@each_way
@pytest.mark.parametrize(
    ("block_ids", "nbytes", "message"),
    [
        ([0, 7], 2 * 12, "not all below 2"),
        ([-1, 0], 2 * 12, "not all below"),
        ([0], 11, "12 bytes"),
    ],
)
def test_copies_outside_the_cache_are_refused(
    way: Callable[[GroupLayout], tuple[Copy, Copy]], block_ids: list[int], nbytes: int, message: str
) -> None:
    gather, _ = way(mla(1, 2, tokens=3, width=4, gap=0).layout)
    with pytest.raises(ValueError, match=message):
        gather([HostBlocks(block_ids, np.zeros(nbytes, np.uint8))], never)


@each_way
def test_a_message_names_one_block_of_thousands(
    way: Callable[[GroupLayout], tuple[Copy, Copy]],
) -> None:
    gather, _ = way(mla(1, 2, tokens=3, width=4, gap=0).layout)
    ids = [0] * 5000 + [7]
    with pytest.raises(
        ValueError, match="block id 7: 5001 block ids are not all below 2"
    ) as refused:
        gather([HostBlocks(ids, np.zeros(12 * len(ids), np.uint8))], never)
    assert len(str(refused.value)) < 100


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


@given(st.integers(0, 3 * PIECE_BYTES), st.integers(0, 3 * PIECE_BYTES))
def test_copies_are_cut_where_pinned_pieces_meet(address: int, nbytes: int) -> None:
    parts = list(cut(address, nbytes))
    assert [end for _, end in parts[:-1]] == [begin for begin, _ in parts[1:]]
    assert sum(end - begin for begin, end in parts) == nbytes
    for begin, end in parts:
        assert begin < end
        assert (address + begin) // PIECE_BYTES == (address + end - 1) // PIECE_BYTES


@pytest.mark.parametrize("direct_bytes", [1, 1 << 20])
def test_a_block_may_lie_across_two_pinned_pieces(direct_bytes: int) -> None:
    cache = mla(2, 4, tokens=64, width=64, gap=0)
    # Address space only; what is touched is a page or two.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = np.frombuffer(mmap.mmap(-1, 3 * PIECE_BYTES, flags), np.uint8)
    border = 2 * PIECE_BYTES - memory.ctypes.data % PIECE_BYTES
    host = memory[border - 5000 : border - 5000 + 2 * cache.layout.block_bytes]
    gather, _ = device_copies(cache.layout, direct_bytes=direct_bytes)
    gather([HostBlocks([3, 1], host)], never)
    assert host.tobytes() == cache.block(3) + cache.block(1)


def test_wide_pages_are_moved_in_wide_elements() -> None:
    def element(page_bytes: int, offset: int = 0) -> Any:
        memory = (ctypes.c_uint64 * 64)()
        region = Region(ctypes.addressof(memory) + offset, page_bytes, page_bytes)
        copier = DeviceCopier(GroupLayout(2, (region,), ()), CPU, page_bytes)
        (stack,) = copier._stacks
        return stack.blocks.dtype

    assert [element(n) for n in (64, 36, 6, 7)] == [
        torch.int64,
        torch.int32,
        torch.int16,
        torch.uint8,
    ]
    assert element(64, offset=1) is torch.uint8

"""Plans, carried out on NumPy arrays, must move exactly the bytes that the engine's view names."""

from __future__ import annotations

import bisect
import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdock_server.transfer.plans import planner as planning
from kvdock_server.transfer.plans import regions
from kvdock_server.transfer.plans.cost_model import COST_MODEL
from kvdock_server.transfer.plans.group_memory import BlockRegion, GroupMemory, LayoutError
from kvdock_server.transfer.plans.pieces import (
    SERVER_PACE,
    Piece,
    Rectangles,
    ScatteredBlocks,
    Segments,
)
from kvdock_server.transfer.plans.planner import Planner, host_addresses

sys.path.insert(0, str(Path(__file__).parent))
import kv_layouts

Bytes = npt.NDArray[np.uint8]
Ids = npt.NDArray[np.int64]
DEVICE_BASE = 1 << 40
HOST_BASE = 1 << 45


@dataclass
class Memory:
    """Device allocations and a host pool at made-up addresses; a stray address is an error.

    The allocations lie back to back, so that whatever looks across their ends finds something.
    """

    device: list[Bytes]
    host: Bytes

    @property
    def bases(self) -> list[int]:
        sizes = [len(array) for array in self.device]
        return [DEVICE_BASE + start for start in itertools.accumulate(sizes[:-1], initial=0)]

    def device_bytes(self, address: int, nbytes: int) -> Bytes:
        index = bisect.bisect(self.bases, address) - 1
        offset = address - self.bases[index]
        assert offset + nbytes <= len(self.device[index])
        return self.device[index][offset : offset + nbytes]

    def host_bytes(self, address: int, nbytes: int) -> Bytes:
        offset = address - HOST_BASE
        assert 0 <= offset <= len(self.host) - nbytes
        return self.host[offset : offset + nbytes]


def runs_of(piece: Segments | Rectangles) -> Iterator[tuple[int, int, int]]:
    """(device address, host address, bytes) of every contiguous run."""
    if isinstance(piece, Segments):
        yield from zip(
            piece.device.tolist(), piece.host.tolist(), piece.nbytes.tolist(), strict=True
        )
        return
    for device, host, width, height, device_pitch, host_pitch in zip(
        piece.device.tolist(),
        piece.host.tolist(),
        piece.width.tolist(),
        piece.height.tolist(),
        piece.device_pitch.tolist(),
        piece.host_pitch.tolist(),
        strict=True,
    ):
        assert width <= device_pitch  # as the driver asks
        assert width <= host_pitch
        for row in range(height):
            yield device + row * device_pitch, host + row * host_pitch, width


def carry_out(piece: Piece, planner: Planner, memory: Memory, *, store: bool, borders: Ids) -> int:
    """Move a piece's bytes; how many there were."""

    def move(device: Bytes, host: Bytes) -> None:
        (host if store else device)[:] = device if store else host

    def host_bytes(address: int, nbytes: int) -> Bytes:
        crossed = (address < borders) & (borders < address + nbytes)
        assert not crossed.any(), "the copy crosses a border"
        return memory.host_bytes(address, nbytes)

    moved = 0
    if isinstance(piece, ScatteredBlocks):
        regions = planner.regions
        buffer = np.zeros(piece.total_bytes, np.uint8)
        pairs = []
        for index, block in enumerate(piece.ids.tolist()):
            for device, stride, nbytes, offset in zip(
                regions.device.tolist(),
                regions.stride.tolist(),
                regions.nbytes.tolist(),
                regions.host_offset.tolist(),
                strict=True,
            ):
                at = index * piece.block_bytes + offset
                pairs.append(
                    (memory.device_bytes(device + block * stride, nbytes), buffer[at : at + nbytes])
                )
        if store:
            for device, staged in pairs:
                staged[:] = device
        for at, host, nbytes in runs_of(piece.host):
            move(buffer[at : at + nbytes], host_bytes(host, nbytes))
            moved += nbytes
        if not store:
            for device, staged in pairs:
                device[:] = staged
        return moved
    if isinstance(piece, Rectangles):
        spans = (piece.height - np.uint64(1)) * piece.device_pitch + piece.width
        for device, span in zip(piece.device.tolist(), spans.tolist(), strict=True):
            memory.device_bytes(device, span)  # fails unless it is within one allocation
    for device, host, nbytes in runs_of(piece):
        move(memory.device_bytes(device, nbytes), host_bytes(host, nbytes))
        moved += nbytes
    return moved


def block_ids(kind: str, blocks: int, count: int, rng: np.random.Generator) -> Ids:
    if kind == "random":
        return rng.permutation(blocks)[:count]
    ids = np.arange(count)
    if kind == "down":
        return ids[::-1]
    if kind == "short runs":
        return np.concatenate([rng.permutation(part) for part in np.array_split(ids, 3)])
    return ids


KINDS = ["up", "down", "random", "short runs"]


def check_plan(
    case: kv_layouts.Case,
    ids: Ids,
    slots: Ids,
    skip: int,
    *,
    stage: bool,
    piece_bytes: int | None,
    store: bool,
    tiny_limits: bool,
) -> None:
    """Carry a plan out and compare all memory with what indexing the engine's arrays gives."""
    layout = case.layout
    layout.check(case.allocation_bytes)
    rng = np.random.default_rng(1)
    device = [rng.integers(0, 256, size, np.uint8) for size in case.allocation_bytes]
    host = rng.integers(0, 256, int(slots.max()) + layout.chunk_bytes + 3, np.uint8)
    memory = Memory([a.copy() for a in device], host.copy())

    expected = Memory([a.copy() for a in device], host.copy())
    for index, block in enumerate(ids.tolist()):
        chunk, within = divmod(index + skip, layout.blocks_per_chunk)
        at = int(slots[chunk]) + within * layout.block_bytes
        for page in case.pages(expected.device, block):
            if store:
                expected.host[at : at + len(page)] = page
            else:
                page[:] = expected.host[at : at + len(page)]
            at += len(page)

    with pytest.MonkeyPatch.context() as patch:
        if tiny_limits:  # so that small arrays reach every branch
            patch.setattr(
                planning, "SERVER_PACE", replace(SERVER_PACE, piece_us=3.0, staged_bytes=4096)
            )
            for module in (planning, regions):
                patch.setattr(module, "MAX_OPERATION_BYTES", 150)
            patch.setattr(planning, "_BATCH_OPERATIONS", 7)
            model = COST_MODEL._replace(stage_us=0.0)
            patch.setattr(planning, "COST_MODEL", model)
        step = piece_bytes or 1 << 40
        borders = np.arange(HOST_BASE + step, HOST_BASE + len(host), step, dtype=np.uint64)
        planner = Planner(layout, memory.bases, borders=borders, pace=planning.SERVER_PACE)
        hosts = host_addresses(HOST_BASE + slots, layout, skip)
        moved = 0
        for piece in planner.plan(ids, hosts, stage=stage):
            assert stage or not isinstance(piece, ScatteredBlocks)
            assert piece.total_bytes > 0
            moved += carry_out(piece, planner, memory, store=store, borders=borders)

    assert moved == len(ids) * layout.block_bytes
    np.testing.assert_array_equal(memory.host, expected.host)
    for array, wanted in zip(memory.device, expected.device, strict=True):
        np.testing.assert_array_equal(array, wanted)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_any_plan_moves_exactly_the_blocks_named(data: st.DataObject) -> None:
    build = kv_layouts.CASES[data.draw(st.sampled_from(sorted(kv_layouts.CASES)))]
    blocks = data.draw(st.integers(1, 40))
    chunk = data.draw(st.integers(1, 6))
    case = build(
        data.draw(st.integers(1, 17)),
        blocks,
        data.draw(st.sampled_from([1, 6, 16, 64, 96])),
        chunk,
        data.draw(st.sampled_from([0, 0, 3, 16])),
    )
    chunks = data.draw(st.integers(1, max(1, blocks // chunk)))
    skip = data.draw(st.integers(0, chunk - 1))
    if chunks * chunk - skip > blocks:
        skip = chunk - blocks
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    slots = np.arange(chunks) * case.layout.chunk_bytes
    if data.draw(st.booleans()):
        slots = rng.permutation(chunks * 2)[:chunks] * (case.layout.chunk_bytes + 7)
    check_plan(
        case,
        block_ids(data.draw(st.sampled_from(KINDS)), blocks, chunks * chunk - skip, rng),
        slots,
        skip,
        stage=data.draw(st.booleans()),
        piece_bytes=data.draw(st.sampled_from([None, 64, 333, 4096])),
        store=data.draw(st.booleans()),
        tiny_limits=data.draw(st.booleans()),
    )


@pytest.mark.parametrize("name", sorted(kv_layouts.CASES))
@pytest.mark.parametrize("kind", KINDS)
def test_every_layout_in_every_order(name: str, kind: str) -> None:
    """Large enough that all kinds of copies occur, whatever the random choice above does."""
    for page, stage, piece_bytes, store, tiny_limits in itertools.product(
        (16, 96), (False, True), (None, 5000), (False, True), (False, True)
    ):
        case = kv_layouts.CASES[name](13, 40, page, 4, 3)
        slots = np.arange(9) * case.layout.chunk_bytes
        slots[6:] += 11
        ids = block_ids(kind, 40, 33, np.random.default_rng(0))
        check_plan(
            case,
            ids,
            slots,
            3,
            stage=stage,
            piece_bytes=piece_bytes,
            store=store,
            tiny_limits=tiny_limits,
        )


def kinds(layout: GroupMemory, ids: list[int], *, stage: bool = True) -> set[type[Piece]]:
    bases = [DEVICE_BASE + (i << 36) for i in range(LAYERS)]
    planner = Planner(layout, bases)
    slots = HOST_BASE + np.arange(len(ids) // layout.blocks_per_chunk) * layout.chunk_bytes
    return {type(piece) for piece in planner.plan(ids, host_addresses(slots, layout), stage=stage)}


LARGE_PAGE = 64 << 10
SMALL_PAGE = 8 << 10
LAYERS = 80
BLOCKS = 1024
RANDOM = [int(i) for i in np.random.default_rng(0).permutation(BLOCKS)]
RUNS = np.random.default_rng(0).permutation(BLOCKS // 64)
RUNS_OF_64 = [int(64 * run + i) for run in RUNS for i in range(64)]


def layer_major(page: int, *, apart: bool) -> GroupMemory:
    return GroupMemory(
        BLOCKS,
        16,
        tuple(
            BlockRegion(i if apart else 0, 0 if apart else i * BLOCKS * page, page, page)
            for i in range(LAYERS)
        ),
    )


def count(pieces: list[Piece]) -> int:
    assert {type(piece) for piece in pieces} == {Segments}
    return sum(len(piece) for piece in pieces if isinstance(piece, Segments))


def test_a_block_major_cache_is_one_segment_a_block() -> None:
    regions = [
        BlockRegion(0, i * SMALL_PAGE, LAYERS * SMALL_PAGE, SMALL_PAGE) for i in range(LAYERS)
    ]
    layout = GroupMemory(BLOCKS, 16, tuple(regions))
    planner = Planner(layout, [DEVICE_BASE])
    hosts = host_addresses(HOST_BASE + np.arange(2) * layout.chunk_bytes, layout)
    assert count(list(planner.plan(list(range(64, 32, -1)), hosts, stage=True))) == 32
    assert count(list(planner.plan(list(range(32)), hosts, stage=True))) == 1


def test_pages_of_whole_layers_need_no_kernel() -> None:
    assert kinds(layer_major(1 << 20, apart=True), RANDOM) == {Segments}


@pytest.mark.parametrize("page", [SMALL_PAGE, LARGE_PAGE])
def test_layers_at_one_pitch_are_rectangles_whatever_the_ids(page: int) -> None:
    assert kinds(layer_major(page, apart=False), RANDOM) == {Rectangles}
    assert kinds(layer_major(page, apart=False), RUNS_OF_64) == {Rectangles}


@pytest.mark.parametrize("page", [SMALL_PAGE, LARGE_PAGE])
def test_consecutive_blocks_of_layers_apart_are_rectangles(page: int) -> None:
    assert kinds(layer_major(page, apart=True), RUNS_OF_64) == {Rectangles}


def test_small_pages_at_no_pitch_are_staged_or_segments() -> None:
    layout = layer_major(SMALL_PAGE, apart=True)
    assert kinds(layout, RANDOM) == {ScatteredBlocks}
    assert kinds(layout, RANDOM, stage=False) == {Segments}


def test_large_pages_at_no_pitch_are_segments_if_longer_than_the_driver_takes() -> None:
    assert kinds(layer_major(LARGE_PAGE, apart=True), RANDOM) == {ScatteredBlocks}
    assert kinds(layer_major(LARGE_PAGE + (8 << 10), apart=True), RANDOM) == {Segments}


def test_more_is_staged_of_what_is_passed_on() -> None:
    layout = layer_major(LARGE_PAGE + (8 << 10), apart=True)
    planner = Planner(layout, [DEVICE_BASE + (i << 36) for i in range(LAYERS)])
    hosts = host_addresses(HOST_BASE + np.arange(BLOCKS // 16) * layout.chunk_bytes, layout)
    assert not planner.may_stage(forwarded=False)
    assert planner.may_stage(forwarded=True)
    pieces = planner.plan(RANDOM, hosts, stage=True, forwarded=True)
    assert {type(piece) for piece in pieces} == {ScatteredBlocks}


def test_a_kernel_for_one_chunk_of_many_segments_and_none_for_few() -> None:
    assert kinds(layer_major(SMALL_PAGE, apart=True), RANDOM[:16]) == {ScatteredBlocks}
    few = GroupMemory(BLOCKS, 16, layer_major(SMALL_PAGE, apart=True).regions[:4])
    assert kinds(few, RANDOM[:16]) == {Segments}


def test_only_the_scattered_part_of_a_request_is_staged() -> None:
    ids = [*range(512), *(i for i in RANDOM if i >= 512)]
    assert kinds(layer_major(SMALL_PAGE, apart=True), ids) == {Rectangles, ScatteredBlocks}


def test_only_blocks_on_a_border_lose_their_rectangles() -> None:
    layout = layer_major(SMALL_PAGE, apart=True)
    bases = [DEVICE_BASE + (i << 36) for i in range(LAYERS)]
    borders = HOST_BASE - (300 << 10) + np.arange(1, 9, dtype=np.uint64) * np.uint64(256 << 20)
    planner = Planner(layout, bases, borders=borders)
    slots = HOST_BASE + np.arange(BLOCKS // 16) * layout.chunk_bytes
    pieces = list(planner.plan(list(range(BLOCKS)), host_addresses(slots, layout), stage=False))
    segments = sum(piece.total_bytes for piece in pieces if isinstance(piece, Segments))
    assert segments == 2 * layout.block_bytes  # 640 MiB from just behind a border on: two blocks


def test_pieces_are_bounded_in_time_and_bytes() -> None:
    layout = layer_major(SMALL_PAGE, apart=False)
    planner = Planner(layout, [DEVICE_BASE])
    slots = HOST_BASE + np.arange(BLOCKS // 16) * layout.chunk_bytes
    for piece in planner.plan(RANDOM, host_addresses(slots, layout), stage=True):
        assert piece.total_bytes <= 72 << 20


@pytest.mark.parametrize(
    ("layout", "sizes", "complaint"),
    [
        (GroupMemory(4, 1, (BlockRegion(0, 0, 8, 8),)), [31], "ends at byte 32"),
        (GroupMemory(4, 1, (BlockRegion(0, 1, 8, 8),)), [32], "ends at byte 33"),
        (GroupMemory(4, 1, (BlockRegion(1, 0, 8, 8),)), [32], "names allocation 1"),
        (GroupMemory(4, 1, (BlockRegion(0, 0, 7, 8),)), [99], "overlap"),
        (GroupMemory(4, 1, (BlockRegion(0, 0, 8, 0),)), [32], "at least one byte"),
        (GroupMemory(4, 1, ()), [32], "needs blocks"),
        (GroupMemory(0, 1, (BlockRegion(0, 0, 8, 8),)), [32], "needs blocks"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(
    layout: GroupMemory, sizes: list[int], complaint: str
) -> None:
    with pytest.raises(LayoutError, match=complaint):
        layout.check(sizes)


class Uncountable(Sequence[int]):
    """Block ids that must not be looked at."""

    def __len__(self) -> int:
        return 1 << 40

    def __getitem__(self, index: Any) -> Any:
        raise AssertionError(f"block id {index} was looked at")


def test_block_ids_are_counted_before_they_are_looked_at() -> None:
    layout = GroupMemory(9, 4, (BlockRegion(0, 0, 8, 8),))
    with pytest.raises(ValueError, match="2 chunks of 4 blocks less 1 make 7"):
        layout.block_ids(Uncountable(), 2, 1)
    assert layout.block_ids(range(2, 9), 2, 1).tolist() == [2, 3, 4, 5, 6, 7, 8]
    for ids, wrong in (([0, 1, 2, 9], 9), ([0, 1, 2, -1], -1)):
        with pytest.raises(ValueError, match=f"block id {wrong}: 9 blocks are registered"):
            layout.block_ids(ids, 1, 0)

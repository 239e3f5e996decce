"""Which bytes go where, and by which kind of copy. Pure: addresses in, pieces of work out.

A GPU's copy engines run beside its kernels and cost them next to nothing, but each operation has a
price. A kernel of another process makes the engine's kernels wait for a time slice, but has no
price per segment. So the planner looks for the copy-engine operations that are the least work, and
only where even those would waste too much of the link it asks for a kernel:

* Segments: contiguous on both sides, many in one call. Regions that follow one another are one
  segment (block-major caches), and consecutive ids of a dense cache melt into one.
* Rectangles: rows at one pitch on both sides. Either the rows are the layers of one block, where
  the layers lie at one pitch in one allocation; or the rows are consecutive blocks of one layer.
* Scattered blocks: gathered into (or spread from) a large buffer by a kernel, with one large copy
  between that buffer and host memory.

Each run of consecutive blocks gets what is cheapest for it by the prices in COPY_PRICES. Work comes
in pieces bounded in time, so that what waits behind a piece never waits long and a cancelled
transfer ends soon.

Directions do not matter here: a plan says which device bytes and which host bytes are the same
bytes. Addresses are plain integers, so the tests carry plans out on NumPy arrays.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvdock_server.transfer.layout import GroupLayout

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]


class CopyPrices(NamedTuple):
    """What copies cost. Times in microseconds, sizes in bytes."""

    link_bytes_per_us: float
    segment_us: float
    """Of each segment, beyond its bytes' own time."""
    least_segment_us: float
    """No segment takes less than this, however short."""
    apart_us: float
    """Added to that where regions lie in several allocations, among which the driver has to find
    each segment's."""
    rectangle_us: float
    """Of each rectangle, beyond its bytes' own time."""
    stage_segments_below: float
    """Share of the link's rate below which segments are given up for a kernel."""
    stage_passed_on_below: float
    """The same where a load goes on to other devices: queueing that takes the same thread's time,
    and the bytes go on in kernels anyway."""
    stage_rectangles_below: float
    """The same for rectangles, which cost the server next to no time of a processor."""
    stage_us: float
    """What all segments must cost beyond their bytes' own time: for less no engine is disturbed."""


COPY_PRICES = CopyPrices(
    link_bytes_per_us=54_500,
    segment_us=0.06,
    least_segment_us=1.2,
    apart_us=0.2,
    rectangle_us=3.2,
    stage_segments_below=0.85,
    stage_passed_on_below=0.95,
    stage_rectangles_below=0.75,
    stage_us=1000.0,
)
"""Measured on an H100 80GB (PCIe Gen5 x16, driver 580.159), its memory opened through CUDA IPC, in
GB/s from device to host / from host to device; beside an engine with the engine's slowdown:

                                          alone          beside an engine
    plain copies of 256 MiB               54.7 / 54.9    54.5 x 1.02 / 54.6 x 1.06
    segments of 2 MiB                     54.5 / 53.0    53.9 x 1.03 / 52.0 x 1.07
    segments of 64 KiB                    53.0 / 53.1    45.5 x 1.01 / 53.9 x 1.06
    the same, through the server          52.4 / 51.3    38.7 x 1.02 / 42.1 x 1.05
    segments of 32 KiB                    50.4 / 50.5    36.4 x 1.02 / 36.4 x 1.05
    segments of 16 KiB                    25.7 / 16.0
    rectangles of 32 layers x 64 KiB      50.8 / 50.4    39.7 x 1.02 / 44.5 x 1.06
    rectangles of 64 blocks x 64 KiB      52.2 / 50.6    42.4 x 1.02 / 48.6 x 1.06
    rectangles of 16 blocks x 64 KiB      47.3 / 45.2    36.3 x 1.02 / 40.9 x 1.05
    rectangles of 64 layers x 16 KiB      50.0 / 46.8
    rectangles of 64 layers x 8 KiB       45.1 / 41.9
    by a kernel, through the server       54.1 / 54.4    53.4 x 1.14 / 54.2 x 1.19

The driver takes 0.5 us of a processor for each segment, and up to 1.2 us in the server, so segments
shorter than what the link moves meanwhile, 64 KiB, leave it idle. In 32 allocations instead of one
it takes longer: in one run segments of 64 KiB came to 51.3 GB/s in one allocation and to 47.0 in
32, and those of 72 KiB to 51.8.
"""

PIECE_US = 1200.0
"""Time of one piece of copy-engine work at the prices above: 64 MiB of large segments."""

STAGED_PIECE_BYTES = 256 << 20
"""Bytes of one staged piece. Two processes share an SM by time slices, so few large kernels cost an
engine less than many small ones. Its step beside stores and loads without pause, over its step
alone: 1.38 for stores with 32 MiB, 1.20 and 1.34 with 128 MiB, 1.11 and 1.20 with 256 MiB."""

STAGING_BUFFERS = 2
"""Of one direction of one device: so many staged pieces are under way at most."""

MAX_STAGED_BLOCKS = 1 << 16
"""Block ids in one staged piece."""

_MAX_OPERATION_BYTES = 32 << 20
_WINDOW_OPERATIONS = 1 << 12
_LADDER_STEPS = (1, 2)


@dataclass(frozen=True, slots=True)
class Segments:
    """Contiguous copies: ``nbytes[i]`` bytes at ``device[i]`` are those at ``host[i]``."""

    device: U64
    host: U64
    nbytes: U64

    def __len__(self) -> int:
        return len(self.nbytes)

    @property
    def total_bytes(self) -> int:
        return int(self.nbytes.sum())

    def take(self, index: slice | npt.NDArray[np.bool_]) -> Segments:
        """Some of them."""
        return Segments(self.device[index], self.host[index], self.nbytes[index])


@dataclass(frozen=True, slots=True)
class Rectangles:
    """Copies of ``height[i]`` rows of ``width[i]`` bytes, each side at its own pitch."""

    device: U64
    host: U64
    width: U64
    height: U64
    device_pitch: U64
    host_pitch: U64

    def __len__(self) -> int:
        return len(self.width)

    @property
    def total_bytes(self) -> int:
        return int((self.width * self.height).sum())

    def take(self, index: slice | npt.NDArray[np.bool_]) -> Rectangles:
        """Some of them."""
        return Rectangles(
            self.device[index],
            self.host[index],
            self.width[index],
            self.height[index],
            self.device_pitch[index],
            self.host_pitch[index],
        )

    def rows(self) -> Segments:
        """The same bytes, row by row."""
        repeat = self.height.astype(np.int64)
        row = _ranges(repeat).astype(np.uint64)
        return Segments(
            np.repeat(self.device, repeat) + row * np.repeat(self.device_pitch, repeat),
            np.repeat(self.host, repeat) + row * np.repeat(self.host_pitch, repeat),
            np.repeat(self.width, repeat),
        )


@dataclass(frozen=True, slots=True)
class ScatteredBlocks:
    """Whole blocks for a kernel: block ``ids[i]`` lies in the buffer at ``i * block_bytes``.

    ``host`` says how the buffer and host memory belong together; its ``device`` addresses are
    offsets into the buffer.
    """

    ids: I64
    block_bytes: int
    host: Segments

    @property
    def total_bytes(self) -> int:
        return len(self.ids) * self.block_bytes


@dataclass(frozen=True, slots=True)
class RelayedBlocks:
    """Blocks that a load has brought to its device, to go on to ``receivers`` other devices.

    They are there when ``after`` is done, two events.
    """

    ids: I64
    block_bytes: int
    receivers: int
    after: tuple[int, int]

    @property
    def total_bytes(self) -> int:
        """Counted once, however many receivers there are: they get them at the same time."""
        return len(self.ids) * self.block_bytes


CopyPiece = Segments | Rectangles | ScatteredBlocks
"""Work between one device and host memory: what a Planner plans."""

Piece = CopyPiece | RelayedBlocks


class MergedRegions(NamedTuple):
    """Regions of a layout with device addresses, those that touch on both sides made one."""

    allocation: I64
    device: U64
    stride: U64
    nbytes: U64
    host_offset: U64


class Ladder(NamedTuple):
    """Regions at one pitch on both sides: rows of one rectangle for every block."""

    first: int
    rows: int
    device_pitch: int
    host_pitch: int


class Planner:
    """Plans for one group of one worker. What does not depend on block ids is worked out once."""

    def __init__(
        self,
        layout: GroupLayout,
        bases: Sequence[int],
        *,
        borders: U64 | None = None,
    ) -> None:
        """``bases`` are the addresses at which the layout's allocations are mapped here.

        No copy crosses any of ``borders``, ascending host addresses.
        """
        self.layout = layout
        self.block_bytes = layout.block_bytes
        self.regions = _merge(layout, bases)
        self._borders = borders if borders is not None else np.zeros(0, dtype=np.uint64)
        # One region without gaps: consecutive ids are contiguous.
        self._dense = len(self.regions.device) == 1 and (
            layout.num_blocks == 1 or self.regions.stride[0] == self.regions.nbytes[0]
        )
        self._are_apart = bool((self.regions.allocation != self.regions.allocation[0]).any())
        prices = self._segment_prices(self.regions.nbytes)
        self._ladders, self._singles = cheapest_ladders(self.regions, prices)
        self._block_us = len(self._ladders) * COPY_PRICES.rectangle_us + float(
            prices[self._singles].sum()
        )
        self._run_us = len(self.regions.device) * COPY_PRICES.rectangle_us
        self._fits_staging = not self._dense and self.block_bytes * 2 <= STAGED_PIECE_BYTES

    def may_stage(self, *, passed_on: bool) -> bool:
        """True if some block ids are better staged: one block is too dear for copy engines.

        ``passed_on``: in a load that goes on to other devices.
        """
        efficiency = _efficiency(np.array(self.block_bytes), np.array(self._block_us))
        return self._fits_staging and bool(efficiency < self._stage_blocks_below(passed_on))

    def plan(
        self,
        block_ids: Sequence[int] | npt.NDArray[np.integer],
        hosts: U64,
        *,
        stage: bool,
        passed_on: bool = False,
    ) -> Iterator[CopyPiece]:
        """The pieces that move blocks ``block_ids``, block ``i`` to or from address ``hosts[i]``.

        Planning is lazy and takes about as long as a piece needs to be copied, at most. Every block
        id must be below the layout's number of blocks. With ``stage`` false there are no scattered
        blocks. ``passed_on``: the load goes on to other devices.
        """
        ids = np.asarray(block_ids, dtype=np.int64)
        # Consecutive both here and there: only such blocks share an operation.
        joined = (np.diff(ids) == 1) & (np.diff(hosts) == np.uint64(self.block_bytes))
        if len(self._borders):
            # A block on a border stays alone, so that its neighbours keep their rectangles.
            joined &= ~self._crosses(hosts[:-1], np.uint64(2 * self.block_bytes))
        starts = np.concatenate([[0], np.flatnonzero(~joined) + 1])
        lengths = np.diff(np.concatenate([starts, [len(ids)]]))
        if self._dense:
            yield from self._dense_pieces(ids, hosts, starts, lengths)
            return
        by_rows = self._run_us < lengths * self._block_us
        cost = np.where(by_rows, self._run_us, lengths * self._block_us)
        staged = np.full(len(starts), False)
        if stage and self._fits_staging:
            blocks_below = self._stage_blocks_below(passed_on)
            below = np.where(by_rows, COPY_PRICES.stage_rectangles_below, blocks_below)
            staged = _efficiency(lengths * self.block_bytes, cost) < below
            if not passed_on and cost[staged].sum() < COPY_PRICES.stage_us:
                staged[:] = False
        rest = ~staged & ~by_rows
        by_rows &= ~staged
        if staged.any():
            members = np.repeat(staged, lengths)
            yield from self._staged_pieces(ids[members], hosts[members])
        if by_rows.any():
            yield from self._row_pieces(
                ids[starts[by_rows]], hosts[starts[by_rows]], lengths[by_rows]
            )
        if rest.any():
            members = np.repeat(rest, lengths)
            yield from self._block_pieces(ids[members], hosts[members])

    def _segment_prices(self, nbytes: U64) -> npt.NDArray[np.float64]:
        return segment_prices(nbytes, are_apart=self._are_apart)

    def _stage_blocks_below(self, passed_on: bool) -> float:
        """Share of the link's rate below which blocks on their own are staged."""
        if self._ladders:
            return COPY_PRICES.stage_rectangles_below
        return COPY_PRICES.stage_passed_on_below if passed_on else COPY_PRICES.stage_segments_below

    def _dense_pieces(self, ids: I64, hosts: U64, starts: I64, lengths: I64) -> Iterator[CopyPiece]:
        block = np.uint64(self.block_bytes)
        first = ids[starts].astype(np.uint64)
        yield from self._segment_pieces(
            Segments(
                self.regions.device[0] + first * self.regions.stride[0],
                hosts[starts],
                lengths.astype(np.uint64) * block,
            )
        )

    def _row_pieces(self, first: I64, hosts: U64, lengths: I64) -> Iterator[CopyPiece]:
        """Rows are blocks: a rectangle for each run and region."""
        regions = self.regions
        most = max(1, _MAX_OPERATION_BYTES // int(regions.nbytes.max()))
        parts = -(-lengths // most)
        part = _ranges(parts)
        first = np.repeat(first, parts) + part * most
        hosts = np.repeat(hosts, parts) + (part * most).astype(np.uint64) * np.uint64(
            self.block_bytes
        )
        lengths = np.minimum(np.repeat(lengths, parts) - part * most, most)
        count = len(regions.device)
        for window in _windows(len(first), count):
            ids = first[window].astype(np.uint64)[:, None]
            rows = len(ids)
            yield from self._rectangle_pieces(
                Rectangles(
                    (regions.device + ids * regions.stride).ravel(),
                    (hosts[window][:, None] + regions.host_offset).ravel(),
                    np.tile(regions.nbytes, rows),
                    np.repeat(lengths[window].astype(np.uint64), count),
                    np.tile(np.maximum(regions.stride, regions.nbytes), rows),
                    np.full(rows * count, self.block_bytes, dtype=np.uint64),
                )
            )

    def _block_pieces(self, ids: I64, hosts: U64) -> Iterator[CopyPiece]:
        """Block by block: rectangles whose rows are layers, and segments for the other regions."""
        regions = self.regions
        for window in _windows(len(ids), len(self._ladders) + len(self._singles)):
            block = ids[window].astype(np.uint64)[:, None]
            host = hosts[window][:, None]
            count = len(block)
            if self._ladders:
                ladders = np.array(self._ladders, dtype=np.uint64)
                first = ladders[:, 0].astype(np.intp)
                yield from self._rectangle_pieces(
                    Rectangles(
                        (regions.device[first] + block * regions.stride[first]).ravel(),
                        (host + regions.host_offset[first]).ravel(),
                        np.tile(regions.nbytes[first], count),
                        np.tile(ladders[:, 1], count),
                        np.tile(ladders[:, 2], count),
                        np.tile(ladders[:, 3], count),
                    )
                )
            if len(self._singles):
                single = self._singles
                yield from self._segment_pieces(
                    Segments(
                        (regions.device[single] + block * regions.stride[single]).ravel(),
                        (host + regions.host_offset[single]).ravel(),
                        np.tile(regions.nbytes[single], count),
                    )
                )

    def _staged_pieces(self, ids: I64, hosts: U64) -> Iterator[CopyPiece]:
        blocks = min(STAGED_PIECE_BYTES // self.block_bytes, MAX_STAGED_BLOCKS)
        size = np.uint64(self.block_bytes)
        for start in range(0, len(ids), blocks):
            host = hosts[start : start + blocks]
            starts = np.concatenate([[0], np.flatnonzero(np.diff(host) != size) + 1])
            lengths = np.diff(np.concatenate([starts, [len(host)]])).astype(np.uint64)
            segments = Segments(starts.astype(np.uint64) * size, host[starts], lengths * size)
            yield ScatteredBlocks(
                ids[start : start + blocks], self.block_bytes, self._within_borders(segments)
            )

    def _segment_pieces(self, segments: Segments) -> Iterator[Segments]:
        segments = self._within_borders(_split(segments, _MAX_OPERATION_BYTES))
        for part in _cut(segments.nbytes, self._segment_prices(segments.nbytes)):
            yield segments.take(part)

    def _rectangle_pieces(self, rectangles: Rectangles) -> Iterator[CopyPiece]:
        if len(self._borders):
            span = (rectangles.height - np.uint64(1)) * rectangles.host_pitch + rectangles.width
            crossing = self._crosses(rectangles.host, span)
            if crossing.any():
                # Those of blocks that lie on a border.
                yield from self._segment_pieces(rectangles.take(crossing).rows())
                rectangles = rectangles.take(~crossing)
        for part in _cut(rectangles.width * rectangles.height, COPY_PRICES.rectangle_us):
            yield rectangles.take(part)

    def _crosses(self, host: U64, span: U64 | np.uint64) -> npt.NDArray[np.bool_]:
        first = np.searchsorted(self._borders, host, side="right")
        last = np.searchsorted(self._borders, host + span - np.uint64(1), side="right")
        return np.asarray(first != last, dtype=np.bool_)

    def _within_borders(self, segments: Segments) -> Segments:
        if not len(self._borders):
            return segments
        while (crossing := self._crosses(segments.host, segments.nbytes)).any():
            tail = segments.take(crossing)
            border = self._borders[np.searchsorted(self._borders, tail.host, side="right")]
            cut = border - tail.host
            head = segments.nbytes.copy()
            head[crossing] = cut
            segments = Segments(
                np.concatenate([segments.device, tail.device + cut]),
                np.concatenate([segments.host, border]),
                np.concatenate([head, tail.nbytes - cut]),
            )
        return segments


def block_hosts(
    slots: Sequence[int] | npt.NDArray[np.integer],
    layout: GroupLayout,
    skip_blocks: int = 0,
) -> U64:
    """Host addresses of all blocks of the chunks at addresses ``slots``.

    The first ``skip_blocks`` blocks of the first chunk are left out.
    """
    within = np.arange(layout.blocks_per_chunk, dtype=np.uint64) * np.uint64(layout.block_bytes)
    hosts = (np.asarray(slots, dtype=np.uint64)[:, None] + within).ravel()
    return hosts[skip_blocks:]


def _efficiency(
    nbytes: npt.NDArray[np.integer], cost_us: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Rate over the link's, where operations cost ``cost_us`` beyond their bytes."""
    link_us = nbytes / COPY_PRICES.link_bytes_per_us
    return np.asarray(link_us / (link_us + cost_us), dtype=np.float64)


def segment_prices(nbytes: U64, *, are_apart: bool = False) -> npt.NDArray[np.float64]:
    """What segments cost beyond their bytes' own time on the link."""
    link_us = nbytes / COPY_PRICES.link_bytes_per_us
    least_us = COPY_PRICES.least_segment_us + (COPY_PRICES.apart_us if are_apart else 0.0)
    prices = np.maximum(least_us - link_us, 0) + COPY_PRICES.segment_us
    return np.asarray(prices, dtype=np.float64)


def _merge(layout: GroupLayout, bases: Sequence[int]) -> MergedRegions:
    """Regions that follow one another on both sides become one, for every block alike."""
    merged: list[list[int]] = []  # allocation, device address, stride, bytes, host offset
    host_offset = 0
    for region in layout.regions:
        device = bases[region.allocation] + region.offset
        last = merged[-1] if merged else None
        if (
            last is not None
            and last[0] == region.allocation
            and last[2] == region.block_stride
            and last[1] + last[3] == device
        ):
            last[3] += region.page_bytes
        else:
            merged.append(
                [region.allocation, device, region.block_stride, region.page_bytes, host_offset]
            )
        host_offset += region.page_bytes
    columns = np.array(merged, dtype=np.uint64).T.copy()
    return MergedRegions(columns[0].astype(np.int64), *columns[1:])


def cheapest_ladders(
    regions: MergedRegions, prices: npt.NDArray[np.float64]
) -> tuple[list[Ladder], npt.NDArray[np.intp]]:
    """Ladders, and the regions that are in none, at the lowest price for one block.

    With step 2 every other region is a rung: K and V of a layer at one distance, layers at
    another.
    """
    best: tuple[float, list[Ladder], list[int]] | None = None
    for step in _LADDER_STEPS:
        ladders: list[Ladder] = []
        singles: list[int] = []
        for first in range(min(step, len(regions.device))):
            _climb(regions, prices, first, step, ladders, singles)
        price = len(ladders) * COPY_PRICES.rectangle_us + float(prices[singles].sum())
        if best is None or price < best[0]:
            best = price, ladders, singles
    assert best is not None
    return best[1], np.array(sorted(best[2]), dtype=np.intp)


def _climb(
    regions: MergedRegions,
    prices: npt.NDArray[np.float64],
    first: int,
    step: int,
    ladders: list[Ladder],
    singles: list[int],
) -> None:
    """Sort regions ``first``, ``first + step``, ... into ladders and singles."""
    allocation = regions.allocation.tolist()
    device = regions.device.tolist()
    stride = regions.stride.tolist()
    nbytes = regions.nbytes.tolist()
    host = regions.host_offset.tolist()
    count = len(device)
    at = first
    while at < count:
        rows = 1
        device_pitch = host_pitch = 0
        if at + step < count:
            device_pitch = device[at + step] - device[at]
            host_pitch = host[at + step] - host[at]
        if nbytes[at] <= min(device_pitch, host_pitch):
            most = max(1, _MAX_OPERATION_BYTES // nbytes[at])
            rung = at + step
            while (
                rows < most
                and rung < count
                and allocation[rung] == allocation[at]
                and stride[rung] == stride[at]
                and nbytes[rung] == nbytes[at]
                and device[rung] - device[rung - step] == device_pitch
                and host[rung] - host[rung - step] == host_pitch
            ):
                rows += 1
                rung += step
        if rows * prices[at] > COPY_PRICES.rectangle_us:
            ladders.append(Ladder(at, rows, device_pitch, host_pitch))
            at += rows * step
        else:
            singles.append(at)
            at += step


def _split(segments: Segments, most: int) -> Segments:
    """Segments of at most ``most`` bytes."""
    if not len(segments) or int(segments.nbytes.max()) <= most:
        return segments
    size = np.uint64(most)
    parts = ((segments.nbytes + size - np.uint64(1)) // size).astype(np.int64)
    begin = _ranges(parts).astype(np.uint64) * size
    return Segments(
        np.repeat(segments.device, parts) + begin,
        np.repeat(segments.host, parts) + begin,
        np.minimum(np.repeat(segments.nbytes, parts) - begin, size),
    )


def _cut(nbytes: U64, operation_us: float | npt.NDArray[np.float64]) -> Iterator[slice]:
    """Slices of operations that take about PIECE_US each."""
    if not len(nbytes):
        return
    ends = np.cumsum(nbytes / COPY_PRICES.link_bytes_per_us + operation_us)
    cuts = np.searchsorted(ends, np.arange(PIECE_US, ends[-1], PIECE_US)).tolist()
    start = 0
    for end in [*(cut + 1 for cut in cuts), len(nbytes)]:
        if end > start:
            yield slice(start, end)
            start = end


def _ranges(counts: I64) -> I64:
    """0, 1, ... counts[0] - 1, 0, 1, ... counts[1] - 1, and so on."""
    ends = np.cumsum(counts)
    return np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - counts, counts)


def _windows(count: int, operations: int) -> Iterator[slice]:
    """Slices of ``count`` items that have ``operations`` each, so many that planning is short."""
    step = max(1, _WINDOW_OPERATIONS // max(1, operations))
    for start in range(0, count, step):
        yield slice(start, start + step)

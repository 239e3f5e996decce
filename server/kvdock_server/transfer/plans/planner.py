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

Each run of consecutive blocks gets what is cheapest for it by the prices in COPY_PRICES.

Directions do not matter here: a plan says which device bytes and which host bytes are the same
bytes. Addresses are plain integers, so the tests carry plans out on NumPy arrays.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from kvdock_server.transfer.plans.arrays import I64, U64, ranges
from kvdock_server.transfer.plans.cost_model import COPY_PRICES, efficiency, segment_prices
from kvdock_server.transfer.plans.group_memory import GroupLayout
from kvdock_server.transfer.plans.pieces import (
    MAX_OPERATION_BYTES,
    MAX_STAGED_BLOCKS,
    PIECE_US,
    STAGED_PIECE_BYTES,
    CopyPiece,
    Rectangles,
    ScatteredBlocks,
    Segments,
)
from kvdock_server.transfer.plans.regions import cheapest_ladders, merged

_WINDOW_OPERATIONS = 1 << 12


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
        self.regions = merged(layout, bases)
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
        share = efficiency(np.array(self.block_bytes), np.array(self._block_us))
        return self._fits_staging and bool(share < self._stage_blocks_below(passed_on))

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
            staged = efficiency(lengths * self.block_bytes, cost) < below
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
        most = max(1, MAX_OPERATION_BYTES // int(regions.nbytes.max()))
        parts = -(-lengths // most)
        part = ranges(parts)
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
        segments = self._within_borders(_split(segments, MAX_OPERATION_BYTES))
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


def _split(segments: Segments, most: int) -> Segments:
    """Segments of at most ``most`` bytes."""
    if not len(segments) or int(segments.nbytes.max()) <= most:
        return segments
    size = np.uint64(most)
    parts = ((segments.nbytes + size - np.uint64(1)) // size).astype(np.int64)
    begin = ranges(parts).astype(np.uint64) * size
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


def _windows(count: int, operations: int) -> Iterator[slice]:
    """Slices of ``count`` items that have ``operations`` each, so many that planning is short."""
    step = max(1, _WINDOW_OPERATIONS // max(1, operations))
    for start in range(0, count, step):
        yield slice(start, start + step)

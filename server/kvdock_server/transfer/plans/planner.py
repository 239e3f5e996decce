"""Which bytes go where between one device and host memory, and by which kind of copy. Pure.

A GPU's copy engines run beside its kernels and cost them next to nothing, but each operation costs
time of its own. A kernel of another process makes the engine's kernels wait for a time slice, but
costs nothing per segment. So the planner looks for the copy-engine operations with the least cost.
It asks for a kernel only where copy engines would leave too much of the link idle:

* Segments: contiguous on both sides, many in one call of the driver. Regions that follow one
  another are one segment (block-major caches), as are consecutive blocks of a cache without gaps.
* Rectangles: rows of equal length, at one pitch on either side. The pitch is the distance in bytes
  from the beginning of a row to the beginning of the next row. Either the rows are the layers of
  one block, if the layers lie at one pitch in one allocation. Or they are consecutive blocks of one
  layer.
* Scattered blocks: a kernel moves them between the cache and a staging buffer, and one large copy
  goes between the buffer and host memory.

Each run of consecutive blocks gets what costs least by COST_MODEL.

The direction does not matter here: a plan says which bytes of the device belong to which bytes of
the host. Addresses are plain integers, so the tests carry plans out on NumPy arrays.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from kvdock_server.transfer.plans.arrays import I64, U64, ranges, runs
from kvdock_server.transfer.plans.cost_model import COST_MODEL, efficiency, segment_costs_us
from kvdock_server.transfer.plans.group_memory import GroupMemory
from kvdock_server.transfer.plans.pieces import (
    MAX_OPERATION_BYTES,
    MAX_STAGED_BLOCKS,
    SERVER_PACE,
    CopyPiece,
    Pace,
    Rectangles,
    ScatteredBlocks,
    Segments,
)
from kvdock_server.transfer.plans.regions import cheapest_grouping, merged

_BATCH_OPERATIONS = 1 << 12
"""Copies that are planned at a time."""


class Planner:
    """Plans the copies of one group of one worker."""

    def __init__(
        self,
        layout: GroupMemory,
        bases: Sequence[int],
        *,
        borders: U64 | None = None,
        pace: Pace = SERVER_PACE,
    ) -> None:
        """``bases`` are the addresses at which the worker's allocations are mapped here.

        ``borders`` are ascending host addresses that no copy crosses.
        """
        self.layout = layout
        self.block_bytes = layout.block_bytes
        self._pace = pace
        self.regions = merged(layout, bases)
        self._borders = borders if borders is not None else np.zeros(0, dtype=np.uint64)
        # One region without gaps: consecutive ids are contiguous.
        self._dense = len(self.regions.device) == 1 and (
            layout.num_blocks == 1 or self.regions.stride[0] == self.regions.nbytes[0]
        )
        self._are_apart = bool((self.regions.allocation != self.regions.allocation[0]).any())
        costs_us = segment_costs_us(self.regions.nbytes, are_apart=self._are_apart)
        self._grouping = cheapest_grouping(self.regions, costs_us)
        self._run_us = len(self.regions.device) * COST_MODEL.rectangle_us
        self._fits_staging = not self._dense and self.block_bytes * 2 <= pace.staged_bytes

    def may_stage(self, *, forwarded: bool) -> bool:
        """True if some plans have scattered blocks, since single blocks cost copy engines too much.

        ``forwarded``: the load goes on to other devices.
        """
        share = efficiency(np.array(self.block_bytes), np.array(self._grouping.block_us))
        return self._fits_staging and bool(share < self._stage_blocks_below(forwarded))

    def plan(
        self,
        block_ids: Sequence[int] | npt.NDArray[np.integer],
        hosts: U64,
        *,
        stage: bool,
        forwarded: bool = False,
    ) -> Iterator[CopyPiece]:
        """The pieces that move block ``block_ids[i]`` to or from address ``hosts[i]``.

        Every block id must be below the layout's ``num_blocks``. Without ``stage`` there are no
        scattered blocks. ``forwarded``: the load goes on to other devices.

        Each piece is planned when it is asked for, in the time of its copy at most.
        """
        ids = np.asarray(block_ids, dtype=np.int64)
        # Only blocks that are consecutive on both sides share an operation.
        joined = (np.diff(ids) == 1) & (np.diff(hosts) == np.uint64(self.block_bytes))
        if len(self._borders):
            # A block on a border stays alone, so that its neighbours keep their rectangles.
            joined &= ~self._crosses(hosts[:-1], np.uint64(2 * self.block_bytes))
        starts, lengths = runs(joined)
        if self._dense:
            device = self.regions.device[0] + ids[starts].astype(np.uint64) * self.regions.stride[0]
            nbytes = lengths.astype(np.uint64) * np.uint64(self.block_bytes)
            yield from self._segment_pieces(Segments(device, hosts[starts], nbytes))
            return
        blocks_us = lengths * self._grouping.block_us
        by_rows = self._run_us < blocks_us
        cost_us = np.where(by_rows, self._run_us, blocks_us)
        staged = np.full(len(starts), False)
        if stage and self._fits_staging:
            blocks_below = self._stage_blocks_below(forwarded)
            below = np.where(by_rows, COST_MODEL.stage_rectangles_below, blocks_below)
            staged = efficiency(lengths * self.block_bytes, cost_us) < below
            if not forwarded and cost_us[staged].sum() < COST_MODEL.stage_us:
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

    def _stage_blocks_below(self, forwarded: bool) -> float:
        """Share of the link's rate below which single blocks are staged."""
        if self._grouping.strided:
            return COST_MODEL.stage_rectangles_below
        return COST_MODEL.stage_forwarded_below if forwarded else COST_MODEL.stage_segments_below

    def _row_pieces(self, first: I64, hosts: U64, lengths: I64) -> Iterator[CopyPiece]:
        """A rectangle for each run and region, whose rows are the run's blocks."""
        regions = self.regions
        most = max(1, MAX_OPERATION_BYTES // int(regions.nbytes.max()))
        cuts = -(-lengths // most)
        cut = ranges(cuts)
        first = np.repeat(first, cuts) + cut * most
        hosts = np.repeat(hosts, cuts) + (cut * most).astype(np.uint64) * np.uint64(
            self.block_bytes
        )
        lengths = np.minimum(np.repeat(lengths, cuts) - cut * most, most)
        count = len(regions.device)
        for batch in _batches(len(first), count):
            ids = first[batch].astype(np.uint64)[:, None]
            rows = len(ids)
            yield from self._rectangle_pieces(
                Rectangles(
                    (regions.device + ids * regions.stride).ravel(),
                    (hosts[batch][:, None] + regions.host_offset).ravel(),
                    np.tile(regions.nbytes, rows),
                    np.repeat(lengths[batch].astype(np.uint64), count),
                    np.tile(np.maximum(regions.stride, regions.nbytes), rows),
                    np.full(rows * count, self.block_bytes, dtype=np.uint64),
                )
            )

    def _block_pieces(self, ids: I64, hosts: U64) -> Iterator[CopyPiece]:
        """For each block: a rectangle for each set of strided regions, segments for the others."""
        regions, (strided, single, _) = self.regions, self._grouping
        for batch in _batches(len(ids), len(strided) + len(single)):
            block = ids[batch].astype(np.uint64)[:, None]
            host = hosts[batch][:, None]
            count = len(block)
            if strided:
                sets = np.array(strided, dtype=np.uint64)
                first = sets[:, 0].astype(np.intp)
                yield from self._rectangle_pieces(
                    Rectangles(
                        (regions.device[first] + block * regions.stride[first]).ravel(),
                        (host + regions.host_offset[first]).ravel(),
                        np.tile(regions.nbytes[first], count),
                        *(np.tile(column, count) for column in sets.T[1:]),
                    )
                )
            if len(single):
                yield from self._segment_pieces(
                    Segments(
                        (regions.device[single] + block * regions.stride[single]).ravel(),
                        (host + regions.host_offset[single]).ravel(),
                        np.tile(regions.nbytes[single], count),
                    )
                )

    def _staged_pieces(self, ids: I64, hosts: U64) -> Iterator[CopyPiece]:
        blocks = min(self._pace.staged_bytes // self.block_bytes, MAX_STAGED_BLOCKS)
        size = np.uint64(self.block_bytes)
        for start in range(0, len(ids), blocks):
            host = hosts[start : start + blocks]
            starts, lengths = runs(np.diff(host) == size)
            segments = Segments(
                starts.astype(np.uint64) * size, host[starts], lengths.astype(np.uint64) * size
            )
            yield ScatteredBlocks(
                ids[start : start + blocks], self.block_bytes, self._within_borders(segments)
            )

    def _segment_pieces(self, segments: Segments) -> Iterator[Segments]:
        segments = self._within_borders(_split(segments, MAX_OPERATION_BYTES))
        costs_us = segment_costs_us(segments.nbytes, are_apart=self._are_apart)
        for piece in _cut(segments.nbytes, costs_us, self._pace.piece_us):
            yield segments.take(piece)

    def _rectangle_pieces(self, rectangles: Rectangles) -> Iterator[CopyPiece]:
        if len(self._borders):
            span = (rectangles.height - np.uint64(1)) * rectangles.host_pitch + rectangles.width
            crossing = self._crosses(rectangles.host, span)
            if crossing.any():
                # These are blocks that lie on a border.
                yield from self._segment_pieces(rectangles.take(crossing).rows())
                rectangles = rectangles.take(~crossing)
        nbytes = rectangles.width * rectangles.height
        for piece in _cut(nbytes, COST_MODEL.rectangle_us, self._pace.piece_us):
            yield rectangles.take(piece)

    def _crosses(self, host: U64, span: U64 | np.uint64) -> npt.NDArray[np.bool_]:
        """For each range of ``span`` bytes at a host address, whether a border lies inside."""
        first = np.searchsorted(self._borders, host, side="right")
        last = np.searchsorted(self._borders, host + span - np.uint64(1), side="right")
        return np.asarray(first != last, dtype=np.bool_)

    def _within_borders(self, segments: Segments) -> Segments:
        """The same bytes in segments that cross no border."""
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


def host_addresses(
    slots: Sequence[int] | npt.NDArray[np.integer], layout: GroupMemory, skip_blocks: int = 0
) -> U64:
    """The host address of each block of the chunks that lie at addresses ``slots``.

    The first ``skip_blocks`` blocks of the first chunk are left out.
    """
    within = np.arange(layout.blocks_per_chunk, dtype=np.uint64) * np.uint64(layout.block_bytes)
    hosts = (np.asarray(slots, dtype=np.uint64)[:, None] + within).ravel()
    return hosts[skip_blocks:]


def _split(segments: Segments, most: int) -> Segments:
    """The same bytes in segments of at most ``most`` bytes."""
    if not len(segments) or int(segments.nbytes.max()) <= most:
        return segments
    size = np.uint64(most)
    cuts = ((segments.nbytes + size - np.uint64(1)) // size).astype(np.int64)
    begin = ranges(cuts).astype(np.uint64) * size
    return Segments(
        np.repeat(segments.device, cuts) + begin,
        np.repeat(segments.host, cuts) + begin,
        np.minimum(np.repeat(segments.nbytes, cuts) - begin, size),
    )


def _cut(nbytes: U64, cost_us: float | npt.NDArray[np.float64], piece_us: float) -> Iterator[slice]:
    """Slices of operations, each slice about ``piece_us`` microseconds of work.

    Operation ``i`` moves ``nbytes[i]`` bytes. ``cost_us`` is added to the time of its bytes.
    """
    if not len(nbytes):
        return
    ends = np.cumsum(nbytes / COST_MODEL.link_bytes_per_us + cost_us)
    cuts = np.searchsorted(ends, np.arange(piece_us, ends[-1], piece_us)).tolist()
    start = 0
    for end in [*(cut + 1 for cut in cuts), len(nbytes)]:
        if end > start:
            yield slice(start, end)
            start = end


def _batches(count: int, operations: int) -> Iterator[slice]:
    """Slices of ``count`` items, each small enough to be planned in a short time.

    An item takes ``operations`` copies.
    """
    step = max(1, _BATCH_OPERATIONS // max(1, operations))
    for start in range(0, count, step):
        yield slice(start, start + step)

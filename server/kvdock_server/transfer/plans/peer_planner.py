"""Which bytes go from one device's memory to another's, and by which kind of copy. Pure.

Two workers hold the same blocks under the same ids, each in a layout of its own. Cut at the ends of
both layouts' regions, a block is a list of pairs: ranges of bytes that are contiguous on both
devices. Pairs make segments and rectangles as regions do in planner.py. In the segments and
rectangles planned here, ``device`` is the sending device's side and ``host`` the receiving one's.

Copies between devices are many times faster than the link to the host. So what matters is their
number, not their bytes: to queue a copy takes a microsecond of the thread that feeds the link.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvdock_server.transfer.plans.arrays import I64, U64, runs
from kvdock_server.transfer.plans.cost_model import COST_MODEL, segment_costs_us
from kvdock_server.transfer.plans.pieces import Rectangles, Segments
from kvdock_server.transfer.plans.regions import MergedRegions, cheapest_grouping


class Pairs(NamedTuple):
    """In each column one number for each pair.

    Block ``b`` has the same ``nbytes`` at ``source + b * source_stride`` on the sending device and
    at ``target + b * target_stride`` on the receiving one.
    """

    source: U64
    source_stride: U64
    target: U64
    target_stride: U64
    nbytes: U64


class PeerPlanner:
    """Plans copies from one worker's group to another worker's on another device."""

    def __init__(self, source: MergedRegions, target: MergedRegions) -> None:
        """Blocks of both must have the same number of bytes."""
        # A pair begins wherever a region begins on either side.
        begins = np.union1d(source.host_offset, target.host_offset)
        end = source.host_offset[-1] + source.nbytes[-1]
        here = np.searchsorted(source.host_offset, begins, side="right") - 1
        there = np.searchsorted(target.host_offset, begins, side="right") - 1
        self.pairs = Pairs(
            source.device[here] + begins - source.host_offset[here],
            source.stride[here],
            target.device[there] + begins - target.host_offset[there],
            target.stride[there],
            np.diff(np.append(begins, end)),
        )
        costs_us = segment_costs_us(self.pairs.nbytes)
        # Rows of a rectangle share an allocation and a stride on both sides.
        sides = np.stack([source.allocation[here], target.allocation[there]], axis=1)
        sides = np.column_stack([sides, self.pairs.target_stride.astype(np.int64)])
        _, alike = np.unique(sides, axis=0, return_inverse=True)
        pairs_as_regions = MergedRegions(
            alike.ravel(),
            self.pairs.source,
            self.pairs.source_stride,
            self.pairs.nbytes,
            self.pairs.target,
        )
        self._grouping = cheapest_grouping(pairs_as_regions, costs_us)
        # Without gaps on either side consecutive blocks are one segment.
        self._dense = (self.pairs.source_stride == self.pairs.nbytes) & (
            self.pairs.target_stride == self.pairs.nbytes
        )
        self._run_us = float(np.where(self._dense, costs_us, COST_MODEL.rectangle_us).sum())

    def count(self, ids: I64) -> int:
        """How many copies ``plan`` makes for blocks ``ids``; much faster than ``plan``."""
        _, lengths, by_rows = self._runs(ids)
        block_copies = len(self._grouping.strided) + len(self._grouping.singles)
        in_rows = int(np.count_nonzero(by_rows))
        return in_rows * len(self.pairs.nbytes) + int(lengths[~by_rows].sum()) * block_copies

    def plan(self, ids: I64) -> tuple[Segments, Rectangles]:
        """The copies that bring blocks ``ids`` from the sending device to the receiving one."""
        first, lengths, by_rows = self._runs(ids)
        if not by_rows.any():
            return self._by_blocks(ids)
        segments, rectangles = self._by_rows(first[by_rows], lengths[by_rows])
        more_segments, more_rectangles = self._by_blocks(ids[np.repeat(~by_rows, lengths)])
        return segments + more_segments, rectangles + more_rectangles

    def _runs(self, ids: I64) -> tuple[I64, I64, npt.NDArray[np.bool_]]:
        """For each run of consecutive blocks: its first block, its length, and whether its blocks
        are the rows of rectangles."""
        starts, lengths = runs(np.diff(ids) == 1)
        return ids[starts], lengths, self._run_us < lengths * self._grouping.block_us

    def _by_rows(self, first: I64, lengths: I64) -> tuple[Segments, Rectangles]:
        """For each run and pair a segment, or a rectangle whose rows are the run's blocks."""
        pairs, count = self.pairs, len(first)
        block = first.astype(np.uint64)[:, None]
        source = (pairs.source + block * pairs.source_stride).ravel()
        target = (pairs.target + block * pairs.target_stride).ravel()
        nbytes = np.tile(pairs.nbytes, count)
        rows = np.repeat(lengths.astype(np.uint64), len(pairs.nbytes))
        dense = np.tile(self._dense, count)
        return Segments(source, target, nbytes * rows).take(dense), Rectangles(
            source,
            target,
            nbytes,
            rows,
            np.tile(np.maximum(pairs.source_stride, pairs.nbytes), count),
            np.tile(np.maximum(pairs.target_stride, pairs.nbytes), count),
        ).take(~dense)

    def _by_blocks(self, ids: I64) -> tuple[Segments, Rectangles]:
        """For each block: a rectangle for each set of strided regions, segments for other pairs."""
        pairs, count = self.pairs, len(ids)
        block = ids.astype(np.uint64)[:, None]
        source = pairs.source + block * pairs.source_stride
        target = pairs.target + block * pairs.target_stride
        sets = np.array(self._grouping.strided, dtype=np.uint64).reshape(-1, 4)
        first = sets[:, 0].astype(np.intp)
        single = self._grouping.singles
        return Segments(
            source[:, single].ravel(),
            target[:, single].ravel(),
            np.tile(pairs.nbytes[single], count),
        ), Rectangles(
            source[:, first].ravel(),
            target[:, first].ravel(),
            np.tile(pairs.nbytes[first], count),
            *(np.tile(column, count) for column in sets.T[1:]),
        )

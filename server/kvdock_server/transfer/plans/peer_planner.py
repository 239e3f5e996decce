"""Which bytes of one device's memory are to become which of another's. Pure, as plan.py.

Two workers hold the same blocks under the same ids, each in a layout of its own. Cut at the borders
of both layouts' regions, a block is a list of pairs: pieces that are contiguous here and there.
Pairs make segments and rectangles as regions do, between device and device instead of device and
host: in what is planned here ``host`` is the receiving device's side.

Copies between devices are many times faster than the link to the host, so what counts is how few
there are: each takes the driver a microsecond of the thread that feeds the link.
"""

from __future__ import annotations

from dataclasses import fields
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from kvdock_server.transfer.plans.arrays import I64, U64
from kvdock_server.transfer.plans.cost_model import COPY_PRICES, segment_prices
from kvdock_server.transfer.plans.pieces import Rectangles, Segments
from kvdock_server.transfer.plans.regions import MergedRegions, cheapest_ladders

Copies = TypeVar("Copies", Segments, Rectangles)


class Pairs(NamedTuple):
    """Block ``b`` has ``nbytes`` at ``source + b * source_stride``, which belong to
    ``target + b * target_stride``."""

    source: U64
    source_stride: U64
    target: U64
    target_stride: U64
    nbytes: U64


class RelayPlanner:
    """Plans from one worker's group to another's. Both must have blocks of the same bytes."""

    def __init__(self, source: MergedRegions, target: MergedRegions) -> None:
        here, there, within = _common_cuts(source, target)
        self.pairs = Pairs(
            source.device[here] + within.here,
            source.stride[here],
            target.device[there] + within.there,
            target.stride[there],
            within.nbytes,
        )
        prices = segment_prices(self.pairs.nbytes)
        # Rows of a rectangle share an allocation and a stride on both sides.
        sides = np.stack([source.allocation[here], target.allocation[there]], axis=1)
        sides = np.column_stack([sides, self.pairs.target_stride.astype(np.int64)])
        _, alike = np.unique(sides, axis=0, return_inverse=True)
        self._ladders, self._singles = cheapest_ladders(
            MergedRegions(
                alike.ravel(),
                self.pairs.source,
                self.pairs.source_stride,
                self.pairs.nbytes,
                self.pairs.target,
            ),
            prices,
        )
        self._block_us = len(self._ladders) * COPY_PRICES.rectangle_us + float(
            prices[self._singles].sum()
        )
        # Without gaps on either side consecutive blocks are one segment.
        self._dense = (self.pairs.source_stride == self.pairs.nbytes) & (
            self.pairs.target_stride == self.pairs.nbytes
        )
        self._run_us = float(np.where(self._dense, prices, COPY_PRICES.rectangle_us).sum())

    def count(self, ids: I64) -> int:
        """How many copies pass blocks ``ids`` on. Takes a fraction of the time of planning them."""
        _, lengths, by_rows = self._runs(ids)
        block_copies = len(self._ladders) + len(self._singles)
        in_rows = int(np.count_nonzero(by_rows))
        return in_rows * len(self.pairs.nbytes) + int(lengths[~by_rows].sum()) * block_copies

    def plan(self, ids: I64) -> tuple[Segments, Rectangles]:
        """The copies that pass blocks ``ids`` on."""
        first, lengths, by_rows = self._runs(ids)
        if not by_rows.any():
            return self._by_blocks(ids)
        segments, rectangles = self._by_rows(first[by_rows], lengths[by_rows])
        more_segments, more_rectangles = self._by_blocks(ids[np.repeat(~by_rows, lengths)])
        return _joined(segments, more_segments), _joined(rectangles, more_rectangles)

    def _runs(self, ids: I64) -> tuple[I64, I64, npt.NDArray[np.bool_]]:
        """First block and length of each run of consecutive ones, and whether rows are blocks."""
        starts = np.concatenate([[0], np.flatnonzero(np.diff(ids) != 1) + 1])
        lengths = np.diff(np.concatenate([starts, [len(ids)]]))
        return ids[starts], lengths, self._run_us < lengths * self._block_us

    def _by_rows(self, first: I64, lengths: I64) -> tuple[Segments, Rectangles]:
        """Rows are consecutive blocks: for each run and pair a segment or a rectangle."""
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
        """Block by block: rectangles whose rows are pairs, and segments for the other pairs."""
        pairs, count = self.pairs, len(ids)
        block = ids.astype(np.uint64)[:, None]
        source = pairs.source + block * pairs.source_stride
        target = pairs.target + block * pairs.target_stride
        ladders = np.array(self._ladders, dtype=np.uint64).reshape(-1, 4)
        first = ladders[:, 0].astype(np.intp)
        single = self._singles
        return Segments(
            source[:, single].ravel(),
            target[:, single].ravel(),
            np.tile(pairs.nbytes[single], count),
        ), Rectangles(
            source[:, first].ravel(),
            target[:, first].ravel(),
            np.tile(pairs.nbytes[first], count),
            *(np.tile(column, count) for column in ladders.T[1:]),
        )


class _Within(NamedTuple):
    """Where pieces begin in their regions on both sides, and how long they are."""

    here: U64
    there: U64
    nbytes: U64


def _common_cuts(
    source: MergedRegions, target: MergedRegions
) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp], _Within]:
    """The pieces into which both sides' borders cut a block, with their regions on either side."""
    end = source.host_offset[-1] + source.nbytes[-1]
    begins = np.union1d(source.host_offset, target.host_offset)
    here = np.searchsorted(source.host_offset, begins, side="right") - 1
    there = np.searchsorted(target.host_offset, begins, side="right") - 1
    return (
        here,
        there,
        _Within(
            begins - source.host_offset[here],
            begins - target.host_offset[there],
            np.diff(np.append(begins, end)),
        ),
    )


def _joined(some: Copies, more: Copies) -> Copies:
    return type(some)(
        *(
            np.concatenate([getattr(some, column.name), getattr(more, column.name)])
            for column in fields(some)
        )
    )

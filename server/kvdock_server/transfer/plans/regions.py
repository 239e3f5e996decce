"""The regions of a layout where they are mapped, and what can be copied of them at once. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvdock_server.transfer.plans.arrays import I64, U64
from kvdock_server.transfer.plans.cost_model import COPY_PRICES
from kvdock_server.transfer.plans.group_memory import GroupLayout
from kvdock_server.transfer.plans.pieces import MAX_OPERATION_BYTES

_LADDER_STEPS = (1, 2)


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


def merged(layout: GroupLayout, bases: Sequence[int]) -> MergedRegions:
    """Regions that follow one another on both sides become one, for every block alike."""
    rows: list[list[int]] = []  # allocation, device address, stride, bytes, host offset
    host_offset = 0
    for region in layout.regions:
        device = bases[region.allocation] + region.offset
        last = rows[-1] if rows else None
        if (
            last is not None
            and last[0] == region.allocation
            and last[2] == region.block_stride
            and last[1] + last[3] == device
        ):
            last[3] += region.page_bytes
        else:
            rows.append(
                [region.allocation, device, region.block_stride, region.page_bytes, host_offset]
            )
        host_offset += region.page_bytes
    columns = np.array(rows, dtype=np.uint64).T.copy()
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
            most = max(1, MAX_OPERATION_BYTES // nbytes[at])
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

"""Where a worker's regions are mapped, and which regions one copy can move together. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvdock_server.transfer.plans.arrays import I64, U64
from kvdock_server.transfer.plans.cost_model import COST_MODEL
from kvdock_server.transfer.plans.group_memory import GroupMemory
from kvdock_server.transfer.plans.pieces import MAX_OPERATION_BYTES

_STEPS = (1, 2)
"""A set of strided regions has every region from its first on, or every second one: the distance
between K and V of a layer may differ from the distance between layers."""


class MergedRegions(NamedTuple):
    """The regions of one group. Regions that follow one another on both sides are merged.

    In each column one number for each region, in the order of host memory: the index of its
    allocation, the address of block 0's page, the bytes from one block's page to the next block's,
    the bytes of a page, and the page's offset in a block in host memory.
    """

    allocation: I64
    device: U64
    stride: U64
    nbytes: U64
    host_offset: U64


class StridedRegions(NamedTuple):
    """``rows`` regions from index ``first`` on: for each block the rows of one rectangle.

    They lie at one pitch, in bytes, on either side.
    """

    first: int
    rows: int
    device_pitch: int
    host_pitch: int


class Grouping(NamedTuple):
    """How the regions of a block are copied: in sets of strided regions, the others as segments.

    ``singles`` are the indices of the others. ``block_us`` is the cost of one block's copies.
    """

    strided: list[StridedRegions]
    singles: npt.NDArray[np.intp]
    block_us: float


def merged(layout: GroupMemory, bases: Sequence[int]) -> MergedRegions:
    """The regions of a group whose allocations are mapped at addresses ``bases``."""
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


def cheapest_grouping(regions: MergedRegions, costs_us: npt.NDArray[np.float64]) -> Grouping:
    """The grouping with the least cost for one block.

    ``costs_us`` has for each region the cost of copying it as a segment.
    """
    groupings = []
    for step in _STEPS:
        strided: list[StridedRegions] = []
        singles: list[int] = []
        for first in range(min(step, len(regions.device))):
            _group_by_pitch(regions, costs_us, first, step, strided, singles)
        alone = np.array(sorted(singles), dtype=np.intp)
        block_us = len(strided) * COST_MODEL.rectangle_us + float(costs_us[alone].sum())
        groupings.append(Grouping(strided, alone, block_us))
    return min(groupings, key=lambda grouping: grouping.block_us)


def _group_by_pitch(
    regions: MergedRegions,
    costs_us: npt.NDArray[np.float64],
    first: int,
    step: int,
    strided: list[StridedRegions],
    singles: list[int],
) -> None:
    """Add each of the regions ``first``, ``first + step``, ... to ``strided`` or ``singles``."""
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
            row = at + step
            while (
                rows < most
                and row < count
                and allocation[row] == allocation[at]
                and stride[row] == stride[at]
                and nbytes[row] == nbytes[at]
                and device[row] - device[row - step] == device_pitch
                and host[row] - host[row - step] == host_pitch
            ):
                rows += 1
                row += step
        if rows * costs_us[at] > COST_MODEL.rectangle_us:
            strided.append(StridedRegions(at, rows, device_pitch, host_pitch))
            at += rows * step
        else:
            singles.append(at)
            at += step

"""What copies cost, as measured, and which of them a kernel does instead. Pure.

A cost is the time in microseconds beyond the time that the bytes themselves take on the link.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvdock_server.transfer.plans.arrays import U64


class CostModel(NamedTuple):
    """Times in microseconds. Shares are rates over the link's own rate, from 0 to 1."""

    link_bytes_per_us: float
    segment_us: float
    least_segment_us: float
    """No segment takes less than this in all, however short it is."""
    apart_us: float
    """Added to ``least_segment_us`` if regions lie in several allocations, which the driver has to
    find."""
    rectangle_us: float
    stage_segments_below: float
    """Blocks are staged if segments would reach less than this share of the link's rate."""
    stage_forwarded_below: float
    """The same in a load that goes on to other devices. The thread that queues segments has to
    queue the forwarding too."""
    stage_rectangles_below: float
    """The same for rectangles, which cost the server next to no processor time."""
    stage_us: float
    """A transfer whose copies cost less than this in all is not staged: a kernel would disturb an
    engine for little."""


COST_MODEL = CostModel(
    link_bytes_per_us=54_500,
    segment_us=0.06,
    least_segment_us=1.2,
    apart_us=0.2,
    rectangle_us=3.2,
    stage_segments_below=0.85,
    stage_forwarded_below=0.95,
    stage_rectangles_below=0.75,
    stage_us=1000.0,
)
"""Measured on an H100 80GB (PCIe Gen5 x16, driver 580.159) with memory opened through CUDA IPC.
Figures are GB/s, from device to host / from host to device. "Beside an engine" has the engine's
slowdown behind each rate:

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

The driver takes 0.5 us of processor time for each segment, and up to 1.2 us in the server. In
1.2 us the link moves 64 KiB, so shorter segments leave it idle. Several allocations make it slower:
in one run segments of 64 KiB reached 51.3 GB/s in one allocation and 47.0 in 32, and segments of
72 KiB in 32 allocations 51.8.
"""


def efficiency(
    nbytes: npt.NDArray[np.integer], cost_us: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Share of the link's rate at which ``nbytes`` move where their copies cost ``cost_us``."""
    link_us = nbytes / COST_MODEL.link_bytes_per_us
    return np.asarray(link_us / (link_us + cost_us), dtype=np.float64)


def segment_costs_us(nbytes: U64, *, are_apart: bool = False) -> npt.NDArray[np.float64]:
    """Costs of segments of ``nbytes`` each. ``are_apart``: they lie in several allocations."""
    link_us = nbytes / COST_MODEL.link_bytes_per_us
    least_us = COST_MODEL.least_segment_us + (COST_MODEL.apart_us if are_apart else 0.0)
    costs_us = np.maximum(least_us - link_us, 0) + COST_MODEL.segment_us
    return np.asarray(costs_us, dtype=np.float64)

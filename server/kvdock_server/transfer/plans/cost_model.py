"""What copies cost, measured, and what follows for some of them. Pure."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvdock_server.transfer.plans.arrays import U64


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


def efficiency(
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

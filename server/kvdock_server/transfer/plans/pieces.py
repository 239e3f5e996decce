"""Pieces of a transfer, which a lane carries out one by one. Pure.

A piece is bounded in time and bytes. So the next piece never waits long, and a cancelled transfer
ends soon.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from kvdock_server.transfer.plans.arrays import I64, U64, ranges


@dataclass(frozen=True, slots=True)
class Pace:
    """How large the steps are in which a process copies."""

    piece_us: float
    """Microseconds that one piece of copy-engine work takes."""
    under_way_bytes: int
    """While the pieces under way have fewer bytes, another piece may be started."""
    staged_bytes: int
    """Bytes of one staged piece, and of one staging buffer."""
    batch_segments: int
    """Segments in one call of the driver."""
    call_growth: int
    """If the link is idle, each call of the driver has so many times the copies of the one before.
    """
    poll_seconds: float
    """Pause between two looks at a piece that is copied while the next one is under way."""


SERVER_PACE = Pace(1200.0, 160 << 20, 256 << 20, 512, 2, 100e-6)
"""A piece of large segments has 64 MiB. Calls of 512 segments of 64 KiB reach 52.8 / 52.1 GB/s (to
host / to device), calls of 2,048 reach 51.9 / 49.8, and one call of 16,384 reaches 36.2 / 33.9.

Two processes share a multiprocessor by time slices, so few large kernels cost an engine less than
many small ones. Beside stores without pause the engine's step took 1.38 times as long with staged
pieces of 32 MiB, 1.20 times with 128 MiB, and 1.11 times with 256 MiB. Beside loads it took 1.34
times as long with 128 MiB, and 1.20 times with 256 MiB."""

ENGINE_PACE = Pace(8000.0, 640 << 20, 128 << 20, 2048, 8, 1e-3)
"""In an engine's process. After each call of the driver the copying thread waits for the
interpreter's lock, up to 5 ms while the engine computes. So calls and looks are few. Kernels cost
the engine little there, and staging buffers are the engine's memory."""

STAGING_BUFFERS = 2
"""Staging buffers for each direction of each device: the most staged pieces under way."""

MAX_STAGED_BLOCKS = 1 << 16
"""Most blocks in one staged piece."""

MAX_OPERATION_BYTES = 32 << 20
"""Most bytes of one segment, and of one rectangle that has more than one row."""


@dataclass(frozen=True, slots=True)
class _Copies:
    """Copies between device and host memory: in each column one number for each copy."""

    device: U64
    host: U64

    def __len__(self) -> int:
        return len(self.device)

    def __add__(self, more: Self) -> Self:
        pairs = zip(self._columns(), more._columns(), strict=True)
        return type(self)(*(np.concatenate(pair) for pair in pairs))

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        """Copy by copy, its numbers in the order of the columns."""
        return zip(*(column.tolist() for column in self._columns()), strict=True)

    def take(self, index: slice | npt.NDArray[np.bool_]) -> Self:
        """The copies that a slice or a mask selects."""
        return type(self)(*(column[index] for column in self._columns()))

    def _columns(self) -> list[U64]:
        return [getattr(self, name) for name in self.__match_args__]


@dataclass(frozen=True, slots=True)
class Segments(_Copies):
    """Contiguous copies: ``nbytes`` between address ``device`` and address ``host``."""

    nbytes: U64

    @property
    def total_bytes(self) -> int:
        return int(self.nbytes.sum())


@dataclass(frozen=True, slots=True)
class Rectangles(_Copies):
    """Copies of ``height`` rows of ``width`` bytes, the first at addresses ``device`` and ``host``.

    Each further row begins one pitch, in bytes, after the row before it.
    """

    width: U64
    height: U64
    device_pitch: U64
    host_pitch: U64

    @property
    def total_bytes(self) -> int:
        return int((self.width * self.height).sum())

    def rows(self) -> Segments:
        """The same bytes, with a segment for each row."""
        repeat = self.height.astype(np.int64)
        row = ranges(repeat).astype(np.uint64)
        return Segments(
            np.repeat(self.device, repeat) + row * np.repeat(self.device_pitch, repeat),
            np.repeat(self.host, repeat) + row * np.repeat(self.host_pitch, repeat),
            np.repeat(self.width, repeat),
        )


@dataclass(frozen=True, slots=True)
class ScatteredBlocks:
    """Whole blocks that a kernel moves between the cache and a staging buffer.

    Block ``ids[i]`` lies in the buffer at byte ``i * block_bytes``. ``host`` are the copies between
    the buffer and host memory. Their ``device`` is an offset into the buffer.
    """

    ids: I64
    block_bytes: int
    host: Segments

    @property
    def total_bytes(self) -> int:
        return len(self.ids) * self.block_bytes


@dataclass(frozen=True, slots=True)
class ForwardedBlocks:
    """Blocks that a load has brought to its device, and that go on to other devices from there."""

    ids: I64
    block_bytes: int
    receivers: int
    after: tuple[int, int]
    """CUDA events. The blocks have arrived on the load's device when both are done."""

    @property
    def total_bytes(self) -> int:
        """Counted once, however many receivers there are: all get the blocks at the same time."""
        return len(self.ids) * self.block_bytes


CopyPiece = Segments | Rectangles | ScatteredBlocks
"""Work between one device and host memory: what a Planner plans."""

Piece = CopyPiece | ForwardedBlocks

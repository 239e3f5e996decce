"""Pieces of work for a device: what is planned, carried out and counted. Pure.

A piece is bounded, so that what waits behind it never waits long and a cancelled transfer ends
soon.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvdock_server.transfer.plans.arrays import I64, U64, ranges

PIECE_US = 1200.0
"""Time of one piece of copy-engine work: 64 MiB of large segments."""

STAGED_PIECE_BYTES = 256 << 20
"""Bytes of one staged piece. Two processes share an SM by time slices, so few large kernels cost an
engine less than many small ones. Its step beside stores and loads without pause, over its step
alone: 1.38 for stores with 32 MiB, 1.20 and 1.34 with 128 MiB, 1.11 and 1.20 with 256 MiB."""

STAGING_BUFFERS = 2
"""Of one direction of one device: so many staged pieces are under way at most."""

MAX_STAGED_BLOCKS = 1 << 16
"""Block ids in one staged piece."""

MAX_OPERATION_BYTES = 32 << 20
"""Bytes of one segment, and of one rectangle but for its last row."""


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
        row = ranges(repeat).astype(np.uint64)
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

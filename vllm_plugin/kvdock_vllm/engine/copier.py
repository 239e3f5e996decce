"""Copies between an engine's blocks and the host pool, in this process's memory.

Each copy is a NumPy assignment between two strided views. It holds no interpreter lock, so the
engine goes on meanwhile. One call per page would ask for the lock again after every page, and an
engine may hold the lock for milliseconds. So the calls are as few and as large as the addresses
allow: consecutive blocks and evenly spaced layers go together.

After each piece the thread yields the processor. Otherwise a process woken on it, the server for
one, waits some milliseconds until the kernel takes the processor away.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kvdock_vllm.engine.layout import GroupLayout, Region

if TYPE_CHECKING:
    import numpy.typing as npt

    Bytes = npt.NDArray[np.uint8]

Stop = Callable[[], bool]
"""A copy is given up when this returns true."""

# A copy that is given up still ends its piece, in a fraction of a millisecond.
_PIECE_BYTES = 2 << 20


@dataclass(frozen=True, slots=True)
class Stack:
    """Evenly spaced regions of one size: one axis of a copy."""

    first: Region
    pitch: int
    """Bytes from region to region."""
    count: int
    column: int
    """Where the regions begin in a block on the host."""


def stacks(regions: Sequence[Region]) -> list[Stack]:
    """Joins neighbouring regions that are evenly spaced."""
    found: list[Stack] = []
    column = 0
    for region in regions:
        if found and (joined := _join(found[-1], region)) is not None:
            found[-1] = joined
        else:
            found.append(Stack(region, region.page_bytes, 1, column))
        column += region.page_bytes
    return found


def _join(stack: Stack, region: Region) -> Stack | None:
    first = stack.first
    if (region.block_stride, region.page_bytes) != (first.block_stride, first.page_bytes):
        return None
    distance = region.address - first.address
    pitch = stack.pitch if stack.count > 1 else distance
    if pitch <= 0 or distance != stack.count * pitch:
        return None
    return Stack(first, pitch, stack.count + 1, stack.column)


def runs(block_ids: Sequence[int], longest: int) -> Iterator[tuple[int, int, int]]:
    """Parts of consecutive ids, each of at most ``longest``: (index, first id, how many)."""
    start = 0
    for index in range(1, len(block_ids) + 1):
        broken = index == len(block_ids) or block_ids[index] != block_ids[index - 1] + 1
        if broken or index - start == longest:
            yield start, block_ids[start], index - start
            start = index


class CopyStoppedError(Exception):
    """A copy was given up before its end."""


class HostBlocks(NamedTuple):
    """Blocks, and their bytes on the host, one block after the other."""

    block_ids: Sequence[int]
    host: Bytes


def check_blocks(part: HostBlocks, layout: GroupLayout) -> None:
    """Raises ValueError if a block does not exist, or the host's bytes are too many or too few."""
    block_ids, nbytes = part.block_ids, len(part.block_ids) * layout.block_bytes
    if len(part.host) != nbytes:
        raise ValueError(
            f"{len(block_ids)} blocks take {nbytes} bytes on the host, not {len(part.host)}"
        )
    if block_ids and not 0 <= min(block_ids) <= max(block_ids) < layout.num_blocks:
        wrong = next(block for block in block_ids if not 0 <= block < layout.num_blocks)
        raise ValueError(
            f"block id {wrong}: {len(block_ids)} block ids are not all below {layout.num_blocks}"
        )


class Copier:
    """Copies blocks of one group. Thread-safe; the tensors must outlive it."""

    def __init__(self, layout: GroupLayout) -> None:
        self._layout = layout
        self._longest_run = max(1, _PIECE_BYTES // layout.block_bytes)
        self._stacks = [
            (stack, _blocks_view(stack, layout.num_blocks)) for stack in stacks(layout.regions)
        ]

    def gather(self, parts: Sequence[HostBlocks], stop: Stop) -> None:
        """Copies blocks to the host.

        Raises CopyStoppedError as soon as ``stop()`` is true, and what :func:`check_blocks` raises.
        """
        for blocks, host in self._pieces(parts, stop):
            np.copyto(host, blocks)
            os.sched_yield()

    def scatter(self, parts: Sequence[HostBlocks], stop: Stop) -> None:
        """Copies blocks from the host, like :meth:`gather`."""
        for blocks, host in self._pieces(parts, stop):
            np.copyto(blocks, host)
            os.sched_yield()

    def _pieces(self, parts: Sequence[HostBlocks], stop: Stop) -> Iterator[tuple[Bytes, Bytes]]:
        """Views of one shape (blocks, regions, bytes): of the engine, and of the host."""
        for part in parts:
            check_blocks(part, self._layout)
            rows = part.host.reshape(len(part.block_ids), self._layout.block_bytes)
            for index, block_id, count in runs(part.block_ids, self._longest_run):
                if stop():
                    raise CopyStoppedError
                for stack, view in self._stacks:
                    width = stack.count * stack.first.page_bytes
                    host = rows[index : index + count, stack.column : stack.column + width]
                    shape = (count, stack.count, stack.first.page_bytes)
                    yield view[block_id : block_id + count], host.reshape(shape)


def _blocks_view(stack: Stack, num_blocks: int) -> Bytes:
    """All blocks of a stack as an array of shape (blocks, regions, bytes) over their memory."""
    first = stack.first
    shape = (num_blocks, stack.count, first.page_bytes)
    strides = (first.block_stride, stack.pitch, 1)
    nbytes = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    memory: Any = (ctypes.c_ubyte * nbytes).from_address(first.address)
    return np.ndarray(shape, np.uint8, memory, strides=strides)

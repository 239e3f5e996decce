"""Copies between an engine's blocks on a device and the host pool, made by the engine's process.

Blocks go through a staging buffer on the device: one gather or scatter for each stack of regions,
and one large copy between buffer and pool. A kernel costs the engine little in its own process,
while many small copies would leave the link idle. Blocks that are one large piece each are copied
directly.

The work is cut into pieces of one staging buffer. Two pieces are under way at a time, each with its
own buffer and stream: one is gathered while the other is copied. This also bounds the device memory
used, and what is still copied after a stop.

On a CPU the same happens without streams, piece by piece.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kvdock_vllm.engine.copier import (
    CopyStoppedError,
    HostBlocks,
    Stack,
    Stop,
    check_blocks,
    runs,
    stacks,
)
from kvdock_vllm.engine.device.pinning import cut
from kvdock_vllm.engine.layout import GroupLayout

if TYPE_CHECKING:
    import numpy.typing as npt

STAGING_BYTES = 32 << 20
"""Size of a staging buffer, unless a single block is larger: 0.6 ms of copying."""
DIRECT_BYTES = 1 << 20
"""A copy of this size takes longer than its call, so joining copies wins nothing."""

Piece = Callable[[torch.Tensor], None]
"""Queues copies on the current stream. May use the staging buffer that it is given."""

# Elements that a kernel moves: the wider, the faster.
_ELEMENTS = (torch.int64, torch.int32, torch.int16, torch.uint8)


class Staging:
    """Two staging buffers and their streams, for copies in one direction. Thread-safe."""

    def __init__(self, device: torch.device, staging_bytes: int) -> None:
        self._device = device
        _use(device)
        make_buffer = _CudaBuffer if device.type == "cuda" else _Buffer
        self._buffers = [make_buffer(device, staging_bytes) for _ in range(2)]
        self._turn = 0
        self._lock = threading.Lock()

    def run(self, pieces: Iterable[Piece], stop: Stop) -> None:
        """Runs pieces. None of them is under way when this returns or raises.

        Raises CopyStoppedError as soon as ``stop()`` is true, and what a piece raises.
        """
        _use(self._device)
        try:
            for piece in pieces:
                if stop():
                    raise CopyStoppedError
                with self._lock:
                    buffer = self._buffers[self._turn]
                    self._turn = 1 - self._turn
                    buffer.wait()
                    buffer.run(piece)
        finally:
            for buffer in self._buffers:
                buffer.wait()


def _use(device: torch.device) -> None:
    """Makes the device current on this thread, which is one of the connector's own.

    Otherwise torch returns to device 0 after each piece, which creates a context there.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)


class _Buffer:
    """A staging buffer. On a CPU a copy has ended when its call returns."""

    def __init__(self, device: torch.device, nbytes: int) -> None:
        self._buffer = torch.empty(nbytes, dtype=torch.uint8, device=device)

    def run(self, piece: Piece) -> None:
        piece(self._buffer)

    def wait(self) -> None:
        """Waits until the last piece has ended."""


class _CudaBuffer(_Buffer):
    def __init__(self, device: torch.device, nbytes: int) -> None:
        cuda: Any = torch.cuda  # signatures without types
        # CUDA has no lower priority than 0, which is also that of the engine's stream.
        self._stream = cuda.Stream(device, priority=0)
        self._done = cuda.Event(blocking=True)  # who waits for it sleeps
        with torch.cuda.stream(self._stream):
            super().__init__(device, nbytes)

    def run(self, piece: Piece) -> None:
        with torch.cuda.stream(self._stream):
            try:
                super().run(piece)
            finally:
                self._done.record(self._stream)

    def wait(self) -> None:
        self._done.synchronize()  # without the interpreter's lock


@dataclass(frozen=True, slots=True)
class _Rows:
    """Blocks of one part: their ids, and their bytes on the host as (blocks, bytes of a block)."""

    ids: npt.NDArray[np.int64]
    host: torch.Tensor


@dataclass(frozen=True, slots=True)
class _StackView:
    """All blocks of a stack, as (blocks, regions, elements)."""

    blocks: torch.Tensor
    column: int
    """Where the stack's elements begin in a block on the host."""

    def staged(self, rows: torch.Tensor) -> torch.Tensor:
        """The stack's columns of staged blocks, which are (blocks, bytes of a block)."""
        _, regions, length = self.blocks.shape
        columns = rows.view(self.blocks.dtype)[:, self.column : self.column + regions * length]
        return columns.view(len(rows), regions, length)


class DeviceCopier:
    """Copies blocks of one group. Thread-safe; the tensors must outlive it."""

    def __init__(
        self,
        layout: GroupLayout,
        device: torch.device,
        staging_bytes: int,
        direct_bytes: int = DIRECT_BYTES,
    ) -> None:
        """``staging_bytes`` is the size of the staging buffers, at least one block."""
        self._layout = layout
        self._device = device
        self._rows_a_piece = staging_bytes // layout.block_bytes
        self._direct_bytes = direct_bytes
        found = stacks(layout.regions)
        self._stacks = [_stack_view(stack, layout, device) for stack in found]
        self._whole = _whole_blocks(found, layout, device)

    def gather(self, parts: Sequence[HostBlocks], staging: Staging, stop: Stop) -> None:
        """Copies blocks to the host. However this ends, no copy is under way any more.

        Raises CopyStoppedError as soon as ``stop()`` is true, ValueError if a block does not exist
        or the host's bytes are too many or too few.
        """
        staging.run((partial(self._move, piece, True) for piece in self._pieces(parts)), stop)

    def scatter(self, parts: Sequence[HostBlocks], staging: Staging, stop: Stop) -> None:
        """Copies blocks from the host, like :meth:`gather`."""
        staging.run((partial(self._move, piece, False) for piece in self._pieces(parts)), stop)

    def _pieces(self, parts: Sequence[HostBlocks]) -> Iterator[list[_Rows]]:
        """Cuts and joins the parts to pieces of a staging buffer."""
        piece: list[_Rows] = []
        room = self._rows_a_piece
        for part in parts:
            check_blocks(part, self._layout)
            ids = np.array(part.block_ids, dtype=np.int64)
            host = torch.from_numpy(part.host).view(-1, self._layout.block_bytes)
            while len(ids):
                piece.append(_Rows(ids[:room], host[:room]))
                ids, host = ids[room:], host[room:]
                room -= len(piece[-1].ids)
                if not room:
                    yield piece
                    piece, room = [], self._rows_a_piece
        if piece:
            yield piece

    def _move(self, piece: list[_Rows], to_host: bool, buffer: torch.Tensor) -> None:
        copies = self._direct_copies(piece)
        if copies is not None:
            for blocks, host in copies:
                _copy(blocks, host, to_host)
            return
        counts = [len(rows.ids) for rows in piece]
        block_bytes = self._layout.block_bytes
        staged = buffer[: sum(counts) * block_bytes].view(-1, block_bytes)
        index = torch.from_numpy(np.concatenate([rows.ids for rows in piece]))
        index = index.to(self._device, non_blocking=True)
        if to_host:
            for stack in self._stacks:
                torch.index_select(stack.blocks, 0, index, out=stack.staged(staged))
        for rows, blocks in zip(piece, torch.split_with_sizes(staged, counts), strict=True):
            _copy(blocks, rows.host, to_host)
        if not to_host:
            for stack in self._stacks:
                stack.blocks.index_copy_(0, index, stack.staged(staged))

    def _direct_copies(self, piece: list[_Rows]) -> list[tuple[torch.Tensor, torch.Tensor]] | None:
        """Blocks and their bytes on the host, neighbours together. None if copies are small."""
        if self._whole is None:
            return None
        longest = self._rows_a_piece if self._whole.is_contiguous() else 1
        found = [(rows, run) for rows in piece for run in runs(rows.ids.tolist(), longest)]
        num_blocks = sum(count for _, (_, _, count) in found)
        if num_blocks * self._layout.block_bytes < len(found) * self._direct_bytes:
            return None
        return [
            (self._whole[block_id : block_id + count], rows.host[index : index + count])
            for rows, (index, block_id, count) in found
        ]


def _copy(blocks: torch.Tensor, host: torch.Tensor, to_host: bool) -> None:
    """Queues a copy of contiguous bytes."""
    blocks, host = blocks.view(-1), host.view(-1)
    source, target = (blocks, host) if to_host else (host, blocks)
    for begin, end in cut(host.data_ptr(), len(host)):
        target[begin:end].copy_(source[begin:end], non_blocking=True)


def _stack_view(stack: Stack, layout: GroupLayout, device: torch.device) -> _StackView:
    first = stack.first
    unit = math.gcd(
        first.address,
        first.block_stride,
        first.page_bytes,
        stack.pitch,
        stack.column,
        layout.block_bytes,
    )
    dtype = next(dtype for dtype in _ELEMENTS if unit % dtype.itemsize == 0)
    blocks = _memory(
        first.address,
        (layout.num_blocks, stack.count, first.page_bytes // dtype.itemsize),
        (first.block_stride, stack.pitch, dtype.itemsize),
        dtype,
        device,
    )
    return _StackView(blocks, stack.column // dtype.itemsize)


def _whole_blocks(
    found: Sequence[Stack], layout: GroupLayout, device: torch.device
) -> torch.Tensor | None:
    """All blocks as (blocks, bytes of a block), if a block's bytes are in the host's order."""
    if len(found) > 1 or found[0].pitch != found[0].first.page_bytes:
        return None
    first = found[0].first
    shape = (layout.num_blocks, layout.block_bytes)
    return _memory(first.address, shape, (first.block_stride, 1), torch.uint8, device)


def _memory(
    address: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """A tensor over memory of this process. ``strides`` are in bytes.

    Regions may be evenly spaced by chance, across tensors. So no one storage has a whole stack.
    """
    kind = "u" if dtype is torch.uint8 else "i"
    interface = {
        "version": 3,
        "data": (address, False),
        "shape": shape,
        "strides": strides,
        "typestr": f"<{kind}{dtype.itemsize}",
    }
    if device.type == "cpu":
        return torch.from_numpy(np.asarray(SimpleNamespace(__array_interface__=interface)))
    tensor = torch.as_tensor(SimpleNamespace(__cuda_array_interface__=interface), device=device)
    assert tensor.data_ptr() == address, "torch copied memory that it was to show"
    return tensor

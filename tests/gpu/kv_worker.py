"""A process that owns a KV cache on the GPU, as an engine's worker does, and takes orders.

Run with the path of a socket; the test's end is `worker_process.WorkerProcess`. Orders are
(method, arguments), answers (True, result) or (False, message).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from multiprocessing import connection as pipes
from typing import Any

import numpy as np
import torch

from kvdock import Client, Group, Namespace, SessionRole
from kvdock_vllm.engine.device.memory import ExportedGroup, ReadyEvents, export_memory
from kvdock_vllm.engine.layout import GroupLayout
from kvdock_vllm.engine.tensor_regions import layer_regions

DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "uint8": torch.uint8}
CYCLES_PER_MS = 1_900_000

Build = Callable[[torch.dtype, int, int, int], list[torch.Tensor]]


def _empty(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device="cuda")


def _strided(
    storage: torch.Tensor, dtype: torch.dtype, shape: list[int], strides: list[int], start: int
) -> torch.Tensor:
    """A view of uint8 storage from byte ``start`` on; shape and strides in elements."""
    return storage[start:].view(dtype).as_strided(shape, strides)


def kv_first(dtype: torch.dtype, layers: int, blocks: int, page: int) -> list[torch.Tensor]:
    """(2, B, N, H, D), an allocation a layer."""
    size = page // 2 // dtype.itemsize
    return [
        _empty(blocks * page).view(dtype).view(2, blocks, 2, 2, size // 4) for _ in range(layers)
    ]


def block_first(dtype: torch.dtype, layers: int, blocks: int, page: int) -> list[torch.Tensor]:
    """(B, H, N, 2D), an allocation a layer."""
    size = page // dtype.itemsize
    return [_empty(blocks * page).view(dtype).view(blocks, 2, 2, size // 4) for _ in range(layers)]


def permuted(dtype: torch.dtype, layers: int, blocks: int, page: int) -> list[torch.Tensor]:
    """(B, H, N, 2D) by shape, (B, N, H, 2D) in memory."""
    tensors = block_first(dtype, layers, blocks, page)
    return [tensor.permute(0, 2, 1, 3) for tensor in tensors]


def layer_major(dtype: torch.dtype, layers: int, blocks: int, page: int) -> list[torch.Tensor]:
    """All layers in one allocation, at an offset."""
    storage = _empty(layers * blocks * page + 64)
    size = page // dtype.itemsize
    shape, strides = [blocks, 2, 2, size // 4], [size, size // 2, size // 4, 1]
    return [
        _strided(storage, dtype, shape, strides, 64 + layer * blocks * page)
        for layer in range(layers)
    ]


def block_major(dtype: torch.dtype, layers: int, blocks: int, page: int) -> list[torch.Tensor]:
    """All layers of a block together."""
    storage = _empty(layers * blocks * page)
    size = page // dtype.itemsize
    shape, strides = [blocks, 2, 2, size // 4], [layers * size, size // 2, size // 4, 1]
    return [_strided(storage, dtype, shape, strides, layer * page) for layer in range(layers)]


def padded(dtype: torch.dtype, layers: int, blocks: int, page: int) -> list[torch.Tensor]:
    """Block-major, with room after each page and each block."""
    room = page + 16
    storage = _empty(blocks * (layers * room + 32))
    size = page // dtype.itemsize
    stride = (layers * room + 32) // dtype.itemsize
    shape, strides = [blocks, 2, 2, size // 4], [stride, size // 2, size // 4, 1]
    return [_strided(storage, dtype, shape, strides, layer * room) for layer in range(layers)]


def latent(dtype: torch.dtype, layers: int, blocks: int, page: int) -> list[torch.Tensor]:
    """MLA: (B, N, C)."""
    size = page // dtype.itemsize
    return [_empty(blocks * page).view(dtype).view(blocks, 4, size // 4) for _ in range(layers)]


def kernel_blocks(dtype: torch.dtype, layers: int, blocks: int, page: int) -> list[torch.Tensor]:
    """Two of the kernel's blocks to each of the manager's."""
    size = page // dtype.itemsize
    return [_empty(blocks * page).view(dtype).view(blocks * 2, 2, size // 4) for _ in range(layers)]


LAYOUTS: dict[str, Build] = {
    build.__name__: build
    for build in (
        kv_first,
        block_first,
        permuted,
        layer_major,
        block_major,
        padded,
        latent,
        kernel_blocks,
    )
}


class Worker:
    """One KV cache. Every method is an order."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.num_blocks = 0
        self.side = torch.cuda.Stream()
        self.events = ReadyEvents(torch.device("cuda", torch.cuda.current_device()))
        self.snapshot: list[torch.Tensor] = []

    def make(self, layout: str, dtype: str, layers: int, blocks: int, page: int) -> None:
        """Make a cache of that layout with random bytes."""
        self._adopt(LAYOUTS[layout](DTYPES[dtype], layers, blocks, page), blocks)

    def make_inside(self, dtype: str, offsets: list[int], blocks: int, page: int) -> None:
        """Make tensors at those offsets in one allocation of the framework's."""
        kind = DTYPES[dtype]
        storage = _empty(max(offsets) + blocks * page + 16)
        tensors = [
            storage[offset : offset + blocks * page].view(kind).view(blocks, -1)
            for offset in offsets
        ]
        self._adopt(tensors, blocks)

    def export(self, blocks_per_chunk: int, group_idx: int | None = None) -> tuple[Any, Any]:
        """What the server needs to open it."""
        regions = [
            region for tensor in self.tensors for region in layer_regions(tensor, self.num_blocks)
        ]
        layout = GroupLayout(self.num_blocks, tuple(regions), ())
        group = ExportedGroup(group_idx, layout, blocks_per_chunk)
        return tuple(export_memory([group], torch.cuda.current_device()))

    def fill(self, seed: int) -> None:
        """New random bytes everywhere."""
        generator = torch.Generator(device="cuda").manual_seed(seed)
        for tensor in self.tensors:
            self._fill(tensor, generator)
        torch.cuda.synchronize()

    def blocks(self, ids: list[int]) -> np.ndarray[Any, Any]:
        """The bytes of blocks by indexing the tensors; a row each, in the host's order."""
        return self._blocks(self.tensors, ids)

    def write_late(self, milliseconds: int, seed: int) -> bytes:
        """Queue a long kernel and then new bytes everywhere; the event after both."""
        generator = torch.Generator(device="cuda").manual_seed(seed)
        with torch.cuda.stream(self.side):
            torch.cuda._sleep(milliseconds * CYCLES_PER_MS)
            for tensor in self.tensors:
                self._fill(tensor, generator)
            return self.events.record()[1]

    def read_late(self, milliseconds: int) -> bytes:
        """Queue a long kernel and then a copy of everything; the event after both."""
        with torch.cuda.stream(self.side):
            torch.cuda._sleep(milliseconds * CYCLES_PER_MS)
            self.snapshot = [
                tensor.view(torch.uint8).clone(memory_format=torch.preserve_format)
                for tensor in self.tensors
            ]
            return self.events.record()[1]

    def snapshot_blocks(self, ids: list[int]) -> np.ndarray[Any, Any]:
        """The bytes that ``read_late`` saw."""
        dtype = self.tensors[0].dtype
        return self._blocks([copy.view(dtype) for copy in self.snapshot], ids)

    def use_one_event(self) -> None:
        """From now on the same event every time."""
        device = torch.device("cuda", torch.cuda.current_device())
        self.events = ReadyEvents(device, count=1)

    def done_event(self) -> bytes:
        """An event that is done, or nearly."""
        return self.events.record()[1]

    def connect(self, address: str, engine: str, namespace: str, blocks_per_chunk: int) -> str:
        """Open an engine's sessions and hand the cache over; the transfer mode."""
        allocations, groups = self.export(blocks_per_chunk)
        chunk_bytes = blocks_per_chunk * sum(region.page_bytes for region in groups[0].regions)
        client = Client(address)
        client.register_namespace(Namespace(namespace, 256, 1, (Group((chunk_bytes,)),)))
        self.namespace = namespace
        self.scheduler = client.session(engine, role=SessionRole.SCHEDULER)
        self.session = client.session(engine, role=SessionRole.WORKER)
        return self.session.register_memory(namespace, allocations, groups).mode.name

    def store(self, keys: list[bytes], ids: list[int]) -> list[str]:
        """The status of each chunk."""
        event = self.events.record()[1]
        statuses = self.session.store(self.namespace, keys, ids, ready_event=event)
        return [status.name for status in statuses]

    def retrieve(self, keys: list[bytes], ids: list[int], skip_blocks: int) -> list[str]:
        """The status of each chunk that is there."""
        hit = self.scheduler.lookup(self.namespace, keys)
        if hit.lease is None:
            return []
        event = self.events.record()[1]
        results = self.session.retrieve(
            hit.lease, block_ids=ids, skip_blocks=skip_blocks, ready_event=event
        )
        return [result.status.name for result in results]

    def _adopt(self, tensors: list[torch.Tensor], blocks: int) -> None:
        self.tensors, self.num_blocks = tensors, blocks
        torch.cuda.empty_cache()
        self.fill(0)

    @staticmethod
    def _fill(tensor: torch.Tensor, generator: torch.Generator) -> None:
        shape = (*tensor.shape[:-1], tensor.shape[-1] * tensor.element_size())
        values = torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda", generator=generator)
        tensor.view(torch.uint8).copy_(values)

    def _blocks(self, tensors: list[torch.Tensor], ids: list[int]) -> np.ndarray[Any, Any]:
        rows = []
        index = torch.tensor(ids, device="cuda")
        for tensor in tensors:
            if tensor.dim() == 5:  # keys and values apart
                parts = [tensor[0], tensor[1]]
            else:
                split = tensor.shape[0] // self.num_blocks
                parts = [tensor.unflatten(0, (self.num_blocks, split))]
            for part in parts:
                inner = sorted(range(1, part.dim()), key=part.stride, reverse=True)
                ordered = part.view(torch.uint8).permute(0, *inner)
                picked = ordered.index_select(0, index).contiguous()
                rows.append(picked.view(len(ids), math.prod(picked.shape[1:])).cpu().numpy())
        return np.concatenate(rows, axis=1)


def main(make_worker: Callable[[], Worker] = Worker) -> None:
    connection = pipes.Client(sys.argv[1], family="AF_UNIX")
    worker = make_worker()
    while True:
        try:
            name, arguments = connection.recv()
        except EOFError:
            return
        try:
            connection.send((True, getattr(worker, name)(*arguments)))
        except Exception as error:
            connection.send((False, f"{type(error).__name__}: {error}"))


if __name__ == "__main__":
    main()

"""A worker's device memory as the server can open it, and events to order its copies by.

A CUDA IPC handle always stands for a whole allocation of the driver, and a framework's tensor
mostly begins somewhere inside of one. Base, size and so the offset come from the driver itself
(cuMemGetAddressRange): a framework's handle has bytes of its own in front, and its offsets are
relative to its own blocks. Many layers in one allocation share its one handle.

Works on any thread: it makes the device's own context current for as long as it needs it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from kvdock.types import BlockRegion, DeviceAllocation, GroupMemory
from kvdock_vllm.layout import GroupLayout

_HANDLE_BYTES = 64
_UUID_BYTES = 16


class NotExportableError(Exception):
    """CUDA IPC does not export this memory. Copy in shared mode instead; the message says why."""


class ExportedGroup(NamedTuple):
    """One KV-cache group to be exported. ``group_idx`` is None for a model without groups."""

    group_idx: int | None
    layout: GroupLayout
    blocks_per_chunk: int


class ExportedMemory(NamedTuple):
    """What ``Session.register_memory`` takes: each allocation once, and the regions in them."""

    allocations: list[DeviceAllocation]
    groups: list[GroupMemory]


def export_memory(groups: Sequence[ExportedGroup], device_ordinal: int) -> ExportedMemory:
    """Describe this worker's KV cache, which is on one device, to the server.

    NotExportableError where CUDA IPC cannot export the memory. ValueError where a region leaves
    the allocation in which it begins.
    """
    driver = _Driver()
    exported = ExportedMemory([], [])
    allocations: dict[int, int] = {}  # base address: index
    with driver.context_of(device_ordinal):
        uuid = driver.device_uuid(device_ordinal)
        for group_idx, layout, blocks_per_chunk in groups:
            regions = []
            for region in layout.regions:
                base, nbytes = driver.allocation(region.address)
                offset = region.address - base
                end = offset + (layout.num_blocks - 1) * region.block_stride + region.page_bytes
                if end > nbytes:
                    raise ValueError(
                        f"a region of {layout.num_blocks} blocks at offset {offset} ends at {end}, "
                        f"its allocation has {nbytes} bytes"
                    )
                if base not in allocations:
                    allocations[base] = len(allocations)
                    handle = driver.ipc_handle(base)
                    exported.allocations.append(DeviceAllocation(handle, nbytes, uuid))
                regions.append(
                    BlockRegion(allocations[base], offset, region.block_stride, region.page_bytes)
                )
            exported.groups.append(
                GroupMemory(group_idx, layout.num_blocks, blocks_per_chunk, tuple(regions))
            )
    return exported


class ReadyEvents:
    """Interprocess events for one device, used in turn.

    The server waits for what was recorded last when it asks, so an event that is used again before
    the server has asked only makes it wait for more.
    """

    def __init__(self, device: torch.device, count: int = 64) -> None:
        make_event: Any = torch.cuda.Event  # its signature has no types
        with torch.cuda.device(device):
            self._events = [make_event(interprocess=True) for _ in range(count)]
            self._handles = [bytes(event.ipc_handle()) for event in self._events]
        self._next = 0

    def record(self, stream: torch.cuda.Stream | None = None) -> bytes:
        """Mark what the stream (None: the current one) has queued so far; the 64-byte handle."""
        index = self._next
        self._next = (index + 1) % len(self._events)
        self._events[index].record(stream)
        return self._handles[index]


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_ubyte * _HANDLE_BYTES)]


class _Uuid(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_ubyte * _UUID_BYTES)]


_DevicePtr = ctypes.c_uint64
_SIGNATURES: dict[str, list[type]] = {
    "cuInit": [ctypes.c_uint],
    "cuDeviceGet": [ctypes.POINTER(ctypes.c_int), ctypes.c_int],
    "cuDeviceGetUuid_v2": [ctypes.POINTER(_Uuid), ctypes.c_int],
    "cuDevicePrimaryCtxRetain": [ctypes.POINTER(ctypes.c_void_p), ctypes.c_int],
    "cuDevicePrimaryCtxRelease_v2": [ctypes.c_int],
    "cuCtxPushCurrent_v2": [ctypes.c_void_p],
    "cuCtxPopCurrent_v2": [ctypes.POINTER(ctypes.c_void_p)],
    "cuMemGetAddressRange_v2": [
        ctypes.POINTER(_DevicePtr),
        ctypes.POINTER(ctypes.c_size_t),
        _DevicePtr,
    ],
    "cuIpcGetMemHandle": [ctypes.POINTER(_Handle), _DevicePtr],
    "cuGetErrorName": [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)],
}


class _Driver:
    def __init__(self) -> None:
        try:
            self._cuda = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise NotExportableError(f"no CUDA driver in this process: {error}") from error
        for name, signature in _SIGNATURES.items():
            function = getattr(self._cuda, name)
            function.argtypes = signature
            function.restype = ctypes.c_int
        self._call("cuInit", 0)

    @contextmanager
    def context_of(self, ordinal: int) -> Iterator[None]:
        """The device's primary context, which is the framework's, current on this thread."""
        device = self._device(ordinal)
        context = ctypes.c_void_p()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        try:
            self._call("cuCtxPushCurrent_v2", context)
            try:
                yield
            finally:
                self._call("cuCtxPopCurrent_v2", ctypes.byref(context))
        finally:
            self._call("cuDevicePrimaryCtxRelease_v2", device)

    def device_uuid(self, ordinal: int) -> bytes:
        uuid = _Uuid()
        self._call("cuDeviceGetUuid_v2", ctypes.byref(uuid), self._device(ordinal))
        return bytes(uuid.bytes)

    def allocation(self, address: int) -> tuple[int, int]:
        """Base and size of the allocation that an address lies in."""
        base, nbytes = _DevicePtr(), ctypes.c_size_t()
        self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(nbytes), address)
        return base.value, nbytes.value

    def ipc_handle(self, base: int) -> bytes:
        handle = _Handle()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), base)
        return bytes(handle.reserved)

    def _device(self, ordinal: int) -> int:
        device = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(device), ordinal)
        return device.value

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._cuda, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorName(code, ctypes.byref(text))
            raise NotExportableError(
                f"{name} failed with {(text.value or b'an unknown error').decode()} ({code}): "
                "memory of the cumem allocator, of expandable segments and of memory pools has no "
                "legacy IPC handle"
            )

"""A worker's device memory as the server can open it, and events that order the server's copies.

A CUDA IPC handle stands for a whole allocation of the driver, and a tensor of torch mostly begins
inside of one. Base and size, and so the offset, come from the driver (cuMemGetAddressRange).
torch's own handles will not do: they begin with bytes of torch, and their offsets are relative to
its blocks. Layers in one allocation share its handle.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from kvdock.types import BlockRegion, DeviceAllocation, GroupMemory
from kvdock_server.transfer.devices.driver import (
    CudaError,
    CudaUnavailableError,
    Driver,
    load_driver,
)
from kvdock_vllm.engine.layout import GroupLayout


class NotExportableError(Exception):
    """CUDA IPC cannot export this memory, so shared mode is left. The message says why."""


class ExportedGroup(NamedTuple):
    """One KV-cache group to be exported. ``group_idx`` is None for a model with one group."""

    group_idx: int | None
    layout: GroupLayout
    blocks_per_chunk: int


class ExportedMemory(NamedTuple):
    """What ``Session.register_memory`` takes: each allocation once, and the regions in them."""

    allocations: list[DeviceAllocation]
    groups: list[GroupMemory]


def export_memory(groups: Sequence[ExportedGroup], device_ordinal: int) -> ExportedMemory:
    """Describes this worker's KV cache, which is on one device, to the server.

    Raises NotExportableError if CUDA IPC cannot export the memory, ValueError if a region leaves
    the allocation in which it begins.
    """
    try:
        return _export(groups, device_ordinal)
    except (CudaError, CudaUnavailableError) as error:
        raise NotExportableError(str(error)) from error


def _export(groups: Sequence[ExportedGroup], device_ordinal: int) -> ExportedMemory:
    driver = load_driver()
    driver.set_current(driver.retain_context(device_ordinal))
    exported = ExportedMemory([], [])
    allocations: dict[int, int] = {}  # base address: index
    uuid = driver.device_uuids()[device_ordinal]
    for group_idx, layout, blocks_per_chunk in groups:
        regions = []
        for region in layout.regions:
            base, nbytes = driver.allocation(region.address)
            if base not in allocations:
                # The handle comes before any use of the size. Memory that is mapped piece by
                # piece has no handle, and its size would be that of one piece.
                handle = _ipc_handle(driver, base)
                allocations[base] = len(allocations)
                exported.allocations.append(DeviceAllocation(handle, nbytes, uuid))
            offset = region.address - base
            end = offset + (layout.num_blocks - 1) * region.block_stride + region.page_bytes
            if end > nbytes:
                raise ValueError(
                    f"a region of {layout.num_blocks} blocks at offset {offset} ends at {end}, "
                    f"its allocation has {nbytes} bytes"
                )
            regions.append(
                BlockRegion(allocations[base], offset, region.block_stride, region.page_bytes)
            )
        exported.groups.append(
            GroupMemory(group_idx, layout.num_blocks, blocks_per_chunk, tuple(regions))
        )
    return exported


def _ipc_handle(driver: Driver, base: int) -> bytes:
    try:
        return driver.ipc_handle(base)
    except CudaError as error:
        raise NotExportableError(
            f"{error}: memory of the cumem allocator, of expandable segments and of memory pools "
            "has no legacy IPC handle"
        ) from error


class ReadyEvents:
    """Interprocess events for one device, used in turn.

    The server waits for the last record of an event. An event that is recorded again too early only
    makes the server wait for more.
    """

    def __init__(self, device: torch.device, count: int = 64) -> None:
        make_event: Any = torch.cuda.Event  # its signature has no types
        with torch.cuda.device(device):
            self._events = [make_event(interprocess=True) for _ in range(count)]
            self._handles = [bytes(event.ipc_handle()) for event in self._events]
        self._next = 0

    def record(self) -> tuple[torch.cuda.Event, bytes]:
        """Marks what the current stream has queued. Returns the event and its 64-byte handle."""
        index = self._next
        self._next = (index + 1) % len(self._events)
        self._events[index].record()
        return self._events[index], self._handles[index]

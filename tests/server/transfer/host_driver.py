"""A stand-in for the CUDA driver whose devices are host memory, for machines without a GPU.

It keeps the driver's rules that the transfers rely on: a handle is opened once at a time and closed
once, host memory is registered once, a copy may not cross the border of a registration, batches
want registered memory, and events belong to whoever made or opened them. Copies happen at once.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvdock_server.transfer.driver import CudaError, Memcpy2D, Side
from kvdock_server.transfer.plan import U64

UUID = bytes(range(16))


class HostDriver:
    """See above. ``exported`` are the allocations that can be opened, by handle."""

    version = 13_000
    has_batch_copy = True

    def __init__(self, exported: dict[bytes, npt.NDArray[np.uint8]]) -> None:
        self.exported = exported
        self.opened: dict[int, bytes] = {}
        self.registered: dict[int, int] = {}
        self.ready_events: set[bytes] = set()
        self.events: dict[int, bytes] = {}
        self.log: list[str] = []
        self._next = 1000

    def device_uuids(self) -> list[bytes]:
        return [UUID]

    def device_name(self, ordinal: int) -> str:
        return f"host {ordinal}"

    def retain_context(self, ordinal: int) -> int:
        return 1

    def set_current(self, context: int) -> None:
        assert context == 1

    def ipc_open_memory(self, handle: bytes) -> int:
        if handle not in self.exported:
            raise _error("cuIpcOpenMemHandle_v2")
        assert handle not in self.opened.values(), "opened twice"
        self.log.append("open")
        address = self.exported[handle].ctypes.data
        self.opened[address] = handle
        return address

    def ipc_close_memory(self, address: int) -> None:
        del self.opened[address]
        self.log.append("close")

    def allocation_bytes(self, address: int) -> int:
        return len(self.exported[self.opened[address]])

    def ipc_open_event(self, handle: bytes) -> int:
        event = self.create_event()
        self.events[event] = handle
        return event

    def create_stream(self) -> int:
        self._next += 1
        return self._next

    create_event = create_stream

    def query_event(self, event: int) -> bool:
        return event not in self.events or self.events[event] in self.ready_events

    def destroy_event(self, event: int) -> None:
        self.events.pop(event, None)

    def register_host(self, address: int, nbytes: int) -> None:
        assert address not in self.registered
        self.registered[address] = nbytes

    def unregister_host(self, address: int) -> None:
        del self.registered[address]

    def copy_to_host(self, host: int, device: int, nbytes: int, stream: int) -> None:
        self._copy(host, device, nbytes, host)

    def copy_to_device(self, device: int, host: int, nbytes: int, stream: int) -> None:
        self._copy(device, host, nbytes, host)

    def copy_batch(self, targets: int, sources: int, sizes: int, count: int, stream: int) -> None:
        columns = [
            np.ctypeslib.as_array((ctypes.c_uint64 * count).from_address(column)).tolist()
            for column in (targets, sources, sizes)
        ]
        for target, source, nbytes in zip(*columns, strict=True):
            host = source if self._is_device(target) else target
            assert self._registration(host) is not None, "a batch of memory that is not registered"
            self._copy(target, source, nbytes, host)

    def copy_rectangles(
        self, targets: Side, sources: Side, width: U64, height: U64, stream: int
    ) -> None:
        rows: Sequence[Any] = (*targets, *sources, width, height)
        for target, target_pitch, source, source_pitch, nbytes, count in zip(
            *(column.tolist() for column in rows), strict=True
        ):
            host = source if self._is_device(target) else target
            host_pitch = source_pitch if self._is_device(target) else target_pitch
            span = (count - 1) * host_pitch + nbytes
            assert self._registration(host) == self._registration(host + span - 1) is not None
            for row in range(count):
                self._copy(target + row * target_pitch, source + row * source_pitch, nbytes, None)

    def copy_2d(self, copy: Memcpy2D, stream: int) -> None:
        for row in range(copy.height):
            target = (copy.dst_host or copy.dst_device) + row * copy.dst_pitch
            source = (copy.src_host or copy.src_device) + row * copy.src_pitch
            self._copy(target, source, copy.width_in_bytes, None)

    def __getattr__(self, name: str) -> Any:
        """What has no effect here: streams, and events of this process's own."""
        if name in {"destroy_stream", "record_event", "synchronize_event", "synchronize_stream"}:
            return lambda *arguments: None
        raise AttributeError(name)

    def _copy(self, target: int, source: int, nbytes: int, host: int | None) -> None:
        if host is not None and self._registration(host) != self._registration(host + nbytes - 1):
            raise _error("a copy across the border of a registration")
        device = target if self._is_device(target) else source
        assert self._is_device(device), "a copy with no device side"
        assert self._is_device(device + nbytes - 1), "a copy beyond the mapped memory"
        ctypes.memmove(target, source, nbytes)

    def _is_device(self, address: int) -> bool:
        return any(
            base <= address < base + len(self.exported[handle])
            for base, handle in self.opened.items()
        )

    def _registration(self, address: int) -> int | None:
        for base, nbytes in self.registered.items():
            if base <= address < base + nbytes:
                return base
        return None


def _error(call: str) -> CudaError:
    return CudaError(call, 1, "CUDA_ERROR_INVALID_VALUE", "invalid argument")

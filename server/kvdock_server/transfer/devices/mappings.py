"""Allocations of other processes, mapped in this one."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from kvdock_server.transfer.devices.driver import Driver
from kvdock_server.transfer.plans.group_memory import DeviceAllocation, LayoutError


@dataclass(slots=True)
class _Mapping:
    address: int
    nbytes: int
    users: int = 0


class Mappings:
    """The allocations that are mapped for one device: each opened once, and closed exactly once.

    Layers share allocations, and a worker that registers again names allocations that are open
    already. The driver refuses to open a handle twice, and one close ends the mapping for all of
    its users. So users are counted here. Any thread with the device's context current.
    """

    def __init__(self, driver: Driver, *, sizes_are_known: bool = False) -> None:
        """``sizes_are_known``: the described sizes were compared with the driver's before."""
        self._driver = driver
        self._sizes_are_known = sizes_are_known
        self._lock = threading.Lock()
        self._open: dict[bytes, _Mapping] = {}

    def open(self, allocation: DeviceAllocation) -> int:
        """The address at which the allocation is mapped. Each call needs its own ``close``.

        CudaError if it cannot be mapped, LayoutError if it is smaller than described.
        """
        with self._lock:
            mapping = self._open.get(allocation.ipc_handle)
            if mapping is None:
                mapping = self._map(allocation)
                self._open[allocation.ipc_handle] = mapping
            mapping.users += 1
        if allocation.nbytes > mapping.nbytes:
            self.close(allocation.ipc_handle)
            raise LayoutError(
                f"an allocation is described with {allocation.nbytes} bytes, and has "
                f"{mapping.nbytes}: take its size from cuMemGetAddressRange"
            )
        return mapping.address

    def close(self, ipc_handle: bytes) -> None:
        """Take back one ``open``."""
        with self._lock:
            mapping = self._open.get(ipc_handle)
            if mapping is None:
                return  # the device was closed before
            mapping.users -= 1
            if not mapping.users:
                del self._open[ipc_handle]
                self._driver.ipc_close_memory(mapping.address)

    def close_all(self) -> None:
        """End all mappings, whoever uses them."""
        with self._lock:
            while self._open:
                _, mapping = self._open.popitem()
                self._driver.ipc_close_memory(mapping.address)

    def _map(self, allocation: DeviceAllocation) -> _Mapping:
        address = self._driver.ipc_open_memory(allocation.ipc_handle)
        if self._sizes_are_known:
            return _Mapping(address, allocation.nbytes)
        try:
            return _Mapping(address, self._driver.allocation_bytes(address))
        except BaseException:
            self._driver.ipc_close_memory(address)
            raise

"""The device memory of one worker, mapped in this process."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

from kvdock_server.transfer.devices.device import Device, MappedGroup
from kvdock_server.transfer.devices.opened_events import OpenedEvents
from kvdock_server.transfer.plans.group_memory import DeviceAllocation, GroupMemory


class MappedMemory:
    """The allocations of one worker, mapped. Made and closed on any thread that may wait."""

    def __init__(
        self,
        device: Device,
        allocations: Sequence[DeviceAllocation],
        layouts: Mapping[int | None, GroupMemory],
    ) -> None:
        """CudaError if memory cannot be opened, LayoutError if it is not as described.

        ``layouts`` are by group_idx, and so are ``groups``.
        """
        self.device = device
        self.allocations = tuple(allocations)
        self.groups: dict[int | None, MappedGroup] = {}
        self.events = OpenedEvents(device.driver)
        self._handles: list[bytes] = []
        self._lock = threading.Lock()
        self._closed = False
        device.driver.set_current(device.context)
        device.worker_came(self.events)
        try:
            bases = []
            for allocation in allocations:
                bases.append(device.mappings.open(allocation))
                self._handles.append(allocation.ipc_handle)
            for group_idx, layout in layouts.items():
                layout.check([allocation.nbytes for allocation in allocations])
                self.groups[group_idx] = device.planned(layout, bases)
        except BaseException:
            self.close()
            raise
        how = (
            "copy engines, and staging for scattered blocks"
            if any(group.kernel for group in self.groups.values())
            else "copy engines"
        )
        self.description = (
            f"{len(set(self._handles))} allocations opened on {device.name} {device.uuid}, "
            f"copied by {how}"
        )

    def expect_forwarding(self) -> None:
        """From now on loads go on to other devices, so more of their blocks are staged."""
        with self._lock:
            if self._closed:
                return
            self.device.driver.set_current(self.device.context)
            for group_idx, (planner, kernel) in self.groups.items():
                if kernel is None and planner.may_stage(forwarded=True):
                    kernel = self.device.gather_kernel(planner)
                    self.groups[group_idx] = MappedGroup(planner, kernel)

    def close(self) -> None:
        """Unmap the memory. No transfer may be under way. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self.device.driver.set_current_to_close(self.device.context)
        self.events.close_all()
        for group in self.groups.values():
            if group.kernel is not None:
                group.kernel.close()
        for handle in self._handles:
            self.device.mappings.close(handle)
        self.device.worker_left(self.events)

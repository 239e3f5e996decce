"""Interprocess events of a worker's engine, opened in this process.

An engine uses a few events in turn. Opening an event takes longer than asking whether it is done.
So up to _MOST_KEPT events stay open until the worker leaves.
"""

from __future__ import annotations

import threading

from kvdock_server.transfer.devices.driver import Driver

_MOST_KEPT = 256


class OpenedEvents:
    """The events of one worker. Any thread with the device's context current."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._lock = threading.Lock()
        self._kept: dict[bytes, int] = {}

    def open(self, ipc_handle: bytes) -> int:
        """The event of a 64-byte handle; CudaError if there is none. Needs one ``close``."""
        with self._lock:
            event = self._kept.get(ipc_handle)
            if event is None:
                event = self._driver.ipc_open_event(ipc_handle)
                if len(self._kept) < _MOST_KEPT:
                    self._kept[ipc_handle] = event
            return event

    def is_done(self, event: int) -> bool:
        return self._driver.query_event(event)

    def close(self, ipc_handle: bytes, event: int) -> None:
        """Take back one ``open``."""
        with self._lock:
            if self._kept.get(ipc_handle) != event:
                self._driver.destroy_event(event)

    def close_all(self) -> None:
        """Close the kept events, as the worker leaves. None of them may be in use."""
        with self._lock:
            while self._kept:
                _, event = self._kept.popitem()
                self._driver.destroy_event(event)

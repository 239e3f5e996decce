"""Interprocess events of a worker's engine, opened here.

An engine uses a few in turn for every store and load, and opening one takes longer than asking
whether it is done. So they are kept open until the worker leaves, as many as an engine may have.
"""

from __future__ import annotations

import threading

from kvdock_server.transfer.devices.driver import Driver

_MOST_KEPT = 256


class ReadyEvents:
    """One worker's. Any thread with the device's context current."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._lock = threading.Lock()
        self._kept: dict[bytes, int] = {}

    def open(self, ipc_handle: bytes) -> int:
        """The event. Each needs its ``close``. CudaError if there is no such event."""
        with self._lock:
            event = self._kept.get(ipc_handle)
            if event is None:
                event = self._driver.ipc_open_event(ipc_handle)
                if len(self._kept) < _MOST_KEPT:
                    self._kept[ipc_handle] = event
            return event

    def is_done(self, event: int) -> bool:
        """Whether all that was queued before the event's last record is done."""
        return self._driver.query_event(event)

    def close(self, ipc_handle: bytes, event: int) -> None:
        """The event is not asked any more."""
        with self._lock:
            if self._kept.get(ipc_handle) != event:
                self._driver.destroy_event(event)

    def close_all(self) -> None:
        """The worker leaves. None of its events may be in use."""
        with self._lock:
            while self._kept:
                _, event = self._kept.popitem()
                self._driver.destroy_event(event)

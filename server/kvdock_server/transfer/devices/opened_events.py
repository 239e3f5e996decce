"""Interprocess events of a worker's engine, opened in this process.

An engine uses a few events in turn for all its stores and loads. To open one takes longer than to
ask whether it is done, so they stay open until the worker leaves, as many as an engine may have.
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
        """The event of a 64-byte handle. Each call needs its ``close``.

        CudaError if there is no such event.
        """
        with self._lock:
            event = self._kept.get(ipc_handle)
            if event is None:
                event = self._driver.ipc_open_event(ipc_handle)
                if len(self._kept) < _MOST_KEPT:
                    self._kept[ipc_handle] = event
            return event

    def is_done(self, event: int) -> bool:
        """True if everything is done that was queued before the event was last recorded."""
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

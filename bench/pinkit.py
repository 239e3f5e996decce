"""Waits until a pool is pinned, so that copies run at the link's speed when something is timed."""

from __future__ import annotations

import logging
import threading
import time

from kvdock import Client

PIN_SECONDS = 60.0
POLL_SECONDS = 0.05


class WorkerPinning(logging.Handler):
    """Hears from the log when a worker in this process, in shared mode, has pinned the pool.

    Make it before the worker.
    """

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._over = threading.Event()
        self._refused = ""
        logger = logging.getLogger("kvdock_vllm.engine.device.pinning")
        logger.setLevel(logging.INFO)
        logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno > logging.INFO:
            self._refused = record.getMessage()
        self._over.set()

    def again(self) -> None:
        """Listen for the next worker."""
        self._over.clear()
        self._refused = ""

    def wait(self, seconds: float = PIN_SECONDS) -> str:
        """Wait for it, and tell in words how long that took or why it is not so."""
        began = time.monotonic()
        if not self._over.wait(seconds):
            return f"NOT pinned by the worker after {seconds:.0f} s"
        return self._refused or f"pinned by the worker after {time.monotonic() - began:.1f} s"


def wait_until_pinned(pinned_by: str, pinning: WorkerPinning) -> str:
    """Wait for whoever pins the pool: "worker", "nobody", or a server's address. In words."""
    if pinned_by == "nobody":
        return "nothing to wait for"
    return pinning.wait() if pinned_by == "worker" else wait_for_server(pinned_by)


def wait_for_server(address: str, seconds: float = PIN_SECONDS) -> str:
    """Wait until the server has pinned its pool; in words, how long."""
    began = time.monotonic()
    with Client(address) as client:
        while True:
            waited = time.monotonic() - began
            pool = client.status().pool
            if pool.pinned_bytes == pool.total_bytes:
                return f"pinned after {waited:.1f} s"
            if pool.pin_refused or waited > seconds:
                return f"NOT pinned after {waited:.1f} s {pool.pin_refused}"
            time.sleep(POLL_SECONDS)

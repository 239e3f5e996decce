"""The test's end of a `kv_worker` process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from multiprocessing.connection import Listener
from pathlib import Path
from typing import Any


class WorkerError(Exception):
    """An order failed in the worker."""


class WorkerProcess:
    """A worker in a process of its own, which runs the script of that name beside this file."""

    def __init__(
        self, environment: Mapping[str, str] | None = None, script: str = "kv_worker.py"
    ) -> None:
        with tempfile.TemporaryDirectory(prefix="kvdock-gpu-") as folder:
            socket = f"{folder}/worker.sock"
            with Listener(socket, family="AF_UNIX") as listener:
                self.process = subprocess.Popen(
                    [sys.executable, str(Path(__file__).with_name(script)), socket],
                    env={**os.environ, **(environment or {})},
                )
                self._connection = listener.accept()

    def __getattr__(self, name: str) -> Any:
        """An order: `worker.fill(3)`."""

        def order(*arguments: object) -> Any:
            self._connection.send((name, arguments))
            succeeded, result = self._connection.recv()
            if not succeeded:
                raise WorkerError(result)
            return result

        return order

    def kill(self) -> None:
        """End it as the kernel's out-of-memory killer would."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def stop(self) -> None:
        """End it in order."""
        self._connection.close()
        if self.process.poll() is None:
            self.process.wait(timeout=30)

"""Real servers in processes of their own, for all tests."""

from __future__ import annotations

import atexit
import functools
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from loop_watchdog import LIMIT_SECONDS
from nursery import ForkedProcess, Nursery
from watched_server import READY


class ServerProcess:
    """A server that this test started, and may kill and start again at the same address."""

    def __init__(
        self,
        socket: Path,
        *arguments: str,
        program: Sequence[str] = ("-m", "kvdock_server"),
        prefix: Sequence[str] = (),
        held_up: Path | None = None,
        limit: float = LIMIT_SECONDS,
    ) -> None:
        """``program``: what Python runs; ``prefix``: the command that runs Python.

        ``held_up``: a file that takes what held up its loop for longer than ``limit`` seconds.
        """
        if held_up is not None:
            program = [
                str(Path(__file__).with_name("watched_server.py")),
                str(held_up),
                str(limit),
                *program,
            ]
        self._program = program
        self._prefix = prefix
        self.socket = socket
        self.address = f"unix://{socket}"
        self._arguments = arguments
        self.process = self.start()

    def start(self) -> subprocess.Popen[bytes] | ForkedProcess:
        """Start and wait until it serves; RuntimeError with its output if it does not."""
        arguments = [*self._program, "--listen", self.address, *self._arguments]
        environment = {name: value for name, value in os.environ.items() if "KVDOCK" not in name}
        stderr, their_stderr = os.pipe()
        self._stderr = os.fdopen(stderr)
        with Path(os.devnull).open() as nothing:
            if self._prefix:
                self.process = subprocess.Popen(
                    [*self._prefix, sys.executable, *arguments],
                    stdin=nothing,
                    stderr=their_stderr,
                    env=environment,
                )
            else:
                streams = (nothing.fileno(), sys.__stdout__.fileno(), their_stderr)
                self.process = _nursery().fork(arguments, environment, streams)
        os.close(their_stderr)
        lines = []
        for line in self._stderr:
            lines.append(line)
            if READY in line:
                return self.process
        raise RuntimeError(f"the server ended with {self.process.wait()}: {''.join(lines)}")

    def kill(self) -> None:
        """End it as a crash would."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def stop(self) -> int:
        """End it as an operator would; its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=30)

    def restart(self) -> None:
        """Kill it and start another one at the same address."""
        self.kill()
        self.start()

    @property
    def log(self) -> str:
        """What it has written since it served, up to its end. Only after it ended."""
        return self._stderr.read()


@functools.cache
def _nursery() -> Nursery:
    folder = tempfile.TemporaryDirectory(prefix="kvdock-nursery-")
    seed = Path(__file__).with_name("server_seed.py")
    # NumPy starts a thread for each other processor when it is imported, which forks do not have.
    nursery = Nursery(seed, Path(folder.name) / "log", {"OPENBLAS_NUM_THREADS": "1"})
    atexit.register(folder.cleanup)
    atexit.register(nursery.close)
    return nursery

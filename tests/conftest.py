"""Fixtures shared by all tests: a real server in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from hold_ups import HOLD_UPS
from loop_watchdog import LIMIT_SECONDS
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
        self._log: list[str] = []
        self.process = self.start()

    def start(self) -> subprocess.Popen[str]:
        """Start and wait until it serves; RuntimeError with its output if it does not."""
        self.process = subprocess.Popen(
            [
                *self._prefix,
                sys.executable,
                *self._program,
                "--listen",
                self.address,
                *self._arguments,
            ],
            stderr=subprocess.PIPE,
            text=True,
            env={name: value for name, value in os.environ.items() if "KVDOCK" not in name},
        )
        assert self.process.stderr is not None
        lines = []
        for line in self.process.stderr:
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
        assert self.process.stderr is not None
        return self.process.stderr.read()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for begin, (seconds, reason) in HOLD_UPS.items():
            if item.nodeid.startswith(begin):
                item.add_marker(pytest.mark.hold_up(seconds, reason=reason))


@pytest.fixture
def hold_up_limit(request: pytest.FixtureRequest) -> float:
    """For how many seconds one callback may hold up a server's event loop in this test."""
    marker = request.node.get_closest_marker("hold_up")
    return marker.args[0] if marker else LIMIT_SECONDS


@pytest.fixture
def start_server(hold_up_limit: float) -> Iterator[Callable[..., ServerProcess]]:
    """A function that starts a server with the given arguments, on a socket of its own.

    The test fails if something holds up the event loop of one of them.
    """
    # Not tmp_path: a socket's path must be short.
    with tempfile.TemporaryDirectory(prefix="kvdock-test-") as folder:
        servers: list[ServerProcess] = []
        held_up = Path(folder) / "held-up"

        def start(*arguments: str, memory: str = "64MiB", **options: Any) -> ServerProcess:
            socket = Path(folder) / f"{len(servers)}.sock"
            options = {"held_up": held_up, "limit": hold_up_limit} | options
            servers.append(ServerProcess(socket, "--memory", memory, *arguments, **options))
            return servers[-1]

        yield start
        for server in servers:
            server.stop()
        if held_up.exists():
            pytest.fail(held_up.read_text(), pytrace=False)


@pytest.fixture
def server(start_server: Callable[..., ServerProcess]) -> ServerProcess:
    """A server with 64 MiB."""
    return start_server()

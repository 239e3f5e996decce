"""Forks processes from one that has done the imports, which are most of what a small start costs.

A fork has run nothing but imports, so it is as new as an interpreter of its own; only Python's hash
seed is the same for all forks of a nursery.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

_CHILD = Path(__file__).with_name("nursery_child.py")


class ForkedProcess:
    """A process that a nursery forked, with the members of subprocess.Popen that callers use."""

    def __init__(self, pid: int, status: IO[bytes]) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._status = status

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; subprocess.TimeoutExpired after ``timeout`` seconds."""
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
            self.returncode = int(self._status.readline())
            self._status.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Nursery:
    """A process that has imported ``seed``, a module with a function ``run``, and forks.

    Args:
        seed: path of the module. ``run(arguments, descriptors)`` is called in each fork and does
            not return.
        log: file that takes what the nursery itself prints.
        environment: of the nursery, on top of this process's own.
    """

    def __init__(self, seed: Path, log: Path, environment: Mapping[str, str] | None = None) -> None:
        self._log = log
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, str(_CHILD), str(theirs.fileno()), str(seed)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                env={**os.environ, **(environment or {})},
            )

    def fork(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        streams: tuple[int, int, int],
        descriptors: Sequence[int] = (),
    ) -> ForkedProcess:
        """Start a process.

        Args:
            arguments: what ``run`` is called with.
            environment: all of the process's own.
            streams: become its standard input, output and errors. The caller still closes them.
            descriptors: files that ``run`` gets beside them. The caller still closes them.

        Raises:
            RuntimeError: the nursery has ended, for instance since an import failed.
        """
        status, their_status = os.pipe()
        message = json.dumps({"arguments": list(arguments), "environment": dict(environment)})
        try:
            socket.send_fds(
                self._channel, [message.encode()], [their_status, *streams, *descriptors]
            )
        finally:
            os.close(their_status)
        answers = os.fdopen(status, "rb")
        pid = answers.readline()
        if not pid:
            raise RuntimeError(f"the nursery has ended: {self._log.read_text(errors='replace')}")
        return ForkedProcess(int(pid), answers)

    def close(self) -> None:
        """Fork no more; the forks live on."""
        self._channel.close()
        self._process.wait(60)

"""A kvdock server as a child process, on a Unix socket of its own."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from kvdock import Client, KVDockError
from kvdock.v1 import admin_pb2

POLL_SECONDS = 0.02
POOL_SECONDS = 30.0


class ServerError(Exception):
    """The server did not start or did not stop; the message ends with its log."""


class ServerProcess:
    """A server that answers when the constructor returns.

    Args:
        folder: takes the socket and the log; one for each server.
        memory: as --memory, for example "1GiB".
        chunk_tokens: tokens a chunk.
        arguments: more of ``kvdock serve``.
        timeout_s: for the start, and for the stop.

    Raises:
        ServerError: it did not answer within timeout_s. It is dead then.
    """

    def __init__(
        self,
        folder: Path,
        *,
        memory: str = "1GiB",
        chunk_tokens: int = 32,
        arguments: Sequence[str] = (),
        timeout_s: float = 20.0,
    ) -> None:
        self.address = f"unix://{folder / 'kvdock.sock'}"
        self._log = folder / "server.log"
        self._timeout_s = timeout_s
        command = [sys.executable, "-m", "kvdock_server", "--listen", self.address]
        command += ["--memory", memory, "--chunk-tokens", str(chunk_tokens), *arguments]
        with self._log.open("ab") as output:
            self._process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        self._wait_until_ready()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def log_text(self) -> str:
        """Everything the server has printed so far."""
        return self._log.read_text(errors="replace")

    def close(self) -> int:
        """Stop the server with SIGTERM and return its exit status."""
        self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(self._timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise self._failure(f"did not stop within {self._timeout_s:.0f} s") from None

    def kill(self) -> None:
        """End the server at once, as a crash would."""
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._process.poll() is None:
            self.close()

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + self._timeout_s
        answer = ""
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise self._failure(f"ended with status {self._process.returncode}")
            # A channel that once failed to connect waits before it tries again: take a new one.
            with Client(self.address) as client:
                try:
                    answer = client.health()
                except KVDockError as error:
                    answer = str(error)
            if answer == "SERVING":
                return
            time.sleep(POLL_SECONDS)
        self.kill()
        raise self._failure(f"was not ready within {self._timeout_s:.0f} s ({answer})")

    def _failure(self, what: str) -> ServerError:
        return ServerError(f"the server {what}; its log:\n{self.log_text}")


def wait_for_pool(client: Client, nbytes: Callable[[admin_pb2.PoolStatus], int]) -> None:
    """Wait until ``nbytes`` of its status, say what is faulted in or pinned, are the whole pool.

    Raises:
        ServerError: they were not within POOL_SECONDS.
    """
    deadline = time.monotonic() + POOL_SECONDS
    while nbytes(pool := client.status().pool) < pool.total_bytes:
        if time.monotonic() > deadline:
            raise ServerError(f"not all of the pool is ready after {POOL_SECONDS:.0f} s: {pool}")
        time.sleep(POLL_SECONDS)

"""A server whose answers come late: a Unix socket before another, which delays what comes back.

    python bench/delayed.py LISTEN TARGET

Each line of stdin is a delay in seconds, in force from then on. With "inf" nothing comes back any
more until the next line.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

_MOST_BYTES = 1 << 16


class Delayed:
    """The proxy as a child process. ``address`` is where to connect."""

    def __init__(self, target: str, folder: Path) -> None:
        path = folder / "delayed.sock"
        self.address = f"unix://{path}"
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(path), target.removeprefix("unix://")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "ready\n":
            raise RuntimeError(f"the proxy ended with status {self._process.wait()}")

    def set(self, seconds: float) -> None:
        """From now on answers come back so much later."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{seconds}\n")
        self._process.stdin.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.communicate()


class _Proxy:
    def __init__(self, target: str) -> None:
        self._target = target
        self._seconds = 0.0
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    def set(self, seconds: float) -> None:
        self._seconds = seconds
        self._changed.set()
        self._changed = asyncio.Event()

    async def serve(self, client: asyncio.StreamReader, answers: asyncio.StreamWriter) -> None:
        server, requests = await asyncio.open_unix_connection(self._target)
        late: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        for work in (
            self._pass_on(client, requests),
            self._receive(server, late),
            self._answer(late, answers),
        ):
            task = asyncio.create_task(work)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pass_on(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await source.read(_MOST_BYTES):
                target.write(data)
                await target.drain()
        target.close()

    async def _receive(
        self, source: asyncio.StreamReader, late: asyncio.Queue[tuple[float, bytes]]
    ) -> None:
        clock = asyncio.get_running_loop().time
        with contextlib.suppress(ConnectionError):
            while data := await source.read(_MOST_BYTES):
                late.put_nowait((clock(), data))
        late.put_nowait((clock(), b""))

    async def _answer(
        self, late: asyncio.Queue[tuple[float, bytes]], target: asyncio.StreamWriter
    ) -> None:
        clock = asyncio.get_running_loop().time
        data = b"first"
        while data:
            came, data = await late.get()
            while (left := came + self._seconds - clock()) > 0:
                try:
                    await asyncio.wait_for(self._changed.wait(), min(left, 3600.0))
                except TimeoutError:
                    continue
            target.write(data)
        target.close()


async def main() -> None:
    listen, target = sys.argv[1:]
    loop = asyncio.get_running_loop()
    proxy = _Proxy(target)
    await asyncio.start_unix_server(proxy.serve, listen)
    print("ready", flush=True)
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        proxy.set(float(line))


if __name__ == "__main__":
    asyncio.run(main())

"""The bare server as a child process, and clients of it that are built as KVDock's own are."""

from __future__ import annotations

import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Self

import grpc

SERVER = Path(__file__).with_name("bare_server.py")
TURN_TIMEOUT_SECONDS = 10.0
OPTIONS = [
    ("grpc.max_receive_message_length", 4 << 20),
    ("grpc.max_send_message_length", 4 << 20),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
]


class BareServer:
    """A bare server that answers when the constructor returns."""

    def __init__(self, folder: Path) -> None:
        self.target = f"unix:{folder / 'bare.sock'}"
        self._process = subprocess.Popen(
            [sys.executable, str(SERVER), self.target],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdout is not None
        if self._process.stdout.readline() != b"ready\n":
            raise RuntimeError(f"the bare server ended with status {self._process.wait()}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.communicate()


class BareStream:
    """An open stream with threads and futures as in kvdock.Session, but no messages or state."""

    def __init__(self, target: str) -> None:
        self._channel = grpc.insecure_channel(target, OPTIONS)
        self._outbox: SimpleQueue[bytes | None] = SimpleQueue()
        self._waiting: SimpleQueue[Future[bytes]] = SimpleQueue()
        turn = self._channel.stream_stream("/bare/Turn", bytes, bytes)
        self._call = turn(iter(self._outbox.get, None))
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def turn(self, message: bytes) -> bytes:
        """Send a message and wait for its answer; one at a time."""
        future: Future[bytes] = Future()
        self._waiting.put(future)
        self._outbox.put(message)
        return future.result(TURN_TIMEOUT_SECONDS)

    def close(self) -> None:
        self._outbox.put(None)
        self._reader.join(TURN_TIMEOUT_SECONDS)
        self._channel.close()

    def _read(self) -> None:
        for message in self._call:
            self._waiting.get().set_result(message)


def turn_message(request_bytes: int, answer_bytes: int) -> bytes:
    """A message of ``request_bytes`` for BareStream.turn. Its answer has ``answer_bytes``."""
    return struct.pack("<I", answer_bytes) + bytes(request_bytes - 4)


def upload(target: str, messages: int, nbytes: int) -> None:
    """Send ``messages`` messages of ``nbytes`` each in one stream."""

    def requests() -> Iterator[bytes]:
        message = bytes(nbytes)
        for _ in range(messages):
            yield message

    with grpc.insecure_channel(target, OPTIONS) as channel:
        answer: bytes = channel.stream_unary("/bare/Upload", bytes, bytes)(requests())
    (received,) = struct.unpack("<Q", answer)
    if received != messages * nbytes:
        raise RuntimeError(f"the bare server received {received} of {messages * nbytes} bytes")


def download(target: str, messages: int, nbytes: int) -> None:
    """Receive ``messages`` messages of ``nbytes`` each in one stream."""
    with grpc.insecure_channel(target, OPTIONS) as channel:
        call = channel.unary_stream("/bare/Download", bytes, bytes)
        received = sum(len(message) for message in call(struct.pack("<QQ", messages, nbytes)))
    if received != messages * nbytes:
        raise RuntimeError(f"the bare server sent {received} of {messages * nbytes} bytes")

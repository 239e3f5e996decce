"""How fast events reach their readers.

    python bench/events.py [--quick]

Measures two things for 1, 8 and 64 readers. The first is events a second, while one client stores
as fast as it can, until every reader has every event. The second is the delay from the client's
call of commit to the reader, while stores come at a moderate rate.

Beside the first stands the machine's own rate: a bare gRPC server (bench/bare_server.py) sends as
many messages of the same size to as many readers, which only count bytes. Every event carries the
data of a chunk of 32 tokens (hashes of two blocks, token ids). Each reader is a stream with its own
connection. The readers are spread over up to four processes.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc.aio
from barekit import OPTIONS, BareServer
from report import percentile
from rich.console import Console
from rich.table import Table
from serverkit import ServerProcess

from kvdock import ChunkEventData, Client, Group, Namespace
from kvdock.address import parse
from kvdock.channel import options
from kvdock.v1 import events_pb2 as pb
from kvdock.v1 import events_pb2_grpc

READERS = (1, 8, 64)
PROCESSES = 4
STORE_TOKENS = 2_048
"""Of one store: a step of an engine."""
SHARD_BYTES = 4096
CHUNK_TOKENS = 32
BLOCK_TOKENS = 16
NAMESPACE = Namespace("bench", CHUNK_TOKENS, 1, (Group(shard_bytes=(SHARD_BYTES,)),))
START_SECONDS = 60.0


@dataclass(frozen=True)
class Effort:
    """How much to measure."""

    events: int
    """Stored as fast as one client can."""
    delays: int
    """Events stored one at a time, whose delays are measured."""
    rate: float
    """Commits a second while delays are measured."""


FULL = Effort(events=40_000, delays=1_500, rate=150.0)
QUICK = Effort(events=8_000, delays=300, rate=150.0)


@dataclass(frozen=True)
class Result:
    """What one number of readers gave. Times are in seconds."""

    readers: int
    stored_rate: float
    """Events a second into the log."""
    delivered_rate: float
    """Events a second to each reader, until the last one has the last."""
    messages: float
    """Messages to each reader."""
    bare_rate: float
    """Events a second to each reader, if a bare server sent the same messages."""
    server_cpu: float
    """CPU seconds of the server for each event and reader, publishing included."""
    delays: list[float]


async def read(address: str, streams: int, pipe: Connection) -> None:
    """The readers of one process.

    The pipe tells for which event to wait. When each reader has it, the result is sent back.
    """
    parsed = parse(address)
    own = ("grpc.use_local_subchannel_pool", 1)
    goal = asyncio.Event()
    wanted = 0
    times: dict[int, list[float]] = {}
    messages = nbytes = 0

    async def one(ready: asyncio.Semaphore) -> None:
        nonlocal messages, nbytes
        async with grpc.aio.insecure_channel(parsed.target, [*options(parsed), own]) as channel:
            stub = events_pb2_grpc.EventServiceStub(channel)
            async for message in stub.StreamKVEvents(
                pb.StreamKVEventsRequest(progress_interval_ms=100)
            ):
                now = time.monotonic()
                last = message.cursor.sequence
                if message.WhichOneof("message") == "batch":
                    messages += 1
                    nbytes += message.ByteSize()
                    for event in message.batch.events:
                        times.setdefault(event.sequence, []).append(now)
                else:
                    ready.release()
                if goal.is_set() and last >= wanted:
                    return

    ready = asyncio.Semaphore(0)
    tasks = [asyncio.create_task(one(ready)) for _ in range(streams)]
    for _ in tasks:
        await ready.acquire()
    pipe.send("ready")
    wanted = await asyncio.to_thread(pipe.recv)
    goal.set()
    await asyncio.gather(*tasks)
    pipe.send((times, messages, nbytes))


async def read_bare(target: str, streams: int, pipe: Connection) -> None:
    """``streams`` readers of a bare server, told over the pipe how many messages of which size."""
    channels = [grpc.aio.insecure_channel(target, OPTIONS) for _ in range(streams)]
    for channel in channels:
        await channel.channel_ready()
    pipe.send("ready")
    request = struct.pack("<QQ", *await asyncio.to_thread(pipe.recv))

    async def one(channel: grpc.aio.Channel) -> int:
        download = channel.unary_stream("/bare/Download", bytes, bytes)
        return sum([len(message) async for message in download(request)])

    await asyncio.gather(*map(one, channels))
    pipe.send("done")


def reader_process(
    main: Callable[[str, int, Connection], Coroutine[None, None, None]],
    address: str,
    streams: int,
    pipe: Connection,
) -> None:
    asyncio.run(main(address, streams, pipe))


class Readers:
    """All readers. They are reading when the constructor returns."""

    def __init__(
        self,
        address: str,
        count: int,
        main: Callable[[str, int, Connection], Coroutine[None, None, None]] = read,
    ) -> None:
        self._pipes = []
        spawn = multiprocessing.get_context("spawn")
        processes = min(PROCESSES, count)
        for _ in range(processes):
            pipe, theirs = multiprocessing.Pipe()
            self._pipes.append(pipe)
            arguments = (main, address, count // processes, theirs)
            spawn.Process(target=reader_process, args=arguments, daemon=True).start()
        for pipe in self._pipes:
            if not pipe.poll(START_SECONDS):
                raise SystemExit("a reader did not start")
            pipe.recv()

    def finish(self, last: int) -> tuple[dict[int, list[float]], int, int]:
        """When each event reached which readers, and the number of messages and of bytes."""
        times: dict[int, list[float]] = {}
        messages = nbytes = 0
        for some, some_messages, some_bytes in self.ask(last):
            messages += some_messages
            nbytes += some_bytes
            for sequence, when in some.items():
                times.setdefault(sequence, []).extend(when)
        return times, messages, nbytes

    def ask(self, question: object) -> list[Any]:
        """The answers of all processes."""
        for pipe in self._pipes:
            pipe.send(question)
        return [pipe.recv() for pipe in self._pipes]


class Writer:
    """A client that stores, with event data, in shared mode. It copies nothing."""

    def __init__(self, client: Client, chunk_tokens: int) -> None:
        client.register_namespace(NAMESPACE)
        self._chunk_tokens = chunk_tokens
        self._session = client.session(role="worker")
        self._count = 0

    def store(self, chunks: int) -> float:
        """Store ``chunks`` new chunks; when commit was called."""
        keys = [(self._count + index + 1).to_bytes(32, "little") for index in range(chunks)]
        self._count += chunks
        blocks = self._chunk_tokens // BLOCK_TOKENS
        told = [
            ChunkEventData((key,) * blocks, key, key * (self._chunk_tokens // 8), BLOCK_TOKENS)
            for key in keys
        ]
        reservation = self._session.reserve(NAMESPACE.name, keys, event_data=told)
        called = time.monotonic()
        self._session.commit(reservation)
        return called


def measure(count: int, effort: Effort, chunk_tokens: int = CHUNK_TOKENS) -> Result:
    """Measure ``count`` readers, with a server of their own."""
    chunks = STORE_TOKENS // chunk_tokens
    with (
        tempfile.TemporaryDirectory(prefix="kvdock-events-") as folder,
        ServerProcess(Path(folder), memory="512MiB", arguments=["--event-log", "512MiB"]) as server,
        Client(server.address) as client,
    ):
        writer = Writer(client, chunk_tokens)
        writer.store(chunks)

        fast = Readers(server.address, count)
        worked, began = cpu_seconds(server.pid), time.monotonic()
        for _ in range(effort.events // chunks):
            writer.store(chunks)
        stored = time.monotonic() - began
        last = effort.events // chunks * chunks + chunks
        times, messages, nbytes = fast.finish(last)
        delivered = max(times[last]) - began
        worked = cpu_seconds(server.pid) - worked
        if any(len(times[number]) != count for number in range(chunks + 1, last + 1)):
            raise SystemExit("a reader missed an event")
        size = max(1, nbytes // messages)
        bare = bare_seconds(Path(folder), count, messages // count, size)

        steady = Readers(server.address, count)
        called = []
        for number in range(effort.delays):
            time.sleep(max(0.0, began + number / effort.rate - time.monotonic()))
            if not number:
                began = time.monotonic()
            called.append(writer.store(1))
        times, _, _ = steady.finish(last + effort.delays)
        delays = [
            when - called[number]
            for number in range(effort.delays)
            for when in times[last + 1 + number]
        ]
        return Result(
            readers=count,
            stored_rate=effort.events / stored,
            delivered_rate=effort.events / delivered,
            messages=messages / count,
            bare_rate=effort.events / bare,
            server_cpu=worked / (effort.events * count),
            delays=delays,
        )


def bare_seconds(folder: Path, count: int, messages: int, nbytes: int) -> float:
    """How long a bare server takes for ``messages`` messages to each of ``count`` readers."""
    with BareServer(folder) as server:
        readers = Readers(server.target, count, read_bare)
        began = time.monotonic()
        readers.ask((messages, nbytes))
        return time.monotonic() - began


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> int:
    parser = argparse.ArgumentParser(description="Benchmark of KVDock's event stream.")
    parser.add_argument("--quick", action="store_true", help="measure for less time")
    effort = QUICK if parser.parse_args().quick else FULL
    table = Table(title="Events", title_justify="left")
    for name in (
        "readers",
        "stored/s",
        "delivered/s to each",
        "in all/s",
        "of bare gRPC",
        "events a message",
        "server us an event and reader",
        "delay p50 ms",
        "delay p99 ms",
    ):
        table.add_column(name, justify="right")
    for count in READERS:
        result = measure(count, effort)
        table.add_row(
            str(count),
            f"{result.stored_rate:,.0f}",
            f"{result.delivered_rate:,.0f}",
            f"{result.delivered_rate * count:,.0f}",
            f"{result.delivered_rate / result.bare_rate:.2f}",
            f"{effort.events / result.messages:.0f}",
            f"{result.server_cpu * 1e6:.2f}",
            f"{percentile(result.delays, 50) * 1e3:.1f}",
            f"{percentile(result.delays, 99) * 1e3:.1f}",
        )
    Console(width=120).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())

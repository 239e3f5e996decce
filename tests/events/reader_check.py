"""What do readers cost, and what do bad readers cost the others?

Four servers: without event log, with a log that nobody reads, with one that eight healthy readers
follow, and with one that eight healthy readers follow beside one that is slow and one that is
stopped (SIGSTOP). Stores go to them in turns, half a second each, so that all meet the same
machine. At the end the healthy readers must have every event once and in order, and the table shows
the rates of storing beside one another, and the memory of the servers.

A store is what an engine does: Reserve, copy into the pool, Commit, eight chunks at a time with
event data for 256 tokens each. The pool is always full, so half of the events are evictions. First
chunks have 32 MiB, what 256 tokens of an 8B model take; then 4 KiB, so that nothing but calls and
events is left and a million of them come in one or two minutes.

What readers cost the server is the question, not what they do themselves: where there are cores
enough the storing client, the servers and the readers each have their own. And a reader keeps what
it receives and looks at it later.

    python tests/events/reader_check.py --events 1000000
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import operator
import os
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

import grpc

from kvdock import ChunkEventData, ChunkStatus, Client, Group, Namespace
from kvdock.address import parse
from kvdock.channel import options
from kvdock.v1 import events_pb2 as pb

METHOD = f"/{pb.DESCRIPTOR.services_by_name['EventService'].full_name}/StreamKVEvents"

SHARDS = {"32 MiB": 32 << 20, "4 KiB": 4 << 10}
MEMORY = "512MiB"
LOG = 256 << 20
CHUNKS = 8
ROUND_SECONDS = 0.5
ROUNDS = 10
"""With each size of chunk, in each server; with the small ones more if events are still wanted."""
BAD = "8 and 2 bad readers"
HEALTHY = 8
READY_SECONDS = 30.0
SLOW_SECONDS = 0.3
FINISH_SECONDS = 60.0

# What a reader has received and not looked at. Half of what is measured goes into it.
MOST_KEPT_BYTES = 128 << 20

CLIENT_CORES = 2
SERVER_CORES = 3
READER_CORES = 3
"""At least; they get all that are left."""


@dataclass(frozen=True)
class Cores:
    """Who runs where. All are the machine's if it has too few to part them."""

    client: set[int]
    servers: set[int]
    readers: set[int]

    @property
    def parted(self) -> bool:
        return self.client != self.readers


def cores() -> Cores:
    """The cores that this process may use, parted."""
    own = sorted(os.sched_getaffinity(0))
    if len(own) < CLIENT_CORES + SERVER_CORES + READER_CORES:
        return Cores(set(own), set(own), set(own))
    servers = CLIENT_CORES + SERVER_CORES
    return Cores(set(own[:CLIENT_CORES]), set(own[CLIENT_CORES:servers]), set(own[servers:]))


def pin(pid: int, where: set[int]) -> None:
    """Keep all threads of a process on some cores."""
    for thread in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(thread.name), where)


@dataclass
class Seen:
    """What a reader saw. ``broken`` is empty if every event came once and in order."""

    events: int = 0
    messages: int = 0
    last: int = 0
    cut_off: str = ""
    """How, if the server ended the stream."""
    broken: str = ""


def read(address: str, where: set[int], pause: float, pipe: Connection) -> None:
    """A reader's main function: reads until told a number to reach, and then hurries."""
    pin(os.getpid(), where)
    parsed = parse(address)
    channel = grpc.insecure_channel(parsed.target, options(parsed))
    stream = channel.unary_stream(
        METHOD, request_serializer=pb.StreamKVEventsRequest.SerializeToString
    )(pb.StreamKVEventsRequest(progress_interval_ms=100))
    seen = Seen()
    goal = None
    kept: list[bytes] = []
    kept_bytes = 0
    while (message := next_of(stream, seen)) is not None:
        if not seen.messages:
            seen.last = pb.StreamKVEventsResponse.FromString(message).cursor.sequence
            pipe.send("ready")
        seen.messages += 1
        kept.append(message)
        kept_bytes += len(message)
        if goal is not None or kept_bytes > MOST_KEPT_BYTES:
            look_at(kept, seen)
            kept_bytes = 0
        if goal is None:
            time.sleep(pause)
            if pipe.poll():
                goal = pipe.recv()
        elif seen.last >= goal:
            break
    look_at(kept, seen)
    pipe.send(seen)


def look_at(kept: list[bytes], seen: Seen) -> None:
    """Note what was received, and keep it no longer."""
    for encoded in kept:
        message = pb.StreamKVEventsResponse.FromString(encoded)
        for event in message.batch.events:
            if event.sequence != seen.last + 1 and not seen.broken:
                seen.broken = f"event {event.sequence} after {seen.last}"
            seen.last = event.sequence
            seen.events += 1
        if message.WhichOneof("message") == "compacted":
            seen.cut_off = "compacted"
    kept.clear()


def next_of(stream: Any, seen: Seen) -> bytes | None:
    """The next message; None at the end, which the server makes for who takes nothing."""
    try:
        return next(stream, None)
    except grpc.RpcError as error:
        seen.cut_off = stream.code().name
        if stream.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
            raise AssertionError(f"the stream failed: {error}") from error
        return None


class Reader:
    """A reader in a process of its own."""

    def __init__(self, address: str, where: set[int], pause: float = 0.0) -> None:
        self.pipe, theirs = multiprocessing.Pipe()
        self.process = multiprocessing.get_context("spawn").Process(
            target=read, args=(address, where, pause, theirs), daemon=True
        )
        self.process.start()

    def ready(self) -> None:
        """Return when it reads."""
        if not self.pipe.poll(READY_SECONDS):
            raise AssertionError("a reader did not start")
        self.pipe.recv()

    def finish(self, goal: int) -> Seen:
        """What it saw, once it has the event of that number or was cut off before."""
        if not self.pipe.poll():
            self.pipe.send(goal)
        if not self.pipe.poll(FINISH_SECONDS):
            raise AssertionError(f"a reader neither got to event {goal} nor was cut off")
        seen: Seen = self.pipe.recv()
        self.process.join()
        return seen

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)


class Store:
    """A server and a session that stores to it."""

    def __init__(self, folder: Path, where: set[int], *arguments: str) -> None:
        from serverkit import ServerProcess

        folder.mkdir()
        self.server = ServerProcess(folder, memory=MEMORY, arguments=arguments)
        pin(self.server.pid, where)
        self.client = Client(self.server.address)
        for name, nbytes in SHARDS.items():
            name = name.replace(" ", "")
            self.client.register_namespace(Namespace(name, 256, 1, (Group(shard_bytes=(nbytes,)),)))
        self.session = self.client.session(role="worker")
        self.rates: dict[str, list[float]] = {name: [] for name in SHARDS}
        self.work: dict[str, list[float]] = {name: [] for name in SHARDS}
        self._bytes = bytes(max(SHARDS.values()))
        self._next = 0
        while self.client.status().pool.ready_bytes < self.client.status().pool.total_bytes:
            time.sleep(0.05)
        self.pool = self.session.pool
        # Everything is touched and the pool is full before anything is measured.
        for _ in range(20):
            self.prompt("32 MiB")
        self.rss_before = self.rss

    def prompt(self, size: str) -> None:
        """Store a prompt of eight chunks."""
        seed = self._next.to_bytes(8, "little")
        self._next += CHUNKS
        keys = [hashlib.sha256(seed + bytes([index])).digest() for index in range(CHUNKS)]
        told = [ChunkEventData((key,) * 16, key, key * 32, 16) for key in keys]
        namespace = size.replace(" ", "")
        reservation = self.session.reserve(namespace, keys, event_data=told)
        for chunk in reservation.chunks:
            assert chunk.status is ChunkStatus.RESERVED
            assert chunk.location is not None
            self.pool.view(chunk.location)[:] = self._bytes[: chunk.location.length]
        self.session.commit(reservation)

    def round(self, size: str, count: int) -> None:
        """Store so many prompts; notes the rate in chunks a second, and the server's work."""
        began, worked = time.perf_counter(), self._cpu_seconds()
        for _ in range(count):
            self.prompt(size)
        seconds = time.perf_counter() - began
        self.rates[size].append(count * CHUNKS / seconds)
        self.work[size].append((self._cpu_seconds() - worked) / (count * CHUNKS) * 1e6)

    @property
    def rss(self) -> int:
        """Bytes of the server that are its own, without the pool."""
        for line in Path(f"/proc/{self.server.pid}/status").read_text().splitlines():
            if line.startswith("RssAnon"):
                return int(line.split()[1]) << 10
        raise AssertionError("no RssAnon")

    def _cpu_seconds(self) -> float:
        threads = Path(f"/proc/{self.server.pid}/task").glob("*/schedstat")
        return sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9

    def close(self) -> None:
        self.client.close()
        self.server.close()


@dataclass
class Result:
    """What a run found, by store and size. work: the server's, in us a chunk; memory in bytes."""

    published: int
    healthy: list[Seen]
    slow: Seen
    stopped: Seen
    rates: dict[str, dict[str, float]]
    """Chunks a second."""
    rate_ratios: dict[str, dict[str, float]]
    """To those without log."""
    work: dict[str, dict[str, float]]
    work_ratios: dict[str, dict[str, float]]
    rss: dict[str, tuple[int, int]]
    """Before and after the rounds."""
    rss_end: int
    """Of the followed server, after all events."""


def check(events: int, rounds: int = ROUNDS) -> Result:
    """Run until so many events are published. AssertionError if a healthy reader lost any."""
    log = ("--event-log", str(LOG))
    where = cores()
    pin(os.getpid(), where.client)
    with tempfile.TemporaryDirectory(prefix="kvdock-readers-") as name:
        stores = {
            "no log": Store(Path(name, "a"), where.servers),
            "log, no reader": Store(Path(name, "b"), where.servers, *log),
            "8 readers": Store(Path(name, "c"), where.servers, *log),
            BAD: Store(Path(name, "d"), where.servers, *log),
        }
        address = stores["8 readers"].server.address
        others = [Reader(address, where.readers) for _ in range(HEALTHY)]
        address = stores[BAD].server.address
        readers = [Reader(address, where.readers) for _ in range(HEALTHY)]
        slow = Reader(address, where.readers, SLOW_SECONDS)
        stopped = Reader(address, where.readers)
        try:
            for reader in (*others, *readers, slow, stopped):
                reader.ready()
            return measure(stores, readers, slow, stopped, events, rounds)
        finally:
            for reader in (*others, *readers, slow, stopped):
                reader.process.kill()
            for store in stores.values():
                store.close()


def measure(
    stores: dict[str, Store],
    healthy: list[Reader],
    slow: Reader,
    stopped: Reader,
    events: int,
    rounds: int,
) -> Result:
    followed = stores[BAD]
    first = head(followed.client)
    stopped.signal(signal.SIGSTOP)
    for size in SHARDS:
        count = calibrate(stores["no log"], size)
        for _ in range(rounds):
            for store in stores.values():
                store.round(size, count)
    # All have stored as much.
    rss = {name: (store.rss_before, store.rss) for name, store in stores.items()}
    while head(followed.client) - first < events:
        for _ in range(count):
            followed.prompt(size)
    last = head(followed.client)
    seen = [reader.finish(last) for reader in healthy]
    for one in seen:
        assert not one.broken, one.broken
        assert not one.cut_off, f"a healthy reader was cut off at event {one.last}: {one.cut_off}"
        assert one.events == last - first
    rss_end = followed.rss
    slow_seen = slow.finish(last)
    stopped.signal(signal.SIGCONT)
    stopped_seen = stopped.finish(last)
    for one in (slow_seen, stopped_seen):
        assert one.cut_off or one.last == last
    base = stores["no log"]
    return Result(
        published=last - first,
        healthy=seen,
        slow=slow_seen,
        stopped=stopped_seen,
        rates={name: medians(store.rates) for name, store in stores.items()},
        rate_ratios={name: ratios(store.rates, base.rates) for name, store in stores.items()},
        work={name: medians(store.work) for name, store in stores.items()},
        work_ratios={name: ratios(store.work, base.work) for name, store in stores.items()},
        rss=rss,
        rss_end=rss_end,
    )


def medians(values: dict[str, list[float]]) -> dict[str, float]:
    return {size: statistics.median(some) for size, some in values.items()}


def ratios(values: dict[str, list[float]], base: dict[str, list[float]]) -> dict[str, float]:
    """Round by round: neighbours in time met the same machine."""
    return {
        size: statistics.median(map(operator.truediv, some, base[size]))
        for size, some in values.items()
    }


def head(client: Client) -> int:
    """Number of the last event."""
    stream = client.events()
    sequence = next(stream).cursor.sequence
    stream.close()
    return sequence


def calibrate(store: Store, size: str) -> int:
    """How many prompts take about a round."""
    began = time.perf_counter()
    for _ in range(20):
        store.prompt(size)
    return max(1, round(20 * ROUND_SECONDS / (time.perf_counter() - began)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument(
        "--rounds", type=int, default=ROUNDS, help=f"of {4 * ROUND_SECONDS:g} s, with each size"
    )
    arguments = parser.parse_args()
    result = check(arguments.events, arguments.rounds)
    parted = cores().parted
    print("client, servers and readers", "have cores of their own" if parted else "share all cores")
    print(f"{result.published:,} events, each healthy reader has them all, once and in order")
    print(f"messages a healthy reader: {statistics.median(s.messages for s in result.healthy):,}")
    for name, one in (("slow", result.slow), ("stopped", result.stopped)):
        print(f"{name} reader: {one.events:,} events, cut off: {one.cut_off or 'no'}")
    for size in SHARDS:
        print(f"\nchunks of {size:9}   chunks/s  ratio  server us/chunk  ratio")
        for name, rates in result.rates.items():
            print(
                f"{name:19} {rates[size]:10,.0f} {result.rate_ratios[name][size]:6.3f} "
                f"{result.work[name][size]:16.1f} {result.work_ratios[name][size]:6.2f}"
            )
    print("\nmemory of the server beside the pool, MiB")
    for name, (before, after) in result.rss.items():
        print(f"{name:19} {before / 2**20:6.0f} -> {after / 2**20:5.0f}")
    print(f"{BAD}, in the end {result.rss_end / 2**20:.0f}")


if __name__ == "__main__":
    main()

"""How fast bytes move, and whether questions are answered meanwhile.

    python bench/data_path.py [--quick]

* shared: a session stores (reserve, copy into the pool, commit) and retrieves (look up, copy out,
  free the locks). Each is timed as a whole, calls included, in turns with a plain memcpy of the
  same bytes. The memcpy is between pages of the same kinds (this process's own, and shared memory)
  that were touched before.
* inline: put and get of the client, in turns with a raw gRPC stream of messages of the same size to
  and from a server that does nothing (bench/bare_server.py).
* lookups of 128 keys while another process stores and retrieves without pause, in turns with
  lookups while that process rests.

Every byte that comes back is compared. Prints a table; exit status 1 if a bound is missed.
"""

from __future__ import annotations

import argparse
import mmap
import multiprocessing
import os
import secrets
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.synchronize import Event
from pathlib import Path
from statistics import median

import numpy as np
import numpy.typing as npt
from barekit import BareServer, download, upload
from report import Row, milliseconds, percentile, print_report
from serverkit import ServerProcess, wait_for_pool

from kvdock import ChunkStatus, Client, Group, Location, Namespace, Session
from kvdock._inline import MESSAGE_BYTES
from kvdock.keys import chunk_keys

CHUNK_TOKENS = 32
TOKEN_BYTES = 128 << 10
"""Of a Llama 3.1 8B in 16 bits."""
SHARD_BYTES = CHUNK_TOKENS * TOKEN_BYTES
PROMPT_TOKENS = 16_384
"""Of one store or retrieve: 2 GiB."""
POOL_BYTES = 5 << 30

PIECE_BYTES = 8 << 20
"""After each piece a copy lets other processes run. Linux lets a copying process finish its time
slice, so processes that are woken on its core, the server's too, would wait for milliseconds."""

PROMPT_CHUNKS = 128
SMALL_SHARD_BYTES = 4096
SMALL = Namespace("bench-lookups", CHUNK_TOKENS, 1, (Group(shard_bytes=(SMALL_SHARD_BYTES,)),))

SHARED_BOUND = 0.90
INLINE_BOUND = 0.60
TAIL_BOUND = 3.0

START_SECONDS = 30.0

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Effort:
    """How long to measure."""

    shared_rounds: int
    inline_rounds: int
    inline_chunks: int
    tail_rounds: int
    tail_seconds: float
    """How long each round looks up without load, and then again under load."""


FULL = Effort(10, 6, 128, 4, 2.0)
QUICK = Effort(4, 3, 64, 2, 1.0)


@dataclass
class Timings:
    """Seconds for the same bytes in each round: KVDock's, and the ceiling's mean around it."""

    nbytes: int
    kvdock: list[float] = field(default_factory=list)
    ceiling: list[float] = field(default_factory=list)

    def add(self, before: float, kvdock: float, after: float) -> None:
        self.kvdock.append(kvdock)
        self.ceiling.append((before + after) / 2)

    @property
    def ratio(self) -> float:
        """Of the rates. It is taken in each round, since the machine's speed changes."""
        return median(own / mine for own, mine in zip(self.ceiling, self.kvdock, strict=True))

    def row(self, what: str, ceiling: str, bound: float) -> Row:
        """A row of medians."""
        ratio = self.ratio
        return Row(
            what,
            f"{self.nbytes / median(self.kvdock) / 1e9:.2f} GB/s",
            f"{ceiling} {self.nbytes / median(self.ceiling) / 1e9:.2f} GB/s",
            f"{ratio:.0%}",
            f">= {bound:.0%}",
            ratio >= bound,
        )


def main() -> int:
    parser = argparse.ArgumentParser(description="Benchmark of KVDock's data path.")
    parser.add_argument("--quick", action="store_true", help="measure for less time")
    effort = QUICK if parser.parse_args().quick else FULL
    rows = []
    with tempfile.TemporaryDirectory(prefix="kvdock-bench-") as name:
        folder = Path(name)
        with (
            ServerProcess(folder, memory=str(POOL_BYTES)) as server,
            BareServer(folder) as bare,
            Client(server.address) as client,
        ):
            client.register_namespace(namespace(CHUNK_TOKENS))
            wait_for_pool(client, lambda pool: pool.ready_bytes)
            rows += shared_rows(client, CHUNK_TOKENS, effort.shared_rounds)
            rows += inline_rows(client, bare.target, effort)
            for load in (shared_load, inline_load):
                rows.append(tail_row(client, load, effort))
    return print_report("data path", rows)


def namespace(chunk_tokens: int) -> Namespace:
    """A namespace of Llama 3.1 8B for chunks of that size."""
    group = Group(shard_bytes=(chunk_tokens * TOKEN_BYTES,))
    return Namespace(f"bench-{chunk_tokens}", chunk_tokens, 1, (group,))


def touch_pool(session: Session) -> None:
    """Enter every page of the pool into this process's page tables, to be written to."""
    for segment in session.pool.segments:
        whole = session.pool.array(Location(segment.segment_id, 0, segment.nbytes))
        whole[:: 1 << 12] |= 0  # leaves the bytes as they are


def new_keys(count: int) -> list[bytes]:
    """Keys that no chunk has yet."""
    return [secrets.token_bytes(32) for _ in range(count)]


def touched(chunks: int, shard_bytes: int = SHARD_BYTES) -> Bytes:
    """``chunks`` shards of random bytes, aligned as the pool is, in pages that were written to."""
    piece = np.frombuffer(secrets.token_bytes(shard_bytes), np.uint8)
    memory = mmap.mmap(-1, chunks * shard_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    shards = np.frombuffer(memory, np.uint8).reshape(chunks, shard_bytes)
    for index in range(chunks):
        shards[index] = np.roll(piece, index)
    return shards


def touched_shared(chunks: int, shard_bytes: int) -> Bytes:
    """``chunks`` shards in pages of shared memory that were written to, as the pool's are.

    Copies to and from a file's pages are some 5% slower than between a process's own.
    """
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        file.truncate(chunks * shard_bytes)
        memory = mmap.mmap(file.fileno(), chunks * shard_bytes)
    shards = np.frombuffer(memory, np.uint8).reshape(chunks, shard_bytes)
    shards.fill(1)
    return shards


def seconds_of(call: Callable[..., object], *arguments: object) -> float:
    started = time.perf_counter()
    call(*arguments)
    return time.perf_counter() - started


def shared_rows(client: Client, chunk_tokens: int, rounds: int) -> list[Row]:
    """Store and retrieve through the mapped pool against memcpy, in a registered namespace."""
    stores, retrieves = shared_timings(client, chunk_tokens, PROMPT_TOKENS, rounds)
    chunks, mebibytes = PROMPT_TOKENS // chunk_tokens, chunk_tokens * TOKEN_BYTES >> 20
    return [
        stores.row(f"shared store, {chunks} chunks of {mebibytes} MiB", "memcpy", SHARED_BOUND),
        retrieves.row("shared retrieve", "memcpy", SHARED_BOUND),
    ]


def shared_timings(
    client: Client, chunk_tokens: int, prompt_tokens: int, rounds: int
) -> tuple[Timings, Timings]:
    """Of stores and retrieves of a prompt, each beside memcpy."""
    name, nbytes = namespace(chunk_tokens).name, chunk_tokens * TOKEN_BYTES
    chunks = prompt_tokens // chunk_tokens
    source, target = touched(chunks, nbytes), touched(chunks, nbytes)
    plain = touched_shared(chunks, nbytes)
    stores, retrieves = Timings(source.nbytes), Timings(source.nbytes)
    with client.session(role="worker") as session:
        touch_pool(session)
        for _ in range(rounds):
            keys = new_keys(chunks)
            before = seconds_of(np.copyto, plain, source)
            storing = seconds_of(store, session, name, keys, source)
            stores.add(before, storing, seconds_of(np.copyto, plain, source))
            before = seconds_of(np.copyto, target, plain)
            target.fill(0)
            retrieving = seconds_of(retrieve, session, name, keys, target)
            if not np.array_equal(source, target):
                raise RuntimeError("what was retrieved is not what was stored")
            retrieves.add(before, retrieving, seconds_of(np.copyto, target, plain))
    return stores, retrieves


def store(session: Session, name: str, keys: Sequence[bytes], shards: Bytes) -> None:
    """Reserve, copy, commit."""
    reservation = session.reserve(name, keys)
    for shard, chunk in zip(shards, reservation.chunks, strict=True):
        if chunk.location is None:
            raise RuntimeError(f"a chunk was not reserved: {chunk.status.name}")
        copy_politely(session.pool.array(chunk.location), shard)
    statuses = session.commit(reservation)
    if set(statuses) != {ChunkStatus.STORED}:
        raise RuntimeError(f"not all chunks were stored: {statuses}")


def retrieve(session: Session, name: str, keys: Sequence[bytes], shards: Bytes) -> None:
    """Look up, copy, free."""
    hit = session.lookup(name, keys)
    if hit.lease is None or hit.chunks != len(keys):
        raise RuntimeError(f"{hit.chunks} of {len(keys)} stored chunks were hit")
    for shard, chunk in zip(shards, session.retrieve(hit.lease), strict=True):
        if chunk.location is None:
            raise RuntimeError(f"a chunk cannot be had: {chunk.status.name}")
        copy_politely(shard, session.pool.array(chunk.location))
    if session.free_locks(hit.lease) != len(keys):
        raise RuntimeError("a lock was lost during the copy")


def copy_politely(target: Bytes, source: Bytes) -> None:
    """Copy piece by piece, and let others have the core in between."""
    for start in range(0, len(source), PIECE_BYTES):
        np.copyto(target[start : start + PIECE_BYTES], source[start : start + PIECE_BYTES])
        os.sched_yield()


def inline_rows(client: Client, bare_target: str, effort: Effort) -> list[Row]:
    """Put and get against raw streams."""
    source, target = touched(effort.inline_chunks), touched(effort.inline_chunks)
    bare = (bare_target, source.nbytes // MESSAGE_BYTES, MESSAGE_BYTES)
    puts, gets = Timings(source.nbytes), Timings(source.nbytes)
    for _ in range(effort.inline_rounds):
        keys = new_keys(len(source))
        before = seconds_of(upload, *bare)
        putting = seconds_of(put, client, keys, source)
        puts.add(before, putting, seconds_of(upload, *bare))
        target.fill(0)
        before = seconds_of(download, *bare)
        getting = seconds_of(get, client, keys, target)
        if not np.array_equal(source, target):
            raise RuntimeError("what get brought is not what was put")
        gets.add(before, getting, seconds_of(download, *bare))
    return [
        puts.row(f"inline put, messages of {MESSAGE_BYTES >> 10} KiB", "raw stream", INLINE_BOUND),
        gets.row("inline get", "raw stream", INLINE_BOUND),
    ]


def put(client: Client, keys: Sequence[bytes], shards: Bytes) -> None:
    statuses = client.put(namespace(CHUNK_TOKENS).name, keys, list(shards))
    if set(statuses) != {ChunkStatus.STORED}:
        raise RuntimeError(f"not all chunks were put: {statuses}")


def get(client: Client, keys: Sequence[bytes], shards: Bytes) -> None:
    filled = client.get_into(namespace(CHUNK_TOKENS).name, keys, list(shards))
    if filled != len(keys):
        raise RuntimeError(f"{filled} of {len(keys)} chunks came")


Load = Callable[[str], Iterator[None]]
"""Copies without end, with a client of its own. Yields between two copies."""


def shared_load(address: str) -> Iterator[None]:
    """Stores and retrieves through the pool."""
    name = namespace(CHUNK_TOKENS).name
    shards = touched(PROMPT_TOKENS // CHUNK_TOKENS)
    with Client(address) as client, client.session(role="worker") as session:
        touch_pool(session)
        while True:
            keys = new_keys(len(shards))
            store(session, name, keys, shards)
            retrieve(session, name, keys, shards)
            yield


def inline_load(address: str) -> Iterator[None]:
    """Puts and gets."""
    shards = touched(16)
    with Client(address) as client:
        while True:
            keys = new_keys(len(shards))
            put(client, keys, shards)
            get(client, keys, shards)
            yield


def run_load(load: Load, address: str, ready: Event, running: Event, stop: Event) -> None:
    """A process that copies while running is set, until stop is."""
    copies = load(address)
    next(copies)
    ready.set()
    while not stop.is_set():
        if running.wait(0.05):
            next(copies)


def tail_row(client: Client, load: Load, effort: Effort) -> Row:
    """The tail of lookups with and without a process that copies."""
    keys = chunk_keys(range(PROMPT_CHUNKS * CHUNK_TOKENS), CHUNK_TOKENS)
    client.register_namespace(SMALL)
    context = multiprocessing.get_context("spawn")
    ready, running, stop = context.Event(), context.Event(), context.Event()
    arguments = (load, str(client.address), ready, running, stop)
    process = context.Process(target=run_load, args=arguments, daemon=True)
    process.start()
    resting: list[float] = []
    loaded: list[float] = []
    try:
        if not ready.wait(START_SECONDS):
            raise RuntimeError(f"{load.__name__} did not start within {START_SECONDS:.0f} s")
        client.put(SMALL.name, keys, [bytes(SMALL_SHARD_BYTES)] * len(keys))
        with client.session(role="scheduler") as session:
            for _ in range(effort.tail_rounds):
                resting += lookups(session, keys, effort.tail_seconds)
                running.set()
                loaded += lookups(session, keys, effort.tail_seconds)
                running.clear()
                # Long enough for its last copy to end before the lookups without load.
                time.sleep(0.5)
    finally:
        stop.set()
        process.join(START_SECONDS)
    if process.exitcode != 0:
        raise RuntimeError(f"{load.__name__} ended with status {process.exitcode}")
    tail, resting_tail = percentile(loaded, 99), percentile(resting, 99)
    return Row(
        f"lookup of 128 keys under {load.__name__.replace('_', ' ')}: p99",
        milliseconds(tail),
        f"resting {milliseconds(resting_tail)}",
        f"{tail / resting_tail:.2f} x",
        f"<= {TAIL_BOUND:.0f} x",
        tail / resting_tail <= TAIL_BOUND,
    )


def lookups(session: Session, keys: list[bytes], seconds: float) -> list[float]:
    """Look up again and again for ``seconds``; how many seconds each lookup took."""
    measured = []
    end = time.perf_counter() + seconds
    while (started := time.perf_counter()) < end:
        hit = session.lookup(SMALL.name, keys)
        measured.append(time.perf_counter() - started)
        if hit.lease is None or hit.chunks != len(keys):
            raise RuntimeError(f"a lookup of {len(keys)} cached chunks hit {hit.chunks}")
        session.free_locks(hit.lease)
    return measured


if __name__ == "__main__":
    sys.exit(main())

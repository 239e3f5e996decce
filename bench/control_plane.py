"""How fast questions are answered, and how small the index is.

    python bench/control_plane.py [--quick]

Lookups of a prompt of 32,768 tokens, all cached, are timed in turns with bare round trips: with
chunks of the default size (1,024 keys), of 256 tokens (128 keys), and of sizes between and below.
A bare round trip sends raw bytes of the same sizes over a gRPC stream, whose client is built the
same way, to a server that does nothing (bench/bare_server.py). Prints a table; exit status 1 if a
bound is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import multiprocessing
import queue
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from barekit import OPTIONS, BareServer, BareStream, turn_message
from report import Row, milliseconds, percentile, print_report
from serverkit import ServerProcess

import kvdock.aio
from kvdock import Client, Group, Namespace
from kvdock.keys import chunk_keys
from kvdock.v1 import cache_pb2, session_pb2, session_pb2_grpc

CHUNK_TOKENS = 32
"""The default."""
PROMPT_TOKENS = 32_768
PROMPT_CHUNKS = PROMPT_TOKENS // CHUNK_TOKENS
FEW_CHUNKS = 128
KEYS = (FEW_CHUNKS, 256, 512, PROMPT_CHUNKS, 2_048)
SHARD_BYTES = 4096
NAMESPACE = Namespace("bench", CHUNK_TOKENS, 1, (Group(shard_bytes=(SHARD_BYTES,)),))
CLIENTS = 8
RATE_ROUNDS = 2
LEASES_A_FREE = 16
"""Leases that a client under load gives back with one FreeLocks."""

FEW_P50_BOUND_SECONDS = 0.5e-3
BARE_RATIO_BOUND = 3.0
RATE_BOUND = 2_000.0
SERVER_WORK_CHUNKS = 8_192
SERVER_WORK_BOUND_SECONDS = 3e-3
INDEX_BOUND_BYTES = 1024


@dataclass(frozen=True)
class Effort:
    """How long to measure."""

    rounds: int
    turns: int
    """Lookups a round, and as many bare round trips."""
    rate_seconds: float
    index_chunks: int


FULL = Effort(rounds=10, turns=400, rate_seconds=4.0, index_chunks=1_000_000)
QUICK = Effort(rounds=4, turns=150, rate_seconds=1.0, index_chunks=200_000)


@dataclass(frozen=True)
class Latencies:
    """Seconds, each list in the order measured."""

    kvdock: list[float]
    bare: list[float]


def main() -> int:
    parser = argparse.ArgumentParser(description="Benchmark of KVDock's control plane.")
    parser.add_argument("--quick", action="store_true", help="measure for less time")
    effort = QUICK if parser.parse_args().quick else FULL
    keys = prompt_keys(max(KEYS))
    rows = []
    with tempfile.TemporaryDirectory(prefix="kvdock-bench-") as name:
        folder = Path(name)
        with ServerProcess(folder, memory="64MiB") as server, BareServer(folder) as bare:
            with Client(server.address) as client:
                client.register_namespace(NAMESPACE)
                client.put(NAMESPACE.name, keys, [bytes(SHARD_BYTES)] * len(keys))
            for count in KEYS:
                hits, misses = blocking_latencies(server.address, bare.target, keys[:count], effort)
                rows += latency_rows("lookup, held session", count, hits)
                if count == PROMPT_CHUNKS:
                    rows += latency_rows("lookup, a miss", count, misses)
                    found = asyncio_latencies(server.address, bare.target, keys[:count], effort)
                    rows += latency_rows("lookup from asyncio", count, found)
            rows.append(miss_row(server.address))
            for count in (FEW_CHUNKS, PROMPT_CHUNKS):
                rows.append(rate_row(server.address, bare.target, count, effort))
    rows.append(in_a_fresh_process(server_work_row, effort))
    rows.append(in_a_fresh_process(index_row, effort))
    return print_report("control plane", rows)


def prompt_keys(chunks: int, first_token: int = 0) -> list[bytes]:
    """Keys of a prompt of ``chunks`` chunks."""
    return chunk_keys(range(first_token, first_token + chunks * CHUNK_TOKENS), CHUNK_TOKENS)


def message_sizes(keys: list[bytes]) -> tuple[int, int]:
    """Bytes of a lookup on a session stream, and of its answer."""
    request = session_pb2.SessionRequest(
        id=1 << 20, lookup=cache_pb2.LookupRequest(namespace=NAMESPACE.name, keys=keys)
    )
    group = cache_pb2.GroupHit(first_chunk=0, end_chunk=len(keys))
    answer = session_pb2.SessionResponse(
        id=1 << 20,
        lookup=cache_pb2.LookupResponse(
            epoch=1 << 60, hit_chunks=len(keys), lease_id=1 << 62, groups=[group]
        ),
    )
    return request.ByteSize(), answer.ByteSize()


def blocking_latencies(
    address: str, bare_target: str, keys: list[bytes], effort: Effort
) -> tuple[Latencies, Latencies]:
    """Hits and misses of kvdock.Session, each in turns with bare round trips."""
    message = turn_message(*message_sizes(keys))
    unknown = prompt_keys(len(keys), first_token=7)
    hits, misses = Latencies([], []), Latencies([], [])
    bare = BareStream(bare_target)
    with Client(address) as client, client.session(role="scheduler") as session:
        for _ in range(effort.rounds):
            for _ in range(effort.turns):
                hits.bare.append(timed(lambda: bare.turn(message)))
            for _ in range(effort.turns):
                started = time.perf_counter()
                hit = session.lookup(NAMESPACE.name, keys)
                hits.kvdock.append(time.perf_counter() - started)
                if hit.chunks != len(keys) or hit.lease is None:
                    raise RuntimeError(f"a lookup of {len(keys)} cached chunks hit {hit.chunks}")
                session.free_locks(hit.lease)
            for _ in range(effort.turns // 2):
                misses.bare.append(timed(lambda: bare.turn(message)))
                misses.kvdock.append(timed(lambda: session.lookup(NAMESPACE.name, unknown)))
    bare.close()
    return hits, misses


def asyncio_latencies(
    address: str, bare_target: str, keys: list[bytes], effort: Effort
) -> Latencies:
    """Hits of kvdock.aio.Session in turns with bare round trips of an asyncio stream."""
    message = turn_message(*message_sizes(keys))
    latencies = Latencies([], [])

    async def measure() -> None:
        async with (
            grpc.aio.insecure_channel(bare_target, OPTIONS) as channel,
            kvdock.aio.Client(address) as client,
            await client.session(role="scheduler") as session,
        ):
            turn: Any = channel.stream_stream("/bare/Turn", bytes, bytes)
            call = turn()
            for _ in range(effort.rounds):
                for _ in range(effort.turns):
                    started = time.perf_counter()
                    await call.write(message)
                    await call.read()
                    latencies.bare.append(time.perf_counter() - started)
                for _ in range(effort.turns):
                    started = time.perf_counter()
                    hit = await session.lookup(NAMESPACE.name, keys)
                    latencies.kvdock.append(time.perf_counter() - started)
                    if hit.lease is None:
                        raise RuntimeError("a lookup of cached chunks missed")
                    await session.free_locks(hit.lease)
            await call.done_writing()
            await call.read()

    asyncio.run(measure())
    return latencies


def timed(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def latency_rows(what: str, keys: int, latencies: Latencies) -> list[Row]:
    """The median and the tail. The median is bounded up to the default's number of keys."""
    median, bare = (percentile(values, 50) for values in (latencies.kvdock, latencies.bare))
    tail, bare_tail = (percentile(values, 99) for values in (latencies.kvdock, latencies.bare))
    bounds, holds = [f"<= {BARE_RATIO_BOUND:.0f} x"], median / bare <= BARE_RATIO_BOUND
    if keys == FEW_CHUNKS:
        bounds.append(f"<= {milliseconds(FEW_P50_BOUND_SECONDS)}")
        holds &= median <= FEW_P50_BOUND_SECONDS
    is_bounded = keys <= PROMPT_CHUNKS
    return [
        Row(
            f"{what}, {keys:,} keys: p50",
            milliseconds(median),
            milliseconds(bare),
            f"{median / bare:.2f} x",
            " and ".join(bounds) if is_bounded else "",
            holds or not is_bounded,
        ),
        Row(
            f"{what}, {keys:,} keys: p99",
            milliseconds(tail),
            milliseconds(bare_tail),
            f"{tail / bare_tail:.2f} x",
        ),
    ]


def miss_row(address: str) -> Row:
    """Count the messages of a miss on the wire, and the locks that are left afterwards."""
    outbox: queue.SimpleQueue[session_pb2.SessionRequest | None] = queue.SimpleQueue()
    with Client(address) as client, grpc.insecure_channel(client.address.target) as channel:
        stub = session_pb2_grpc.SessionServiceStub(channel)
        answers: Any = stub.Session(iter(outbox.get, None), timeout=30)
        opening = session_pb2.OpenRequest(
            engine_id="bench", role=session_pb2.SESSION_ROLE_SCHEDULER
        )
        outbox.put(session_pb2.SessionRequest(id=1, open=opening))
        next(answers)
        lookup = cache_pb2.LookupRequest(
            namespace=NAMESPACE.name, keys=prompt_keys(PROMPT_CHUNKS, first_token=7)
        )
        outbox.put(session_pb2.SessionRequest(id=2, lookup=lookup))
        answer = next(answers)
        index = client.status().index
        outbox.put(None)
        others = list(answers)
    clean = (
        answer.id == 2
        and answer.lookup.hit_chunks == 0
        and answer.lookup.lease_id == 0
        and (index.leases, index.locks, index.locked_parts) == (0, 0, 0)
    )
    return Row(
        "a miss: messages there and back, locks left",
        f"1 and {1 + len(others)}, {index.locks}",
        bound="one round trip, nothing left",
        holds=clean and not others,
    )


def rate_row(address: str, bare_target: str, keys: int, effort: Effort) -> Row:
    """The rate of eight client processes at once, beside eight clients of the bare server."""
    lookups, turns = rates(address, bare_target, keys, effort)
    return Row(
        f"{CLIENTS} client processes, {keys:,} keys each, locks freed",
        f"{lookups:,.0f} lookups/s",
        f"{turns:,.0f} turns/s",
        f"{lookups / turns:.2f} x",
        f">= {RATE_BOUND:,.0f} lookups/s",
        lookups >= RATE_BOUND,
    )


def rates(address: str, bare_target: str, keys: int, effort: Effort) -> tuple[float, float]:
    """Lookups a second of eight client processes at once, and of bare round trips as well."""
    context = multiprocessing.get_context("spawn")
    counts = {lookup_client: 0, bare_client: 0}
    targets = {lookup_client: address, bare_client: bare_target}
    with ProcessPoolExecutor(CLIENTS, mp_context=context) as pool:
        for client in [bare_client, lookup_client] * RATE_ROUNDS:
            # Starting a process takes longer than starting the measurement may differ by.
            start = time.time() + 3.0
            arguments = (targets[client], keys, start, effort.rate_seconds)
            futures = [pool.submit(client, *arguments) for _ in range(CLIENTS)]
            counts[client] += sum(future.result() for future in futures)
    seconds = effort.rate_seconds * RATE_ROUNDS
    return counts[lookup_client] / seconds, counts[bare_client] / seconds


def lookup_client(address: str, count: int, start: float, seconds: float) -> int:
    """How many lookups of ``count`` keys one process makes in ``seconds`` from ``start`` on.

    ``start`` is of time.time. It frees the locks of some lookups at a time.
    """
    keys = prompt_keys(count)
    held: list[cache_pb2.LockRange] = []
    with Client(address) as client, client.session(role="scheduler") as session:

        def lookup() -> None:
            hit = session.lookup(NAMESPACE.name, keys)
            if hit.chunks != len(keys) or hit.lease is None:
                raise RuntimeError(f"a lookup of {len(keys)} cached chunks hit {hit.chunks}")
            held.append(cache_pb2.LockRange(lease_id=hit.lease.id))
            if len(held) == LEASES_A_FREE:
                # Nobody needs the answer, so nobody waits for it.
                session.submit(cache_pb2.FreeLocksRequest(locks=held))
                held.clear()

        return count_calls(start, seconds, lookup)


def bare_client(target: str, keys: int, start: float, seconds: float) -> int:
    """How many round trips one process makes, with messages of a lookup's sizes."""
    message = turn_message(*message_sizes(prompt_keys(keys)))
    bare = BareStream(target)
    count = count_calls(start, seconds, lambda: bare.turn(message))
    bare.close()
    return count


def count_calls(start: float, seconds: float, call: Callable[[], object]) -> int:
    call()
    time.sleep(max(0.0, start - time.time()))
    count = 0
    while time.time() < start + seconds:
        call()
        count += 1
    return count


def in_a_fresh_process(measure: Callable[[Effort], Row], effort: Effort) -> Row:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measure, effort).result()


def server_work_row(effort: Effort) -> Row:
    """All of the server's work for a lookup except gRPC: parse, look up, lock, answer.

    Measured in CPU time of its thread, which other processes do not lengthen.
    """
    from kvdock_server.core import LockRange, Role
    from kvdock_server.rpc import verbs
    from kvdock_server.steps import at_once

    core = core_with_memory(SERVER_WORK_CHUNKS)
    keys = prompt_keys(SERVER_WORK_CHUNKS)
    fill(core, keys)
    session = core.open_session(engine_id="bench", role=Role.SCHEDULER)
    lookup = cache_pb2.LookupRequest(namespace=NAMESPACE.name, keys=keys)
    message = session_pb2.SessionRequest(id=1, lookup=lookup).SerializeToString()
    seconds = []
    for _ in range(10 * effort.rounds):
        started = time.thread_time()
        request = session_pb2.SessionRequest.FromString(message)
        answer = session_pb2.SessionResponse(
            id=request.id, lookup=verbs.lookup(core, session, request.lookup)
        )
        answer.SerializeToString()
        seconds.append(time.thread_time() - started)
        lease_id = answer.lookup.lease_id
        if at_once(core.free_locks_in_steps(session, [LockRange(lease_id)])) != [len(keys)]:
            raise RuntimeError("a lookup of cached chunks did not lock them all")
    median = percentile(seconds, 50)
    return Row(
        f"server work, lookup of {SERVER_WORK_CHUNKS:,} chunks: parse, find, lock, answer (CPU)",
        milliseconds(median),
        bound=f"<= {milliseconds(SERVER_WORK_BOUND_SECONDS)}",
        holds=median <= SERVER_WORK_BOUND_SECONDS,
    )


def index_row(effort: Effort) -> Row:
    """Resident memory that each chunk adds to a process that holds nothing else."""
    core = core_with_memory(effort.index_chunks)
    before = resident_bytes()
    # Prompts of 1,024 chunks, and all their keys new: each chunk has a key of its own in the index.
    for first in range(0, effort.index_chunks, 1024):
        count = min(1024, effort.index_chunks - first)
        fill(core, [(first + i + 1).to_bytes(32, "little") for i in range(count)])
    a_chunk = (resident_bytes() - before) / effort.index_chunks
    if core.index.spaces[0].visible_parts != effort.index_chunks:
        raise RuntimeError("not all chunks are in the index")
    return Row(
        f"index, {effort.index_chunks:,} chunks in it",
        f"{a_chunk:.0f} B a chunk",
        bound=f"<= {INDEX_BOUND_BYTES:,} B a chunk",
        holds=a_chunk <= INDEX_BOUND_BYTES,
    )


def core_with_memory(chunks: int, *, event_log: bool = False) -> Any:
    """A server's core in this process, with room for ``chunks`` chunks. Its memory is not real."""
    from kvdock_server.config import Config
    from kvdock_server.core import Core
    from kvdock_server.events.log import Limits
    from kvdock_server.index.policies import POLICIES
    from kvdock_server.rpc import verbs
    from kvdock_server.tiers.host.slots import SlotAllocator

    slab = 64 << 20
    pool = -(-chunks * SHARD_BYTES // slab) * slab
    slots = SlotAllocator(pool, slab)
    slots.add(0, pool)
    core = Core(
        slots,
        event_log=Limits(64 << 20, 1_000_000) if event_log else None,
        policy=POLICIES[Config.eviction](pool),
    )
    request = cache_pb2.RegisterNamespaceRequest(namespace=NAMESPACE.to_proto())
    verbs.register_namespace(core, None, request)
    return core


def fill(core: Any, keys: list[bytes]) -> None:
    """Store chunks of one prompt."""
    from kvdock_server.steps import at_once

    for slot in at_once(core.reserve_in_steps(None, NAMESPACE.name, None, 0, b"", keys)):
        if not core.seal(slot):
            raise RuntimeError("a chunk could not be sealed")


def resident_bytes() -> int:
    """Resident memory of this process."""
    gc.collect()
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmRSS")


if __name__ == "__main__":
    sys.exit(main())

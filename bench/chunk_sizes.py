"""What the size of chunks costs, on a host without GPU.

    python bench/chunk_sizes.py [--quick]

For chunks of 16 to 256 tokens: keys, lookups, the server's work for a store, memory of the index,
events, and copies in shared mode. Each lookup's time stands beside a bare round trip with messages
of the same size (bench/control_plane.py), each copy beside a memcpy (bench/data_path.py). Prints a
table with a column for each size, as Markdown.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

import control_plane
import data_path
import events
from barekit import BareServer
from report import percentile
from serverkit import ServerProcess, wait_for_pool

from kvdock import ChunkEventData, Client
from kvdock.keys import chunk_keys
from kvdock.v1 import cache_pb2
from kvdock_server.core import Role
from kvdock_server.rpc import verbs
from kvdock_server.steps import at_once

SIZES = (16, 32, 64, 128, 256)
PROMPT_TOKENS = control_plane.PROMPT_TOKENS
PREFILL_TOKENS = 20_000
"""Tokens that an engine computes in a second."""
POOL_BYTES = 100 << 30
TOKEN_BYTES = {"Llama 8B": 131_072, "Llama 70B, TP 8": 40_960, "DeepSeek V3": 70_272}
"""Of one shard. DeepSeek's blocks have 64 tokens at least."""

Cells = Sequence[str]


def main() -> None:
    parser = argparse.ArgumentParser(description="What the size of chunks costs.")
    parser.add_argument("--quick", action="store_true", help="measure for less time")
    quick = parser.parse_args().quick
    effort = control_plane.QUICK if quick else control_plane.FULL
    rounds = 3 if quick else 5
    table: dict[str, Cells] = {
        "tokens computed again at a hit's end, mean": each(lambda size: f"{(size - 1) / 2:g}"),
        **{
            f"a shard of {model}": each(lambda size, one=nbytes: kibibytes(size * one))
            for model, nbytes in TOKEN_BYTES.items()
        },
        "keys of the prompt": each(keys_ms),
    }
    table |= lookups(replace(effort, rounds=2), rounds)
    table["index, a pool of 100 GiB of Llama 8B"] = index_bytes(effort)
    table["server's work, store of the prompt"] = each(lambda size: store_ms(size, told=False))
    table["the same with event data"] = each(lambda size: store_ms(size, told=True))
    table["events a second, at 20,000 tokens a second"] = each(
        lambda size: f"{PREFILL_TOKENS / size:,.0f}"
    )
    table |= delivered(events.QUICK if quick else events.FULL)
    table |= shared_rates(rounds)
    print("| | " + " | ".join(map(str, SIZES)) + " |")
    print("|---" * (len(SIZES) + 1) + "|")
    for what, cells in table.items():
        print(f"| {what} | " + " | ".join(cells) + " |")


def each(cell: Callable[[int], str]) -> Cells:
    return [cell(size) for size in SIZES]


def kibibytes(nbytes: int) -> str:
    return f"{nbytes / 1024:,.0f} KiB"


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"


def cpu_median(call: Callable[[], object], rounds: int = 15) -> float:
    """CPU seconds of this thread."""
    found = []
    for _ in range(rounds):
        started = time.thread_time()
        call()
        found.append(time.thread_time() - started)
    return percentile(found, 50)


def keys_ms(size: int) -> str:
    """What the scheduler's thread pays for a prompt that it has not seen."""
    tokens = random.Random(size).choices(range(128_000), k=PROMPT_TOKENS)
    return milliseconds(cpu_median(lambda: chunk_keys(tokens, size)))


def lookups(effort: control_plane.Effort, rounds: int) -> dict[str, Cells]:
    """Lookups of the prompt, all of it cached."""
    keys = control_plane.prompt_keys(PROMPT_TOKENS // min(SIZES))
    took: dict[int, list[float]] = {size: [] for size in SIZES}
    over: dict[int, list[float]] = {size: [] for size in SIZES}
    rates: dict[int, list[tuple[float, float]]] = {size: [] for size in SIZES}
    with tempfile.TemporaryDirectory(prefix="kvdock-bench-") as name:
        folder = Path(name)
        with ServerProcess(folder, memory="64MiB") as server, BareServer(folder) as bare:
            with Client(server.address) as client:
                client.register_namespace(control_plane.NAMESPACE)
                shards = [bytes(control_plane.SHARD_BYTES)] * len(keys)
                client.put(control_plane.NAMESPACE.name, keys, shards)
            ends = server.address, bare.target
            for size in SIZES * rounds:
                count = PROMPT_TOKENS // size
                hits, _ = control_plane.blocking_latencies(*ends, keys[:count], effort)
                took[size].append(percentile(hits.kvdock, 50))
                over[size].append(took[size][-1] / percentile(hits.bare, 50))
                rates[size].append(control_plane.rates(*ends, count, effort))
    return {
        "lookup of the prompt, p50": each(lambda size: milliseconds(median(took[size]))),
        "over a bare round trip": each(lambda size: f"{median(over[size]):.2f}"),
        "lookups a second, 8 clients": each(
            lambda size: f"{median(lookups for lookups, _ in rates[size]):,.0f}"
        ),
        "over their bare round trips": each(
            lambda size: f"{median(lookups / turns for lookups, turns in rates[size]):.2f}"
        ),
    }


def index_bytes(effort: control_plane.Effort) -> Cells:
    row = control_plane.in_a_fresh_process(control_plane.index_row, effort)
    a_chunk = int(row.measured.split()[0])
    chunks = [POOL_BYTES // (size * TOKEN_BYTES["Llama 8B"]) for size in SIZES]
    return [f"{count * a_chunk / 1e6:.1f} MB" for count in chunks]


def store_ms(size: int, *, told: bool) -> str:
    """The server's work for the prompt's Reserve and Commit, except gRPC. The pool is full, so each
    chunk evicts one.
    """
    core = control_plane.core_with_memory(1, event_log=told)
    session = core.open_session(engine_id="bench", role=Role.WORKER)
    numbers = iter(range(1, 1 << 30))
    name, count = control_plane.NAMESPACE.name, PROMPT_TOKENS // size

    def store() -> float:
        keys = [next(numbers).to_bytes(32, "little") for _ in range(count)]
        data = [event_data(key, size).to_proto() for key in keys] if told else []
        message = cache_pb2.ReserveRequest(
            namespace=name, keys=keys, event_data=data
        ).SerializeToString()
        started = time.thread_time()
        request = cache_pb2.ReserveRequest.FromString(message)
        reserved = at_once(verbs.reserve(core, session, request))
        reserved.SerializeToString()
        commit = cache_pb2.CommitRequest(reservation_id=reserved.reservation_id)
        at_once(verbs.commit(core, session, commit)).SerializeToString()
        return time.thread_time() - started

    while not core.index.totals.evicted_parts:
        store()
    return milliseconds(percentile([store() for _ in range(15)], 50))


def event_data(key: bytes, size: int) -> ChunkEventData:
    blocks = size // events.BLOCK_TOKENS
    return ChunkEventData((key,) * blocks, key, key * (size // 8), events.BLOCK_TOKENS)


def delivered(effort: events.Effort) -> dict[str, Cells]:
    """Events a second to each of some readers."""
    return {
        f"events delivered a second, {readers} reader{'s' * (readers > 1)}": each(
            lambda size, readers=readers: (
                f"{events.measure(readers, effort, size).delivered_rate:,.0f}"
            )
        )
        for readers in (1, 8)
    }


def shared_rates(rounds: int) -> dict[str, Cells]:
    """Copies of 512 MiB through the mapped pool, over memcpy."""
    stores: dict[int, list[float]] = {size: [] for size in SIZES}
    retrieves: dict[int, list[float]] = {size: [] for size in SIZES}
    with (
        tempfile.TemporaryDirectory(prefix="kvdock-bench-") as name,
        ServerProcess(Path(name), memory="2GiB") as server,
        Client(server.address) as client,
    ):
        wait_for_pool(client, lambda pool: pool.ready_bytes)
        for size in SIZES * rounds:
            client.register_namespace(data_path.namespace(size))
            store, retrieve = data_path.shared_timings(client, size, 4_096, rounds=3)
            client.clear(all=True)
            stores[size].append(store.ratio)
            retrieves[size].append(retrieve.ratio)
    return {
        "shared store, over memcpy": each(lambda size: f"{median(stores[size]):.0%}"),
        "shared retrieve, over memcpy": each(lambda size: f"{median(retrieves[size]):.0%}"),
    }


if __name__ == "__main__":
    main()

"""Rate, disturbance and latency of the GPU data path, beside the link's own ceiling.

    python bench/gpu_data_path.py [--path server|transfers] [--only TEXT]
    python bench/gpu_data_path.py --shared [--busy] [--only TEXT]
    python bench/gpu_data_path.py --chunk-tokens 16,32,64,128,256 [--only TEXT]

Three processes: a worker that owns a KV cache, a server, and an engine that replays a graph of
memory-bound matrix products. With --path server (the default) the worker calls Store and Retrieve
of a running server over its session. With --path transfers the server's transfers run alone, in
this process. Each call moves 1 GiB and is timed from the call to its answer: one call at a time,
and two under way as from an engine with several requests. Beside each figure stands that of plain
copies of pinned memory, measured in the same run.

With --shared the worker also copies by itself, with the connector's code, in turns with the server;
with --busy once more while another of its threads runs Python, as an engine's does. With
--chunk-tokens the same caches are kept in chunks of each size.

Loads go into poisoned memory, and every byte is compared before anything is timed. Prints a table;
exit status 1 if a bound is missed. Where plain copies miss a bound, their figure is the bound.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
from copy_paths import SERVER, CopyPath
from geometries import LOAD, STORE, Case, Geometry
from gpu_chunk_sizes import report as report_chunk_sizes
from gpu_modes import CALLS_UNDER_WAY, NAMES, compare, gigabytes
from gpukit import Engine, Link, Remote, TransfersLoop, TransfersPath, Worker, WorkerPath
from report import Row, print_report
from serverkit import ServerProcess

REPEATS = 7
SMALL_REPEATS = 60
SECONDS = 0.7
STEADY_SECONDS = 1.5

LLAMA = Geometry("Llama-3.1-8B", layers=32, page_bytes=16 * 2 * 8 * 128 * 2, block_tokens=16)
DEEPSEEK = Geometry(
    "DeepSeek-V3", layers=61, page_bytes=64 * 576 * 2, block_tokens=64, chunk_tokens=64
)
SHARD = Geometry("Llama-3.1-70B, TP 8", layers=80, page_bytes=16 * 2 * 128 * 2, block_tokens=16)
CASES = [
    Case(geometry, layout, order)
    for geometry in (LLAMA, DEEPSEEK)
    for layout, order in (
        ("block-major", "random"),
        ("one pitch", "random"),
        ("layers apart", "runs"),
        ("layers apart", "random"),
    )
] + [Case(SHARD, "one pitch", "random"), Case(SHARD, "layers apart", "random")]
CHUNK_SIZE_CASES = [
    Case(geometry, layout, "random")
    for geometry in (LLAMA, SHARD, DEEPSEEK)
    for layout in ("one pitch", "layers apart")
]
LEAST_RATIO = {
    ("block-major", "random"): 0.97,
    ("one pitch", "random"): 0.90,
    ("layers apart", "runs"): 0.95,
    ("layers apart", "random"): 0.90,
}
STAGED = ("layers apart", "random")
MOST_SLOWDOWN = 1.05
MOST_SLOWDOWN_STAGED = 1.25
STEP_NOISE = 0.01
LEAST_LOAD_RATE_DURING_STORES = 0.90
MOST_MS_OVER_SMALL_COPY = 2.0
MOST_SERVER_MIB = 600

Open = Callable[[Case], CopyPath]


@dataclass(frozen=True)
class Plain:
    """Figures of plain copies of 256 MiB."""

    slowdown: dict[str, float]
    """An engine's step during copies of one direction over its step alone."""
    load_rate_during_stores: float
    """The rate of loads during stores over that of loads alone."""


def main() -> int:
    arguments = parse()
    cases = [case for case in CASES if arguments.only in case.label]
    link = Link()
    worker = Remote(Worker)
    title = f"{link.name}, driver for CUDA {link.driver_version}"
    try:
        if arguments.chunk_tokens:
            sizes = [int(size) for size in arguments.chunk_tokens.split(",")]
            chosen = [case for case in CHUNK_SIZE_CASES if arguments.only in case.label]
            with server_of(worker, "4GiB") as open_mode:
                report_chunk_sizes(chosen, sizes, open_mode, worker, link)
            return 0
        if arguments.shared:
            rows = []
            # Both modes hold 1 GiB locked while two calls of 1 GiB are under way.
            with server_of(worker, "8GiB") as open_mode:
                for case in cases:
                    rows += compare(case, open_mode, worker, busy=arguments.busy)
            return print_report(f"{title}, shared mode beside server mode", rows)
        rows = measure_all(cases, arguments.path, worker, link)
        return print_report(f"{title}, path: {arguments.path}", rows)
    finally:
        worker.close()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--path", choices=("server", "transfers"), default="server")
    parser.add_argument("--only", default="", help="cases that have this in their names")
    parser.add_argument("--shared", action="store_true", help="shared mode beside server mode")
    parser.add_argument("--busy", action="store_true", help="with --shared: beside Python, too")
    parser.add_argument("--chunk-tokens", default="", help="compare chunk sizes: 16,32,64,128,256")
    return parser.parse_args()


def measure_all(cases: Sequence[Case], path: str, worker: Remote, link: Link) -> list[Row]:
    """Rate, disturbance and latency of each case."""
    engine = Remote(Engine)
    rows: list[Row] = []
    try:
        engine("run", SECONDS)
        load_kernels(worker)
        free = worker("free_bytes")
        with (server_path if path == "server" else transfers_path)(worker) as open_path:
            plain = measure_plain(link, engine)
            for case in cases:
                rows += measure(case, open_path, worker, engine, link, plain)
            if path == "server":
                rows.append(server_memory(free - worker("free_bytes")))
    finally:
        engine.close()
    return rows


@contextmanager
def server_of(worker: Remote, memory: str) -> Iterator[Callable[[Case, str], CopyPath]]:
    """A server in a process of its own, which the worker calls in a mode of one's choice."""
    with (
        tempfile.TemporaryDirectory(prefix="kvdock-bench-") as folder,
        ServerProcess(Path(folder), memory=memory) as server,
    ):
        yield lambda case, mode: WorkerPath(worker, server.address, case, mode)


@contextmanager
def server_path(worker: Remote) -> Iterator[Open]:
    """Server mode."""
    with server_of(worker, "4GiB") as open_mode:
        yield lambda case: open_mode(case, SERVER)


@contextmanager
def transfers_path(worker: Remote) -> Iterator[Open]:
    """The server's transfers in this process."""
    loop = TransfersLoop()
    try:
        yield lambda case: TransfersPath(loop, worker("export"), case)
    finally:
        loop.close()


def load_kernels(worker: Remote) -> None:
    """Have the worker load what it will run, which takes device memory that is not the server's."""
    worker("make", CASES[0])
    worker("poison")
    worker("sums", CASES[0].block_ids[:1])


def measure_plain(link: Link, engine: Remote) -> Plain:
    alone = engine("run", SECONDS)
    slowdown = {}
    for direction in (STORE, LOAD):
        link.start(direction)
        slowdown[direction] = engine("run", SECONDS) / alone
        link.stop(direction)
    link.start(LOAD)
    time.sleep(SECONDS)
    loads = link.stop(LOAD)
    link.start(STORE)
    link.start(LOAD)
    time.sleep(SECONDS)
    during_stores_ = link.stop(LOAD)
    link.stop(STORE)
    return Plain(slowdown, during_stores_ / loads)


def measure(
    case: Case, open_path: Open, worker: Remote, engine: Remote, link: Link, plain: Plain
) -> list[Row]:
    """All rows of one case."""
    geometry = case.geometry
    worker("make", case)
    before = worker("sums", case.block_ids)
    path = open_path(case)
    print(f"{case.label}: {path.how}", file=sys.stderr)
    try:
        worker("poison")
        path.once(LOAD, geometry.chunks)
        if not np.array_equal(worker("sums", case.block_ids), before):
            raise RuntimeError(f"{case}: what was retrieved is not what was stored")
        rows = []
        alone = engine("run", SECONDS)
        for direction in (STORE, LOAD):
            rows += rates(case, path, link, direction)
            rows.append(beside_engine(case, path, engine, alone, direction, plain))
        rows.append(during_stores(case, path, plain))
        rows.append(small(case, path, link))
        return rows
    finally:
        path.close()


def rates(case: Case, path: CopyPath, link: Link, direction: str) -> list[Row]:
    """Calls that move 1 GiB each: one at a time, and two under way."""
    nbytes = case.geometry.chunks * case.geometry.chunk_bytes
    ceilings, singles = [], []
    for _ in range(REPEATS):
        ceilings.append(link.rate(direction))
        singles.append(nbytes / path.once(direction, case.geometry.chunks))
    path.start(direction, CALLS_UNDER_WAY)
    time.sleep(STEADY_SECONDS)
    steady = path.stop(direction)
    ceiling = median(ceilings)
    bound = None if case.geometry is SHARD else LEAST_RATIO[case.layout, case.order]
    return [
        Row(
            f"{case.label}: {NAMES[direction]}, one call",
            gigabytes(median(singles)),
            gigabytes(ceiling),
            f"{median(singles) / ceiling:.3f}",
        ),
        Row(
            f"{case.label}: {NAMES[direction]}, {CALLS_UNDER_WAY} calls under way",
            gigabytes(steady),
            gigabytes(ceiling),
            f"{steady / ceiling:.3f}",
            f">= {bound}" if bound else "",
            not bound or steady / ceiling >= bound,
        ),
    ]


def beside_engine(
    case: Case, path: CopyPath, engine: Remote, alone: float, direction: str, plain: Plain
) -> Row:
    """The engine's step while copies run without pause, over its step alone."""
    path.start(direction, CALLS_UNDER_WAY)
    try:
        slowdown = engine("run", SECONDS) / alone
    finally:
        meanwhile = path.stop(direction)
    plainly = plain.slowdown[direction]
    by_engines = max(MOST_SLOWDOWN, plainly + STEP_NOISE)
    bound = MOST_SLOWDOWN_STAGED if (case.layout, case.order) == STAGED else by_engines
    return Row(
        f"{case.label}: engine's step during {NAMES[direction]} at {gigabytes(meanwhile)}",
        f"x {slowdown:.3f}",
        f"x {plainly:.3f}",
        bound=f"<= x {bound:.3g}",
        holds=slowdown <= bound,
    )


def during_stores(case: Case, path: CopyPath, plain: Plain) -> Row:
    """Loads while stores run without pause, over loads alone."""
    chunks = case.geometry.chunks
    nbytes = chunks * case.geometry.chunk_bytes
    alone = median(nbytes / path.once(LOAD, chunks) for _ in range(REPEATS))
    path.start(STORE, CALLS_UNDER_WAY)
    try:
        loads = median(nbytes / path.once(LOAD, chunks) for _ in range(REPEATS))
    finally:
        path.stop(STORE)
    bound = min(LEAST_LOAD_RATE_DURING_STORES, plain.load_rate_during_stores)
    return Row(
        f"{case.label}: retrieve during stores over retrieve alone, {gigabytes(loads)}",
        f"{loads / alone:.3f}",
        f"{plain.load_rate_during_stores:.3f}",
        bound=f">= {bound:.3g}",
        holds=loads / alone >= bound,
    )


def small(case: Case, path: CopyPath, link: Link) -> Row:
    """Retrieve of one chunk, beside the bytes' own time on the link."""
    own = case.geometry.chunk_bytes / median(link.rate(LOAD) for _ in range(REPEATS))
    took = median(path.once(LOAD, 1) for _ in range(SMALL_REPEATS))
    over = (took - own) * 1e3
    what = f"{case.label}: retrieve of 256 tokens, p50"
    if isinstance(path, WorkerPath):
        empty = median(path.round_trip() for _ in range(SMALL_REPEATS))
        what += f" (an empty call: {empty * 1e3:.2f} ms)"
    return Row(
        what,
        f"{took * 1e3:.2f} ms",
        f"{own * 1e3:.2f} ms",
        f"{over:+.2f} ms",
        f"<= +{MOST_MS_OVER_SMALL_COPY:g} ms",
        over <= MOST_MS_OVER_SMALL_COPY,
    )


def server_memory(nbytes: int) -> Row:
    """GPU memory of the server when the last worker has gone and staging is given back."""
    return Row(
        "GPU memory of the server beyond staging",
        f"{nbytes / 2**20:.0f} MiB",
        bound=f"< {MOST_SERVER_MIB} MiB",
        holds=nbytes < MOST_SERVER_MIB << 20,
    )


if __name__ == "__main__":
    sys.exit(main())

"""Rate, disturbance and latency of the GPU data path, beside the link's own ceiling.

    python bench/gpu_data_path.py [--path server|mover]

Three processes: a worker that owns a KV cache, a server, and an engine that replays a graph of
memory-bound matrix products. A rate is of one call that moves 1 GiB, from asked to answered: with
--path server (the default) a Store or Retrieve of a running server over a session, with --path
mover the server's transfers alone, in this process. Beside it stands what one large pinned copy
reaches, measured in turns with it.

Loads go into poisoned memory, and every byte is compared before anything is timed. Prints a table;
exit status 1 if a bound is missed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import numpy as np
from gpukit import (
    LOAD,
    STORE,
    Case,
    CopyPath,
    Engine,
    Geometry,
    Link,
    MoverLoop,
    MoverPath,
    Remote,
    Worker,
    WorkerPath,
)
from report import Row, print_report
from serverkit import ServerProcess

REPEATS = 7
SMALL_REPEATS = 60
BESIDE_SECONDS = 1.0

LLAMA = Geometry("Llama-3.1-8B", layers=32, page_bytes=16 * 2 * 8 * 128 * 2, block_tokens=16)
DEEPSEEK = Geometry("DeepSeek-V3", layers=61, page_bytes=64 * 576 * 2, block_tokens=64)
CASES = [
    Case(geometry, layout, order)
    for geometry in (LLAMA, DEEPSEEK)
    for layout, order in (
        ("block-major", "random"),
        ("one pitch", "random"),
        ("layers apart", "runs"),
        ("layers apart", "random"),
    )
]
LEAST_RATIO = {
    ("block-major", "random"): 0.97,
    ("one pitch", "random"): 0.90,
    ("layers apart", "runs"): 0.95,
    ("layers apart", "random"): 0.90,
}
MOST_SLOWDOWN = {("layers apart", "random"): 1.25}
MOST_SLOWDOWN_OF_COPY_ENGINES = 1.05
LEAST_LOAD_RATE_DURING_STORES = 0.90
MOST_MS_OVER_SMALL_COPY = 2.0
MOST_SERVER_MIB = 600

Open = Callable[[Case], CopyPath]
NAMES = {STORE: "store", LOAD: "retrieve"}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--path", choices=("server", "mover"), default="server")
    arguments = parser.parse_args()
    link = Link()
    worker, engine = Remote(Worker), Remote(Engine)
    rows: list[Row] = []
    try:
        engine("run", BESIDE_SECONDS)
        free = worker("free_bytes")
        with (server_path if arguments.path == "server" else mover_path)(worker) as open_path:
            for case in CASES:
                rows += measure(case, open_path, worker, engine, link)
            if arguments.path == "server":
                rows.append(server_memory(free - worker("free_bytes")))
    finally:
        worker.close()
        engine.close()
    title = f"{link.name}, driver for CUDA {link.driver_version}, path: {arguments.path}"
    return print_report(title, rows)


@contextmanager
def server_path(worker: Remote) -> Iterator[Open]:
    """A server of its own process; the worker calls it."""
    with (
        tempfile.TemporaryDirectory(prefix="kvdock-bench-") as folder,
        ServerProcess(Path(folder), memory="4GiB") as server,
    ):
        yield lambda case: WorkerPath(worker, server.address, case)


@contextmanager
def mover_path(worker: Remote) -> Iterator[Open]:
    """The server's transfers in this process."""
    mover = MoverLoop()
    try:
        yield lambda case: MoverPath(mover, worker("export"), case)
    finally:
        mover.close()


def measure(case: Case, open_path: Open, worker: Remote, engine: Remote, link: Link) -> list[Row]:
    """All rows of one case."""
    geometry = case.geometry
    worker("make", case)
    before = worker("sums", case.block_ids)
    path = open_path(case)
    print(f"{geometry.name}, {case.layout}, {case.order}: {path.how}", file=sys.stderr)
    try:
        worker("poison")
        path.once(LOAD, geometry.chunks)
        if not np.array_equal(worker("sums", case.block_ids), before):
            raise RuntimeError(f"{case}: what was retrieved is not what was stored")
        return [
            *(rate(case, path, link, direction) for direction in (STORE, LOAD)),
            *(beside_engine(case, path, engine, direction) for direction in (STORE, LOAD)),
            during_stores(case, path),
            small(case, path, link),
        ]
    finally:
        path.close()


def rate(case: Case, path: CopyPath, link: Link, direction: str) -> Row:
    """One call that moves 1 GiB."""
    nbytes = case.geometry.chunks * case.geometry.chunk_bytes
    ceilings, rates = [], []
    for _ in range(REPEATS):
        ceilings.append(link.rate(direction))
        rates.append(nbytes / path.once(direction, case.geometry.chunks))
    ratio = median(rates) / median(ceilings)
    bound = LEAST_RATIO[case.layout, case.order]
    return Row(
        f"{label(case)}: {NAMES[direction]}",
        gigabytes(median(rates)),
        gigabytes(median(ceilings)),
        f"{ratio:.3f}",
        f">= {bound}",
        ratio >= bound,
    )


def beside_engine(case: Case, path: CopyPath, engine: Remote, direction: str) -> Row:
    """The engine's step while copies run without pause, over its step alone."""
    alone = engine("run", BESIDE_SECONDS)
    path.start(direction)
    try:
        busy = engine("run", BESIDE_SECONDS)
    finally:
        meanwhile = path.stop(direction)
    slowdown = busy / alone
    bound = MOST_SLOWDOWN.get((case.layout, case.order), MOST_SLOWDOWN_OF_COPY_ENGINES)
    return Row(
        f"{label(case)}: engine's step during {NAMES[direction]} at {gigabytes(meanwhile)}",
        f"{busy * 1e3:.3f} ms",
        f"{alone * 1e3:.3f} ms",
        f"{slowdown:.3f}",
        f"<= {bound}",
        slowdown <= bound,
    )


def during_stores(case: Case, path: CopyPath) -> Row:
    """Loads while stores run without pause, over loads alone."""
    chunks = case.geometry.chunks
    nbytes = chunks * case.geometry.chunk_bytes
    alone = median(nbytes / path.once(LOAD, chunks) for _ in range(REPEATS))
    path.start(STORE)
    try:
        rates = [nbytes / path.once(LOAD, chunks) for _ in range(REPEATS)]
    finally:
        path.stop(STORE)
    ratio = median(rates) / alone
    return Row(
        f"{label(case)}: retrieve during stores",
        gigabytes(median(rates)),
        gigabytes(alone),
        f"{ratio:.3f}",
        f">= {LEAST_LOAD_RATE_DURING_STORES}",
        ratio >= LEAST_LOAD_RATE_DURING_STORES,
    )


def small(case: Case, path: CopyPath, link: Link) -> Row:
    """Retrieve of one chunk, beside the bytes' own time on the link."""
    own = case.geometry.chunk_bytes / link.rate(LOAD)
    took = median(path.once(LOAD, 1) for _ in range(SMALL_REPEATS))
    over = (took - own) * 1e3
    return Row(
        f"{label(case)}: retrieve of one chunk of 256 tokens, p50",
        f"{took * 1e3:.2f} ms",
        f"{own * 1e3:.2f} ms",
        f"{over:+.2f} ms",
        f"<= +{MOST_MS_OVER_SMALL_COPY:g} ms",
        over <= MOST_MS_OVER_SMALL_COPY,
    )


def server_memory(nbytes: int) -> Row:
    """What the server holds when the last worker has gone and staging is given back."""
    return Row(
        "GPU memory of the server beyond staging",
        f"{nbytes / 2**20:.0f} MiB",
        bound=f"< {MOST_SERVER_MIB} MiB",
        holds=nbytes < MOST_SERVER_MIB << 20,
    )


def label(case: Case) -> str:
    return f"{case.geometry.name}, {case.layout}, {case.order}"


def gigabytes(rate_: float) -> str:
    return f"{rate_ / 1e9:.1f} GB/s"


if __name__ == "__main__":
    sys.exit(main())

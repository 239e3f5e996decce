"""Copies at several chunk sizes, for bench/gpu_data_path.py."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np
from copy_paths import SERVER, CopyPath
from geometries import LOAD, STORE, Case, Geometry
from gpukit import Link, Orders
from report import console
from rich.table import Table

CALLS_UNDER_WAY = 2
SECONDS = 1.0
LINK_REPEATS = 3
PROMPT_TOKENS = 4096
PROMPT_REPEATS = 20

Open = Callable[[Case, str], CopyPath]


@dataclass(frozen=True)
class Figures:
    """One chunk size."""

    rates: dict[str, float]
    """Of stores and loads, two calls under way, over the link's own in the same run."""
    prompt_seconds: float
    """A lone load of PROMPT_TOKENS."""


def in_chunks_of(geometry: Geometry, chunk_tokens: int) -> Geometry:
    """The same cache in other chunks; in smaller blocks where a chunk is less than a block."""
    block_tokens = min(geometry.block_tokens, chunk_tokens)
    page_bytes = geometry.page_bytes // geometry.block_tokens * block_tokens
    return replace(
        geometry, page_bytes=page_bytes, block_tokens=block_tokens, chunk_tokens=chunk_tokens
    )


def measure(case: Case, open_path: Open, worker: Orders, link: Link) -> Figures:
    """One cache in chunks of one size."""
    chunks = case.geometry.chunks
    worker("make", case)
    before = worker("sums", case.block_ids)
    path = open_path(case, SERVER)
    try:
        worker("poison")
        path.once(LOAD, chunks)
        if not np.array_equal(worker("sums", case.block_ids), before):
            raise RuntimeError(f"{case}: what was loaded is not what was stored")
        rates = {}
        for direction in (STORE, LOAD):
            own = median(link.rate(direction) for _ in range(LINK_REPEATS))
            path.start(direction, CALLS_UNDER_WAY)
            time.sleep(SECONDS)
            rates[direction] = path.stop(direction) / own
        prompt = min(chunks, PROMPT_TOKENS // case.geometry.chunk_tokens)
        seconds = median(path.once(LOAD, prompt) for _ in range(PROMPT_REPEATS))
        return Figures(rates, seconds)
    finally:
        path.close()


def report(
    cases: Sequence[Case], sizes: Sequence[int], open_path: Open, worker: Orders, link: Link
) -> None:
    """Measure each case in chunks of each size, and print a table with a column for each size."""
    table = Table(title=f"{link.name}; rates over the link's own")
    table.add_column("tokens a chunk")
    for size in sizes:
        table.add_column(str(size), justify="right")
    for case in cases:
        found = []
        for size in sizes:
            sized = replace(case, geometry=in_chunks_of(case.geometry, size))
            found.append(measure(sized, open_path, worker, link))
            print(f"{case.label}, {size} tokens a chunk: {found[-1]}", file=sys.stderr, flush=True)
        table.add_row(f"{case.label}: store", *(f"{of.rates[STORE]:.3f}" for of in found))
        table.add_row(f"{case.label}: retrieve", *(f"{of.rates[LOAD]:.3f}" for of in found))
        table.add_row(
            f"{case.label}: retrieve of {PROMPT_TOKENS} tokens, p50, ms",
            *(f"{of.prompt_seconds * 1e3:.2f}" for of in found),
        )
    console().print(table)

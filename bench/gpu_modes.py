"""Shared mode beside server mode, for bench/gpu_data_path.py: rates of both in turns in one run."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from statistics import median

import numpy as np
from copy_paths import SERVER, SHARED, CopyPath
from geometries import LOAD, STORE, Case
from gpukit import Orders
from report import Row

LEAST_SHARED = 0.9
CALLS_UNDER_WAY = 2
ROUNDS = 3
SECONDS = 0.5
SMALL_REPEATS = 40

NAMES = {STORE: "store", LOAD: "retrieve"}
Open = Callable[[Case, str], CopyPath]


def compare(case: Case, open_path: Open, worker: Orders, *, busy: bool) -> list[Row]:
    """Both modes over one case's cache, which one worker registers with one server twice.

    With ``busy`` all is measured again while another thread of the worker runs Python without
    pause. That has no bound: an engine's thread waits for its device most of the time.
    """
    worker("make", case)
    before = worker("sums", case.block_ids)
    paths: dict[str, CopyPath] = {}
    try:
        for mode in (SERVER, SHARED):
            paths[mode] = open_path(case, mode)
            print(f"{case.label}: {paths[mode].how}", file=sys.stderr, flush=True)
        for mode, path in paths.items():
            worker("poison")
            path.once(LOAD, case.geometry.chunks)
            if not np.array_equal(worker("sums", case.block_ids), before):
                raise RuntimeError(f"{case}, {mode}: what was loaded is not what was stored")
        rows = rates(case, paths, "", LEAST_SHARED)
        if busy:
            worker("be_busy", True)
            try:
                rows += rates(case, paths, ", beside busy Python", None)
            finally:
                worker("be_busy", False)
        return rows
    finally:
        for path in paths.values():
            path.close()


def rates(
    case: Case, paths: Mapping[str, CopyPath], meanwhile: str, bound: float | None
) -> list[Row]:
    """Rates of stores and loads, and the time of a small load."""
    rows = []
    for direction in (STORE, LOAD):
        found: dict[str, list[float]] = {mode: [] for mode in paths}
        for _ in range(ROUNDS):
            for mode, path in paths.items():
                path.start(direction, CALLS_UNDER_WAY)
                time.sleep(SECONDS)
                found[mode].append(path.stop(direction))
        server, shared = (median(found[mode]) for mode in (SERVER, SHARED))
        rows.append(
            Row(
                f"{case.label}: {NAMES[direction]} in shared mode{meanwhile}",
                gigabytes(shared),
                f"{gigabytes(server)} in server mode",
                f"{shared / server:.3f}",
                "" if bound is None else f">= {bound}",
                bound is None or shared / server >= bound,
            )
        )
    small: dict[str, list[float]] = {mode: [] for mode in paths}
    for _ in range(SMALL_REPEATS):
        for mode, path in paths.items():
            small[mode].append(path.once(LOAD, 1))
    server, shared = (median(small[mode]) * 1e3 for mode in (SERVER, SHARED))
    rows.append(
        Row(
            f"{case.label}: retrieve of one chunk in shared mode, p50{meanwhile}",
            f"{shared:.2f} ms",
            f"{server:.2f} ms in server mode",
            f"{shared - server:+.2f} ms",
        )
    )
    return rows


def gigabytes(rate: float) -> str:
    return f"{rate / 1e9:.1f} GB/s"

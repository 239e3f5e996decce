"""Real vLLM with KVDock: time to first token, and what storing costs a running batch.

    python bench/engine.py [--prompts 8] [--engines plain,kvdock,native,kvdock-shared]

The model is shaped like Llama 3.1 8B, in bfloat16. Engines run one after another on one GPU, each
in a process of its own: one without connector; one with KVDock and a server; one with vLLM's own
CPU offloading (OffloadingConnector); one with KVDock in shared mode, in which the engine's process
copies. On request there is one more, kvdock-block-major: KVDock on vLLM's V1 runner. Up to vLLM
0.26 only that runner keeps all layers of a block together when a connector prefers it.

Each prompt is asked three times: cold; at once again, when it is in the GPU's own cache; and after
other prompts have taken all of the GPU's cache, when it comes from the connector. The benchmark
checks where each prompt came from, and that all answers are equal. Beside a hit stands the time
that its bytes take at the rate of one large copy of pinned memory, measured in the same run. Then
answers to a batch of new prompts are generated, all of which is stored, beside the same batch
without a connector.

Prints a table; exit status 1 if a bound is missed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from connectors import connected, keep_log, run_child
from geometries import LOAD, STORE
from gpukit import Link, Remote
from report import Row, print_report

from kvdock import Client

CHILD = Path(__file__).with_name("engine_child.py")
LENGTHS = {"1k": 1025, "4k": 4097, "10k": 10_241, "32k": 32_769}
KV_BYTES_PER_TOKEN = 32 * 2 * 8 * 128 * 2
BATCHES = 3
POOL_GIB = 32
ENGINE_SECONDS = 170
CEILING_REPEATS = 7
# The last scheduling step of a prompt computes its last token alone. These prompts take one step.
ONE_STEP = ("1k",)

# Loaded less GPU's own cache, over the time of the bytes.
MOST_OVER_TRANSFER = {"10k": 1.3, "32k": 1.1}
MOST_OVER_NATIVE = {"1k": 1.0, "4k": 0.85, "10k": 0.85, "32k": 0.85}
MOST_SHARED_OVER_SERVER = 1.1
LEAST_OVER_COLD = {"10k": 5.0, "32k": 9.0}
LEAST_BATCH_RATIO = 0.97


@dataclass(frozen=True)
class Engine:
    """One of the engines that are measured."""

    name: str
    title: str
    lengths: tuple[str, ...] = tuple(LENGTHS)
    batches: int = BATCHES
    v1_runner: bool = False


ENGINES = {
    engine.name: engine
    for engine in (
        Engine("plain", "without connector"),
        Engine("kvdock", "KVDock"),
        Engine("native", "native offloading"),
        Engine("kvdock-shared", "KVDock, shared mode"),
        Engine("kvdock-block-major", "KVDock, block-major", ("10k", "32k"), 0, v1_runner=True),
    )
}

DEFAULT_ENGINES = "plain,kvdock,native,kvdock-shared"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--prompts", type=int, default=8, help="of each length")
    parser.add_argument("--engines", default=DEFAULT_ENGINES, help=f"of {','.join(ENGINES)}")
    parser.add_argument("--seconds", type=float, default=460, help="for all of it")
    arguments = parser.parse_args()
    deadline = time.monotonic() + arguments.seconds
    link = Remote(Link)
    ceilings = {
        way: median(link("rate", way) for _ in range(CEILING_REPEATS)) for way in (LOAD, STORE)
    }
    link.close()
    results: dict[str, dict[str, Any]] = {}
    rows = [Row(f"one large copy, {way}", gigabytes(rate)) for way, rate in ceilings.items()]
    for name in arguments.engines.split(","):
        engine = ENGINES[name]
        seconds = min(ENGINE_SECONDS, deadline - time.monotonic())
        result: dict[str, Any] = {}
        failure = "no time is left for it (--seconds)"
        if seconds > 0:
            result, failure = run(engine, arguments.prompts, seconds)
        results[name] = result
        print(json.dumps({"engine": name, **summary(result)}), file=sys.stderr, flush=True)
        if failure:
            print(failure, file=sys.stderr, flush=True)
            rows.append(Row(f"{engine.title}: failed", "", bound="runs", holds=False))
    for name in LENGTHS:
        rows += first_token_rows(name, results, ceilings[LOAD])
    rows += answer_rows(results)
    rows += batch_rows(results)
    return print_report(f"{card()}; prompts of each length: {arguments.prompts}", rows)


def run(engine: Engine, prompts: int, seconds: float) -> tuple[dict[str, Any], str]:
    """Run an engine. What its process measured before it ended, and why it failed, if it did."""
    environment = {"VLLM_USE_V2_MODEL_RUNNER": "0"} if engine.v1_runner else {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvdock-bench-")))
        kind = engine.name.removesuffix("-block-major")
        connection = stack.enter_context(connected(kind, folder, POOL_GIB))
        plan = {
            "kv_transfer_config": connection.transfer_config,
            "lengths": {name: LENGTHS[name] for name in engine.lengths},
            "prompts": prompts,
            "batches": engine.batches,
            "pinned_by": connection.pinned_by(),
        }
        result, failure = run_child(CHILD, plan, folder, seconds, environment)
        keep_log(engine.name, folder / "engine.log", connection.server)
        if connection.server is not None and not failure:
            with Client(connection.server.address) as client:
                result["server"] = str(client.status())
        return result, failure


def first_token_rows(name: str, results: dict[str, dict[str, Any]], ceiling: float) -> list[Row]:
    """One length: cold, from the GPU, and from each connector."""
    rows: list[Row] = []
    label = f"{LENGTHS[name]} tokens"
    cold = milliseconds(results, "plain", name, "cold")
    gpu = milliseconds(results, "plain", name, "gpu")
    rows.append(Row(f"{label}: cold, without connector", show(cold)))
    rows.append(Row(f"{label}: from the GPU's own cache, without connector", show(gpu)))
    native = milliseconds(results, "native", name, "warm")
    by_server = milliseconds(results, "kvdock", name, "warm")
    for engine in ENGINES.values():
        samples = results.get(engine.name, {}).get("samples", {}).get(name, {})
        if not samples.get("warm"):
            continue
        warm = milliseconds(results, engine.name, name, "warm")
        own_gpu = milliseconds(results, engine.name, name, "gpu")
        own_cold = milliseconds(results, engine.name, name, "cold")
        loaded = median(sample["loaded_tokens"] for sample in samples["warm"])
        local = max(sample["local_tokens"] for sample in samples["warm"])
        transfer = loaded * KV_BYTES_PER_TOKEN / ceiling * 1e3
        beyond = (warm - own_gpu) / transfer if transfer else float("inf")
        ours = engine.name != "native"
        shared = engine.name == "kvdock-shared"
        # Shared mode has a bound of its own: server mode's times.
        bounded = ours and not shared and name in LEAST_OVER_COLD
        what = f"{label}: {engine.title}"
        rows.append(Row(f"{what}, cold (all is stored)", show(own_cold)))
        rows.append(Row(f"{what}, from the GPU's own cache", show(own_gpu)))
        rows.append(
            Row(
                f"{what}, {loaded:.0f} tokens loaded, {local} found on the GPU",
                show(warm),
                f"{transfer:.1f} ms for the bytes",
                f"{beyond:.2f} over GPU",
                f"<= {MOST_OVER_TRANSFER[name]}" if bounded else "",
                not bounded or beyond <= MOST_OVER_TRANSFER[name],
            )
        )
        if bounded:
            least = LEAST_OVER_COLD[name]
            rows.append(
                Row(
                    f"{what}: cold over warm",
                    f"x {cold / warm:.1f}",
                    bound=f">= x {least:g}",
                    holds=cold / warm >= least,
                )
            )
        if ours and not shared and native == native:
            rows.append(over(f"{what}: over native", warm / native, MOST_OVER_NATIVE[name]))
        if shared and by_server == by_server:
            rows.append(
                over(f"{what}: over server mode", warm / by_server, MOST_SHARED_OVER_SERVER)
            )
    return rows


def over(what: str, ratio: float, bound: float) -> Row:
    return Row(what, f"x {ratio:.2f}", bound=f"<= x {bound:g}", holds=ratio <= bound)


def answer_rows(results: dict[str, dict[str, Any]]) -> list[Row]:
    """Rows on whether equal prompts have equal answers, wherever their KV cache came from."""
    answers: dict[tuple[str, int], list[list[int]]] = {}
    in_one_step: list[bool] = []
    misses = 0
    for result in results.values():
        for name, samples in result.get("samples", {}).items():
            for kind, of_kind in samples.items():
                for index, sample in enumerate(of_kind):
                    if kind == "cold" and name in ONE_STEP:
                        # Its last token was computed with the others, which rounds differently.
                        in_one_step.append(sample["tokens"] == samples["gpu"][index]["tokens"])
                    else:
                        answers.setdefault((name, index), []).append(sample["tokens"])
                    if kind == "warm":
                        misses += sample["cached_tokens"] < LENGTHS[name] - 1
    equal = sum(all(other == one[0] for other in one) for one in answers.values())
    total = sum(len(one) for one in answers.values())
    controls = [result["control_differs"] for result in results.values() if result]
    return [
        Row(
            f"prompts whose answers are equal, cold, from the GPU and loaded ({total} answers)",
            f"{equal} of {len(answers)}",
            bound="all",
            holds=equal == len(answers) > 0,
        ),
        Row(
            "  cold prompts computed in one step, which rounds otherwise: equal all the same",
            f"{sum(in_one_step)} of {len(in_one_step)}",
        ),
        Row("  hits of which not all was cached", str(misses), bound="0", holds=not misses),
        Row(
            "  another middle of a prompt changes its answer",
            f"{sum(controls)} of {len(controls)} engines",
            bound="all",
            holds=all(controls),
        ),
    ]


def batch_rows(results: dict[str, dict[str, Any]]) -> list[Row]:
    """The batch with everything stored, beside the one without connector."""
    plain = results.get("plain", {})
    rows: list[Row] = []
    figures: list[tuple[str, Callable[[dict[str, Any]], list[float]], str]] = [
        ("tokens generated a second", lambda result: result["batch_rates"], ""),
        (
            "time between two tokens, median",
            lambda result: [gaps[0] * 1e3 for gaps in result["batch_gaps"]],
            " ms",
        ),
        (
            "time between two tokens, 99th percentile",
            lambda result: [gaps[1] * 1e3 for gaps in result["batch_gaps"]],
            " ms",
        ),
    ]
    for title, read, unit in figures:
        if not plain.get("batch_rates"):
            continue
        base = median(read(plain))
        rows.append(Row(f"batch, without connector: {title}", f"{base:.1f}{unit}"))
        for name in ("kvdock", "native"):
            result = results.get(name, {})
            if not result.get("batch_rates"):
                continue
            value = median(read(result))
            kept = value / base if not unit else base / value
            bounded = name == "kvdock" and "percentile" not in title
            rows.append(
                Row(
                    f"batch, {ENGINES[name].title}, all stored: {title}",
                    f"{value:.1f}{unit}",
                    f"{base:.1f}{unit}",
                    f"{kept:.3f}",
                    f">= {LEAST_BATCH_RATIO}" if bounded else "",
                    not bounded or kept >= LEAST_BATCH_RATIO,
                )
            )
    return rows


def milliseconds(results: dict[str, dict[str, Any]], engine: str, name: str, kind: str) -> float:
    """Median time to first token; NaN if it was not measured."""
    samples = results.get(engine, {}).get("samples", {}).get(name, {}).get(kind, [])
    return median(sample["ttft"] for sample in samples) * 1e3 if samples else float("nan")


def summary(result: dict[str, Any]) -> dict[str, Any]:
    """Figures that are not in the table."""
    first = result.get("first_hit") or {}
    return {
        "runner": result.get("runner"),
        "cudagraph_mode": result.get("cudagraph_mode"),
        "start_s": result.get("start_seconds"),
        "pool": result.get("pinned"),
        "first_hit_ms": first.get("ttft", 0) * 1e3,
        "first_hit_tokens": first.get("loaded_tokens"),
        "ttft_ms": {
            f"{name} {kind}": [round(sample["ttft"] * 1e3, 1) for sample in of_kind]
            for name, samples in result.get("samples", {}).items()
            for kind, of_kind in samples.items()
        },
        "batch_rates": result.get("batch_rates"),
        "batch_gaps": result.get("batch_gaps"),
        "server": result.get("server"),
    }


def card() -> str:
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()


def show(value: float) -> str:
    return f"{value:.1f} ms"


def gigabytes(rate: float) -> str:
    return f"{rate / 1e9:.1f} GB/s"


if __name__ == "__main__":
    sys.exit(main())

"""Conversations on real vLLM, many at once: with KVDock, without, and with its peers.

    python bench/multiturn.py [--engines plain,kvdock,native,lmcache,pegaflow,kvdock-shared]
    python bench/multiturn.py --cpu

40 users talk with one engine over 5 turns, 16 requests at a time. A turn's prompt is all that was
said before and some new tokens; all prompts begin with the same system prompt. The conversations
come to several times what the engine's own cache holds. Engines run one after another, each in a
process of its own, with the model of bench/engine.py. Peers that are not installed are left out.

Answers: with --cpu the model is a small one in float32, and every answer must be the one given
without connector. In bfloat16 under load answers may differ, since requests meet in other batches.
There two prompts are asked alone, before and after the load, as in bench/engine.py.

Prints two tables; exit status 1 if a bound is missed, an engine failed, or an answer is wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from connectors import connected, installed, keep_log, run_child
from conversations import SMALL, Run, Work
from engine import card
from lineplot import Line, line_plot
from multiturn_figures import (
    KVDOCK,
    PLAIN,
    Figures,
    answer_rows,
    bound_rows,
    figures,
    mean_parts,
    slowest,
)
from report import Row, console, print_report
from rich.table import Table
from serverkit import ServerError

from kvdock import Client

CHILD = Path(__file__).with_name("multiturn_child.py")
TITLES = {
    PLAIN: "none",
    KVDOCK: "KVDock",
    "kvdock-shared": "KVDock, shared",
    "native": "native",
    "lmcache": "LMCache",
    "pegaflow": "PegaFlow",
}
GPU_ENGINES = "plain,kvdock,native,lmcache,pegaflow,kvdock-shared"
CPU_ENGINES = "plain,kvdock"
GPU_GIB, CPU_GIB = 52, 1
CPU_CHUNK_TOKENS = "64"


@dataclass(frozen=True)
class Column:
    """One engine that is measured."""

    kind: str
    chunk_tokens: int | None = None
    """Of KVDock's server; None leaves it to the server."""
    variant: bool = False
    """A further chunk size, which is shown and has no bounds."""

    @property
    def name(self) -> str:
        return f"{self.kind}:{self.chunk_tokens}" if self.variant else self.kind

    @property
    def title(self) -> str:
        size = f", {self.chunk_tokens} a chunk" if self.chunk_tokens else ""
        return TITLES[self.kind] + size


def columns(engines: str, chunk_tokens: str) -> list[Column]:
    """The columns of a run; KVDock in server mode has one for each chunk size."""
    sizes = [int(size) for size in chunk_tokens.split(",") if size]
    first = sizes[0] if sizes else None
    found = []
    for kind in engines.split(","):
        if kind not in TITLES:
            raise SystemExit(f"--engines: {kind!r} is none of {', '.join(TITLES)}")
        found.append(Column(kind, first if kind.startswith(KVDOCK) else None))
        if kind == KVDOCK:
            found += [Column(kind, size, variant=True) for size in sizes[1:]]
    return found


def main() -> int:
    arguments = parse()
    work = work_of(arguments)
    gib = arguments.memory or (CPU_GIB if arguments.cpu else GPU_GIB)
    engines = arguments.engines or (CPU_ENGINES if arguments.cpu else GPU_ENGINES)
    sizes = arguments.chunk_tokens or (CPU_CHUNK_TOKENS if arguments.cpu else "")
    deadline = time.monotonic() + arguments.seconds
    runs: dict[str, Run] = {}
    titles: dict[str, str] = {}
    rows: list[Row] = []
    for column in columns(engines, sizes):
        if not installed(column.kind):
            say(f"{column.title}: not installed, left out")
            continue
        began = time.monotonic()
        seconds = min(arguments.each_seconds, deadline - began)
        run, failure = None, "no time is left for it (--seconds)"
        if seconds > 0:
            try:
                run, failure = measure(column, work, gib, seconds, arguments.cpu)
            except ServerError as error:
                failure = str(error)
        if run is None:
            say(f"{column.title}: {failure}")
            rows.append(Row(f"{column.title}: failed", "", bound="runs", holds=False))
            continue
        runs[column.name], titles[column.name] = run, column.title
        told(column.title, run, time.monotonic() - began)
        write(arguments, work, runs, titles)
    found = {name: figures(run) for name, run in runs.items()}
    show_figures(found, titles)
    rows += answer_rows(runs, exact=arguments.cpu)
    # A CPU and its small model say nothing about speed.
    rows += [] if arguments.cpu else bound_rows(found)
    where = "on the CPU, float32" if arguments.cpu else card()
    return print_report(f"{where}; {work.users} users, {work.turns} turns", rows)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engines", help=f"of {GPU_ENGINES}")
    parser.add_argument(
        "--cpu",
        action="store_true",
        help="a small model; checks all answers",
    )
    parser.add_argument("--small", action="store_true", help="less work (as --cpu does)")
    for field in fields(Work):
        name = f"--{field.name.replace('_', '-')}"
        parser.add_argument(name, type=int, help=f"of the work ({field.default})")
    parser.add_argument("--chunk-tokens", help="of KVDock's server; several make several columns")
    parser.add_argument("--memory", type=int, help="host memory for each cache, GiB")
    parser.add_argument("--each-seconds", type=float, default=160, help="for one engine")
    parser.add_argument("--seconds", type=float, default=570, help="for all of it")
    parser.add_argument("--json", type=Path, help="file for figures and all requests")
    parser.add_argument("--plot", type=Path, help="file for the plot, an SVG")
    return parser.parse_args()


def work_of(arguments: argparse.Namespace) -> Work:
    preset = SMALL if arguments.cpu or arguments.small else Work()
    given = {field.name: getattr(arguments, field.name) for field in fields(Work)}
    return replace(preset, **{name: value for name, value in given.items() if value is not None})


def measure(
    column: Column, work: Work, gib: int, seconds: float, on_cpu: bool
) -> tuple[Run | None, str]:
    """Run one engine; why it failed, if it did. ``seconds`` do not count a peer's server."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvdock-bench-")))
        connection = stack.enter_context(connected(column.kind, folder, gib, column.chunk_tokens))
        server = connection.server
        plan = {
            "kv_transfer_config": connection.transfer_config,
            "work": asdict(work),
            "on_cpu": on_cpu,
            "pinned_by": connection.pinned_by(on_cpu),
        }
        environment = {"VLLM_CPU_KVCACHE_SPACE": "1"} if on_cpu else {}
        result, failure = run_child(CHILD, plan, folder, seconds, environment)
        keep_log(column.name, folder / "engine.log", server)
        if server is not None and not failure:
            with Client(server.address) as client:
                say(" ".join(str(client.status()).split()))
    return (None, failure) if failure else (Run.of(result), "")


def told(title: str, run: Run, seconds: float) -> None:
    """Says at once what an engine did: a later one may take the rest of the time."""
    parts = ", ".join(f"{what} {s * 1e3:.1f}" for what, s in mean_parts(slowest(run)).items())
    by_turn = " ".join(f"{value * 1e3:.0f}" for value in figures(run).by_turn)
    say(
        f"{title}: {seconds:.0f} s, up in {run.start_seconds:.1f}, warm in "
        f"{run.warm_up_seconds:.1f}, {run.pinned}; load {run.total_seconds:.1f} s; by turn "
        f"{by_turn} ms; slowest of later turns, mean ms: {parts}"
    )


def write(
    arguments: argparse.Namespace, work: Work, runs: dict[str, Run], titles: dict[str, str]
) -> None:
    """What is known so far, to the files that were asked for."""
    found = {name: figures(run) for name, run in runs.items()}
    if arguments.json is not None:
        everything = {
            name: {"title": titles[name], "figures": asdict(found[name]), **asdict(run)}
            for name, run in runs.items()
        }
        arguments.json.write_text(json.dumps({"work": asdict(work), "engines": everything}))
    if arguments.plot is not None:
        lines = [
            Line(titles[name], [value * 1e3 for value in of.by_turn]) for name, of in found.items()
        ]
        ticks = [str(turn + 1) for turn in range(work.turns)]
        title = f"Time to first token, median, {work.in_flight} requests at once"
        arguments.plot.write_text(line_plot(title, "turn", "ms", ticks, lines))


def show_figures(found: dict[str, Figures], titles: dict[str, str]) -> None:
    """A table with a column for each engine."""
    table = Table(title="times to first token and between tokens in ms")
    table.add_column("")
    for name in found:
        table.add_column(titles[name], justify="right")
    for what, digits, scale, field in (
        ("total, s", 1, 1, "total"),
        ("tokens a second", 0, 1, "rate"),
        ("first turn, p50", 1, 1e3, "first_p50"),
        ("later turns, p50", 1, 1e3, "later_p50"),
        ("later turns, p90", 1, 1e3, "later_p90"),
        ("later turns, p99", 1, 1e3, "later_p99"),
        ("between tokens, p50", 2, 1e3, "gap_p50"),
        ("between tokens, p99", 1, 1e3, "gap_p99"),
        ("later turns, share cached", 3, 1, "cached_share"),
    ):
        values = [getattr(of, field) * scale for of in found.values()]
        table.add_row(what, *(f"{value:,.{digits}f}" for value in values))
    by_turn: list[Any] = [[f"{value * 1e3:.0f}" for value in of.by_turn] for of in found.values()]
    for turn, values in enumerate(zip(*by_turn, strict=True), 1):
        table.add_row(f"turn {turn}, p50", *values)
    console().print(table)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())

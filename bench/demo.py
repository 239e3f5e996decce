"""What KVDock does, in two minutes on any machine: `make demo`.

The demo starts a server. A vLLM process answers a few long prompts that it never saw, and exits. A
second vLLM process, as new as the first, gets the same prompts. Their KV cache comes from the
server, so the first tokens come much sooner, and the tokens are the same. Then the demo overwrites
one cached chunk of one prompt. A third process answers this prompt differently, and the others as
before: so the tokens are really made from the cache.

Exit status 0 if all of this happened, else 1.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from enginekit import EngineError, EngineProcess, Generation, Request
from modelkit import Llama, make_checkpoint, random_prompt
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from serverkit import ServerError, ServerProcess

from kvdock import Client, KVDockError
from kvdock.keys import chunk_keys

PROMPT_TOKENS = (1_500, 2_000, 2_500, 3_000)
OUTPUT_TOKENS = 24
CHUNK_TOKENS = 256
DAMAGED_PROMPT = 1
DAMAGED_CHUNK = 3

# Large enough that a prompt takes two cores a second, small enough to be made in one.
MODEL = Llama(layers=8, hidden=1024, heads=16, kv_heads=4, head_dim=64, intermediate=2816)

# Promised for two cores; on a GPU this model is too small to be worth a cache.
MIN_SPEEDUP = 3.0

CACHED_TOKENS = "num_kvdock_extra_cached_tokens"


class DemoError(Exception):
    """The demonstration could not be carried out."""


@dataclass(frozen=True)
class Check:
    """A claim, and whether it holds."""

    claim: str
    holds: bool


def main() -> int:
    console = Console()
    if not console.is_terminal:
        console = Console(width=100)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kvdock-demo-") as folder:
        try:
            checks = run(Path(folder), console)
        except (DemoError, EngineError, ServerError, KVDockError) as error:
            console.print(f"the demo failed: {error}", style="bold red", markup=False)
            return 1
        for check in checks:
            mark = "[green]yes[/]" if check.holds else "[bold red]NO[/] "
            console.print(f"  {mark}  {check.claim}")
        console.print(f"  took {time.monotonic() - started:.0f} s")
        if all(check.holds for check in checks):
            return 0
        _print_logs(Path(folder), console)
        return 1


def run(folder: Path, console: Console) -> list[Check]:
    """Carry the demonstration out, print its table and return the verdict."""
    prompts = [random_prompt(n, seed=n, vocab=MODEL.vocab) for n in PROMPT_TOKENS]
    columns = (SpinnerColumn(), TextColumn("{task.description:48}"), BarColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
        task = progress.add_task("", total=2 + 3 * (1 + len(prompts)))

        def begin(step: str) -> None:
            progress.update(task, description=step)

        def done() -> None:
            progress.advance(task)

        begin("making a model")
        model = make_checkpoint(folder / "model", MODEL)
        done()
        begin("starting the KVDock server")
        with ServerProcess(folder, chunk_tokens=CHUNK_TOKENS) as server:
            done()

            def process(name: str) -> list[Generation]:
                log = folder / f"{name}.log"
                return _answer(prompts, name, model, log, server.address, begin, done)

            cold = process("first")
            warm = process("second")
            _overwrite_chunk(server.address, prompts[DAMAGED_PROMPT], DAMAGED_CHUNK)
            control = process("third")
    console.print(_table(cold, warm, control))
    return verdict(cold, warm, control)


def _answer(
    prompts: Sequence[Sequence[int]],
    name: str,
    model: Path,
    log: Path,
    address: str,
    begin: Callable[[str], None],
    done: Callable[[], None],
) -> list[Generation]:
    """Answer the prompts one after the other in a vLLM process of its own, which then exits."""
    begin(f"starting the {name} vLLM process")
    with EngineProcess(model, log=log, kv_connector={"kvdock.address": address}) as engine:
        # The first prompt of a process pays for what is set up only once. This one is another in
        # each process, so that none finds it cached.
        engine.generate(Request(random_prompt(max(PROMPT_TOKENS), seed=os.getpid() + engine.pid)))
        done()
        generations = []
        for number, prompt in enumerate(prompts, 1):
            begin(f"{name} process: prompt {number} of {len(prompts)}")
            request = Request(prompt, OUTPUT_TOKENS, kv_transfer_params={CACHED_TOKENS: None})
            generations += engine.generate(request)
            done()
        status = engine.close()
    if status != 0:
        raise DemoError(f"the {name} vLLM process exited with status {status}")
    return generations


def _overwrite_chunk(address: str, prompt: Sequence[int], chunk: int) -> None:
    """Zero one chunk of a prompt where it lies in the server's memory."""
    keys = chunk_keys(prompt, CHUNK_TOKENS)[: chunk + 1]
    with Client(address) as client, client.session() as session:
        names = [status.namespace.name for status in client.namespaces()]
        if len(names) != 1:
            raise DemoError(f"one engine registered the namespaces {names} instead of one")
        hit = session.lookup(names[0], keys)
        if hit.lease is None or hit.chunks <= chunk:
            raise DemoError(f"{hit.chunks} chunks are cached where chunk {chunk} was to be changed")
        (found,) = session.retrieve(hit.lease, chunk, chunk + 1)
        if found.location is None:
            raise DemoError(f"chunk {chunk} cannot be had: {found.status.name}")
        view = session.pool.view(found.location)
        view[:] = bytes(len(view))
        session.free_locks(hit.lease)


def _table(
    cold: Sequence[Generation], warm: Sequence[Generation], control: Sequence[Generation]
) -> Table:
    table = Table(
        title="one process cold, the next warm from KVDock, a third after a chunk was zeroed",
        caption="cold and warm: time to the first token",
    )
    for heading in ("prompt tokens", "hit tokens", "cold", "warm", "speedup"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("tokens equal", no_wrap=True)
    table.add_column("third process", no_wrap=True)
    rows = zip(PROMPT_TOKENS, cold, warm, control, strict=True)
    for number, (tokens, first, second, third) in enumerate(rows):
        damaged = ", zeroed" if number == DAMAGED_PROMPT else ""
        table.add_row(
            f"{tokens:,}",
            f"{_hit_tokens(second):,}",
            f"{_ttft(first) * 1e3:,.0f} ms",
            f"{_ttft(second) * 1e3:,.0f} ms",
            f"{_ttft(first) / _ttft(second):.1f} x",
            "yes" if second.tokens == first.tokens else "NO",
            ("equal" if third.tokens == first.tokens else "other") + damaged,
        )
    return table


def verdict(
    cold: Sequence[Generation], warm: Sequence[Generation], control: Sequence[Generation]
) -> list[Check]:
    """Check the answers of the three processes, one generation for each of PROMPT_TOKENS."""
    full_chunks = [tokens // CHUNK_TOKENS * CHUNK_TOKENS for tokens in PROMPT_TOKENS]
    speedup = sum(map(_ttft, cold)) / sum(map(_ttft, warm))
    same = [third.tokens == first.tokens for first, third in zip(cold, control, strict=True)]
    others = same[:DAMAGED_PROMPT] + same[DAMAGED_PROMPT + 1 :]
    checks = [
        Check("the first process found nothing cached", not any(map(_hit_tokens, cold))),
        Check(
            "the second got every full chunk of every prompt, the engine says so too",
            [_hit_tokens(second) for second in warm] == full_chunks
            and [second.num_cached_tokens for second in warm] == full_chunks,
        ),
        Check(
            "and answered with the same tokens",
            [second.tokens for second in warm] == [first.tokens for first in cold],
        ),
        Check("with a zeroed chunk, the answer is another", not same[DAMAGED_PROMPT]),
        Check("and the other prompts' answers are what they were", all(others)),
    ]
    if not torch.cuda.is_available():
        claim = f"first tokens came at least {MIN_SPEEDUP:.0f} times as soon, all taken together"
        checks.insert(3, Check(claim, speedup >= MIN_SPEEDUP))
    return checks


def _print_logs(folder: Path, console: Console) -> None:
    """Print the server's log and the connectors' log lines."""
    for log in sorted(folder.glob("*.log")):
        for line in log.read_text(errors="replace").splitlines():
            if "KVDock" in line or log.name == "server.log":
                console.print(f"{log.name}: {line}", style="dim", markup=False)


def _hit_tokens(generation: Generation) -> int:
    """Tokens that came from KVDock, as the connector reports them with the response."""
    reported = generation.kv_transfer_params or {}
    return int(reported.get(CACHED_TOKENS) or 0)


def _ttft(generation: Generation) -> float:
    if generation.ttft_s is None:
        raise DemoError(f"a prompt got no token; it ended with {generation.finish_reason!r}")
    return generation.ttft_s


if __name__ == "__main__":
    sys.exit(main())

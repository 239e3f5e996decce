"""What an engine loses when its server stands still.

    python bench/pauses.py [--quick]

vLLM's own scheduler and the connector, around a model that costs nothing (the simulator of
tests/vllm_plugin), beside a server that is stopped with SIGSTOP:

* for 0.2 s, while the lookups of 8 requests are under way: how long requests are served without
  cache after it goes on;
* for as long as 7 requests preempt each other in a cache of 39 blocks: the longest that one of the
  engine's steps waits.

Prints a table; exit status 1 if a bound is missed.
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from modelkit import Llama, make_checkpoint, random_prompt
from report import Row, print_report
from serverkit import ServerProcess

# Behind the rest, so that another version's simulator may be put before it.
sys.path.append(str(Path(__file__).parents[1] / "tests" / "vllm_plugin"))

from simulator import CHUNK_TOKENS, SimulatedEngine

EXTRA: Final = "num_kvdock_extra_cached_tokens"
KNOWN: Final = 80
"""Prompts, one for each time that it is tried whether there are hits."""
LOOKUPS: Final = 8
LOOKUP_TIMEOUT_MS: Final = 100
PAUSE_SECONDS: Final = 0.2
BACK_BOUND_SECONDS: Final = 0.2
PREEMPTING: Final = 7
BLOCKS: Final = 39
"""Beside the one that vLLM keeps for itself."""
STEP_BOUND_SECONDS: Final = 0.5


def main() -> int:
    parser = argparse.ArgumentParser(description="Benchmark of an engine whose server pauses.")
    parser.add_argument("--quick", action="store_true", help="measure fewer times")
    rounds = 3 if parser.parse_args().quick else 10
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    with tempfile.TemporaryDirectory(prefix="kvdock-bench-") as folder:
        model = make_checkpoint(Path(folder) / "model", Llama(layers=1))
        with ServerProcess(Path(folder), memory="64MiB", chunk_tokens=CHUNK_TOKENS) as server:
            back = [seconds_without_cache(model, server, number) for number in range(rounds)]
            steps = [longest_step(model, server) for _ in range(rounds)]
    return print_report(
        "A server that stands still",
        [
            row(f"without cache after a pause of {PAUSE_SECONDS} s", back, BACK_BOUND_SECONDS),
            row("longest wait of a step that preempts", steps, STEP_BOUND_SECONDS),
        ],
    )


def row(what: str, seconds: list[float], bound: float) -> Row:
    shown = f"{sorted(seconds)[len(seconds) // 2]:.2f} s, at most {max(seconds):.2f}"
    return Row(what, shown, bound=f"<= {bound} s", holds=max(seconds) <= bound)


@contextmanager
def standing_still(server: ServerProcess) -> Iterator[None]:
    os.kill(server.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(server.pid, signal.SIGCONT)


def seconds_without_cache(model: Path, server: ServerProcess, number: int) -> float:
    """From the end of a pause to the first request that has its hit."""
    prompts = prompts_of(number)
    known = [next(prompts) for _ in range(KNOWN)]
    config = {"kvdock.lookup_timeout_ms": LOOKUP_TIMEOUT_MS}
    with SimulatedEngine(model, server.address, extra_config=config) as engine:
        for prompt in known:
            engine.generate(prompt)
        settle(engine)
        if not is_hit(engine, known.pop()):
            raise RuntimeError("nothing was stored")
        with standing_still(server):
            began = time.monotonic()
            for asked in range(LOOKUPS):
                engine.add(f"asked {asked}", next(prompts))
            while time.monotonic() - began < PAUSE_SECONDS:
                engine.step()
        ended = time.monotonic()
        while not is_hit(engine, known.pop()):
            elapsed = time.monotonic() - ended
            while time.monotonic() - ended < max(elapsed + 0.01, elapsed * 1.1):
                engine.step()
        seconds = time.monotonic() - ended
        if engine.counted.get("lookup_timeouts", 0) < LOOKUPS:
            raise RuntimeError(f"not all lookups timed out: {engine.counted}")
        settle(engine)
    return seconds


def prompts_of(number: int) -> Iterator[list[int]]:
    """Prompts of a chunk that no other number has."""
    for seed in itertools.count(number * 1_000):
        yield random_prompt(CHUNK_TOKENS + 1, seed=seed)


def is_hit(engine: SimulatedEngine, prompt: list[int]) -> bool:
    """Whether a prompt that the engine itself does not know is found in the server."""
    name = f"prompt {len(engine.outcomes)}"
    engine.add(name, prompt, kv_transfer_params={EXTRA: None})
    outcome = engine.outcomes[name]
    while outcome.finish_reason is None:
        engine.step()
    return bool(outcome.kv_transfer_params and outcome.kv_transfer_params[EXTRA])


def longest_step(model: Path, server: ServerProcess) -> float:
    """Until three times blocks were given away that a store had not read yet, or all is done."""
    with SimulatedEngine(model, server.address, num_blocks=BLOCKS + 1) as engine:
        settle(engine)
        longest = 0.0
        with standing_still(server):
            for number in range(PREEMPTING):
                prompt = random_prompt(CHUNK_TOKENS // 2 + number, seed=number)
                engine.add(str(number), prompt, max_tokens=300)
            while engine.scheduler.has_unfinished_requests() and engine.overwritten < 3:
                began = waited()
                engine.step()
                longest = max(longest, waited() - began)
        settle(engine)
    return longest


def waited() -> float:
    """What this thread has not computed so far."""
    return time.monotonic() - time.thread_time()


def settle(engine: SimulatedEngine) -> None:
    """Carry out all that is under way."""
    engine.run()
    engine.forget()


if __name__ == "__main__":
    sys.exit(main())

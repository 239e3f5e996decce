"""Runs and measures one engine of bench/engine.py, and writes the figures as JSON.

    python bench/engine_child.py PLAN.json RESULT.json

The engine runs in this process (bench/stepped_engine.py).

Prompts have one token more than whole chunks and whole scheduling steps. So the last token is
computed alone, over the same cached tokens, whether these were computed, found in the engine's own
cache or loaded. Kernels and shapes are the same, so the greedy tokens must be exactly equal.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from modelkit import random_prompt
from pinkit import WorkerPinning, wait_until_pinned
from stepped_engine import LLAMA_8B, Sample, Setup, SteppedEngine

CACHE_TOKENS = 36_864
# Two of them, one after the other, leave nothing of a prompt on the GPU, and need not fit exactly.
FILLER_TOKENS = 36_000
FILLER_SEEDS = (901, 902)
# Between a prompt's first answer and its load no more is stored than a pool of 32 GiB holds.
PROMPTS_AT_ONCE = 4
BATCH_REQUESTS = 16
BATCH_PROMPT_TOKENS = 1792
BATCH_ANSWER_TOKENS = 272  # with them each request fills one more chunk


@dataclass(frozen=True)
class Plan:
    """The measurements to make, as bench/engine.py asks for them."""

    kv_transfer_config: dict[str, Any] | None
    lengths: dict[str, int]
    """Prompts of each length in tokens, by name."""
    prompts: int
    """Number of prompts of each length."""
    batches: int
    """How often to run the batch."""
    pinned_by: str
    """Who pins the pool: "worker", "nobody", or the address of KVDock's server."""


@dataclass
class Result:
    """Everything measured. Samples by length and by where the prompt's KV came from."""

    start_seconds: float
    runner: str
    cudagraph_mode: str
    samples: dict[str, dict[str, list[Sample]]] = field(default_factory=dict)
    first_hit: Sample | None = None
    """The engine's first load, which includes everything that is set up only once."""
    pinned: str = ""
    """How long the first measurement waited for the pool to be pinned."""
    control_differs: bool = False
    """True if other tokens in the middle of a prompt change the answer."""
    batch_rates: list[float] = field(default_factory=list)
    """For each run: generated tokens a second. The time includes the prompts."""
    batch_gaps: list[list[float]] = field(default_factory=list)
    """For each run: median and 99th percentile of the seconds between two tokens of a request."""


class Engine(SteppedEngine):
    """The engine of these measurements."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        super().__init__(Setup(plan.kv_transfer_config, CACHE_TOKENS, BATCH_REQUESTS), folder)

    def run_batch(self, seed: int) -> tuple[float, list[float]]:
        """Requests with new prompts, all at once: tokens a second, and the gaps between tokens."""
        started = time.perf_counter()
        for index in range(BATCH_REQUESTS):
            prompt = random_prompt(
                BATCH_PROMPT_TOKENS, seed=seed * 1000 + index, vocab=LLAMA_8B.vocab
            )
            self.add(f"batch-{seed}-{index}", prompt, BATCH_ANSWER_TOKENS)
        latest: dict[str, tuple[int, float]] = {}
        gaps: list[float] = []
        finished = 0
        while finished < BATCH_REQUESTS:
            outputs = self.step()
            now = time.perf_counter()
            for output in outputs:
                count = len(output.outputs[0].token_ids)
                before = latest.get(output.request_id)
                if before is not None and count > before[0]:
                    gaps.append((now - before[1]) / (count - before[0]))
                if before is None or count > before[0]:
                    latest[output.request_id] = (count, now)
                finished += output.finished
        rate = sum(count for count, _ in latest.values()) / (time.perf_counter() - started)
        self.settle()
        gaps.sort()
        return rate, [gaps[len(gaps) // 2], gaps[int(len(gaps) * 0.99)]]


def measure(engine: Engine, plan: Plan, pinning: WorkerPinning, result: Result) -> Iterator[None]:
    """Make the measurements one after another, and fill in ``result``."""
    has_connector = plan.kv_transfer_config is not None

    def prompt(tokens: int, index: int) -> list[int]:
        return random_prompt(tokens, seed=tokens * 100 + index, vocab=LLAMA_8B.vocab)

    def fill() -> None:
        for seed in FILLER_SEEDS:
            engine.ask(random_prompt(FILLER_TOKENS, seed=seed, vocab=LLAMA_8B.vocab))

    fill()
    for tokens in sorted(set(plan.lengths.values()))[:2]:
        warm_up = prompt(tokens, 99)
        engine.ask(warm_up)
        engine.ask(warm_up)
        if has_connector:
            fill()
            engine.ask(warm_up)
    result.first_hit = engine.first_hit
    result.pinned = wait_until_pinned(plan.pinned_by, pinning)
    yield
    for name, tokens in plan.lengths.items():
        samples: dict[str, list[Sample]] = {"cold": [], "gpu": []}
        if has_connector:
            samples["warm"] = []
        result.samples[name] = samples
        for first in range(0, plan.prompts, PROMPTS_AT_ONCE):
            some = range(first, min(first + PROMPTS_AT_ONCE, plan.prompts))
            for index in some:
                question = prompt(tokens, index)
                samples["cold"].append(engine.ask(question))
                samples["gpu"].append(engine.ask(question))
            if has_connector:
                fill()
                samples["warm"] += [engine.ask(prompt(tokens, index)) for index in some]
        yield
    name, tokens = next(iter(plan.lengths.items()))
    other = prompt(tokens, 0)
    other[256:512] = random_prompt(256, seed=7, vocab=LLAMA_8B.vocab)
    result.control_differs = engine.ask(other).tokens != result.samples[name]["gpu"][0].tokens
    yield
    for run in range(plan.batches + 1):
        rate, gaps = engine.run_batch(seed=run + 1)
        if run:  # the first is for warming up
            result.batch_rates.append(rate)
            result.batch_gaps.append(gaps)
            yield


def main() -> None:
    plan = Plan(**json.loads(Path(sys.argv[1]).read_text()))
    target = Path(sys.argv[2])
    pinning = WorkerPinning()
    started = time.perf_counter()
    engine = Engine(plan, target.parent / "model")
    result = Result(time.perf_counter() - started, engine.runner, engine.cudagraph_mode)
    print(f"engine up in {result.start_seconds:.1f} s", flush=True)
    for _ in measure(engine, plan, pinning, result):
        # These figures count even if a later measurement fails.
        target.write_text(json.dumps(asdict(result)))
        print(f"{time.perf_counter() - started:.1f} s", flush=True)
    engine.close()


if __name__ == "__main__":
    main()

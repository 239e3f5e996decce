"""Runs and measures one engine of bench/engine.py, and writes the figures as JSON.

    python bench/engine_child.py PLAN.json RESULT.json

The engine runs in this process (VLLM_ENABLE_V1_MULTIPROCESSING=0) and is stepped as vLLM's own core
loop steps it. Its weights are random, scaled so that the cache decides the answers
(bench/modelkit.py): bytes that are loaded wrongly change the tokens.

Prompts have one token more than whole chunks and whole scheduling steps. So the last token is
computed alone, over the same cached tokens, whether these were computed, found in the engine's own
cache or loaded. Kernels and shapes are the same, so the greedy tokens must be exactly equal.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

import torch
from modelkit import QUERY_KEY_GAIN, VALUE_GAIN, Llama, random_prompt
from vllm import EngineArgs, SamplingParams
from vllm.inputs import TokensPrompt
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.llm_engine import LLMEngine

LLAMA_8B = Llama(
    layers=32,
    hidden=4096,
    heads=32,
    kv_heads=8,
    head_dim=128,
    intermediate=14336,
    vocab=128256,
    max_position=65536,
)
KV_BYTES_PER_TOKEN = 32 * 2 * 8 * 128 * 2
BLOCK_TOKENS = 16
CACHE_TOKENS = 36_864
STEP_TOKENS = 2048
# Two of them, one after the other, leave nothing of a prompt on the GPU, and need not fit exactly.
FILLER_TOKENS = 36_000
FILLER_SEEDS = (901, 902)
# Between a prompt's first answer and its load no more is stored than a pool of 32 GiB holds.
PROMPTS_AT_ONCE = 4
ANSWER_TOKENS = 4
BATCH_REQUESTS = 16
BATCH_PROMPT_TOKENS = 1792
BATCH_ANSWER_TOKENS = 272  # with them each request fills one more chunk
SETTLE_SECONDS = 30.0
REQUEST_SECONDS = 60.0
EXTRA_TOKENS = "num_kvdock_extra_cached_tokens"


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


@dataclass
class Sample:
    """One request."""

    ttft: float
    """Seconds from handing the request to the engine to its first token."""
    tokens: list[int]
    cached_tokens: int
    local_tokens: int
    """Found in the engine's own cache, as the connector was told. Without connector: all cached."""
    loaded_tokens: int
    """Tokens that the connector promised. KVDock: tokens that it says were really loaded."""


@dataclass
class Result:
    """Everything measured. Samples by length and by where the prompt's KV came from."""

    start_seconds: float
    runner: str
    cudagraph_mode: str
    samples: dict[str, dict[str, list[Sample]]] = field(default_factory=dict)
    first_hit: Sample | None = None
    """The engine's first load, which includes everything that is set up only once."""
    control_differs: bool = False
    """True if other tokens in the middle of a prompt change the answer."""
    batch_rates: list[float] = field(default_factory=list)
    """For each run: generated tokens a second. The time includes the prompts."""
    batch_gaps: list[list[float]] = field(default_factory=list)
    """For each run: median and 99th percentile of the seconds between two tokens of a request."""


class Engine:
    """A vLLM engine. It also notes what its connector reports."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        config = {**LLAMA_8B.config(), "torch_dtype": "bfloat16"}
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config))
        arguments: dict[str, Any] = {
            "model": str(folder),
            "load_format": "dummy",
            "dtype": "bfloat16",
            "skip_tokenizer_init": True,
            # Decoding steps, and so a hit's last token, are replayed as in production: launched one
            # by one, their kernels take as long as the processor needs.
            "compilation_config": {
                "mode": 0,
                "cudagraph_mode": "FULL_DECODE_ONLY",
                "cudagraph_capture_sizes": [1, 2, 4, 8, BATCH_REQUESTS],
            },
            "block_size": BLOCK_TOKENS,
            "num_gpu_blocks_override": CACHE_TOKENS // BLOCK_TOKENS + 1,
            "max_model_len": CACHE_TOKENS - BLOCK_TOKENS,
            "max_num_batched_tokens": STEP_TOKENS,
            "max_num_seqs": BATCH_REQUESTS,
            "gpu_memory_utilization": 0.6,
            "disable_log_stats": True,
        }
        if plan.kv_transfer_config is not None:
            arguments["kv_transfer_config"] = plan.kv_transfer_config
        self._engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
        client: Any = self._engine.engine_core
        self._core: Any = client.engine_core
        self._scheduler: Any = self._core.scheduler
        runner: Any = self._core.model_executor.driver_worker.worker.model_runner
        self.runner = f"{type(runner).__module__}"
        self.cudagraph_mode = str(runner.compilation_config.cudagraph_mode)
        fill_weights(runner.model)
        self._requests = 0
        self._matched = (0, 0)
        self.first_hit: Sample | None = None
        if self._scheduler.connector is not None:
            self._overhear(self._scheduler.connector)

    def ask(self, prompt: list[int]) -> Sample:
        """One request, alone; returns when the engine is idle again."""
        started = time.perf_counter()
        self._matched = (0, 0)
        self._add(prompt, ANSWER_TOKENS)
        ttft = 0.0
        while True:
            for output in self._step():
                if not ttft and output.outputs[0].token_ids:
                    ttft = time.perf_counter() - started
                if not output.finished:
                    continue
                self._settle()
                cached = output.num_cached_tokens or 0
                local, loaded = self._matched
                if self._scheduler.connector is None:
                    local = cached
                said = (output.kv_transfer_params or {}).get(EXTRA_TOKENS)
                loaded = loaded if said is None else said
                sample = Sample(ttft, list(output.outputs[0].token_ids), cached, local, loaded)
                if self.first_hit is None and loaded:
                    self.first_hit = sample
                return sample
            if time.perf_counter() - started > REQUEST_SECONDS:
                raise TimeoutError(f"a prompt of {len(prompt)} tokens was not answered")

    def run_batch(self, seed: int) -> tuple[float, list[float]]:
        """Requests with new prompts, all at once: tokens a second, and the gaps between tokens."""
        started = time.perf_counter()
        for index in range(BATCH_REQUESTS):
            prompt = random_prompt(
                BATCH_PROMPT_TOKENS, seed=seed * 1000 + index, vocab=LLAMA_8B.vocab
            )
            self._add(prompt, BATCH_ANSWER_TOKENS)
        latest: dict[str, tuple[int, float]] = {}
        gaps: list[float] = []
        finished = 0
        while finished < BATCH_REQUESTS:
            outputs = self._step()
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
        self._settle()
        gaps.sort()
        return rate, [gaps[len(gaps) // 2], gaps[int(len(gaps) * 0.99)]]

    def close(self) -> None:
        self._engine.engine_core.shutdown()

    def _add(self, prompt: list[int], answer_tokens: int) -> None:
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=answer_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.CUMULATIVE,
            extra_args={"kv_transfer_params": {EXTRA_TOKENS: 0}}
            if self._scheduler.connector is not None
            else None,
        )
        self._requests += 1
        self._engine.add_request(
            f"request-{self._requests}", TokensPrompt(prompt_token_ids=prompt), sampling
        )

    def _step(self) -> list[Any]:
        outputs: list[Any] = self._engine.step()
        if not self._scheduler.running and self._scheduler.has_requests():
            # As vLLM's core loop does: let transfer threads have the interpreter.
            time.sleep(0.001)
        return outputs

    def _settle(self) -> None:
        """Step on until the engine is idle, as vLLM's core loop does between requests."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while self._scheduler.has_requests():
            if time.monotonic() > deadline:
                raise TimeoutError("the engine still has work long after its last answer")
            self._step()

    def _overhear(self, connector: Any) -> None:
        answer = connector.get_num_new_matched_tokens

        def overheard(request: Any, num_computed_tokens: int) -> Any:
            answered = answer(request, num_computed_tokens)
            if answered[0] is not None:
                self._matched = (num_computed_tokens, answered[0])
            return answered

        connector.get_num_new_matched_tokens = overheard


@torch.inference_mode()
def fill_weights(model: Any) -> None:
    """The recipe of bench/modelkit.py, made on the device."""
    generator = torch.Generator(next(model.parameters()).device).manual_seed(0)
    gains = {"qkv_proj": QUERY_KEY_GAIN, "o_proj": VALUE_GAIN}
    for name, weight in model.named_parameters():
        if weight.dim() < 2:
            weight.fill_(1)
            continue
        gain = next((gain for part, gain in gains.items() if part in name), 1.0)
        std = 1.0 if "embed_tokens" in name else gain / math.sqrt(weight.shape[1])
        weight.normal_(0.0, std, generator=generator)


def measure(engine: Engine, plan: Plan, result: Result) -> Iterator[None]:
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
    started = time.perf_counter()
    engine = Engine(plan, target.parent / "model")
    result = Result(time.perf_counter() - started, engine.runner, engine.cudagraph_mode)
    print(f"engine up in {result.start_seconds:.1f} s", flush=True)
    for _ in measure(engine, plan, result):
        # These figures count even if a later measurement fails.
        target.write_text(json.dumps(asdict(result)))
        print(f"{time.perf_counter() - started:.1f} s", flush=True)
    engine.close()


if __name__ == "__main__":
    main()

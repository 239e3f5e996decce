"""A vLLM engine in this process, stepped as vLLM's own core loop steps it, for benchmarks.

Its model is shaped like Llama 3.1 8B. The weights are random, scaled so that the cache decides the
answers (bench/modelkit.py): bytes that are loaded wrongly change the tokens. On a CPU it is a
small model in float32.
"""

from __future__ import annotations

import json
import math
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

import torch
from modelkit import QUERY_KEY_GAIN, VALUE_GAIN, Llama, make_checkpoint
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
    max_position=131_072,
)
BLOCK_TOKENS = 16
CPU_BLOCK_TOKENS = 32  # what vLLM has kernels for there
SETTLE_SECONDS = 30.0
REQUEST_SECONDS = 60.0
EXTRA_TOKENS = "num_kvdock_extra_cached_tokens"


@dataclass(frozen=True)
class Setup:
    """What an engine is made of."""

    kv_transfer_config: dict[str, Any] | None
    cache_tokens: int
    """Tokens that the engine's own KV cache holds; hardly longer prompts are refused."""
    most_requests: int
    """Requests that may run at once."""
    step_tokens: int = 2048
    on_cpu: bool = False


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


class SteppedEngine:
    """An engine that does a step when it is told to. It also notes what its connector reports."""

    def __init__(self, setup: Setup, folder: Path) -> None:
        """``folder`` takes the model."""
        self.shape = Llama() if setup.on_cpu else LLAMA_8B
        block_tokens = CPU_BLOCK_TOKENS if setup.on_cpu else BLOCK_TOKENS
        arguments: dict[str, Any] = {
            "model": str(folder),
            "skip_tokenizer_init": True,
            "block_size": block_tokens,
            "num_gpu_blocks_override": setup.cache_tokens // block_tokens + 1,
            "max_model_len": setup.cache_tokens - block_tokens,
            "max_num_batched_tokens": setup.step_tokens,
            "max_num_seqs": setup.most_requests,
            "disable_log_stats": True,
        }
        if setup.on_cpu:
            make_checkpoint(folder, self.shape)
            arguments |= {"dtype": "float32", "enforce_eager": True}
        else:
            arguments |= _on_a_gpu(self.shape, folder, setup.most_requests)
        if setup.kv_transfer_config is not None:
            arguments["kv_transfer_config"] = setup.kv_transfer_config
        self._engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
        client: Any = self._engine.engine_core
        self._core: Any = client.engine_core
        self.scheduler: Any = self._core.scheduler
        self.connector: Any = self.scheduler.connector
        """The scheduler's half; None without connector."""
        runner: Any = self._core.model_executor.driver_worker.worker.model_runner
        self.runner = f"{type(runner).__module__}"
        self.cudagraph_mode = str(runner.compilation_config.cudagraph_mode)
        if not setup.on_cpu:
            fill_weights(runner.model)
        self._requests = 0
        self._matched = (0, 0)
        self.first_hit: Sample | None = None
        if self.connector is not None:
            self._overhear(self.connector)

    def ask(self, prompt: list[int], answer_tokens: int = 4) -> Sample:
        """One request, alone; returns when the engine is idle again."""
        started = time.perf_counter()
        self._matched = (0, 0)
        self._requests += 1
        self.add(f"request-{self._requests}", prompt, answer_tokens)
        ttft = 0.0
        while True:
            for output in self.step():
                if not ttft and output.outputs[0].token_ids:
                    ttft = time.perf_counter() - started
                if not output.finished:
                    continue
                self.settle()
                cached = output.num_cached_tokens or 0
                local, loaded = self._matched
                if self.connector is None:
                    local = cached
                said = (output.kv_transfer_params or {}).get(EXTRA_TOKENS)
                loaded = loaded if said is None else said
                sample = Sample(ttft, list(output.outputs[0].token_ids), cached, local, loaded)
                if self.first_hit is None and loaded:
                    self.first_hit = sample
                return sample
            if time.perf_counter() - started > REQUEST_SECONDS:
                raise TimeoutError(f"a prompt of {len(prompt)} tokens was not answered")

    def add(self, name: str, prompt: list[int], answer_tokens: int) -> None:
        """Hand a request to the engine. It answers greedily and never stops early."""
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=answer_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.CUMULATIVE,
            extra_args={"kv_transfer_params": {EXTRA_TOKENS: 0}}
            if self.connector is not None
            else None,
        )
        self._engine.add_request(name, TokensPrompt(prompt_token_ids=prompt), sampling)

    def step(self) -> list[Any]:
        """One step; vLLM's RequestOutputs."""
        outputs: list[Any] = self._engine.step()
        if not self.scheduler.running and self.scheduler.has_requests():
            # As vLLM's core loop does: let transfer threads have the interpreter.
            time.sleep(0.001)
        return outputs

    def settle(self) -> None:
        """Step on until the engine is idle, as vLLM's core loop does between requests."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while self.scheduler.has_requests():
            if time.monotonic() > deadline:
                raise TimeoutError("the engine still has work long after its last answer")
            self.step()

    def close(self) -> None:
        self._engine.engine_core.shutdown()

    def _overhear(self, connector: Any) -> None:
        answer = connector.get_num_new_matched_tokens

        def overheard(request: Any, num_computed_tokens: int) -> Any:
            answered = answer(request, num_computed_tokens)
            if answered[0] is not None:
                self._matched = (num_computed_tokens, answered[0])
            return answered

        connector.get_num_new_matched_tokens = overheard


def _on_a_gpu(shape: Llama, folder: Path, most_requests: int) -> dict[str, Any]:
    """Arguments for the large model, of which the folder gets the configuration alone."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**shape.config(), "torch_dtype": "bfloat16"}))
    return {
        "load_format": "dummy",
        "dtype": "bfloat16",
        # Decoding steps, and so a hit's last token, are replayed as in production: launched one by
        # one, their kernels take as long as the processor needs.
        "compilation_config": {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": [size for size in (1, 2, 4, 8) if size < most_requests]
            + [most_requests],
        },
        "gpu_memory_utilization": 0.6,
    }


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

"""One vLLM engine as a process that takes commands: the child of enginekit.EngineProcess.

Commands are lines of JSON on standard input, answers lines of JSON on the file descriptor given as
the only argument: standard output belongs to vLLM's log. The first line holds the arguments for
vLLM's EngineArgs, and under "statekit" those of statekit.prepare if the model needs it; the answer
to it comes when the engine is ready. The process ends at the end of
its input, after shutting the engine down as `vllm serve` does.

vLLM runs in this process (enginekit sets VLLM_ENABLE_V1_MULTIPROCESSING=0), which halves its start,
and is stepped here exactly as its own core loop steps it.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

import statekit
from vllm import EngineArgs, SamplingParams
from vllm.inputs import TokensPrompt
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.llm_engine import LLMEngine

SETTLE_SECONDS = 30.0
"""How long the engine may still have work (stores under way) after its last answer."""


class Runner:
    """An engine and the commands for it."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self._engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
        self._requests = 0
        self._drafts = 0
        self._count_drafts()
        self._adapters: dict[str, LoRARequest] = {}

    def generate(self, requests: list[dict[str, Any]], settle: bool = True) -> list[dict[str, Any]]:
        """Run requests together until each has finished or was aborted; one result for each.

        To ``settle``, go on until the engine is idle.
        """
        results: list[dict[str, Any]] = []
        running: dict[str, int] = {}
        started: dict[str, float] = {}
        for index, request in enumerate(requests):
            request_id = f"request-{self._requests}"
            self._requests += 1
            prompt = TokensPrompt(prompt_token_ids=request["prompt"])
            if request["cache_salt"] is not None:
                prompt["cache_salt"] = request["cache_salt"]
            extra = request["kv_transfer_params"]
            sampling = SamplingParams(
                temperature=0.0,
                max_tokens=request["max_tokens"],
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.CUMULATIVE,
                extra_args=None if extra is None else {"kv_transfer_params": extra},
            )
            results.append(
                {
                    "tokens": [],
                    "num_cached_tokens": None,
                    "ttft_s": None,
                    "finish_reason": None,
                    "kv_transfer_params": None,
                }
            )
            running[request_id] = index
            started[request_id] = time.perf_counter()
            self._engine.add_request(
                request_id, prompt, sampling, lora_request=self._adapter(request["lora"])
            )
        steps = 0
        while running:
            for output in self._step():
                if output.request_id not in running:
                    continue
                index = running[output.request_id]
                result, completion = results[index], output.outputs[0]
                if result["ttft_s"] is None and completion.token_ids:
                    result["ttft_s"] = time.perf_counter() - started[output.request_id]
                    result["num_cached_tokens"] = output.num_cached_tokens
                result["tokens"] = list(completion.token_ids)
                zero = requests[index]["zero_kv"]
                if zero is not None and len(result["tokens"]) == 1:
                    self._zero_kv(output.request_id, *zero)
                if output.finished:
                    result["finish_reason"] = completion.finish_reason
                    result["kv_transfer_params"] = output.kv_transfer_params
                    del running[output.request_id]
            steps += 1
            for request_id, index in list(running.items()):
                after = requests[index]["abort_after_steps"]
                if after is not None and steps >= after:
                    self._engine.abort_request([request_id])
                    results[index]["finish_reason"] = "abort"
                    del running[request_id]
        if settle:
            self._settle()
        return results

    def reset_prefix_cache(self, reset_connector: bool) -> bool:
        """Forget the engine's own prefix cache, and the connector's only if wanted."""
        return bool(self._engine.reset_prefix_cache(reset_connector=reset_connector))

    def proposed_drafts(self) -> int:
        """How many tokens a drafter has proposed so far."""
        return self._drafts

    def close(self) -> None:
        """Shut the engine down, its connector included."""
        self._engine.engine_core.shutdown()

    @property
    def _core(self) -> Any:
        client: Any = self._engine.engine_core
        return client.engine_core

    def _adapter(self, folder: str | None) -> LoRARequest | None:
        """The adapter in a folder, the same number each time."""
        if folder is None:
            return None
        number = len(self._adapters) + 1
        return self._adapters.setdefault(folder, LoRARequest(Path(folder).name, number, folder))

    def _count_drafts(self) -> None:
        take = self._core.scheduler.update_draft_token_ids

        def count(proposed: Any) -> None:
            self._drafts += sum(map(len, proposed.draft_token_ids))
            take(proposed)

        self._core.scheduler.update_draft_token_ids = count

    def _step(self) -> list[Any]:
        outputs = self._engine.step()
        if not outputs:
            # As vLLM's core loop does: let transfer threads have the interpreter.
            time.sleep(0.001)
        return outputs

    def _settle(self) -> None:
        """Step on until the engine is idle, as vLLM's core loop does between requests."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while self._core.scheduler.has_requests():
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"the engine still has work {SETTLE_SECONDS:.0f} s after its last answer: "
                    "its connector never reported a transfer as finished"
                )
            self._step()

    def _zero_kv(self, request_id: str, first_token: int, end_token: int) -> None:
        """Zero what the KV cache holds of a running request's tokens [first_token, end_token)."""
        scheduler = self._core.scheduler
        internal = next(name for name in scheduler.requests if name.startswith(request_id))
        runner = self._core.model_executor.driver_worker.worker.model_runner
        groups = scheduler.kv_cache_config.kv_cache_groups
        block_ids = scheduler.kv_cache_manager.get_block_ids(internal)
        layers = runner.compilation_config.static_forward_context
        for group, ids in zip(groups, block_ids, strict=True):
            block_size = group.kv_cache_spec.block_size
            chosen = [b for b in ids[first_token // block_size : end_token // block_size] if b]
            for name in group.layer_names:
                layers[name].kv_cache[chosen] = 0


def main(answers_fd: int) -> NoReturn:
    answers = os.fdopen(answers_fd, "w", buffering=1)

    def answer(value: object) -> None:
        answers.write(json.dumps(value) + "\n")

    status = 1
    try:
        arguments = json.loads(sys.stdin.readline())
        if (preparation := arguments.pop("statekit", None)) is not None:
            statekit.prepare(**preparation)
        runner = Runner(arguments)
        try:
            answer({"pid": os.getpid()})
            for line in sys.stdin:
                command = json.loads(line)
                answer(getattr(runner, command["verb"])(**command["arguments"]))
        finally:
            runner.close()
        status = 0
    except BaseException:
        traceback.print_exc()
    # As the interpreter ends, but without freeing all objects of vLLM and torch first, which takes
    # two seconds.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main(int(sys.argv[1]))

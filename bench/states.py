"""vLLM with models of recurrent state: what one engine stored, another one goes on from.

    python bench/states.py [--models qwen3-next nemotron-h] [--cpu]

For each model, a small one of that shape with made-up weights (statekit.py), on this machine's GPU
or with --cpu on its processor: a first engine answers prompts, and is gone. A second one, which
never saw them, must load each up to its last state, and answer with the same tokens; then once more
after its own cache was emptied. Then many prompts at once, in a cache that is too small for them,
must all be answered. At last the stored states are overwritten with zeros, and the answer must
change. The table comes last. The exit status is 1 if anything is not as it must be.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from enginekit import EngineProcess, Generation, Request
from modelkit import random_prompt
from report import Row, print_report
from serverkit import ServerProcess
from statekit import MODELS, StateModel, make_state_model

from kvdock import Client
from kvdock.keys import chunk_keys
from kvdock.types import GroupKind, Namespace, SessionRole

ASK = {"num_kvdock_extra_cached_tokens": None}
TOKENS = 24
PROMPTS = 4
AT_ONCE = 12

# The kernels of GPUs want heads as large as those of the real models.
ON_GPUS: dict[str, dict[str, Any]] = {
    "qwen3-next": {
        "head_dim": 256,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
    },
    "nemotron-h": {"head_dim": 128, "ssm_state_size": 128, "chunk_size": 128},
    "mamba2": {"state_size": 128, "chunk_size": 128},
    "granite-4": {"mamba_d_state": 128, "mamba_chunk_size": 128},
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["qwen3-next", "nemotron-h"])
    parser.add_argument("--cpu", action="store_true", help="on the processor")
    parser.add_argument("--logs", type=Path, help="a folder for the engines' logs")
    options = parser.parse_args()
    rows: list[Row] = []
    for name in options.models:
        with tempfile.TemporaryDirectory(prefix="kvdock-bench-") as folder:
            logs = options.logs or Path(folder)
            logs.mkdir(parents=True, exist_ok=True)
            rows += check(name, Path(folder), logs, on_cpu=options.cpu)
    return print_report("recurrent state", rows)


def check(name: str, folder: Path, logs: Path, *, on_cpu: bool) -> list[Row]:
    """All of one model."""
    model = MODELS[name]
    if not on_cpu:
        settings = {**model.settings, **ON_GPUS.get(name, {})}
        model = replace(model, settings=settings, dtype="bfloat16", needs_cpu_patch=False)
    path = make_state_model(folder / "model", model)
    with ServerProcess(folder) as server:
        return _Bench(name, model, path, logs, server.address, on_cpu).run()


class _Bench:
    def __init__(
        self, name: str, model: StateModel, path: Path, logs: Path, address: str, on_cpu: bool
    ) -> None:
        self._name = name
        self._model = model
        self._path = path
        self._logs = logs
        self._address = address
        self._more: dict[str, Any] = {} if on_cpu else {"gpu_memory_utilization": 0.3}
        self._rows: list[Row] = []

    def run(self) -> list[Row]:
        with self._engine("first") as first:
            # The blocks that vLLM chooses are known when the namespace is.
            block = self._namespace().chunk_tokens
            prompts = [random_prompt((n + 2) * block + 1, seed=n) for n in range(PROMPTS)]
            cold = [self._ask(first, prompt) for prompt in prompts]
        with self._engine("second") as second:
            warm = [self._ask(second, prompt) for prompt in prompts]
            second.reset_prefix_cache()
            again = [self._ask(second, prompt) for prompt in prompts]
            self._compare("another engine", prompts, cold, warm)
            self._compare("its own cache emptied", prompts, cold, again)
            second.reset_prefix_cache()
            self._zero_states(prompts[-1], block)
            spoiled = self._ask(second, prompts[-1])
            changed = spoiled.tokens != cold[-1].tokens
            whole = loaded(spoiled) == len(prompts[-1]) - 1
            said = "changed" if changed else "the same"
            self._row("the answer after its states were zeroed", said, changed and whole, "changed")
        # Enough for one of the longest, its states, and little more.
        small = 3 * (PROMPTS + 4)
        with self._engine("small", num_gpu_blocks_override=small) as engine:
            many = [random_prompt((n % 4 + 2) * block + 7, seed=100 + n) for n in range(AT_ONCE)]
            answers = engine.generate(*(Request(one, max_tokens=2 * TOKENS) for one in many))
            count = sum(len(answer.tokens) == 2 * TOKENS for answer in answers)
            what = f"answered of {AT_ONCE} at once in {small} blocks"
            self._row(what, str(count), count == AT_ONCE)
        return self._rows

    def _engine(self, role: str, **more: Any) -> EngineProcess:
        settings = {"kvdock.address": self._address, "kvdock.lookup_timeout_ms": 3000}
        arguments = {**self._model.engine_arguments, **self._more, **more}
        log = self._logs / f"{self._name}-{role}.log"
        return EngineProcess(self._path, log=log, kv_connector=settings, timeout_s=300, **arguments)

    def _ask(self, engine: EngineProcess, prompt: Sequence[int]) -> Generation:
        (answer,) = engine.generate(Request(prompt, max_tokens=TOKENS, kv_transfer_params=ASK))
        return answer

    def _compare(
        self,
        what: str,
        prompts: Sequence[Sequence[int]],
        cold: Sequence[Generation],
        warm: Sequence[Generation],
    ) -> None:
        equal = sum(one.tokens == other.tokens for one, other in zip(cold, warm, strict=True))
        self._row(f"{what}: equal answers", f"{equal} of {len(cold)}", equal == len(cold))
        tokens, wanted = sum(map(loaded, warm)), sum(len(prompt) - 1 for prompt in prompts)
        self._row(f"{what}: tokens loaded", f"{tokens} of {wanted}", tokens == wanted)

    def _row(self, what: str, value: str, passed: bool, bound: str = "all") -> None:
        self._rows.append(Row(f"{self._name}: {what}", value, bound=bound, holds=passed))

    def _namespace(self) -> Namespace:
        with Client(self._address) as client:
            (listed,) = client.namespaces()
        return listed.namespace

    def _zero_states(self, prompt: Sequence[int], block: int) -> None:
        """Zeroes the last state of a prompt in the pool."""
        namespace = self._namespace()
        keys = chunk_keys(prompt, block)
        with (
            Client(self._address) as client,
            client.session("a tool", role=SessionRole.TOOL) as session,
        ):
            hit = session.lookup(namespace.name, keys)
            assert hit.lease is not None
            for group in namespace.groups:
                if group.kind is GroupKind.RECURRENT_STATE:
                    (part,) = session.retrieve(
                        hit.lease, hit.chunks - 1, hit.chunks, group_idx=group.group_idx
                    )
                    assert part.location is not None
                    memory = session.pool.view(part.location)
                    memory[:] = bytes(len(memory))
            session.free_locks(hit.lease)


def loaded(answer: Generation) -> int:
    """How many of the prompt's tokens came from KVDock."""
    assert answer.kv_transfer_params is not None
    return int(answer.kv_transfer_params["num_kvdock_extra_cached_tokens"])


if __name__ == "__main__":
    sys.exit(main())

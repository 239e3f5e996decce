"""vLLM with models of several kinds: what one engine stored, another one goes on from.

    python bench/kinds.py [--models llama4 eagle ngram deepseek-v3.2] [--cpu]

Local attention, drafters and sparse latent attention, each a small model with made-up weights
(modelkit.py), on this machine's GPU or with --cpu on its processor. A plain engine answers prompts.
A first engine with KVDock must give the same answers, and is gone. A second one, which never saw
the prompts, must load each and answer the same, and once more after its own cache was emptied. At
last the stored bytes of a chunk are overwritten with zeros, and the answer must change. The table
comes last. The exit status is 1 if anything is not as it must be. DeepSeek V3.2 needs a GPU of
Hopper's kind or later.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from enginekit import EngineProcess, Generation, Request
from modelkit import DeepseekV32, EagleLlama, Llama, Llama4, Shape, make_checkpoint, random_prompt
from report import Row, print_report
from serverkit import ServerProcess

from kvdock import Client
from kvdock.keys import chunk_keys
from kvdock.types import SessionRole

ASK = {"num_kvdock_extra_cached_tokens": None}
CHUNK = 256
TOKENS = 40
# The longest is longer than what DeepSeek V3.2 looks at.
PROMPT_TOKENS = (CHUNK + 9, 5 * CHUNK + 50, 12 * CHUNK + 3)
# Only the n-gram drafter needs tokens that come again.
VOCABULARY = 512


@dataclass(frozen=True)
class Kind:
    """A model, and how its engine is started."""

    shape: Shape
    arguments: Callable[[Path], dict[str, Any]] = lambda folder: {}
    on_gpus: dict[str, Any] = field(default_factory=dict)
    read_ahead: int = 0
    """Tokens before its end at which a hit ends, for the drafter."""


def _eagle(folder: Path) -> dict[str, Any]:
    drafter = make_checkpoint(folder / "drafter", EagleLlama(), seed=1)
    return {
        "speculative_config": {
            "method": "eagle",
            "model": str(drafter),
            "num_speculative_tokens": 3,
        }
    }


def _ngram(folder: Path) -> dict[str, Any]:
    lookup = {"prompt_lookup_min": 1, "prompt_lookup_max": 2}
    return {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, **lookup}}


KINDS = {
    "llama4": Kind(Llama4(piece=3 * CHUNK)),
    "eagle": Kind(Llama(), _eagle, read_ahead=1),
    "ngram": Kind(Llama(), _ngram),
    "deepseek-v3.2": Kind(DeepseekV32(), on_gpus={"dtype": "bfloat16", "block_size": 64}),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--cpu", action="store_true", help="on the processor")
    parser.add_argument("--logs", type=Path, help="a folder for the engines' logs")
    options = parser.parse_args()
    rows: list[Row] = []
    for name in options.models:
        with tempfile.TemporaryDirectory(prefix="kvdock-bench-") as folder:
            logs = options.logs or Path(folder)
            logs.mkdir(parents=True, exist_ok=True)
            rows += check(name, Path(folder), logs, on_cpu=options.cpu)
    return print_report("kinds of models", rows)


def check(name: str, folder: Path, logs: Path, *, on_cpu: bool) -> list[Row]:
    """All of one model."""
    kind = KINDS[name]
    model = make_checkpoint(folder / "model", kind.shape)
    arguments = kind.arguments(folder)
    if not on_cpu:
        arguments |= {"gpu_memory_utilization": 0.3, **kind.on_gpus}
    rows: list[Row] = []

    def row(what: str, value: str, holds: bool, bound: str) -> None:
        rows.append(Row(f"{name}: {what}", value, bound=bound, holds=holds))

    def same(what: str, answers: Sequence[Generation]) -> None:
        equal = sum(a.tokens == b.tokens for a, b in zip(plain, answers, strict=True))
        row(f"{what}: equal answers", f"{equal} of {len(plain)}", equal == len(plain), "all")

    def hits(what: str, answers: Sequence[Generation]) -> None:
        found = [loaded(answer) for answer in answers]
        wanted = [count // CHUNK * CHUNK - kind.read_ahead for count in PROMPT_TOKENS]
        row(f"{what}: tokens loaded", f"{sum(found)} of {sum(wanted)}", found == wanted, "all")

    with ServerProcess(folder, chunk_tokens=CHUNK) as server:

        def engine(role: str, *, with_kvdock: bool = True) -> EngineProcess:
            settings = {"kvdock.address": server.address, "kvdock.lookup_timeout_ms": 3000}
            return EngineProcess(
                model,
                log=logs / f"{name}-{role}.log",
                kv_connector=settings if with_kvdock else None,
                timeout_s=300,
                **arguments,
            )

        prompts = [random_prompt(count, seed=count, vocab=VOCABULARY) for count in PROMPT_TOKENS]
        with engine("plain", with_kvdock=False) as process:
            plain = [ask(process, prompt, with_kvdock=False) for prompt in prompts]
        with engine("first") as process:
            same("an engine that stores", [ask(process, prompt) for prompt in prompts])
        with engine("second") as process:
            for what in ("another engine", "its own cache emptied"):
                answers = [ask(process, prompt) for prompt in prompts]
                same(what, answers)
                hits(what, answers)
                process.reset_prefix_cache()
            zero_last_chunk(server.address, prompts[1])
            changed = ask(process, prompts[1]).tokens != plain[1].tokens
            said = "changed" if changed else "the same"
            row("the answer after a chunk was zeroed", said, changed, "changed")
    return rows


def ask(engine: EngineProcess, prompt: Sequence[int], *, with_kvdock: bool = True) -> Generation:
    params = ASK if with_kvdock else None
    (answer,) = engine.generate(Request(prompt, max_tokens=TOKENS, kv_transfer_params=params))
    return answer


def zero_last_chunk(address: str, prompt: Sequence[int]) -> None:
    """Zeroes what the pool has of a prompt's last whole chunk."""
    keys = chunk_keys(prompt, CHUNK)
    with Client(address) as client, client.session("a tool", role=SessionRole.TOOL) as session:
        (listed,) = client.namespaces()
        hit = session.lookup(listed.namespace.name, keys)
        assert hit.lease is not None
        for group in listed.namespace.groups:
            parts = session.retrieve(
                hit.lease, hit.chunks - 1, hit.chunks, group_idx=group.group_idx
            )
            for part in parts:
                if part.location is not None:
                    memory = session.pool.view(part.location)
                    memory[:] = bytes(len(memory))
        session.free_locks(hit.lease)


def loaded(answer: Generation) -> int:
    """How many of the prompt's tokens came from KVDock."""
    assert answer.kv_transfer_params is not None
    return int(answer.kv_transfer_params["num_kvdock_extra_cached_tokens"])


if __name__ == "__main__":
    sys.exit(main())

"""Real vLLM on two devices, for three models: one engine stores, and the next one loads.

    python bench/tensor_parallel.py [--models mla gqa hybrid]

Latent attention (DeepSeek-V2-shaped), grouped-query attention (Llama) and sliding windows beside
full attention (Gemma 3), each with two tensor-parallel ranks and a server of its own. Weights are
random, scaled so that the cache decides the answer (modelkit.py). A first engine answers some
prompts and exits. A second one, as new, gets each prompt with the first token of its answer, loads
the prompt from KVDock, and must go on with the same tokens. Then the last chunk of one prompt is
zeroed in the server, and the answer must be another.

Prompts are whole scheduling steps and chunks. So both engines compute the answer's first token
alone, over the same cached tokens, computed or loaded. The kernels and shapes are the same;
otherwise rounding might choose another token. The server's counters tell what was stored and
copied. Under latent attention both ranks hold the same cache: one of them must have stored, and one
copy from the host must have served both (on GPUs; on a CPU each rank copies by itself).

Models run side by side where there are devices for them. Prints a table; exit status 1 if a row
does not hold. It also runs on a CPU, with vLLM's build for CPUs.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from enginekit import EngineError, EngineProcess, Generation, Request
from modelkit import DeepseekV2, Gemma3, Llama, Shape, make_checkpoint, random_prompt
from report import Row, print_report
from serverkit import ServerError, ServerProcess

from kvdock import Client, KVDockError, TransferMode
from kvdock.keys import chunk_keys
from kvdock.types import Namespace
from kvdock.v1 import admin_pb2

RANKS = 2
CHUNK_TOKENS = 256
STEP_TOKENS = 2048
PROMPT_TOKENS = (STEP_TOKENS, 2 * STEP_TOKENS, 2 * STEP_TOKENS)
OUTPUT_TOKENS = 24
DAMAGED_PROMPT = 1
START_SECONDS = 180.0
RESET_SECONDS = 10.0
CACHED_TOKENS = "num_kvdock_extra_cached_tokens"


@dataclass(frozen=True)
class Model:
    """One model and what its engine needs."""

    title: str
    shape: Shape
    gpu: dict[str, Any] = field(default_factory=dict)
    cpu: dict[str, Any] = field(default_factory=dict)
    """Arguments of vLLM's EngineArgs."""
    is_latent: bool = False
    is_hybrid: bool = False


MODELS = {
    "mla": Model(
        "DeepSeek-V2-shaped, latent attention",
        DeepseekV2(
            layers=6, hidden=1024, heads=16, qk_nope_head_dim=128, v_head_dim=128, intermediate=2048
        ),
        gpu={"block_size": 64},
        cpu={"block_size": 16},
        is_latent=True,
    ),
    "gqa": Model(
        "Llama-shaped, grouped queries",
        Llama(layers=6, hidden=1024, heads=8, kv_heads=4, head_dim=128, intermediate=2048),
        gpu={"block_size": 16},
    ),
    "hybrid": Model(
        "Gemma-3-shaped, sliding windows",
        Gemma3(layers=6, hidden=1024, heads=8, kv_heads=4, head_dim=128, intermediate=2048),
        gpu={"block_size": 16},
        is_hybrid=True,
    ),
}

ON_GPU = torch.cuda.is_available()
GPU_ARGUMENTS: dict[str, Any] = {"dtype": "bfloat16", "gpu_memory_utilization": 0.15}


@dataclass(frozen=True)
class Run:
    """Figures of one model's two engine starts."""

    modes: list[str]
    namespace: Namespace
    cold: list[Generation]
    warm: list[Generation]
    control: Generation
    stored: admin_pb2.Counters
    """Of the first start."""
    loaded: admin_pb2.Counters
    """Of the second start, up to the last prompt's answer."""
    seconds: float


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    names: list[str] = parser.parse_args().models
    devices: SimpleQueue[str] = SimpleQueue()
    pairs = max(1, torch.cuda.device_count() // RANKS)
    for pair in range(pairs):
        devices.put(",".join(str(RANKS * pair + rank) for rank in range(RANKS)))
    with tempfile.TemporaryDirectory(prefix="kvdock-bench-") as folder:

        def rows_of(name: str) -> list[Row]:
            mine = devices.get()
            try:
                return measure(MODELS[name], Path(folder) / name, mine)
            finally:
                devices.put(mine)

        with ThreadPoolExecutor(pairs) as threads:
            rows = [row for some in threads.map(rows_of, names) for row in some]
    where = f"{RANKS} of {torch.cuda.get_device_name()}" if ON_GPU else "a CPU"
    return print_report(f"engine starts cold and warm, {RANKS} ranks on {where}", rows)


def measure(model: Model, folder: Path, devices: str) -> list[Row]:
    """The rows of one model. If the model cannot be run, a single row says so."""
    folder.mkdir()
    try:
        return rows(model, run(model, folder, devices))
    except (EngineError, ServerError, KVDockError, RuntimeError) as error:
        print(f"{model.title}: {error}", file=sys.stderr)
        for log in sorted(folder.glob("*.log")):
            for line in log.read_text(errors="replace").splitlines():
                if "KVDock" in line or log.name == "server.log":
                    print(f"{model.title}: {log.name}: {line}", file=sys.stderr)
        what = str(error).splitlines()[0]
        return [Row(f"{model.title}: FAILED", what[:60], bound="runs", holds=False)]


def run(model: Model, folder: Path, devices: str) -> Run:
    """Start a server and, one after the other, two engines."""
    began = time.monotonic()
    checkpoint = make_checkpoint(folder / "model", model.shape)
    prompts = [random_prompt(n, seed=n + i) for i, n in enumerate(PROMPT_TOKENS)]
    with (
        ServerProcess(folder, memory="1GiB", chunk_tokens=CHUNK_TOKENS) as server,
        Client(server.address, timeout=30) as client,
    ):
        with engine(model, checkpoint, folder / "first.log", server.address, devices) as first:
            cold = ask(first, prompts, OUTPUT_TOKENS + 1)
        longer = [
            [*prompt, *generation.tokens[:1]]
            for prompt, generation in zip(prompts, cold, strict=True)
        ]
        stored = client.status().counters
        with engine(model, checkpoint, folder / "second.log", server.address, devices) as second:
            warm = ask(second, longer, OUTPUT_TOKENS)
            status = client.status()
            (known,) = client.namespaces()
            zero_last_chunk(server.address, known.namespace, prompts[DAMAGED_PROMPT])
            reset_prefix_cache(second)
            (control,) = ask(second, [longer[DAMAGED_PROMPT]], OUTPUT_TOKENS)
        modes = [TransferMode(session.mode).name for session in status.sessions
                 if session.engine_id and session.role == 2]  # fmt: skip
        return Run(
            modes,
            known.namespace,
            cold,
            warm,
            control,
            stored,
            difference(status.counters, stored),
            time.monotonic() - began,
        )


@contextmanager
def engine(
    model: Model, checkpoint: Path, log: Path, address: str, devices: str
) -> Iterator[EngineProcess]:
    """A new engine, shut down in order at the end. EngineError if its exit status is not 0."""
    environment = (
        {"CUDA_VISIBLE_DEVICES": devices}
        if ON_GPU
        else {"VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, range(RANKS)))}
    )
    arguments = {**GPU_ARGUMENTS, **model.gpu} if ON_GPU else model.cpu
    with EngineProcess(
        checkpoint,
        log=log,
        environment=environment,
        timeout_s=START_SECONDS,
        **{
            "tensor_parallel_size": RANKS,
            "max_model_len": max(PROMPT_TOKENS) + OUTPUT_TOKENS + 2,
            "max_num_batched_tokens": STEP_TOKENS,
            "kv_transfer_config": {
                "kv_connector": "KVDockConnector",
                "kv_connector_module_path": "kvdock_vllm.connector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"kvdock.address": address},
            },
            **arguments,
        },
    ) as process:
        yield process
        if (status := process.close()) != 0:
            raise EngineError(f"the engine exited with status {status}")


def ask(process: EngineProcess, prompts: Sequence[Sequence[int]], tokens: int) -> list[Generation]:
    """Answers of ``tokens`` tokens to prompts, one after the other."""
    return [
        generation
        for prompt in prompts
        for generation in process.generate(
            Request(prompt, tokens, kv_transfer_params={CACHED_TOKENS: None})
        )
    ]


def reset_prefix_cache(process: EngineProcess) -> None:
    """Reset it as soon as the engine allows it: a transfer that holds blocks forbids it."""
    deadline = time.monotonic() + RESET_SECONDS
    while not process.reset_prefix_cache():
        if time.monotonic() > deadline:
            raise EngineError("the engine does not reset its prefix cache")
        time.sleep(0.1)


def zero_last_chunk(address: str, namespace: Namespace, prompt: Sequence[int]) -> None:
    """Zero what all shards and groups hold of a prompt's last full chunk."""
    keys = chunk_keys(prompt, CHUNK_TOKENS)
    last = len(keys) - 1
    with Client(address) as client, client.session() as session:
        hit = session.lookup(namespace.name, keys)
        if hit.lease is None or hit.chunks != len(keys):
            raise RuntimeError(f"{hit.chunks} of {len(keys)} chunks are cached after the answers")
        for group in hit.groups:
            for shard in range(namespace.kv_world_size):
                (found,) = session.retrieve(
                    hit.lease, last, last + 1, group_idx=group.group_idx, kv_worker_id=shard
                )
                if found.location is None:
                    raise RuntimeError(f"chunk {last} cannot be had: {found.status.name}")
                view = session.pool.view(found.location)
                view[:] = bytes(len(view))
        session.free_locks(hit.lease)


def difference(now: admin_pb2.Counters, before: admin_pb2.Counters) -> admin_pb2.Counters:
    return admin_pb2.Counters(
        **{
            descriptor.name: getattr(now, descriptor.name) - getattr(before, descriptor.name)
            for descriptor in admin_pb2.Counters.DESCRIPTOR.fields
        }
    )


def rows(model: Model, run: Run) -> list[Row]:
    """The table's rows about a model."""
    wanted = list(PROMPT_TOKENS)
    chunks = sum(wanted) // CHUNK_TOKENS
    hits = [hit_tokens(generation) for generation in run.warm]
    # Without latent attention each rank holds a part of every chunk.
    shards = 1 if model.is_latent else RANKS
    equal = [warm.tokens == cold.tokens[1:] for warm, cold in zip(run.warm, run.cold, strict=True)]
    control = run.control.tokens != run.warm[DAMAGED_PROMPT].tokens
    title = model.title
    table = [
        Row(
            f"{title}: first start, then second ({run.seconds:.0f} s)",
            f"{milliseconds(run.cold)} / {milliseconds(run.warm)}",
        ),
        Row(
            f"{title}: tokens from KVDock, second start",
            f"{sum(hits):,}",
            bound=f"{sum(wanted):,}",
            holds=hits == wanted and not any(map(hit_tokens, run.cold)),
        ),
        Row(
            f"{title}: greedy tokens as the first start's",
            f"{sum(equal)} of {len(equal)}",
            bound="all",
            holds=all(equal),
        ),
        Row(
            f"{title}: with a chunk zeroed, {hit_tokens(run.control):,} tokens from KVDock",
            "another answer" if control else "the same answer",
            bound="another",
            holds=control and hit_tokens(run.control) == wanted[DAMAGED_PROMPT],
        ),
    ]
    per_chunk = run.stored.stored_shards / chunks
    hit_bytes = chunks * sum(
        sum(spread(group.shard_bytes, run.namespace.kv_world_size))
        for group in run.namespace.groups
    )
    # A sliding window's group stores and loads only the end of a prompt.
    at_most = "<= " if model.is_hybrid else ""
    groups = len(run.namespace.groups)
    table.append(
        Row(
            f"{title}: shards stored a chunk, by {RANKS} ranks",
            f"{per_chunk:.2f}",
            bound=f"{at_most}{shards * groups}",
            holds=per_chunk <= shards * groups if model.is_hybrid else per_chunk == shards,
        )
    )
    modes = ", ".join(sorted(set(run.modes)))
    loaded = run.loaded.host_to_device_bytes / hit_bytes
    passed_on = run.loaded.device_to_device_bytes / hit_bytes
    if modes != "SERVER":
        return [*table, Row(f"{title}: copied by the workers, in {modes} mode", "")]
    table += [
        Row(
            f"{title}: bytes from the host over those hit, second start",
            f"{loaded:.2f}",
            bound=f"{at_most}1",
            holds=0 < loaded <= 1 if model.is_hybrid else loaded == 1,
        ),
        Row(
            f"{title}: bytes from device to device over those hit, second start",
            f"{passed_on:.2f}",
            bound=f"{RANKS - 1 if model.is_latent else 0}",
            holds=passed_on == (RANKS - 1 if model.is_latent else 0),
        ),
    ]
    return table


def spread(shard_bytes: Sequence[int], shards: int) -> Sequence[int]:
    """Bytes of each shard. A single number stands for all shards."""
    return shard_bytes if len(shard_bytes) == shards else list(shard_bytes) * shards


def milliseconds(generations: Sequence[Generation]) -> str:
    """Time to the first token of each."""
    return ", ".join(f"{(generation.ttft_s or 0) * 1e3:.0f}" for generation in generations) + " ms"


def hit_tokens(generation: Generation) -> int:
    """Tokens that came from KVDock, as the connector reports them with the response."""
    return int((generation.kv_transfer_params or {}).get(CACHED_TOKENS) or 0)


if __name__ == "__main__":
    sys.exit(main())

"""Real vLLM with several ranks, and with adapters: each gets its own bytes back, in a new process.

The first engine computes every prompt, the second loads them all. Then bytes are exchanged in the
server, between ranks where each has its own: other tokens show that the place of bytes matters.

On CPUs vLLM answers a prompt of an MLA model differently alone and in a batch, and a token
differently as the end of a prompt and as a generated one (so that such models are cached only where
kvdock.mla_on_cpu asks for it: test_mla_on_cpu.py); and one without adapter, in a batch with
others that have one, as if it had theirs. So prompts are run one by one, and what is compared are
generated tokens: the second engine's prompt has the first one's first answer at its end, which is
all that it has to compute before it goes on in the same way.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from enginekit import EngineProcess, Generation, Request
from modelkit import DeepseekV2, Llama, Shape, make_adapter, make_checkpoint, random_prompt
from servers import ServerProcess
from tests.e2e.engines import start_engine

from kvdock import Client
from kvdock.keys import chunk_keys
from kvdock.types import SessionRole
from kvdock.v1 import admin_pb2

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

CHUNK = 256
CHUNKS = 3
PROMPTS = [random_prompt(CHUNKS * CHUNK, seed=seed) for seed in (1, 2)]
ASK = {"num_kvdock_extra_cached_tokens": None}


@dataclass(frozen=True)
class Case:
    """A model on two ranks."""

    shape: Shape
    shards: int
    """Ranks that hold different bytes."""
    arguments: dict[str, Any] = field(default_factory=dict)


TENSOR = {"tensor_parallel_size": 2}
# On CPUs vLLM prepares what stages pass on only where it warms up for a compilation.
PIPELINE = {
    "pipeline_parallel_size": 2,
    "distributed_executor_backend": "mp",
    "enforce_eager": False,
    "compilation_config": {"mode": 2, "backend": "eager"},
}
CASES = {
    "GQA, 2 tensor-parallel ranks": Case(Llama(), 2, TENSOR),
    "MLA, 2 tensor-parallel ranks": Case(DeepseekV2(), 1, {**TENSOR, "block_size": 16}),
    "GQA, 2 pipeline stages": Case(Llama(), 2, PIPELINE),
}


@pytest.fixture
def server() -> Iterator[ServerProcess]:
    # Not pytest's folders: a socket's path must be short.
    with tempfile.TemporaryDirectory(prefix="kvdock-test-") as folder:
        process = ServerProcess(
            Path(folder) / "s.sock", "--memory", "64MiB", "--chunk-tokens", str(CHUNK)
        )
        yield process
        process.stop()


def engine_at(server: ServerProcess, model: Path, log: Path, **arguments: Any) -> EngineProcess:
    settings = {
        "kvdock.address": server.address,
        "kvdock.lookup_timeout_ms": 3000,
        "kvdock.mla_on_cpu": True,
    }
    return start_engine(model, log=log, kv_connector=settings, **arguments)


def ask(prompt: list[int], **arguments: Any) -> Request:
    return Request(prompt, kv_transfer_params=ASK, **arguments)


def one_by_one(engine: EngineProcess, requests: Iterable[Request]) -> list[Generation]:
    return [answer for request in requests for answer in engine.generate(request)]


def extra(answer: Generation) -> int:
    assert answer.kv_transfer_params is not None
    return int(answer.kv_transfer_params["num_kvdock_extra_cached_tokens"])


def counters(server: ServerProcess) -> admin_pb2.Counters:
    with Client(server.address) as client:
        return client.status().counters


def exchange(server: ServerProcess, shards: int) -> None:
    """Exchange what two ranks hold of a chunk of the first prompt; or, if all ranks hold the same,
    that chunk and the second prompt's. (Within a prompt the order of keys and values is nothing to
    attention.)
    """
    other = (1, 0) if shards == 1 else (0, 1)
    with Client(server.address) as client, contextlib.ExitStack() as stack:
        (listed,) = client.namespaces()
        session = stack.enter_context(client.session("a tool", role=SessionRole.TOOL))
        views = []
        for prompt, shard in ((0, 0), other):
            keys = chunk_keys(PROMPTS[prompt], CHUNK)
            hit = session.lookup(listed.namespace.name, keys)
            assert hit.lease is not None
            (found,) = session.retrieve(hit.lease, 1, 2, kv_worker_id=shard)
            assert found.location is not None
            views.append(session.pool.view(found.location))
        one, two = (bytes(view) for view in views)
        assert one != two
        views[0][:], views[1][:] = two, one


@pytest.mark.parametrize("name", CASES)
def test_each_rank_gets_its_own_bytes_back(
    server: ServerProcess, tmp_path: Path, name: str
) -> None:
    case = CASES[name]
    model = make_checkpoint(tmp_path / "model", case.shape)
    arguments = {"environment": {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}, **case.arguments}
    with engine_at(server, model, tmp_path / "cold.log", **arguments) as engine:
        cold = one_by_one(engine, map(ask, PROMPTS))
    assert [extra(answer) for answer in cold] == [0, 0]
    chunks = CHUNKS * len(PROMPTS)
    stored = counters(server).stored_shards
    assert stored == chunks * case.shards, "each rank stores what only it has"

    longer = [
        ask(prompt + answer.tokens[:1], max_tokens=15)
        for prompt, answer in zip(PROMPTS, cold, strict=True)
    ]
    with engine_at(server, model, tmp_path / "warm.log", **arguments) as engine:
        warm = one_by_one(engine, longer)
        assert [answer.tokens for answer in warm] == [answer.tokens[1:] for answer in cold]
        assert [extra(answer) for answer in warm] == [CHUNKS * CHUNK] * len(PROMPTS)
        now = counters(server)
        assert now.stored_shards == stored, "nothing is stored twice"
        assert now.retrieved_shards == chunks * 2, "each rank loads"

        exchange(server, case.shards)
        assert engine.reset_prefix_cache()
        (wrong,) = engine.generate(longer[0])
        assert extra(wrong) == CHUNKS * CHUNK
        assert wrong.tokens != warm[0].tokens


def test_two_adapters_and_their_base_share_nothing(server: ServerProcess, tmp_path: Path) -> None:
    shape = Llama()
    model = make_checkpoint(tmp_path / "model", shape)
    adapters = [make_adapter(tmp_path / name, shape, seed=n) for n, name in ((1, "a"), (2, "b"))]
    prompt = PROMPTS[0]
    requests = [ask(prompt), *(ask(prompt, lora=str(folder)) for folder in adapters)]
    arguments = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    with engine_at(server, model, tmp_path / "cold.log", **arguments) as engine:
        cold = []
        for request in requests:
            # One after another, so that those before are stored when the next is looked up.
            cold += engine.generate(request)
            assert engine.reset_prefix_cache()
    assert [extra(answer) for answer in cold] == [0, 0, 0]
    assert counters(server).stored_shards == 3 * CHUNKS
    # Bytes of another would be seen.
    assert len({tuple(answer.tokens) for answer in cold}) == 3

    with engine_at(server, model, tmp_path / "warm.log", **arguments) as engine:
        warm = one_by_one(engine, reversed(requests))[::-1]
    assert [answer.tokens for answer in warm] == [answer.tokens for answer in cold]
    assert [extra(answer) for answer in warm] == [CHUNKS * CHUNK] * 3

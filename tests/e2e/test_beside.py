"""Real vLLM with KVDock beside vLLM's ExampleConnector, in both orders: the same tokens.

An engine that finds nothing anywhere answers all prompts first. What it answers then is what every
engine must answer later, whichever connector loads. Both connectors' bytes are changed in the end,
and that is seen.

ExampleConnector finds only whole prompts, in files. So a prompt that goes on differently after a
common beginning is KVDock's to load in either order.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from enginekit import EngineProcess, Generation, Request
from modelkit import Llama, make_checkpoint, random_prompt
from servers import ServerProcess
from tests.e2e.engines import start_engine

from kvdock import Client
from kvdock.keys import chunk_keys
from kvdock.types import SessionRole

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

CHUNK = 256
BLOCK = 32
ASK = {"num_kvdock_extra_cached_tokens": None}
PROMPTS = [random_prompt(tokens, seed=tokens) for tokens in (3 * CHUNK + 40, 5 * CHUNK + 7)]
# They leave the first prompt after two chunks.
TURNS = [PROMPTS[0][: 2 * CHUNK] + random_prompt(300, seed=n) for n in (1, 2)]
ALL = [*PROMPTS, *TURNS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("beside")


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    return make_checkpoint(folder / "model", Llama())


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with tempfile.TemporaryDirectory(prefix="kvdock-test-") as name:
        process = ServerProcess(
            Path(name) / "s.sock", "--memory", "128MiB", "--chunk-tokens", str(CHUNK)
        )
        try:
            yield process
        finally:
            process.stop()


def engine_at(
    server: ServerProcess, model: Path, folder: Path, *, kvdock_first: bool
) -> EngineProcess:
    ours = {
        "kv_connector": "KVDockConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "kvdock.address": server.address,
            "kvdock.lookup_timeout_ms": 3000,
        },
    }
    theirs = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(folder / "files")},
    }
    several: dict[str, Any] = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "connectors": [ours, theirs] if kvdock_first else [theirs, ours]
        },
    }
    # A prompt must be computed in one step: ExampleConnector stores no more than a first step.
    return start_engine(
        model,
        log=folder / f"{'kvdock' if kvdock_first else 'example'}-first.log",
        kv_transfer_config=several,
        max_num_batched_tokens=4096,
    )


def ask(engine: EngineProcess, prompts: Sequence[Sequence[int]]) -> list[Generation]:
    """One after the other, each with nothing in the engine's own prefix cache."""
    answers = []
    for prompt in prompts:
        assert engine.reset_prefix_cache()
        answers += engine.generate(Request(prompt, kv_transfer_params=ASK))
    return answers


def tokens(answers: Sequence[Generation]) -> list[list[int]]:
    return [answer.tokens for answer in answers]


def loaded(answer: Generation) -> int:
    """Tokens that KVDock loaded."""
    assert answer.kv_transfer_params is not None
    return int(answer.kv_transfer_params["num_kvdock_extra_cached_tokens"])


def spoil(server: ServerProcess, prompt: Sequence[int]) -> None:
    """Zeroes one chunk of a prompt in KVDock's pool."""
    keys = chunk_keys(prompt, CHUNK)
    with Client(server.address) as client:
        (listed,) = client.namespaces()
        with client.session("a tool", role=SessionRole.TOOL) as session:
            hit = session.lookup(listed.namespace.name, keys)
            assert hit.lease is not None
            (chunk,) = session.retrieve(hit.lease, 1, 2)
            assert chunk.location is not None
            memory = session.pool.view(chunk.location)
            memory[:] = bytes(len(memory))
            session.free_locks(hit.lease)


@pytest.fixture(scope="module")
def example_first(server: ServerProcess, model: Path, folder: Path) -> Iterator[EngineProcess]:
    with engine_at(server, model, folder, kvdock_first=False) as engine:
        yield engine


@pytest.fixture(scope="module")
def cold(example_first: EngineProcess) -> list[list[int]]:
    """What is answered when nothing is cached anywhere."""
    # Beginnings first, so that none is there when a prompt needs it.
    prompts = [PROMPTS[1], TURNS[0]]
    answers = ask(example_first, prompts)
    assert [(loaded(answer), answer.num_cached_tokens) for answer in answers] == [(0, 0)] * 2
    salted = []
    for prompt in (PROMPTS[0], TURNS[1]):
        assert example_first.reset_prefix_cache()
        # KVDock has the beginning of these, but not for this tenant.
        salted += example_first.generate(
            Request(prompt, kv_transfer_params=ASK, cache_salt=f"tenant {len(salted)}")
        )
    assert [(loaded(answer), answer.num_cached_tokens) for answer in salted] == [(0, 0)] * 2
    return tokens([salted[0], answers[0], answers[1], salted[1]])


@pytest.fixture(scope="module")
def loaded_by_example(example_first: EngineProcess, cold: list[list[int]]) -> list[Generation]:
    """ExampleConnector has loaded all prompts, and KVDock stored them."""
    return ask(example_first, ALL)


def test_the_example_first_loads_whole_prompts_and_kvdock_the_others(
    example_first: EngineProcess, cold: list[list[int]], loaded_by_example: list[Generation]
) -> None:
    answers = loaded_by_example
    assert tokens(answers) == cold
    aligned = [(len(prompt) - 2) // BLOCK * BLOCK for prompt in ALL]
    assert [answer.num_cached_tokens for answer in answers] == aligned
    assert [loaded(answer) for answer in answers] == [0] * 4
    more = PROMPTS[1] + random_prompt(50, seed=9)
    (answer,) = ask(example_first, [more])
    assert loaded(answer) == answer.num_cached_tokens == 5 * CHUNK


@pytest.mark.usefixtures("loaded_by_example")
def test_kvdock_first_loads_all_that_it_has(
    server: ServerProcess, model: Path, folder: Path, cold: list[list[int]]
) -> None:
    with engine_at(server, model, folder, kvdock_first=True) as engine:
        answers = ask(engine, ALL)
        assert tokens(answers) == cold
        whole = [len(prompt) // CHUNK * CHUNK for prompt in ALL]
        # Of the prompts that were asked for with a salt it has what the others share with them, and
        # what it stored when ExampleConnector had loaded them.
        assert [loaded(answer) for answer in answers] == whole
        several = engine.generate(*(Request(prompt, kv_transfer_params=ASK) for prompt in ALL))
        assert tokens(several) == cold
        assert engine.log_text.count("kvdock.load_failure_policy is recompute") == 1
        assert "has not been run beside" not in engine.log_text
        spoil(server, PROMPTS[0])
        (spoiled,) = ask(engine, PROMPTS[:1])
        assert loaded(spoiled) == whole[0]
        assert spoiled.tokens != cold[0]
        with Client(server.address) as client:
            client.clear(all=True)
        # Now ExampleConnector loads, behind KVDock.
        answers = ask(engine, ALL)
        assert tokens(answers) == cold
        assert loaded(answers[0]) == 0
        assert all(answer.num_cached_tokens for answer in answers)


def test_changed_files_change_the_tokens(
    example_first: EngineProcess, folder: Path, cold: list[list[int]]
) -> None:
    for file in (folder / "files").rglob("*.safetensors"):
        held = safetensors.torch.load_file(file)
        safetensors.torch.save_file(
            {name: torch.zeros_like(tensor) for name, tensor in held.items()}, file
        )
    assert tokens(ask(example_first, PROMPTS)) != cold[:2]

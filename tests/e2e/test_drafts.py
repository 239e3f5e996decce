"""Real vLLM with speculative decoding: the same tokens, and hits of what was generated.

What every engine must answer is what a plain one without connector and drafter answers. The model
is random, so nearly all drafts are rejected: were their KV stored, a hit would change the answer.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from enginekit import EngineProcess, Request
from modelkit import EagleLlama, Glm4Moe, Llama, Shape, make_checkpoint, random_prompt
from servers import ServerProcess
from tests.e2e.engines import start_engine
from tests.e2e.test_hybrid import ask, extra

from kvdock import Client
from kvdock.keys import chunk_keys
from kvdock.types import SessionRole

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

CHUNK = 64
DRAFTS = 3
GENERATED = 4 * CHUNK
long_test = pytest.mark.skipif(
    "KVDOCK_LONG_TESTS" not in os.environ, reason="takes a minute: set KVDOCK_LONG_TESTS"
)

# The drafter of n-grams looks for the last token in the prompt.
BASE = random_prompt(5 * CHUNK + 9, seed=1, vocab=64)
OTHER = BASE[: 3 * CHUNK] + random_prompt(2 * CHUNK, seed=2, vocab=64)

METHODS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 2},
    "eagle": {"method": "eagle"},
    "mtp": {"method": "mtp"},
}


@pytest.fixture(
    scope="module",
    params=["ngram", *(pytest.param(name, marks=long_test) for name in ("eagle", "mtp"))],
)
def method(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, method: str) -> Path:
    return tmp_path_factory.mktemp(method)


@pytest.fixture(scope="module")
def model(folder: Path, method: str) -> Path:
    shape: Shape = Glm4Moe() if method == "mtp" else Llama()
    return make_checkpoint(folder / "model", shape)


@pytest.fixture(scope="module")
def plain(model: Path, folder: Path) -> Callable[[Sequence[int], int], list[int]]:
    """The tokens that an engine without connector and drafter answers."""
    prompts = [BASE, OTHER]
    with start_engine(model, log=folder / "plain.log") as engine:
        answers = engine.generate(*(Request(prompt, max_tokens=GENERATED) for prompt in prompts))
    known = {tuple(p): a.tokens for p, a in zip(prompts, answers, strict=True)}
    return lambda prompt, count: known[tuple(prompt)][:count]


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerProcess]:
    # One for each drafter. Not in its folder: a socket's path must be short.
    with tempfile.TemporaryDirectory(prefix="kvdock-test-") as short:
        process = ServerProcess(
            Path(short) / "s.sock", "--memory", "128MiB", "--chunk-tokens", str(CHUNK)
        )
        try:
            yield process
        finally:
            process.stop()


@pytest.fixture(scope="module")
def engine(
    model: Path, folder: Path, server: ServerProcess, plain: Any, method: str
) -> Iterator[EngineProcess]:
    """A second engine. A first one has answered BASE and is gone."""
    drafter = {**METHODS[method], "num_speculative_tokens": DRAFTS}
    if method == "eagle":
        drafter["model"] = str(make_checkpoint(folder / "drafter", EagleLlama(), seed=1))
    settings = {"kvdock.address": server.address, "kvdock.lookup_timeout_ms": 3000}
    with contextlib.ExitStack() as stack:

        def start(name: str) -> EngineProcess:
            process = start_engine(
                model,
                log=folder / f"{name}.log",
                kv_connector=settings,
                speculative_config=drafter,
            )
            return stack.enter_context(process)

        first = start("first")
        (answer,) = first.generate(ask(BASE, max_tokens=GENERATED))
        assert answer.tokens == plain(BASE, GENERATED)
        assert first.proposed_drafts() > CHUNK
        assert first.close() == 0
        yield start("second")


def hit_tokens(method: str, tokens: int) -> int:
    """Of a hit the last token is computed again for a drafter's layer."""
    return tokens // CHUNK * CHUNK - (method != "ngram")


def test_the_second_engine_hits_what_the_first_stored(
    engine: EngineProcess, plain: Any, method: str
) -> None:
    (answer,) = engine.generate(ask(BASE, max_tokens=GENERATED))
    assert answer.tokens == plain(BASE, GENERATED)
    assert extra(answer) == hit_tokens(method, len(BASE))


@pytest.mark.parametrize("generated", [CHUNK - 9, 2 * CHUNK + 20, 3 * CHUNK + 30])
def test_what_was_generated_beside_rejected_drafts_is_a_hit(
    engine: EngineProcess, plain: Any, method: str, generated: int
) -> None:
    assert engine.reset_prefix_cache()
    answers = plain(BASE, GENERATED)
    (answer,) = engine.generate(ask(BASE + answers[:generated], max_tokens=CHUNK - 30))
    assert answer.tokens == answers[generated : generated + CHUNK - 30]
    assert extra(answer) == hit_tokens(method, len(BASE) + generated)


def test_a_prefix_hit_that_continues_differently(
    engine: EngineProcess, plain: Any, method: str
) -> None:
    assert engine.reset_prefix_cache()
    (answer,) = engine.generate(ask(OTHER, max_tokens=CHUNK))
    assert answer.tokens == plain(OTHER, CHUNK)
    assert extra(answer) == hit_tokens(method, 3 * CHUNK)


def test_changed_bytes_change_the_tokens(
    engine: EngineProcess, server: ServerProcess, plain: Any, method: str
) -> None:
    # This comes last, since it spoils the cache: a chunk of generated tokens.
    assert engine.reset_prefix_cache()
    whole = BASE + plain(BASE, GENERATED)[: 3 * CHUNK]
    chunk = len(whole) // CHUNK - 1
    with Client(server.address) as client:
        (listed,) = client.namespaces()
        keys = chunk_keys(whole, CHUNK)
        with client.session("a tool", role=SessionRole.TOOL) as session:
            hit = session.lookup(listed.namespace.name, keys)
            assert hit.chunks == chunk + 1
            assert hit.lease is not None
            (part,) = session.retrieve(hit.lease, chunk, chunk + 1)
            assert part.location is not None
            memory = session.pool.view(part.location)
            memory[:] = bytes(len(memory))
            session.free_locks(hit.lease)
    (answer,) = engine.generate(ask(whole, max_tokens=CHUNK))
    assert extra(answer) == hit_tokens(method, len(whole))
    assert answer.tokens != plain(BASE, GENERATED)[3 * CHUNK :]

"""Real vLLM with models of recurrent state: the same tokens, cold and warm.

As in test_hybrid.py: what every engine must answer is what a plain engine without connector
answers, a second engine process gets what a first one stored, and zeroed states change the tokens.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from enginekit import EngineProcess, Generation, Request
from modelkit import random_prompt
from servers import ServerProcess
from statekit import MODELS, StateModel, make_state_model
from tests.e2e.engines import start_engine

from kvdock import Client
from kvdock.keys import chunk_keys
from kvdock.types import GroupKind, SessionRole

_long = pytest.mark.skipif(
    "KVDOCK_LONG_TESTS" not in os.environ, reason="takes a minute: set KVDOCK_LONG_TESTS"
)
_IN_CI = ("lfm2", "qwen3-next")

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

ASK = {"num_kvdock_extra_cached_tokens": None}
StartEngine = Callable[..., EngineProcess]


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=() if name in _IN_CI else _long) for name in MODELS],
)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(name: str) -> StateModel:
    return MODELS[name]


@pytest.fixture(scope="module")
def same(name: str) -> int:
    """How many tokens of answers that are computed together are compared. Batches round otherwise,
    on which the later tokens hang, with short convolutions after few. That all bytes are right the
    simulated engine checks.
    """
    return 1 if name == "lfm2" else 6


@pytest.fixture(scope="module")
def block(model: StateModel) -> int:
    return model.block_tokens


@pytest.fixture(scope="module")
def base(block: int) -> list[int]:
    """A prompt that ends one token behind a block. A convolution sees no further."""
    return random_prompt(4 * block + 1, seed=1)


@pytest.fixture(scope="module")
def prompts(block: int, base: list[int]) -> dict[str, list[int]]:
    """What the first engine answers, in this order."""
    shared = random_prompt(2 * block + block // 2, seed=2)
    return {
        "less than a block": random_prompt(block - 1, seed=3),
        "whole blocks": random_prompt(2 * block, seed=4),
        "one token more than whole blocks": base,
        "the first of two that part": shared + random_prompt(block, seed=5),
        "the second of two that part": shared + random_prompt(block, seed=6),
    }


@pytest.fixture(scope="module")
def later(block: int, base: list[int], prompts: dict[str, list[int]]) -> dict[str, list[int]]:
    """What only the second engine answers, and the plain one."""
    shared = prompts["the first of two that part"][: 2 * block + block // 2]
    return {
        "the third that parts": shared + random_prompt(block, seed=7),
        "a longer one": base + random_prompt(block, seed=8),
        "one that leaves it early": base[: 2 * block] + random_prompt(block + 1, seed=9),
        **{f"one of several, {n}": base + random_prompt(n + 2, seed=20 + n) for n in range(3)},
    }


@pytest.fixture(scope="module")
def twins(block: int) -> tuple[list[int], list[int]]:
    """Two prompts that part where vLLM keeps no state: it has not seen the other then."""
    shared = random_prompt(2 * block, seed=10)
    return shared + random_prompt(2 * block, seed=11), shared + random_prompt(block + 1, seed=12)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, name: str) -> Path:
    return tmp_path_factory.mktemp(name)


@pytest.fixture(scope="module")
def server(name: str) -> Iterator[ServerProcess]:
    """One for each model."""
    # Not pytest's folders: a socket's path must be short.
    with tempfile.TemporaryDirectory(prefix="kvdock-test-") as short:
        process = ServerProcess(Path(short) / "s.sock", "--memory", "256MiB")
        try:
            yield process
        finally:
            process.stop()


@pytest.fixture(scope="module")
def start(
    folder: Path, name: str, model: StateModel, server: ServerProcess
) -> Iterator[StartEngine]:
    path = make_state_model(folder / "model", model)
    with contextlib.ExitStack() as stack:

        def engine(role: str, settings: dict[str, Any] | None = None, **more: Any) -> EngineProcess:
            kv_connector = None
            if settings is not None:
                kv_connector = {"kvdock.address": server.address, **settings}
                # Loaded machines answer slowly; the tests of slow servers are elsewhere.
                kv_connector["kvdock.lookup_timeout_ms"] = 3000
            arguments = {**model.engine_arguments, **more}
            process = start_engine(
                path, log=folder / f"{role}.log", kv_connector=kv_connector, **arguments
            )
            return stack.enter_context(process)

        yield engine


@pytest.fixture(scope="module")
def plain(
    start: StartEngine,
    prompts: dict[str, list[int]],
    later: dict[str, list[int]],
    twins: tuple[list[int], list[int]],
) -> Callable[[Any], Any]:
    """The tokens that an engine without connector answers, computed from the first on."""
    engine = start("plain")
    known: dict[Any, Any] = {}
    # As the first engine answers them: where vLLM sees prompts part it ends a step, and so rounds
    # otherwise.
    sequence = [*prompts.values(), *later.values()]
    in_order = [engine.generate(Request(one, max_tokens=24))[0].tokens for one in sequence]
    assert engine.reset_prefix_cache()
    known["in order",] = in_order
    with_hits = dict(zip(later, in_order[len(prompts) :], strict=True))
    known["with hits",] = with_hits
    for prompt in [*prompts.values(), *later.values(), *twins]:
        (answer,) = engine.generate(Request(prompt, max_tokens=24))
        known[tuple(prompt)] = answer.tokens
        assert engine.reset_prefix_cache()
    assert engine.close() == 0
    return lambda prompt: known[tuple(prompt)]


@pytest.fixture(scope="module")
def stored(start: StartEngine, plain: Any, prompts: dict[str, list[int]]) -> None:
    """A first engine has run the prompts and is gone."""
    engine = start("first", {})
    for prompt, expected in zip(prompts.values(), plain(["in order"]), strict=False):
        (answer,) = engine.generate(ask(prompt))
        assert answer.tokens == expected
    assert engine.close() == 0


@pytest.fixture(scope="module")
def engine(start: StartEngine, stored: None) -> EngineProcess:
    """A second engine, which never saw the prompts."""
    return start("second", {})


def ask(prompt: Sequence[int], **arguments: Any) -> Request:
    return Request(prompt, max_tokens=24, kv_transfer_params=ASK, **arguments)


def extra(answer: Generation) -> int:
    assert answer.kv_transfer_params is not None
    return int(answer.kv_transfer_params["num_kvdock_extra_cached_tokens"])


def lookups(server: ServerProcess) -> int:
    with Client(server.address) as client:
        return client.status().counters.lookups


def test_the_model_has_states_beside_what_else_it_has(
    engine: EngineProcess, server: ServerProcess, name: str, block: int
) -> None:
    with Client(server.address) as client:
        (listed,) = client.namespaces()
    kinds = [group.kind for group in listed.namespace.groups]
    assert GroupKind.RECURRENT_STATE in kinds
    assert (GroupKind.FULL_ATTENTION in kinds) == (name != "mamba2")
    assert listed.namespace.chunk_tokens == block


def test_the_second_engine_hits_what_the_first_stored(
    engine: EngineProcess, plain: Any, prompts: dict[str, list[int]], block: int
) -> None:
    for name, prompt in prompts.items():
        for _ in range(2):  # the second time from KVDock too
            (answer,) = engine.generate(ask(prompt))
            assert answer.tokens == plain(prompt), name
            expected = (len(prompt) - 1) // block * block
            assert extra(answer) == answer.num_cached_tokens == expected, name
            assert engine.reset_prefix_cache()


def test_hits_of_prompts_that_continue_differently(
    engine: EngineProcess,
    plain: Any,
    later: dict[str, list[int]],
    block: int,
    name: str,
) -> None:
    hits = {
        # vLLM saw two prompts part there. Without attention beside the states it does not see it.
        "the third that parts": 2 * block if name != "mamba2" else 0,
        "a longer one": 4 * block,
        # No state was kept there.
        "one that leaves it early": 0,
    }
    for name, hit in hits.items():
        assert engine.reset_prefix_cache()
        (answer,) = engine.generate(ask(later[name]))
        # A hit of vLLM's own ends where ours does, and rounds alike.
        expected = plain(["with hits"])[name] if hit else plain(later[name])
        assert answer.tokens == expected, name
        assert extra(answer) == hit, name


def test_several_at_once_load_their_prefix_once(
    engine: EngineProcess, plain: Any, later: dict[str, list[int]], block: int, same: int
) -> None:
    assert engine.reset_prefix_cache()
    several = {name: prompt for name, prompt in later.items() if name.startswith("one of several")}
    answers = engine.generate(*map(ask, several.values()))
    for name, answer in zip(several, answers, strict=True):
        assert answer.tokens[:same] == plain(["with hits"])[name][:same]
        assert answer.num_cached_tokens == 4 * block


@pytest.mark.parametrize("steps", [1, 3])
def test_an_aborted_request(
    engine: EngineProcess, plain: Any, base: list[int], prompts: dict[str, list[int]], steps: int
) -> None:
    assert engine.reset_prefix_cache()
    other = prompts["whole blocks"]
    aborted, answer = engine.generate(ask(base, abort_after_steps=steps), ask(other))
    assert aborted.finish_reason == "abort"
    assert answer.tokens == plain(other)
    assert engine.reset_prefix_cache()
    (again,) = engine.generate(ask(base))
    assert again.tokens == plain(base)


def test_requests_that_are_preempted(
    start: StartEngine,
    stored: None,
    plain: Any,
    later: dict[str, list[int]],
    name: str,
    same: int,
    server: ServerProcess,
) -> None:
    if name not in _IN_CI[:1]:
        pytest.skip("one model shows it")
    # Enough for one of the longest, with its states, but not for two.
    small = start(
        "small",
        {"kvdock.state_interval_tokens": 1},
        num_gpu_blocks_override=24,
        max_model_len=1024,
    )
    requests = [
        Request(prompt, max_tokens=160, kv_transfer_params=ASK) for prompt in later.values()
    ]
    before = lookups(server)
    for prompt, answer in zip(later.values(), small.generate(*requests), strict=True):
        assert answer.tokens[:same] == plain(prompt)[:same]
    assert lookups(server) - before > len(requests), "nothing was preempted and looked up again"
    assert small.close() == 0


def test_an_interval_makes_hits_where_vllm_keeps_no_state(
    start: StartEngine, stored: None, plain: Any, twins: tuple[list[int], list[int]], block: int
) -> None:
    settings = {"kvdock.state_interval_tokens": 2 * block}
    engine = start("dense", settings, max_num_batched_tokens=block, max_num_seqs=4)
    for prompt, hit in zip(twins, (0, 2 * block), strict=True):
        (answer,) = engine.generate(ask(prompt))
        assert extra(answer) == hit
        assert answer.tokens == plain(prompt)
        assert engine.reset_prefix_cache()
    assert engine.close() == 0


def test_zeroed_states_change_the_tokens(
    engine: EngineProcess, server: ServerProcess, plain: Any, base: list[int], block: int
) -> None:
    # The last test, since it spoils the cache.
    assert engine.reset_prefix_cache()
    with Client(server.address) as client:
        (listed,) = client.namespaces()
        with client.session("a tool", role=SessionRole.TOOL) as session:
            hit = session.lookup(listed.namespace.name, chunk_keys(base, block))
            assert hit.chunks == 4
            assert hit.lease is not None
            for group in listed.namespace.groups:
                if group.kind is not GroupKind.RECURRENT_STATE:
                    continue
                (part,) = session.retrieve(hit.lease, 3, 4, group_idx=group.group_idx)
                assert part.location is not None
                memory = session.pool.view(part.location)
                assert any(memory)
                memory[:] = bytes(len(memory))
            session.free_locks(hit.lease)
    (answer,) = engine.generate(ask(base))
    assert extra(answer) == 4 * block
    assert answer.tokens != plain(base)

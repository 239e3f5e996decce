"""Real vLLM engines around one KVDock server: the same tokens, whatever happens.

What every engine must answer is what a plain engine without connector answers, computed once. The
model is one for which a wrong KV cache changes the tokens (test_modelkit.py), and one test here
changes cached bytes and sees that.

An engine takes ten seconds to start, so the tests that can share one do; they run in the order in
which they stand.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from enginekit import EngineProcess, Generation, Request
from modelkit import Llama, make_checkpoint, random_prompt
from servers import ServerProcess
from tests.e2e.engines import start_engine

from kvdock import Client
from kvdock.keys import chunk_keys
from kvdock.types import SessionRole
from kvdock.v1 import admin_pb2

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

CHUNK = 256
CHUNK_BYTES = 4 * 2 * CHUNK * 2 * 64 * 4
ASK = {"num_kvdock_extra_cached_tokens": None}

BASE = random_prompt(1500, seed=1)
STORED = {
    "one token less than a chunk": random_prompt(CHUNK - 1, seed=2),
    "a chunk": random_prompt(CHUNK, seed=3),
    "one token more than a chunk": random_prompt(CHUNK + 1, seed=4),
    "one token less than three chunks": random_prompt(3 * CHUNK - 1, seed=5),
    "three chunks": random_prompt(3 * CHUNK, seed=6),
    "one token more than three chunks": random_prompt(3 * CHUNK + 1, seed=7),
    "long": BASE,
}
# Prompts that leave BASE after so many tokens.
LEAVES_AFTER = (2 * CHUNK - 1, 2 * CHUNK, 2 * CHUNK + 1, 2 * CHUNK + 100)
OTHERS = {after: BASE[:after] + random_prompt(400, seed=20 + after) for after in LEAVES_AFTER}
# Prompts that leave BASE after its last full chunk.
TOGETHER = [BASE[: 5 * CHUNK] + random_prompt(20, seed=60 + n) for n in range(4)]
MANY = [random_prompt(1400, seed=40 + n) for n in range(6)]
# Two chunks, and most of a third that an answer of 96 tokens completes.
SAYING = random_prompt(2 * CHUNK + 200, seed=70)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), Llama())


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


@contextlib.contextmanager
def serving(memory: str, *, start: bool = True) -> Iterator[ServerProcess]:
    # Not pytest's folders: a socket's path must be short.
    with tempfile.TemporaryDirectory(prefix="kvdock-test-") as folder:
        server = ServerProcess(
            Path(folder) / "s.sock", "--memory", memory, "--chunk-tokens", str(CHUNK)
        )
        if not start:
            server.stop()
        try:
            yield server
        finally:
            server.stop()


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with serving("256MiB") as process:
        yield process


@pytest.fixture(scope="module")
def plain(model: Path, logs: Path) -> Callable[[Sequence[int], int], list[int]]:
    """The tokens that an engine without connector answers."""
    prompts = [*STORED.values(), *OTHERS.values(), *TOGETHER, *MANY, SAYING]
    with start_engine(model, log=logs / "plain.log") as engine:
        answers = engine.generate(*(Request(prompt, max_tokens=96) for prompt in prompts))
    known = {tuple(p): a.tokens for p, a in zip(prompts, answers, strict=True)}
    return lambda prompt, count: known[tuple(prompt)][:count]


def engine_at(server: ServerProcess, model: Path, log: Path, **arguments: Any) -> EngineProcess:
    # Loaded machines answer slowly; the tests of slow servers are elsewhere.
    settings = {"kvdock.address": server.address, "kvdock.lookup_timeout_ms": 3000}
    return start_engine(model, log=log, kv_connector=settings, **arguments)


@pytest.fixture(scope="module")
def stored(server: ServerProcess, model: Path, logs: Path, plain: Any) -> None:
    """A first engine has run the prompts and is gone."""
    with engine_at(server, model, logs / "first.log") as engine:
        answers = engine.generate(*(ask(prompt) for prompt in STORED.values()))
    for prompt, answer in zip(STORED.values(), answers, strict=True):
        assert answer.tokens == plain(prompt, 16)
        assert extra(answer) == 0


@pytest.fixture(scope="module")
def engine(server: ServerProcess, model: Path, logs: Path, stored: None) -> Iterator[EngineProcess]:
    """A second engine, which never saw the prompts."""
    with engine_at(server, model, logs / "second.log") as process:
        yield process


def ask(prompt: Sequence[int], **arguments: Any) -> Request:
    return Request(prompt, kv_transfer_params=ASK, **arguments)


def extra(answer: Generation) -> int:
    assert answer.kv_transfer_params is not None
    return int(answer.kv_transfer_params["num_kvdock_extra_cached_tokens"])


def status(server: ServerProcess) -> admin_pb2.StatusResponse:
    with Client(server.address) as client:
        return client.status()


def assert_nothing_held(server: ServerProcess) -> None:
    deadline = time.monotonic() + 5
    while True:
        now = status(server)
        held = (now.index.leases, now.index.locks, now.pool.reserved_bytes)
        if not any(held):
            return
        assert time.monotonic() < deadline, f"(leases, locks, reserved bytes) = {held}"
        time.sleep(0.02)


# -- one server, an engine that is gone and one that is here ---------------------------------------


@pytest.mark.parametrize("name", STORED)
def test_the_second_engine_hits_what_the_first_stored(
    engine: EngineProcess, plain: Any, name: str
) -> None:
    prompt = STORED[name]
    (answer,) = engine.generate(ask(prompt))
    assert answer.tokens == plain(prompt, 16)
    assert extra(answer) == answer.num_cached_tokens == len(prompt) // CHUNK * CHUNK


@pytest.mark.parametrize("after", LEAVES_AFTER)
def test_a_prefix_hit_that_continues_differently(
    engine: EngineProcess, plain: Any, after: int
) -> None:
    assert engine.reset_prefix_cache()
    (answer,) = engine.generate(ask(OTHERS[after]))
    assert answer.tokens == plain(OTHERS[after], 16)
    assert extra(answer) == after // CHUNK * CHUNK


def test_a_hit_that_begins_inside_a_chunk(engine: EngineProcess, plain: Any) -> None:
    assert engine.reset_prefix_cache()
    # The engine's own prefix cache then holds one and a half chunks.
    engine.generate(Request(BASE[: CHUNK + CHUNK // 2], max_tokens=1))
    (answer,) = engine.generate(ask(BASE))
    assert answer.tokens == plain(BASE, 16)
    assert answer.num_cached_tokens == 5 * CHUNK
    assert extra(answer) < 5 * CHUNK
    assert extra(answer) >= 5 * CHUNK - (CHUNK + CHUNK // 2)


def test_one_prefix_that_several_ask_for_at_once_is_loaded_once(
    engine: EngineProcess, server: ServerProcess, plain: Any
) -> None:
    assert engine.reset_prefix_cache()
    before = status(server).counters.retrieved_shards
    for prompt, answer in zip(TOGETHER, engine.generate(*map(ask, TOGETHER)), strict=True):
        assert answer.tokens == plain(prompt, 16)
        assert answer.num_cached_tokens == 5 * CHUNK
    assert status(server).counters.retrieved_shards - before == 5
    assert_nothing_held(server)


def test_all_at_once(engine: EngineProcess, plain: Any) -> None:
    assert engine.reset_prefix_cache()
    prompts = [*STORED.values(), *OTHERS.values()]
    for prompt, answer in zip(prompts, engine.generate(*map(ask, prompts)), strict=True):
        assert answer.tokens == plain(prompt, 16)


@pytest.mark.parametrize("steps", [1, 2, 3, 6])
def test_an_aborted_request(
    engine: EngineProcess, server: ServerProcess, plain: Any, steps: int
) -> None:
    assert engine.reset_prefix_cache()
    aborted, other = engine.generate(
        ask(BASE, abort_after_steps=steps), ask(STORED["three chunks"])
    )
    assert aborted.finish_reason == "abort"
    assert other.tokens == plain(STORED["three chunks"], 16)
    assert_nothing_held(server)


def test_a_generated_answer_is_cached_for_the_next_turn(
    engine: EngineProcess, server: ServerProcess, plain: Any
) -> None:
    prompt = OTHERS[2 * CHUNK]
    (first,) = engine.generate(ask(prompt, max_tokens=96))
    assert first.tokens == plain(prompt, 96)
    assert engine.reset_prefix_cache()
    # 912 tokens and 96 generated ones, of which the last was never computed.
    (second,) = engine.generate(ask(prompt + first.tokens + random_prompt(60, seed=9)))
    assert extra(second) == 3 * CHUNK
    assert_nothing_held(server)


def test_tenants_are_kept_apart(engine: EngineProcess, plain: Any) -> None:
    assert engine.reset_prefix_cache()
    (answer,) = engine.generate(ask(BASE, cache_salt="a tenant's own"))
    assert answer.tokens == plain(BASE, 16)
    assert extra(answer) == 0


def saying(prompt: Sequence[int], max_tokens: int = 16, **words: Any) -> Request:
    return Request(prompt, max_tokens=max_tokens, kv_transfer_params={**ASK, "kvdock": words})


def test_a_request_that_is_not_to_be_stored(
    engine: EngineProcess, server: ServerProcess, plain: Any
) -> None:
    assert engine.reset_prefix_cache()
    before = status(server).counters.stored_shards
    reading, silent = engine.generate(
        saying(BASE, store=False), saying(SAYING, max_tokens=96, store=False)
    )
    assert (reading.tokens, extra(reading)) == (plain(BASE, 16), 5 * CHUNK)
    assert (silent.tokens, extra(silent)) == (plain(SAYING, 96), 0)
    assert status(server).counters.stored_shards == before
    # The control, and what is wrong is told.
    assert engine.reset_prefix_cache()
    (stored,) = engine.generate(saying(SAYING, max_tokens=96, store="no"))
    assert (stored.tokens, extra(stored)) == (plain(SAYING, 96), 0)
    assert stored.kv_transfer_params is not None
    assert "it must be true or false" in stored.kv_transfer_params["kvdock"]["ignored"][0]
    assert status(server).counters.stored_shards == before + 3


def test_a_request_whose_first_tokens_are_kept(
    engine: EngineProcess, server: ServerProcess, plain: Any
) -> None:
    before = status(server).counters.stored_shards
    (first,) = engine.generate(saying(MANY[4], pin="mine", store_tokens=2 * CHUNK + 9))
    assert first.tokens == plain(MANY[4], 16)
    assert status(server).counters.stored_shards == before + 2
    with Client(server.address) as client:
        assert [(pin.pin, pin.parts) for pin in client.pins()] == [("mine", 2)]
        assert client.evict(all=True).parts > 0
        assert engine.reset_prefix_cache()
        kept, evicted = engine.generate(saying(MANY[4], store=False), saying(BASE, store=False))
        assert (kept.tokens, extra(kept)) == (plain(MANY[4], 16), 2 * CHUNK)
        assert (evicted.tokens, extra(evicted)) == (plain(BASE, 16), 0)
        assert client.unpin("mine").parts == 2


def test_two_engines_at_once(
    engine: EngineProcess, server: ServerProcess, model: Path, logs: Path, plain: Any
) -> None:
    assert engine.reset_prefix_cache()
    with engine_at(server, model, logs / "third.log") as third, ThreadPoolExecutor(2) as threads:
        # One of them loads what the other is just storing, or stores it as well.
        requests = [ask(prompt) for prompt in (*MANY[:3], BASE)]
        both = list(threads.map(lambda process: process.generate(*requests), (engine, third)))
        again = third.generate(*requests)
    for answers in (*both, again):
        for request, answer in zip(requests, answers, strict=True):
            assert answer.tokens == plain(request.prompt, 16)
    assert_nothing_held(server)


def test_changed_bytes_change_the_tokens(
    engine: EngineProcess, server: ServerProcess, plain: Any
) -> None:
    # Last of those that share this server: it spoils the cache.
    assert engine.reset_prefix_cache()
    with Client(server.address) as client:
        (listed,) = client.namespaces()
        namespace = listed.namespace
        keys = chunk_keys(BASE, CHUNK)
        with client.session("a tool", role=SessionRole.TOOL) as session:
            hit = session.lookup(namespace.name, keys)
            assert hit.chunks == len(keys) == 5
            assert hit.lease is not None
            (chunk,) = session.retrieve(hit.lease, 2, 3)
            assert chunk.location is not None
            memory = session.pool.view(chunk.location)
            assert len(memory) == CHUNK_BYTES
            memory[:] = bytes(len(memory))
            session.free_locks(hit.lease)
    (answer,) = engine.generate(ask(BASE))
    assert extra(answer) == 5 * CHUNK
    assert answer.tokens != plain(BASE, 16)


# -- too little room -------------------------------------------------------------------------------


def test_preemption_and_eviction(model: Path, logs: Path, plain: Any) -> None:
    # The pool holds 12 chunks, the prompts have 30. The engine has 90 blocks for two prompts of 44,
    # which grow to 47 each.
    with (
        serving("12MiB") as server,
        engine_at(
            server, model, logs / "small.log", num_gpu_blocks_override=91, max_model_len=2048
        ) as engine,
    ):
        for _ in range(2):
            answers = engine.generate(*(ask(prompt, max_tokens=96) for prompt in MANY))
            for prompt, answer in zip(MANY, answers, strict=True):
                assert answer.tokens == plain(prompt, 96)
            engine.reset_prefix_cache()
        (last,) = engine.generate(ask(MANY[0], max_tokens=96))
        assert last.tokens == plain(MANY[0], 96)
        counters = status(server).counters
        assert counters.lookups > 2 * len(MANY) + 1, "nothing was preempted and looked up again"
        assert counters.evicted_parts > 0
        assert_nothing_held(server)


# -- servers that come and go ----------------------------------------------------------------------


def test_a_server_that_appears_dies_and_comes_back(model: Path, logs: Path, plain: Any) -> None:
    with serving("64MiB", start=False) as server:
        began = time.monotonic()
        with engine_at(server, model, logs / "restarts.log") as engine:
            started = time.monotonic() - began

            def run() -> int:
                engine.reset_prefix_cache()
                (answer,) = engine.generate(ask(BASE))
                assert answer.tokens == plain(BASE, 16)
                return extra(answer)

            def hits_come_within(seconds: float) -> None:
                deadline = time.monotonic() + seconds
                while run() != 5 * CHUNK:
                    assert time.monotonic() < deadline, "no hits"

            assert [run(), run()] == [0, 0]
            server.start()
            hits_come_within(15)
            server.kill()
            assert [run(), run()] == [0, 0]
            server.start()
            hits_come_within(15)
            server.restart()
            hits_come_within(15)
            assert_nothing_held(server)
            assert engine.log_text.count("serves without cache") <= 2 * 3, "one line an outage"
        assert started < 90

"""Real vLLM with a hybrid model, sliding windows beside full attention: the same tokens.

As in test_connector.py: what every engine must answer is what a plain engine without connector
answers, a second engine process gets what a first one stored, and changed bytes change the tokens,
where they are looked at. The windows are longer than a chunk (Gemma 3) and shorter (gpt-oss).
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from enginekit import EngineProcess, Generation, Request
from modelkit import Gemma3, make_checkpoint, random_prompt
from servers import ServerProcess
from tests.e2e.engines import start_engine

from kvdock import Client
from kvdock.keys import chunk_keys
from kvdock.types import Group, GroupKind, SessionRole

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

CHUNK = 256
WINDOWS = (512, 128)
ASK = {"num_kvdock_extra_cached_tokens": None}

BASE = random_prompt(6 * CHUNK + 50, seed=1)
STORED = {
    "one token less than a chunk": random_prompt(CHUNK - 1, seed=2),
    "one token more than a chunk": random_prompt(CHUNK + 1, seed=3),
    "as long as the longer window": random_prompt(512, seed=4),
    "one token more than that": random_prompt(513, seed=5),
    "whole chunks, longer than any window": random_prompt(4 * CHUNK, seed=6),
    "long": BASE,
}
# Prompts that leave BASE after so many tokens: hits that end before a window is full, where it
# begins to slide, and later.
LEAVES_AFTER = (CHUNK, 2 * CHUNK - 1, 2 * CHUNK, 3 * CHUNK, 5 * CHUNK + 100)
OTHERS = {after: BASE[:after] + random_prompt(400, seed=20 + after) for after in LEAVES_AFTER}
# Its second chunk is complete with a generated token.
TURN = random_prompt(2 * CHUNK - 40, seed=7)

StartEngine = Callable[..., Any]


@pytest.fixture(scope="module", params=WINDOWS)
def window(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, window: int) -> Path:
    return tmp_path_factory.mktemp(f"window-{window}")


@pytest.fixture(scope="module")
def model(folder: Path, window: int) -> Path:
    return make_checkpoint(folder / "model", Gemma3(window=window))


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[ServerProcess]:
    # Not pytest's folders: a socket's path must be short.
    with tempfile.TemporaryDirectory(prefix="kvdock-test-") as short:
        process = ServerProcess(
            Path(short) / "s.sock", "--memory", "256MiB", "--chunk-tokens", str(CHUNK)
        )
        try:
            yield process
        finally:
            process.stop()


@pytest.fixture(scope="module")
def start(model: Path, folder: Path, server: ServerProcess) -> Iterator[StartEngine]:
    """Starts engines at the server."""
    with contextlib.ExitStack() as stack:

        def engine(name: str) -> EngineProcess:
            # Loaded machines answer slowly; the tests of slow servers are elsewhere.
            settings = {"kvdock.address": server.address, "kvdock.lookup_timeout_ms": 3000}
            process = start_engine(model, log=folder / f"{name}.log", kv_connector=settings)
            return stack.enter_context(process)

        yield engine


@pytest.fixture(scope="module")
def plain(model: Path, folder: Path) -> Callable[[Sequence[int], int], list[int]]:
    """The tokens that an engine without connector answers."""
    prompts = [*STORED.values(), *OTHERS.values(), TURN]
    with start_engine(model, log=folder / "plain.log") as engine:
        answers = engine.generate(*(Request(prompt, max_tokens=96) for prompt in prompts))
    known = {tuple(p): a.tokens for p, a in zip(prompts, answers, strict=True)}
    return lambda prompt, count: known[tuple(prompt)][:count]


@pytest.fixture(scope="module")
def stored(start: StartEngine, plain: Any) -> None:
    """A first engine has run the prompts and is gone."""
    engine = start("first")
    for prompt in STORED.values():
        (answer,) = engine.generate(ask(prompt))
        assert answer.tokens == plain(prompt, 16)
        assert extra(answer) == 0
    assert engine.close() == 0


@pytest.fixture(scope="module")
def engine(start: StartEngine, stored: None) -> Any:
    """A second engine, which never saw the prompts."""
    return start("second")


def ask(prompt: Sequence[int], **arguments: Any) -> Request:
    return Request(prompt, kv_transfer_params=ASK, **arguments)


def extra(answer: Generation) -> int:
    assert answer.kv_transfer_params is not None
    return int(answer.kv_transfer_params["num_kvdock_extra_cached_tokens"])


def retrieved(server: ServerProcess) -> int:
    with Client(server.address) as client:
        return client.status().counters.retrieved_shards


def groups(server: ServerProcess) -> dict[GroupKind, list[Group]]:
    with Client(server.address) as client:
        (listed,) = client.namespaces()
    found: dict[GroupKind, list[Group]] = {}
    for group in listed.namespace.groups:
        found.setdefault(group.kind, []).append(group)
    return found


def assert_nothing_held(server: ServerProcess) -> None:
    deadline = time.monotonic() + 5
    while True:
        with Client(server.address) as client:
            now = client.status()
        held = (now.index.leases, now.index.locks, now.pool.reserved_bytes)
        if not any(held):
            return
        assert time.monotonic() < deadline, f"(leases, locks, reserved bytes) = {held}"
        time.sleep(0.02)


def test_a_window_takes_no_more_memory_than_it_needs(
    engine: EngineProcess, server: ServerProcess, window: int
) -> None:
    found = groups(server)
    (full,) = found[GroupKind.FULL_ATTENTION]
    sliding = found[GroupKind.SLIDING_WINDOW]
    # Four layers of windows and two of full attention: groups of two layers.
    assert len(sliding) == 2
    assert len({group.group_idx for group in (full, *sliding)}) == 3
    for group in sliding:
        assert group.window_tokens == window
        assert group.shard_bytes[0] * CHUNK == full.shard_bytes[0] * min(window, CHUNK)


@pytest.mark.parametrize("name", STORED)
def test_the_second_engine_hits_what_the_first_stored(
    engine: EngineProcess, server: ServerProcess, plain: Any, window: int, name: str
) -> None:
    prompt = STORED[name]
    before = retrieved(server)
    (answer,) = engine.generate(ask(prompt))
    assert answer.tokens == plain(prompt, 16)
    chunks = len(prompt) // CHUNK
    assert extra(answer) == answer.num_cached_tokens == chunks * CHUNK
    of_window = min(chunks, max(1, window // CHUNK))
    assert retrieved(server) - before == chunks + 2 * of_window


@pytest.mark.parametrize("after", LEAVES_AFTER)
def test_a_prefix_hit_that_continues_differently(
    engine: EngineProcess, plain: Any, after: int
) -> None:
    assert engine.reset_prefix_cache()
    (answer,) = engine.generate(ask(OTHERS[after], max_tokens=40))
    assert answer.tokens == plain(OTHERS[after], 40)
    assert extra(answer) == after // CHUNK * CHUNK


@pytest.mark.parametrize("own", [CHUNK + CHUNK // 2, 3 * CHUNK, 6 * CHUNK - 32])
def test_a_hit_behind_what_the_engine_has(engine: EngineProcess, plain: Any, own: int) -> None:
    assert engine.reset_prefix_cache()
    engine.generate(Request(BASE[: own + 1], max_tokens=1))
    (answer,) = engine.generate(ask(BASE))
    assert answer.tokens == plain(BASE, 16)
    assert answer.num_cached_tokens == 6 * CHUNK
    assert 0 <= extra(answer) <= 6 * CHUNK


def test_all_at_once(engine: EngineProcess, server: ServerProcess, plain: Any) -> None:
    assert engine.reset_prefix_cache()
    prompts = [*STORED.values(), *OTHERS.values()]
    for prompt, answer in zip(prompts, engine.generate(*map(ask, prompts)), strict=True):
        assert answer.tokens == plain(prompt, 16)
    assert_nothing_held(server)


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_an_aborted_request(
    engine: EngineProcess, server: ServerProcess, plain: Any, steps: int
) -> None:
    assert engine.reset_prefix_cache()
    other = STORED["whole chunks, longer than any window"]
    aborted, answer = engine.generate(ask(BASE, abort_after_steps=steps), ask(other))
    assert aborted.finish_reason == "abort"
    assert answer.tokens == plain(other, 16)
    assert_nothing_held(server)


def test_a_chunk_that_was_generated_token_by_token(engine: EngineProcess, plain: Any) -> None:
    (first,) = engine.generate(ask(TURN, max_tokens=96))
    assert first.tokens == plain(TURN, 96)
    assert engine.reset_prefix_cache()
    (second,) = engine.generate(ask(TURN + first.tokens[:60]))
    assert extra(second) == 2 * CHUNK
    assert second.tokens == plain(TURN, 96)[60:76]


@pytest.mark.parametrize(
    ("kind", "chunk", "is_seen"),
    [
        (GroupKind.SLIDING_WINDOW, 0, False),
        (GroupKind.SLIDING_WINDOW, 5, True),
        (GroupKind.FULL_ATTENTION, 1, True),
    ],
)
def test_changed_bytes_change_the_tokens_where_they_are_seen(
    engine: EngineProcess,
    server: ServerProcess,
    plain: Any,
    kind: GroupKind,
    chunk: int,
    is_seen: bool,
) -> None:
    # These come last, and the one that changes nothing before those that spoil the cache.
    assert engine.reset_prefix_cache()
    with Client(server.address) as client:
        (listed,) = client.namespaces()
        keys = chunk_keys(BASE, CHUNK)[: chunk + 1]
        with client.session("a tool", role=SessionRole.TOOL) as session:
            hit = session.lookup(listed.namespace.name, keys)
            assert hit.chunks == chunk + 1
            assert hit.lease is not None
            for group in groups(server)[kind]:
                (part,) = session.retrieve(hit.lease, chunk, chunk + 1, group_idx=group.group_idx)
                assert part.location is not None
                memory = session.pool.view(part.location)
                assert len(memory) == group.shard_bytes[0]
                memory[:] = bytes(len(memory))
            session.free_locks(hit.lease)
    (answer,) = engine.generate(ask(BASE))
    assert extra(answer) == 6 * CHUNK
    assert (answer.tokens != plain(BASE, 16)) == is_seen

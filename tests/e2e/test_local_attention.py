"""Real vLLM with Llama 4's layers, chunked local attention beside full attention: the same tokens.

As in test_hybrid.py: what every engine must answer is what a plain engine without connector
answers, a second engine process gets what a first one stored, and changed bytes change the tokens
where they are looked at.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from enginekit import EngineProcess, Request
from modelkit import Llama4, make_checkpoint, random_prompt
from servers import ServerProcess
from tests.e2e.engines import start_engine
from tests.e2e.test_hybrid import ask, assert_nothing_held, extra, groups, retrieved

from kvdock import Client
from kvdock.keys import chunk_keys
from kvdock.types import GroupKind, SessionRole

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

CHUNK = 256
PIECE = 3 * CHUNK
LOCAL_GROUPS = 2

BASE = random_prompt(8 * CHUNK + 50, seed=1)
STORED = {
    "within the first piece": random_prompt(2 * CHUNK + 9, seed=2),
    "of whole pieces": random_prompt(2 * PIECE, seed=3),
    "one token more than whole pieces": random_prompt(2 * PIECE + 1, seed=4),
    "long": BASE,
}
# How many chunks a hit has, and how many of them are of the piece in which it ends.
HITS = {
    "within the first piece": (2, 2),
    # The last token is computed again, and sees its whole piece. So the last chunk is no hit.
    "of whole pieces": (5, 2),
    "one token more than whole pieces": (6, 0),
    "long": (8, 2),
}
LEAVES_AFTER = (CHUNK, PIECE - 1, PIECE, PIECE + CHUNK + 100, 2 * PIECE)
OTHERS = {after: BASE[:after] + random_prompt(400, seed=20 + after) for after in LEAVES_AFTER}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("local")


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    return make_checkpoint(folder / "model", Llama4(piece=PIECE))


@pytest.fixture(scope="module")
def plain(model: Path, folder: Path) -> Callable[[Sequence[int], int], list[int]]:
    """The tokens that an engine without connector answers."""
    prompts = [*STORED.values(), *OTHERS.values()]
    with start_engine(model, log=folder / "plain.log") as engine:
        answers = engine.generate(*(Request(prompt, max_tokens=40) for prompt in prompts))
    known = {tuple(p): a.tokens for p, a in zip(prompts, answers, strict=True)}
    return lambda prompt, count: known[tuple(prompt)][:count]


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
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
def engine(model: Path, folder: Path, server: ServerProcess, plain: Any) -> Iterator[EngineProcess]:
    """A second engine. A first one has run the prompts and is gone."""
    settings = {"kvdock.address": server.address, "kvdock.lookup_timeout_ms": 3000}
    with contextlib.ExitStack() as stack:
        for name in ("first", "second"):
            process = stack.enter_context(
                start_engine(model, log=folder / f"{name}.log", kv_connector=settings)
            )
            if name == "second":
                yield process
                return
            for prompt in STORED.values():
                (answer,) = process.generate(ask(prompt))
                assert answer.tokens == plain(prompt, 16)
                assert extra(answer) == 0
            assert process.close() == 0


def test_the_server_knows_the_pieces(engine: EngineProcess, server: ServerProcess) -> None:
    found = groups(server)
    (full,) = found[GroupKind.FULL_ATTENTION]
    local = found[GroupKind.CHUNKED_LOCAL_ATTENTION]
    # Four local layers and two of full attention: groups of two layers.
    assert len(local) == LOCAL_GROUPS
    for group in local:
        assert (group.attention_chunk_tokens, group.window_tokens) == (PIECE, 0)
        assert group.shard_bytes == full.shard_bytes


@pytest.mark.parametrize("name", STORED)
def test_the_second_engine_hits_what_the_first_stored(
    engine: EngineProcess, server: ServerProcess, plain: Any, name: str
) -> None:
    prompt = STORED[name]
    before = retrieved(server)
    (answer,) = engine.generate(ask(prompt))
    assert answer.tokens == plain(prompt, 16)
    chunks, of_piece = HITS[name]
    assert extra(answer) == answer.num_cached_tokens == chunks * CHUNK
    assert retrieved(server) - before == chunks + LOCAL_GROUPS * of_piece


@pytest.mark.parametrize("after", LEAVES_AFTER)
def test_a_prefix_hit_that_continues_differently(
    engine: EngineProcess, plain: Any, after: int
) -> None:
    assert engine.reset_prefix_cache()
    (answer,) = engine.generate(ask(OTHERS[after], max_tokens=40))
    assert answer.tokens == plain(OTHERS[after], 40)
    assert extra(answer) == after // CHUNK * CHUNK


@pytest.mark.parametrize("own", [PIECE + CHUNK // 2, 2 * PIECE])
def test_a_hit_behind_what_the_engine_has(engine: EngineProcess, plain: Any, own: int) -> None:
    assert engine.reset_prefix_cache()
    engine.generate(Request(BASE[: own + 1], max_tokens=1))
    (answer,) = engine.generate(ask(BASE))
    assert answer.tokens == plain(BASE, 16)
    assert answer.num_cached_tokens == 8 * CHUNK


@pytest.mark.parametrize("steps", [1, 2])
def test_an_aborted_request(
    engine: EngineProcess, server: ServerProcess, plain: Any, steps: int
) -> None:
    assert engine.reset_prefix_cache()
    other = STORED["of whole pieces"]
    aborted, answer = engine.generate(ask(BASE, abort_after_steps=steps), ask(other))
    assert aborted.finish_reason == "abort"
    assert answer.tokens == plain(other, 16)
    assert_nothing_held(server)


# The one that changes nothing comes before the one that spoils the cache.
@pytest.mark.parametrize(("chunk", "is_seen"), [(4, False), (7, True)])
def test_changed_bytes_change_the_tokens_where_they_are_seen(
    engine: EngineProcess, server: ServerProcess, plain: Any, chunk: int, is_seen: bool
) -> None:
    assert engine.reset_prefix_cache()
    with Client(server.address) as client:
        (listed,) = client.namespaces()
        keys = chunk_keys(BASE, CHUNK)[: chunk + 1]
        with client.session("a tool", role=SessionRole.TOOL) as session:
            hit = session.lookup(listed.namespace.name, keys)
            assert hit.chunks == chunk + 1
            assert hit.lease is not None
            for group in groups(server)[GroupKind.CHUNKED_LOCAL_ATTENTION]:
                (part,) = session.retrieve(hit.lease, chunk, chunk + 1, group_idx=group.group_idx)
                assert part.location is not None
                memory = session.pool.view(part.location)
                memory[:] = bytes(len(memory))
            session.free_locks(hit.lease)
    (answer,) = engine.generate(ask(BASE))
    assert extra(answer) == 8 * CHUNK
    assert (answer.tokens != plain(BASE, 16)) == is_seen

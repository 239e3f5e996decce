"""Hybrid models under vLLM's scheduler: every byte that a layer sees is checked in every step.

Null blocks are looked for in all loads and stores by the simulated engine itself.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future, wait
from typing import Any

import pytest
from simkit import (
    ASK,
    C,
    StartEngine,
    assert_nothing_held,
    extra,
    kill_before_a_load,
    prompt,
    slow_copies,
    status,
)
from simulator import Layers, SimulatedEngine
from vllm.distributed.kv_transfer.kv_connector.v1.base import SupportsHMA

from kvdock import Client
from kvdock_vllm.connector import KVDockConnector
from kvdock_vllm.engine import store_jobs
from kvdock_vllm.engine import stores as stores_module
from kvdock_vllm.engine.request_lookup import State
from kvdock_vllm.engine.transfers.shared import SharedTransfers
from kvdock_vllm.holds import Holds

pytestmark = pytest.mark.skipif(
    not issubclass(KVDockConnector, SupportsHMA),
    reason="this version of vLLM cannot be told of loads that fail in several groups",
)

FULL = Layers(16)
MODELS = {
    "window of several chunks": (FULL, Layers(32, window=150)),
    "window of half a chunk, first": (Layers(16, window=24), FULL),
    "window that ends a chunk": (FULL, Layers(16, window=C)),
    "window that begins a block": (FULL, Layers(32, window=33)),
    "two windows": (Layers(32, window=70), FULL, Layers(16, window=17)),
    "larger blocks of full attention": (Layers(32), Layers(16, window=100)),
    "nothing but a window": (Layers(16, window=100),),
    "no window at all": (FULL, Layers(32)),
    "pieces of several chunks": (Layers(16, piece=4 * C), FULL, Layers(16, piece=4 * C)),
}
SOME = ["window of several chunks", "two windows", "pieces of several chunks"]


@pytest.fixture(params=MODELS)
def groups(request: pytest.FixtureRequest) -> tuple[Layers, ...]:
    found: tuple[Layers, ...] = MODELS[request.param]
    return found


def hit(groups: tuple[Layers, ...], tokens: int) -> int:
    """How many of a prompt's tokens can be had when all of it was stored.

    vLLM computes the last token again, for which a window may need a block more than vLLM keeps:
    that of a prompt of whole chunks is not asked for then. Nor is that of a prompt of whole pieces.
    """
    awkward = any(
        (one.window and (one.window - 1) % one.block_tokens == 0)
        or (one.piece and tokens % one.piece == 0)
        for one in groups
    )
    return (tokens - awkward) // C * C


# -- hits -------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [C - 1, C, C + 1, 3 * C, 3 * C + 1, 7 * C + 40])
def test_a_second_engine_gets_what_the_first_stored(
    start_engine: StartEngine, groups: tuple[Layers, ...], tokens: int
) -> None:
    engine = start_engine(groups=groups)
    cold = engine.generate(prompt(tokens), max_tokens=40)
    assert cold.tokens == engine.expected(prompt(tokens), 40)
    warm = start_engine(groups=groups).generate(
        prompt(tokens), max_tokens=40, kv_transfer_params=ASK
    )
    assert warm.tokens == cold.tokens
    assert extra(warm) == warm.num_cached_tokens == hit(groups, tokens)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_every_chunk_that_is_generated_is_a_hit_for_the_next_turn(
    start_engine: StartEngine, groups: tuple[Layers, ...], async_scheduling: bool
) -> None:
    first = start_engine(groups=groups, async_scheduling=async_scheduling).generate(
        prompt(C // 2), max_tokens=4 * C
    )
    whole = prompt(C // 2) + first.tokens
    other = start_engine(groups=groups)
    for chunks in (1, 3, 4):
        other.forget()
        warm = other.generate(whole[: chunks * C + 9], kv_transfer_params=ASK)
        assert extra(warm) == chunks * C


@pytest.mark.parametrize("budget", [48, 112])
def test_chunks_that_are_computed_over_several_steps(
    start_engine: StartEngine, groups: tuple[Layers, ...], budget: int
) -> None:
    start_engine(groups=groups, max_num_batched_tokens=budget).generate(prompt(6 * C + 5))
    for chunks in (2, 6):
        warm = start_engine(groups=groups).generate(
            prompt(6 * C + 5)[: chunks * C + 5], kv_transfer_params=ASK
        )
        assert extra(warm) == chunks * C


@pytest.mark.parametrize("shared", [C - 1, C, C + 1, 2 * C + 17, 5 * C])
def test_a_prefix_hit_that_continues_differently(
    start_engine: StartEngine, groups: tuple[Layers, ...], shared: int
) -> None:
    engine = start_engine(groups=groups)
    common = prompt(shared)
    engine.generate(common + prompt(3 * C, seed=1), max_tokens=2)
    engine.forget()
    other = engine.generate(common + prompt(3 * C, seed=2), max_tokens=40, kv_transfer_params=ASK)
    assert extra(other) == shared // C * C


@pytest.mark.parametrize("own", [C // 2, C + C // 2, 4 * C, 5 * C - 32])
def test_a_hit_behind_what_the_engine_has(
    start_engine: StartEngine, kvdock: Any, groups: tuple[Layers, ...], own: int
) -> None:
    engine = start_engine(groups=groups)
    whole = prompt(5 * C + 3)
    engine.generate(whole)
    engine.forget()
    had = engine.generate(whole[: own + 1])
    assert had.finish_reason == "length"
    outcome = engine.generate(whole, max_tokens=40, kv_transfer_params=ASK)
    assert outcome.num_cached_tokens == 5 * C
    assert 0 < extra(outcome) <= 5 * C - own + 32
    assert_nothing_held(kvdock)


def test_only_what_the_windows_need_is_stored_and_loaded(
    start_engine: StartEngine, kvdock: Any
) -> None:
    # Of the first group two blocks of each chunk's four, of the last one of four.
    groups = (Layers(16, window=24), FULL, Layers(16, window=17))
    engine = start_engine(groups=groups)
    engine.generate(prompt(6 * C + 5))
    page = 3 * 2048
    assert engine.counted["stored_chunks"] == 3 * 6
    assert engine.counted["stored_bytes"] == 6 * (2 + 4 + 1) * page
    other = start_engine(groups=groups)
    other.generate(prompt(6 * C + 5))
    assert other.counted["loaded_chunks"] == 1 + 6 + 1
    assert other.counted["loaded_bytes"] == (2 + 6 * 4 + 1) * page
    assert status(kvdock).counters.retrieved_shards == 8


@pytest.mark.parametrize(("chunks", "of_piece"), [(2, 2), (3, 0), (4, 1), (6, 0)])
def test_of_local_attention_only_the_last_piece_is_loaded(
    start_engine: StartEngine, kvdock: Any, chunks: int, of_piece: int
) -> None:
    groups = (FULL, Layers(16, piece=3 * C))
    start_engine(groups=groups).generate(prompt(6 * C + 5))
    other = start_engine(groups=groups)
    warm = other.generate(
        prompt(6 * C + 5)[: chunks * C + 5], max_tokens=40, kv_transfer_params=ASK
    )
    assert extra(warm) == chunks * C
    assert other.counted["loaded_chunks"] == chunks + of_piece
    assert status(kvdock).counters.retrieved_shards == chunks + of_piece


@pytest.mark.parametrize("piece", [C // 2, C])
def test_of_local_attention_nothing_is_kept_where_a_piece_ends_with_each_chunk(
    start_engine: StartEngine, kvdock: Any, piece: int
) -> None:
    groups = (Layers(16, piece=piece), FULL)
    start_engine(groups=groups).generate(prompt(4 * C + 5), max_tokens=C)
    assert status(kvdock).index.parts == 5
    other = start_engine(groups=groups)
    for tokens in (3 * C, 4 * C + 5):
        warm = other.generate(prompt(4 * C + 5)[:tokens], max_tokens=C, kv_transfer_params=ASK)
        assert warm.tokens == other.expected(prompt(4 * C + 5)[:tokens], C)
        assert extra(warm) == (2 * C if tokens == 3 * C else 4 * C)
        other.forget()


def test_a_model_of_local_attention_alone(start_engine: StartEngine, kvdock: Any) -> None:
    groups = (Layers(16, piece=2 * C),)
    engine, other = start_engine(groups=groups), start_engine(groups=groups)
    # Of a longer prompt vLLM computes only the last piece, which extends nothing that is stored.
    for tokens, hit_tokens in ((C + 5, C), (5 * C + 5, 0)):
        engine.generate(prompt(tokens))
        warm = other.generate(prompt(tokens), max_tokens=40, kv_transfer_params=ASK)
        assert warm.tokens == other.expected(prompt(tokens), 40)
        assert extra(warm) == hit_tokens


def test_a_hit_needs_no_parts_before_its_windows(start_engine: StartEngine, kvdock: Any) -> None:
    groups = MODELS["window of several chunks"]
    engine = start_engine(groups=groups)
    whole = prompt(9 * C + 5)
    engine.generate(whole)
    with Client(kvdock.address) as client:
        (listed,) = client.namespaces()
        client.clear(listed.namespace.name)
    # The engine has the prefix itself: of what its windows left behind it can store nothing.
    engine.generate(whole + prompt(C, seed=1))
    with Client(kvdock.address) as client:
        parts = [part.group_idx for part in client.chunks(listed.namespace.name)]
    assert (parts.count(0), parts.count(1)) == (10, 3)
    warm = start_engine(groups=groups).generate(
        whole + prompt(C, seed=1), max_tokens=40, kv_transfer_params=ASK
    )
    assert extra(warm) == 10 * C


def test_a_hit_ends_where_the_windows_parts_are(start_engine: StartEngine, kvdock: Any) -> None:
    groups = MODELS["window of several chunks"]
    engine = start_engine(groups=groups)
    whole = prompt(9 * C + 5)
    engine.generate(whole)
    with Client(kvdock.address) as client:
        (listed,) = client.namespaces()
        client.clear(listed.namespace.name)
    engine.generate(whole)
    # Six chunks of full attention are there, and nothing of what windows need at their end.
    warm = start_engine(groups=groups).generate(whole[: 6 * C + 5], kv_transfer_params=ASK)
    assert extra(warm) == 0
    assert_nothing_held(kvdock)


@pytest.mark.parametrize("mla", [False, True])
def test_tensor_parallel_ranks(start_engine: StartEngine, kvdock: Any, mla: bool) -> None:
    arguments: dict[str, Any] = {"groups": MODELS["two windows"], "tensor_size": 2, "mla": mla}
    cold = start_engine(**arguments).generate(prompt(5 * C + 9), max_tokens=C)
    assert status(kvdock).counters.stored_shards == 3 * 6 * (1 if mla else 2)
    warm = start_engine(**arguments).generate(
        prompt(5 * C + 9), max_tokens=C, kv_transfer_params=ASK
    )
    assert warm.tokens == cold.tokens
    assert extra(warm) == 5 * C


def test_a_model_without_its_windows_shares_nothing(start_engine: StartEngine) -> None:
    start_engine(groups=(FULL, Layers(16, window=100))).generate(prompt(4 * C))
    for groups in ((FULL, Layers(16, window=90)), (FULL, FULL), (Layers(16, window=100), FULL)):
        warm = start_engine(groups=groups).generate(prompt(4 * C), kv_transfer_params=ASK)
        assert extra(warm) == 0


# -- blocks that are given away -----------------------------------------------------------------


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_blocks_that_a_window_left_behind_while_a_store_reads_them(
    start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch, async_scheduling: bool
) -> None:
    # Without a cache of its own vLLM gives out first what was given back last. Nothing is held
    # here, so that stores have to be ended.
    monkeypatch.setattr(Holds, "bind", lambda *_: None)
    slow_copies(monkeypatch, 0.01)
    monkeypatch.setattr(store_jobs, "_FLUSH_SECONDS", 0.001)
    groups = MODELS["two windows"]
    engine = start_engine(
        groups=groups,
        num_blocks=120,
        max_num_batched_tokens=128,
        enable_prefix_caching=False,
        async_scheduling=async_scheduling,
    )
    for n in range(3):
        engine.add(f"r{n}", prompt(7 * C, seed=n), max_tokens=C)
    engine.run(100)
    assert engine.overwritten > 0
    monkeypatch.undo()
    other = start_engine(groups=groups)
    for n in range(3):
        whole = prompt(7 * C, seed=n) + engine.outcomes[f"r{n}"].tokens
        for chunks in range(1, 8):
            # Whatever is there is right: the engine checks the bytes.
            other.forget()
            other.generate(whole[: chunks * C + 3])


def test_what_windows_left_behind_is_stored_by_a_store_that_begins_late(
    start_engine: StartEngine, kvdock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_store = threading.Event()
    real = SharedTransfers.store

    def late(self: SharedTransfers, *arguments: Any) -> Any:
        assert may_store.wait(60)
        return real(self, *arguments)

    monkeypatch.setattr(SharedTransfers, "store", late)
    monkeypatch.setattr(stores_module, "_RETRY_SECONDS", 0.0)
    groups = (FULL, Layers(16, window=2 * C), Layers(16, window=2 * C))
    engine = start_engine(groups=groups, max_num_batched_tokens=1024, num_blocks=400)
    prompts = [prompt(6 * C + 1, seed=1), prompt(6 * C + 2, seed=2), prompt(2 * C + 47, seed=3)]
    for n, tokens in enumerate(prompts):
        engine.add(f"r{n}", tokens, max_tokens=8)
    records = engine.connector.scheduler_half.records.values()
    wait([record.lookup._future for record in records if record.lookup is not None])
    # All are computed in one step. Then the last one gets blocks for what it generates: vLLM gives
    # out first what windows have left behind last, which is its own first chunk.
    while len(engine.outcomes["r2"].tokens) < 5:
        engine.step()
    may_store.set()
    engine.run()
    assert status(kvdock).index.parts == 3 * (6 + 6 + 2)
    other = start_engine(groups=groups)
    for tokens in prompts:
        outcome = other.generate(tokens, kv_transfer_params=ASK)
        assert extra(outcome) == len(tokens) // C * C


def test_a_chunk_that_becomes_complete_before_its_request_is_answered(
    start_engine: StartEngine,
) -> None:
    groups = (FULL, Layers(16, window=C))
    engine = start_engine(groups=groups)
    engine.generate(prompt(3 * C - 6))
    # The engine has it all, and does not wait for the answer, which does not come.
    engine.add("r", prompt(3 * C - 6), max_tokens=40)
    lookup = engine.connector.scheduler_half.records["r"].lookup
    assert lookup is not None
    lookup.close()
    lookup.state, lookup._future = State.ASKED, Future()
    engine.run()
    whole = prompt(3 * C - 6) + engine.outcomes["r"].tokens
    warm = start_engine(groups=groups).generate(whole, kv_transfer_params=ASK)
    assert extra(warm) == 3 * C


@pytest.mark.parametrize("model_name", SOME)
def test_preempted_requests_are_resumed_from_what_was_stored(
    start_engine: StartEngine, model_name: str
) -> None:
    groups = MODELS[model_name]
    engine = start_engine(groups=groups, num_blocks=110)
    for n in range(6):
        engine.add(f"r{n}", prompt(3 * C, seed=n), max_tokens=3 * C, kv_transfer_params=ASK)
    for n in range(2000):
        if not engine.scheduler.has_requests():
            break
        engine.step()
        if n % 50 == 49:
            engine.preempt_all()
    engine.run(60)
    for n in range(6):
        expected = engine.expected(prompt(3 * C, seed=n), 3 * C)
        assert engine.outcomes[f"r{n}"].tokens == expected
        assert extra(engine.outcomes[f"r{n}"]) == 0


# -- failures ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model_name", "group_idx"),
    [
        *((name, index) for name in [*SOME, "no window at all"] for index in (0, 1)),
        ("nothing but a window", None),
    ],
)
def test_a_load_that_fails_in_one_group_is_computed_as_a_whole(
    start_engine: StartEngine, kvdock: Any, model_name: str, group_idx: int | None
) -> None:
    engine = start_engine(groups=MODELS[model_name], tensor_size=2)
    cold = engine.generate(prompt(6 * C + 9), max_tokens=40)
    engine.forget()
    # A little of it the engine has itself.
    engine.generate(prompt(6 * C)[: C + 1])
    engine.add("r", prompt(6 * C + 9), max_tokens=40, kv_transfer_params=ASK)

    def lose_the_last_chunk() -> None:
        for load in engine.connector.scheduler_half.loads.under_way.values():
            engine.between_schedule_and_forward = lambda: None
            assert load.lookup is not None
            session = load.lookup.live.session
            lost = session.free_locks(load.lookup.lease_id, 5, 6, reader=1, group_idx=group_idx)
            assert lost == 1

    engine.between_schedule_and_forward = lose_the_last_chunk
    engine.run()
    assert engine.outcomes["r"].tokens == cold.tokens
    assert extra(engine.outcomes["r"]) == 0
    assert engine.counted["failed_loads"] == 1
    assert_nothing_held(kvdock)
    engine.forget()
    again = engine.generate(prompt(6 * C + 9), max_tokens=40, kv_transfer_params=ASK)
    assert (again.tokens, extra(again)) == (cold.tokens, 6 * C)


@pytest.mark.parametrize("model_name", ["two windows", "nothing but a window"])
def test_a_server_that_dies_between_the_hit_and_the_load(
    start_engine: StartEngine, kvdock: Any, model_name: str
) -> None:
    engine = start_engine(groups=MODELS[model_name])
    cold = engine.generate(prompt(4 * C), max_tokens=4)
    engine.forget()
    engine.add("r", prompt(4 * C), max_tokens=4, kv_transfer_params=ASK)

    kill_before_a_load(kvdock, engine)
    engine.run()
    assert kvdock.process.poll() is not None
    assert engine.outcomes["r"].tokens == cold.tokens
    assert extra(engine.outcomes["r"]) == 0


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_an_abort_after_any_step(
    start_engine: StartEngine, kvdock: Any, async_scheduling: bool
) -> None:
    engine = start_engine(groups=MODELS["two windows"], async_scheduling=async_scheduling)
    engine.generate(prompt(4 * C))
    for steps in range(1, 12):
        engine.forget()
        engine.add(f"gone{steps}", prompt(5 * C), max_tokens=40)
        for _ in range(steps):
            engine.step()
        engine.abort(f"gone{steps}")
        engine.run()
        assert_nothing_held(kvdock)


def test_a_reset_clears_the_server_too(start_engine: StartEngine, kvdock: Any) -> None:
    engine: SimulatedEngine = start_engine(groups=MODELS["window of several chunks"])
    engine.generate(prompt(4 * C))
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    assert status(kvdock).index.chunks == 0
    assert extra(engine.generate(prompt(4 * C), kv_transfer_params=ASK)) == 0
    engine.forget()
    assert extra(engine.generate(prompt(4 * C), kv_transfer_params=ASK)) == 4 * C

"""Models with recurrent state under vLLM's scheduler: every state that a step reads is checked."""

from __future__ import annotations

import logging
import time
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
from simulator import Layers, Outcome, SimulatedEngine, WrongBytesError

from kvdock import Client
from kvdock.keys import chunk_keys
from kvdock.types import ChunkStatus, GroupKind
from kvdock_vllm import scheduler as scheduler_module
from kvdock_vllm.engine.transfers.shared import SharedTransfers
from kvdock_vllm.vllm_groups import offers_states

pytestmark = pytest.mark.skipif(not offers_states(), reason="refused with this version of vLLM")

STATE = Layers(C, state=True)
FULL = Layers(C)
MODELS = {
    "beside full attention": (STATE, FULL),
    "several, of which one is after it": (STATE, FULL, STATE),
    "beside a window": (FULL, Layers(C, window=100), STATE),
    "nothing but states": (STATE,),
    "with states from inside a step": (Layers(C, state=True, checkpoints=True), FULL),
}
HYBRID = MODELS["beside full attention"]


@pytest.fixture(params=MODELS)
def groups(request: pytest.FixtureRequest) -> tuple[Layers, ...]:
    found: tuple[Layers, ...] = MODELS[request.param]
    return found


def states_stored(server: Any, chunks: int) -> int:
    """Parts of states on the server, which has so many chunks of every other group."""
    with Client(server.address) as client:
        (listed,) = client.namespaces()
    others = sum(one.kind is not GroupKind.RECURRENT_STATE for one in listed.namespace.groups)
    return listed.parts - chunks * others


def run(engine: SimulatedEngine, tokens: list[int], **more: Any) -> Outcome:
    outcome = engine.generate(tokens, kv_transfer_params=ASK, **more)
    assert outcome.tokens == engine.expected(tokens, len(outcome.tokens))
    return outcome


# -- hits -------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [C, C + 1, 7 * C + 40])
def test_a_second_engine_goes_on_from_the_last_state_of_a_prompt(
    start_engine: StartEngine, groups: tuple[Layers, ...], tokens: int
) -> None:
    cold = run(start_engine(groups=groups), prompt(tokens), max_tokens=40)
    warm = run(start_engine(groups=groups), prompt(tokens), max_tokens=40)
    assert warm.tokens == cold.tokens
    # The state after the whole prompt does not tell what to answer.
    assert extra(warm) == warm.num_cached_tokens == (tokens - 1) // C * C


def test_other_bytes_are_noticed(
    start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch, groups: tuple[Layers, ...]
) -> None:
    run(start_engine(groups=groups), prompt(3 * C + 1))
    other = start_engine(groups=groups)
    load = SharedTransfers.load

    def spoil(self: SharedTransfers, request: Any) -> Any:
        filled = load(self, request)
        (rank,) = other.ranks
        for position, layers in enumerate(groups):
            if layers.state and position == request.group.position:
                for view in rank.views[position]:
                    view[list(request.group.block_ids)] = 0
        return filled

    with monkeypatch.context() as patch:
        patch.setattr(SharedTransfers, "load", spoil)
        with pytest.raises(WrongBytesError, match="does not hold the state"):
            run(other, prompt(3 * C + 1))
    other.abort(next(iter(other.scheduler.requests)))
    other.run()


@pytest.mark.parametrize("budget", [48, 200])
def test_prompts_that_are_computed_over_several_steps(
    start_engine: StartEngine, groups: tuple[Layers, ...], budget: int
) -> None:
    run(start_engine(groups=groups, max_num_batched_tokens=budget), prompt(6 * C + 5))
    warm = run(start_engine(groups=groups), prompt(6 * C + 5))
    assert extra(warm) == 6 * C


def test_the_next_turn_goes_on_where_the_last_prompt_ended(
    start_engine: StartEngine, groups: tuple[Layers, ...]
) -> None:
    first = run(start_engine(groups=groups), prompt(3 * C + 9), max_tokens=3 * C)
    turn = prompt(3 * C + 9) + first.tokens + prompt(30, seed=5)
    second = run(start_engine(groups=groups), turn)
    assert extra(second) == 3 * C
    third = run(start_engine(groups=groups), turn + prompt(C, seed=6))
    assert extra(third) == len(turn) // C * C


def test_where_prompts_part_is_a_hit_for_the_third(
    start_engine: StartEngine, groups: tuple[Layers, ...]
) -> None:
    if FULL not in groups:
        pytest.skip("vLLM sees by the blocks of attention where prompts part")
    engine = start_engine(groups=groups)
    common = prompt(3 * C + 20)
    run(engine, common + prompt(2 * C, seed=1))
    # vLLM sees that this one parts from the first, and keeps the state there.
    assert extra(run(engine, common + prompt(2 * C, seed=2))) == 0
    third = run(start_engine(groups=groups), common + prompt(2 * C, seed=3))
    assert extra(third) == 3 * C


@pytest.mark.parametrize("own", [C + C // 2, 4 * C])
def test_a_hit_behind_what_the_engine_has(
    start_engine: StartEngine, kvdock: Any, groups: tuple[Layers, ...], own: int
) -> None:
    engine = start_engine(groups=groups)
    whole = prompt(5 * C + 3)
    run(engine, whole)
    engine.forget()
    run(engine, whole[: own + 1])
    outcome = run(engine, whole, max_tokens=40)
    assert outcome.num_cached_tokens == 5 * C
    assert_nothing_held(kvdock)


def test_a_state_from_inside_a_step_is_stored(
    start_engine: StartEngine, kvdock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = MODELS["with states from inside a step"]
    engine = start_engine(groups=groups)
    ends = []
    checkpoint = engine._checkpoint

    def watched(group: int, start: int, end: int) -> Any:
        ends.append((checkpoint(group, start, end), end))
        return ends[-1][0]

    monkeypatch.setattr(engine, "_checkpoint", watched)
    run(engine, prompt(3 * C + 9))
    assert ends == [((3 * C, 2), 3 * C + 9)]
    assert states_stored(kvdock, 3) == 1


def test_what_vllm_offers_inside_a_block_is_left_out(
    start_engine: StartEngine, kvdock: Any
) -> None:
    engine = start_engine(groups=HYBRID, prefix_match_unit=16)
    assert engine.scheduler.mamba_partial_cache_hit
    whole = prompt(3 * C + 40)
    run(engine, whole, max_tokens=C)
    run(engine, whole + prompt(C, seed=1))
    warm = run(start_engine(groups=HYBRID, prefix_match_unit=16), whole)
    assert extra(warm) % C == 0
    assert_nothing_held(kvdock)


# -- more states than vLLM keeps --------------------------------------------------------------


def test_by_default_only_the_last_state_of_a_prompt_is_stored(
    start_engine: StartEngine, kvdock: Any
) -> None:
    run(start_engine(groups=HYBRID, max_num_batched_tokens=C), prompt(5 * C + 9), max_tokens=2 * C)
    assert states_stored(kvdock, 7) == 1


@pytest.mark.parametrize("name", ["several, of which one is after it", "nothing but states"])
@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize(
    ("interval", "stored"), [(1, [1, 2, 3, 4, 5, 6, 7, 8]), (2 * C, [2, 4, 5, 7])]
)
def test_an_interval_stores_more_states(
    start_engine: StartEngine,
    kvdock: Any,
    name: str,
    async_scheduling: bool,
    interval: int,
    stored: list[int],
) -> None:
    groups = MODELS[name]
    settings: dict[str, Any] = {
        "groups": groups,
        "extra_config": {"kvdock.state_interval_tokens": interval},
    }
    first = start_engine(**settings, max_num_batched_tokens=C, async_scheduling=async_scheduling)
    whole = prompt(5 * C + 9)
    whole += run(first, whole, max_tokens=3 * C).tokens
    # vLLM offers the state after 5 * C.
    assert states_stored(kvdock, 8) == len(stored) * sum(layers.state for layers in groups)
    other = start_engine(**settings)
    for chunks in range(1, 9):
        other.forget()
        warm = run(other, whole[: chunks * C + 1])
        assert extra(warm) == max([C * n for n in stored if n <= chunks], default=0)


def test_the_state_after_a_whole_prompt_is_not_asked_for(
    start_engine: StartEngine, groups: tuple[Layers, ...]
) -> None:
    settings: dict[str, Any] = {
        "groups": groups,
        "extra_config": {"kvdock.state_interval_tokens": 1},
    }
    run(start_engine(**settings, max_num_batched_tokens=C), prompt(3 * C))
    other = start_engine(**settings)
    assert extra(run(other, prompt(3 * C), max_tokens=4)) == 2 * C
    # But a longer one goes on from it.
    other.forget()
    assert extra(run(other, [*prompt(3 * C), 5], max_tokens=4)) == 3 * C


# -- blocks -----------------------------------------------------------------------------------


def test_a_slow_store_does_not_lose_the_state_that_vllm_takes_back(
    start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {
        "groups": HYBRID,
        "extra_config": {"kvdock.state_interval_tokens": 1},
    }
    engine = start_engine(**settings, num_blocks=40, max_num_batched_tokens=C)
    with monkeypatch.context() as patch:
        slow_copies(patch, 0.002)
        run(engine, prompt(6 * C + 1), max_tokens=3 * C)
    assert engine.overwritten == 0
    for chunks in (2, 5):
        assert extra(run(start_engine(**settings), prompt(chunks * C + 1))) == chunks * C


def test_stores_of_blocks_that_others_get_are_ended(
    start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch, kvdock: Any
) -> None:
    engine = start_engine(
        groups=HYBRID, num_blocks=24, extra_config={"kvdock.state_interval_tokens": 1}
    )
    with monkeypatch.context() as patch:
        slow_copies(patch, 0.02)
        for seed in range(4):
            engine.add(f"r{seed}", prompt(4 * C + 1, seed=seed), max_tokens=2 * C)
        engine.run(60)
    assert engine.overwritten
    other = start_engine(groups=HYBRID)
    for seed in range(4):
        run(other, prompt(4 * C + 1, seed=seed))
    assert_nothing_held(kvdock)


@pytest.mark.parametrize("interval", [None, 1])
def test_blocks_that_are_zeroed_too_early_are_kept_until_they_are_stored(
    start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch, interval: int | None
) -> None:
    def zeroes(*_: Any) -> bool:
        return True

    monkeypatch.setattr(scheduler_module, "_zeroes_blocks_unasked", zeroes)
    settings: dict[str, Any] = {"groups": HYBRID, "zeroes_first": True}
    if interval is not None:
        settings["extra_config"] = {"kvdock.state_interval_tokens": interval}
    engine = start_engine(**settings, num_blocks=24)
    assert engine.kv_cache_config.needs_kv_cache_zeroing
    with monkeypatch.context() as patch:
        slow_copies(patch, 0.02)
        for seed in range(4):
            engine.add(f"r{seed}", prompt(4 * C + 1, seed=seed), max_tokens=2 * C)
        engine.run(60)
    assert not engine.overwritten
    assert len(engine.connector.scheduler_half.holds) == 0
    other = start_engine(groups=HYBRID)
    hits = [extra(run(other, prompt(4 * C + 1, seed=seed))) for seed in range(4)]
    assert any(hits)


# -- preemption, abort, eviction, failed loads ------------------------------------------------


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_preempted_request_goes_on_from_a_stored_state(
    start_engine: StartEngine, groups: tuple[Layers, ...], async_scheduling: bool
) -> None:
    engine = start_engine(groups=groups, async_scheduling=async_scheduling)
    whole = prompt(5 * C + 3)
    engine.add("one", whole, max_tokens=6 * C, kv_transfer_params=ASK)
    while len(engine.outcomes["one"].tokens) < C:
        engine.step()
    while engine.connector.scheduler_half.stores.under_way:
        engine.step()
    assert engine.outcomes["one"].finish_reason is None
    assert engine.preempt_all()
    engine.run()
    assert engine.outcomes["one"].tokens == engine.expected(whole, 6 * C)
    assert engine.counted["loaded_tokens"] == 5 * C


def test_an_aborted_load_leaves_nothing_behind(
    start_engine: StartEngine, groups: tuple[Layers, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    run(start_engine(groups=groups), prompt(4 * C + 1))
    engine = start_engine(groups=groups)
    with monkeypatch.context() as patch:
        slow_copies(patch, 0.02)
        engine.add("gone", prompt(4 * C + 1))
        while not engine.connector.scheduler_half.loads.under_way:
            engine.step()
        engine.abort("gone")
        engine.run()
    assert extra(run(engine, prompt(4 * C + 1))) == 4 * C


def test_a_failed_load_is_computed(
    start_engine: StartEngine, kvdock: Any, groups: tuple[Layers, ...]
) -> None:
    run(start_engine(groups=groups), prompt(4 * C + 1))
    engine = start_engine(groups=groups)
    kill_before_a_load(kvdock, engine)
    outcome = run(engine, prompt(4 * C + 1), max_tokens=C)
    assert extra(outcome) == 0
    assert engine.counted["failed_loads"] == 1


def test_without_its_state_a_prefix_is_no_hit(start_engine: StartEngine, kvdock: Any) -> None:
    """As after an eviction: the parts of attention alone do not help."""
    engine = start_engine(groups=HYBRID)
    stored = SharedTransfers.store

    def only_attention(self: SharedTransfers, request: Any) -> Any:
        if HYBRID[request.group.position].state:
            return [ChunkStatus.NO_MEMORY] * len(request.group.keys)
        return stored(self, request)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SharedTransfers, "store", only_attention)
        run(engine, prompt(4 * C + 1))
    assert states_stored(kvdock, 4) == 0
    assert extra(run(start_engine(groups=HYBRID), prompt(4 * C + 1))) == 0
    # Which stored it.
    assert extra(run(start_engine(groups=HYBRID), prompt(4 * C + 1))) == 4 * C


def test_a_hit_ends_at_the_last_state_that_every_group_has(start_engine: StartEngine) -> None:
    groups = MODELS["several, of which one is after it"]
    settings: dict[str, Any] = {
        "groups": groups,
        "extra_config": {"kvdock.state_interval_tokens": 1},
    }
    tokens = prompt(5 * C + 1)
    keys = chunk_keys(tokens, C)
    stored = SharedTransfers.store
    refused: set[bytes] = set()

    def without_the_last_two(self: SharedTransfers, request: Any) -> Any:
        """And what one group stores together with them."""
        if request.group.position == 2 and not set(keys[3:]).isdisjoint(request.group.keys):
            refused.update(request.group.keys)
            return [ChunkStatus.NO_MEMORY] * len(request.group.keys)
        return stored(self, request)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SharedTransfers, "store", without_the_last_two)
        run(start_engine(**settings, max_num_batched_tokens=C), tokens)
    first = min(map(keys.index, refused))
    assert 0 < first <= 3
    assert extra(run(start_engine(**settings), tokens)) == first * C


# -- one load for several ---------------------------------------------------------------------


def test_several_requests_of_a_prefix_load_it_once(
    start_engine: StartEngine, groups: tuple[Layers, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    common = prompt(4 * C)
    run(start_engine(groups=groups), common + prompt(1, seed=9))
    engine = start_engine(groups=groups)
    # None of them ends soon after the prefix, so that vLLM alone would forget the state there.
    prompts = [common + prompt(20 + (seed + 1) * C, seed=seed) for seed in range(4)]
    with monkeypatch.context() as patch:
        slow_copies(patch, 0.02)
        for number, tokens in enumerate(prompts):
            engine.add(str(number), tokens, max_tokens=20, kv_transfer_params=ASK)
        while engine.counted.get("load_waits", 0) < 3:
            engine.step()
    engine.run()
    for number, tokens in enumerate(prompts):
        outcome = engine.outcomes[str(number)]
        assert outcome.tokens == engine.expected(tokens, 20)
        assert outcome.num_cached_tokens == 4 * C
    assert engine.counted["loaded_tokens"] == 4 * C
    assert engine.counted["load_waits"] == 3


def test_nobody_waits_for_a_state_that_vllm_forgets(
    start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forgets(*_: Any) -> bool:
        return False

    monkeypatch.setattr(scheduler_module, "keep_loaded_state", forgets)
    common = prompt(4 * C)
    run(start_engine(groups=HYBRID), common + prompt(1, seed=9))
    engine = start_engine(groups=HYBRID)
    for number in range(3):
        engine.add(str(number), common + prompt(2 * C, seed=number), kv_transfer_params=ASK)
    engine.run()
    assert engine.counted["loaded_tokens"] == 3 * 4 * C
    assert not engine.counted.get("load_waits")


# -- engines that keep no states --------------------------------------------------------------


def test_an_engine_that_keeps_no_states_is_served_without_cache(
    start_engine: StartEngine, kvdock: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="kvdock_vllm.vllm_states"):
        engine = start_engine(
            groups=(Layers(2048, state=True), Layers(C)),
            mamba_cache_mode="none",
            enable_prefix_caching=False,
        )
    (said,) = (one.getMessage() for one in caplog.records if "recurrent state" in one.getMessage())
    assert "mamba_cache_mode is none" in said
    for _ in range(2):
        outcome = engine.generate(prompt(3 * C + 1), max_tokens=4)
        assert outcome.num_cached_tokens == 0
    time.sleep(0.1)
    assert status(kvdock).index.parts == 0

"""Speculative decoding under vLLM's scheduler: what is accepted is stored, and nothing else.

The simulated engine checks every byte in every step, those of the drafter's layer as well. These
depend on the next token.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from simkit import ASK, C, StartEngine, assert_nothing_held, extra, prompt, status
from simulator import Layers
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import SupportsHMA

from kvdock import Client
from kvdock_vllm.connector import KVDockConnector
from kvdock_vllm.drafts import has_kv_of_its_own, tokens_read_ahead

DRAFTS = 3
WINDOW = (Layers(), Layers(32, window=150))
needs_groups = pytest.mark.skipif(
    not issubclass(KVDockConnector, SupportsHMA),
    reason="this version of vLLM cannot be told of loads that fail in several groups",
)
MODELS = [
    pytest.param((Layers(),), id="one group"),
    pytest.param(WINDOW, id="window", marks=needs_groups),
]
both_schedulers = pytest.mark.parametrize("async_scheduling", [False, True])


@pytest.mark.parametrize("groups", MODELS)
@both_schedulers
def test_a_second_engine_gets_what_the_first_stored(
    start_engine: StartEngine, groups: tuple[Layers, ...], async_scheduling: bool
) -> None:
    arguments: dict[str, Any] = {
        "groups": groups,
        "drafts": DRAFTS,
        "async_scheduling": async_scheduling,
    }
    engine = start_engine(**arguments)
    cold = engine.generate(prompt(3 * C + 9), max_tokens=5 * C)
    assert cold.tokens == engine.expected(prompt(3 * C + 9), 5 * C)
    assert min(engine.accepted_drafts, engine.rejected_drafts) > 20
    other = start_engine(**arguments)
    whole = prompt(3 * C + 9) + cold.tokens
    for tokens in (3 * C + 9, 5 * C + 30, len(whole) - 1):
        other.forget()
        warm = other.generate(whole[:tokens], max_tokens=40, kv_transfer_params=ASK)
        assert warm.tokens == other.expected(whole[:tokens], 40)
        # The last token of a hit is computed again, for the drafter's layer.
        assert extra(warm) == tokens // C * C - 1


@both_schedulers
@pytest.mark.parametrize("groups", MODELS)
def test_a_prefix_hit_that_continues_differently(
    start_engine: StartEngine, groups: tuple[Layers, ...], async_scheduling: bool
) -> None:
    """Of the last common token the drafter's layer has nothing of the other prompt."""
    engine = start_engine(groups=groups, drafts=DRAFTS, async_scheduling=async_scheduling)
    engine.generate(prompt(3 * C) + prompt(C, seed=1))
    engine.forget()
    other = prompt(3 * C) + prompt(C, seed=2)
    outcome = engine.generate(other, max_tokens=40, kv_transfer_params=ASK)
    assert outcome.tokens == engine.expected(other, 40)
    assert extra(outcome) == 3 * C - 1


@both_schedulers
def test_a_prompt_that_is_a_hit_as_a_whole(
    start_engine: StartEngine, async_scheduling: bool
) -> None:
    engine = start_engine(drafts=DRAFTS, async_scheduling=async_scheduling)
    cold = engine.generate(prompt(4 * C), max_tokens=C)
    engine.forget()
    warm = engine.generate(prompt(4 * C), max_tokens=C, kv_transfer_params=ASK)
    assert (warm.tokens, extra(warm)) == (cold.tokens, 4 * C - 1)


@pytest.mark.skipif(
    not hasattr(VllmConfig, "num_prefill_lookahead_tokens"), reason="not in this vLLM"
)
@both_schedulers
def test_a_chain_of_modules_reads_further_ahead(
    start_engine: StartEngine, async_scheduling: bool
) -> None:
    engine = start_engine(drafts=DRAFTS, chained=True, async_scheduling=async_scheduling)
    # A prompt of whole chunks: when it is computed, its last tokens are not settled yet.
    common = prompt(3 * C)
    cold = engine.generate(common, max_tokens=2 * C)
    assert cold.tokens == engine.expected(common, 2 * C)
    for more in (prompt(C, seed=2), cold.tokens[: C + 9]):
        engine.forget()
        whole = common + more
        outcome = engine.generate(whole, max_tokens=40, kv_transfer_params=ASK)
        assert outcome.tokens == engine.expected(whole, 40)
        shared = len(whole) if more != prompt(C, seed=2) else len(common)
        assert extra(outcome) == shared // C * C - DRAFTS


@needs_groups
@pytest.mark.parametrize(
    ("layers", "hit_tokens"),
    [
        (Layers(16, window=24), 3 * C - 1),
        # One token earlier its window begins in a block that no hit has.
        (Layers(16, window=17), 3 * C),
    ],
)
def test_a_window_that_has_no_block_for_the_token_before(
    start_engine: StartEngine, layers: Layers, hit_tokens: int
) -> None:
    engine = start_engine(groups=(Layers(), layers), drafts=DRAFTS)
    engine.generate(prompt(4 * C + 5))
    engine.forget()
    # It continues as the prompt that was stored, since for the other window nothing can be done.
    warm = engine.generate(prompt(3 * C + 9), max_tokens=1, kv_transfer_params=ASK)
    assert extra(warm) == hit_tokens


@needs_groups
def test_windows_keep_what_is_generated_while_drafts_are_in_flight(
    start_engine: StartEngine, kvdock: Any
) -> None:
    # A part's first block is left behind eight tokens after the chunk's end. So many may have been
    # accepted when the chunk is known to be complete, and as many again are in flight then.
    groups = (Layers(), Layers(16, window=25))
    engine = start_engine(groups=groups, drafts=7, async_scheduling=True)
    engine.generate(prompt(C // 2), max_tokens=6 * C)
    assert engine.accepted_drafts > C
    with Client(kvdock.address) as client:
        (listed,) = client.namespaces()
        parts = [part.group_idx for part in client.chunks(listed.namespace.name)]
    assert (parts.count(0), parts.count(1)) == (6, 6)


@both_schedulers
def test_preempted_and_aborted_requests(
    start_engine: StartEngine, kvdock: Any, async_scheduling: bool
) -> None:
    engine = start_engine(drafts=DRAFTS, num_blocks=80, async_scheduling=async_scheduling)
    for n in range(6):
        engine.add(f"r{n}", prompt(3 * C, seed=n), max_tokens=3 * C)
    for n in range(400):
        if not engine.scheduler.has_requests():
            break
        engine.step()
        if n % 25 == 24:
            engine.preempt_all()
        if n == 60:
            engine.abort("r5")
    engine.run(60)
    for n in range(5):
        expected = engine.expected(prompt(3 * C, seed=n), 3 * C)
        assert engine.outcomes[f"r{n}"].tokens == expected
    assert_nothing_held(kvdock)


def test_a_load_that_fails(start_engine: StartEngine, kvdock: Any) -> None:
    engine = start_engine(drafts=DRAFTS)
    cold = engine.generate(prompt(4 * C + 9), max_tokens=40)
    engine.forget()
    engine.add("r", prompt(4 * C + 9), max_tokens=40, kv_transfer_params=ASK)

    def lose_the_last_chunk() -> None:
        for load in engine.connector.scheduler_half.loads.under_way.values():
            engine.between_schedule_and_forward = lambda: None
            assert load.lookup is not None
            assert load.lookup.live.session.free_locks(load.lookup.lease_id, 3, 4) == 1

    engine.between_schedule_and_forward = lose_the_last_chunk
    engine.run()
    assert engine.outcomes["r"].tokens == cold.tokens
    assert extra(engine.outcomes["r"]) == 3 * C


def test_an_engine_without_drafter_shares_with_one_whose_drafter_keeps_nothing(
    start_engine: StartEngine, kvdock: Any
) -> None:
    ngram = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}
    cold = start_engine().generate(prompt(3 * C + 9), max_tokens=4)
    warm = start_engine(speculative_config=ngram).generate(
        prompt(3 * C + 9), max_tokens=4, kv_transfer_params=ASK
    )
    assert (warm.tokens, extra(warm)) == (cold.tokens, 3 * C)
    # With a drafter of its own it shares nothing.
    other = start_engine(drafts=DRAFTS)
    assert extra(other.generate(prompt(3 * C + 9), kv_transfer_params=ASK)) == 0
    assert status(kvdock).index.namespaces == 2


def speculative(method: str, **more: Any) -> SimpleNamespace:
    """vLLM's configuration as its versions know it."""
    uses_eagle = method in ("eagle", "eagle3", "mtp", "dflash", "dspark")
    return SimpleNamespace(method=method, use_eagle=lambda: uses_eagle, **more)


@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        (SimpleNamespace(speculative_config=None), 0),
        (SimpleNamespace(speculative_config=speculative("ngram")), 0),
        (SimpleNamespace(speculative_config=speculative("draft_model")), 0),
        # vLLM 0.26 says no more.
        (SimpleNamespace(speculative_config=speculative("eagle")), 1),
        (
            SimpleNamespace(
                speculative_config=speculative("mtp", use_eagle_block_drop=lambda: True),
                num_prefill_lookahead_tokens=3,
            ),
            3,
        ),
        (
            SimpleNamespace(
                speculative_config=speculative("eagle", use_eagle_block_drop=lambda: False),
                num_prefill_lookahead_tokens=1,
            ),
            0,
        ),
        (
            SimpleNamespace(
                speculative_config=speculative(
                    "dflash",
                    use_eagle_block_drop=lambda: False,
                    needs_eagle_block_drop=lambda: False,
                ),
                num_prefill_lookahead_tokens=1,
            ),
            0,
        ),
    ],
)
def test_how_far_drafters_read_ahead(config: Any, tokens: int) -> None:
    assert tokens_read_ahead(config) == tokens


@pytest.mark.parametrize(
    ("method", "has_kv"), [("ngram", False), ("suffix", False), ("eagle", True), ("mtp", True)]
)
def test_which_drafters_keep_kv(method: str, has_kv: bool) -> None:
    assert has_kv_of_its_own(speculative(method)) == has_kv

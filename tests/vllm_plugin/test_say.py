"""What a request says for itself: read, obeyed by a simulated engine, and answered where wrong."""

from __future__ import annotations

import logging
import time
from types import SimpleNamespace
from typing import Any

import pytest
from simkit import ASK, C, StartEngine, extra, prompt, status
from simulator import Layers, SimulatedEngine
from vllm.distributed.kv_transfer.kv_connector.v1 import base

from kvdock import Client, Keep
from kvdock.types import EvictionPriority
from kvdock_vllm.engine import transfers
from kvdock_vllm.engine.say import NOTHING_SAID, Say
from kvdock_vllm.says import Says, answer

GROUPS = [
    pytest.param([Layers()], id="one-group"),
    pytest.param(
        [Layers(), Layers(window=100)],
        id="window",
        marks=pytest.mark.skipif(
            not hasattr(base, "KVConnectorTransferResults"), reason="not in this vLLM"
        ),
    ),
]


def said(words: object) -> Say:
    return NOTHING_SAID.with_words(words)


# -- reading --------------------------------------------------------------------------------


def test_what_is_right_is_taken() -> None:
    words = {"store": True, "store_tokens": 128, "pin": "mine", "keep_seconds": 60}
    say = said(words)
    assert say == Say(True, 128, "mine", 60.0)
    assert say.keep == Keep("mine", 60.0)
    assert said({"keep_seconds": 1.5}).keep == Keep("default", 1.5)
    assert said({"pin": "mine"}).keep == Keep("mine", None)
    assert said({"priority": "low"}).priority is EvictionPriority.LOW
    assert said({}) == NOTHING_SAID
    assert NOTHING_SAID.keep is None


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("store", "false"),
        ("store", 0),
        ("store", None),
        ("store_tokens", -1),
        ("store_tokens", True),
        ("store_tokens", 1.5),
        ("store_tokens", "10"),
        ("pin", ""),
        ("pin", "two words"),
        ("pin", "x" * 129),
        ("pin", 7),
        ("keep_seconds", 0),
        ("keep_seconds", float("nan")),
        ("keep_seconds", float("inf")),
        ("priority", "urgent"),
        ("priority", 1),
        ("priority", "unspecified"),
        pytest.param("keep_seconds", 10**5000, id="huge"),
        ("keep_seconds", 2_592_001),
        ("keep_seconds", "60"),
        ("keep_seconds", True),
        ("Store", False),
        (7, False),
    ],
)
def test_a_wrong_value_is_left_out_and_told_and_the_rest_counts(key: Any, value: Any) -> None:
    good = {"store_tokens": 5} if key != "store_tokens" else {"pin": "mine"}
    say = said({key: value, **good})
    (fault,) = say.faults
    assert str(key) in fault.message
    assert len(fault.message) < 300
    assert Say(store=say.store, store_tokens=say.store_tokens, pin=say.pin) == said(good)


@pytest.mark.parametrize("words", ["no store", 7, [1], True, {1}])
def test_what_is_no_say_at_all_is_told(words: object) -> None:
    (fault,) = said(words).faults
    assert "no object" in fault.message


def test_faults_are_few_and_short() -> None:
    words = {f"unknown{number}" * 1000: "x" * 10**6 for number in range(1000)}
    began = time.perf_counter()
    say = said(words)
    assert time.perf_counter() - began < 0.05
    assert len(say.faults) == 8
    assert all(len(fault.message) < 300 for fault in say.faults)
    assert answer(say)["kvdock"]["ignored"]


def test_a_key_that_is_nearly_right_is_named() -> None:
    assert "did you mean store_tokens?" in said({"store_token": 1}).faults[0].message


def request(params: Any = None, **actions: Any) -> Any:
    """A request with kv_transfer_params, and actions of kv_hints by version."""
    hints = SimpleNamespace(
        actions=[
            SimpleNamespace(action_type="kv.fetch", action_version="1.0", payload={"store": 7}),
            *(
                SimpleNamespace(action_type="kvdock", action_version=version[1:], payload=payload)
                for version, payload in actions.items()
            ),
        ]
    )
    return SimpleNamespace(request_id="r", kv_transfer_params=params, kv_hints=hints)


def test_kv_hints_say_it_too_and_the_client_comes_first() -> None:
    assert Says().of(request(v1={"store": False})) == Say(store=False)
    say = Says().of(request({"kvdock": {"pin": "mine"}}, v1={"store": False, "pin": "other"}))
    assert say == Say(store=False, pin="mine")
    (fault,) = Says().of(request(v2={"store": False})).faults
    assert "action_version 2" in fault.message
    assert Says().of(request(v1=None)).faults
    assert Says().of(request()) == NOTHING_SAID


def test_vllms_own_hints_are_read() -> None:
    protocol = pytest.importorskip("vllm.v1.kv_hints")
    action = protocol.KvHintAction("1", "kvdock", "1.0", {"store": False})
    hints = protocol.KvHintsEnvelope("0.1", "m", [action])
    asked: Any = SimpleNamespace(request_id="r", kv_transfer_params=None, kv_hints=hints)
    assert Says().of(asked) == Say(store=False)


@pytest.mark.parametrize("params", [None, {}, {"kvdock": None}, {"other": 1}, "text", 5])
def test_requests_that_say_nothing(params: Any) -> None:
    assert Says().of(request(params)) is NOTHING_SAID


def test_each_kind_of_fault_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    says = Says()
    with caplog.at_level(logging.WARNING):
        for number in range(3):
            says.of(request({"kvdock": {"store": number, "pin": ""}}))
    assert len(caplog.records) == 2


# -- a simulated engine ----------------------------------------------------------------------


def params(**words: Any) -> dict[str, Any]:
    return {**ASK, "kvdock": words}


def ignored(outcome: Any) -> list[str]:
    faults: list[str] = outcome.kv_transfer_params["kvdock"]["ignored"]
    return faults


def stored(server: Any) -> int:
    return int(status(server).counters.stored_shards)


@pytest.mark.parametrize("groups", GROUPS)
def test_nothing_of_a_request_is_stored_if_it_says_so_but_it_may_load(
    start_engine: StartEngine, kvdock: Any, groups: Any
) -> None:
    engine = start_engine(groups=groups)
    tokens = prompt(4 * C + 5)
    outcome = engine.generate(tokens, max_tokens=3 * C, kv_transfer_params=params(store=False))
    assert outcome.tokens == engine.expected(tokens, 3 * C)
    assert stored(kvdock) == 0
    assert status(kvdock).index.chunks == 0
    # The control: the same request without a say.
    engine.forget()
    engine.generate(tokens, max_tokens=3 * C, kv_transfer_params=ASK)
    before = stored(kvdock)
    assert before >= 6
    engine.forget()
    longer = tokens + prompt(3 * C, seed=1)
    outcome = engine.generate(longer, kv_transfer_params=params(store=False))
    assert extra(outcome) == 4 * C
    assert outcome.tokens == engine.expected(longer, 1)
    assert stored(kvdock) == before


def test_a_request_that_is_not_stored_while_its_lookup_is_answered_late(
    start_engine: StartEngine, kvdock: Any
) -> None:
    engine = start_engine(max_num_batched_tokens=C)
    for number in range(4):
        engine.add(f"r{number}", prompt(5 * C, seed=number), kv_transfer_params=params(store=False))
    engine.run()
    assert stored(kvdock) == 0


def test_only_the_first_tokens_are_stored(engine: SimulatedEngine, kvdock: Any) -> None:
    """Four chunks of the prompt, and three of the answer."""
    there = 0
    cases = [(0, 0), (C - 1, 0), (C, 1), (3 * C + 7, 3), (6 * C, 6), (10**9, 7)]
    for seed, (tokens, chunks) in enumerate(cases):
        asked = prompt(4 * C + 10, seed=seed)
        told = params(store_tokens=tokens)
        outcome = engine.generate(asked, max_tokens=3 * C, kv_transfer_params=told)
        assert outcome.tokens == engine.expected(asked, 3 * C)
        there += chunks
        assert status(kvdock).index.chunks == there, tokens
        engine.forget()
        outcome = engine.generate(asked, kv_transfer_params=params(store=False))
        assert extra(outcome) == min(chunks, 4) * C


def pins(server: Any) -> dict[str, int]:
    with Client(server.address) as client:
        return {pin.pin: pin.parts for pin in client.pins()}


def evict_all(server: Any) -> None:
    with Client(server.address) as client:
        client.evict(all=True)


def test_what_a_request_stores_is_kept(engine: SimulatedEngine, kvdock: Any) -> None:
    kept, other = prompt(4 * C), prompt(4 * C, seed=1)
    engine.generate(kept, kv_transfer_params=params(pin="mine", keep_seconds=600))
    engine.generate(other)
    assert pins(kvdock) == {"mine": 4}
    evict_all(kvdock)
    engine.forget()
    outcome = engine.generate([*kept, 7], kv_transfer_params=ASK)
    assert extra(outcome) == 4 * C
    assert extra(engine.generate([*other, 7], kv_transfer_params=ASK)) == 0
    first = params(pin="first", store_tokens=2 * C)
    engine.generate(prompt(6 * C, seed=2), kv_transfer_params=first)
    assert pins(kvdock) == {"mine": 4, "first": 2}


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("forget", [False, True], ids=["in-the-engine", "loaded"])
def test_what_a_request_uses_is_kept_too(
    start_engine: StartEngine, kvdock: Any, groups: Any, forget: bool
) -> None:
    """It was stored before, by a request that said nothing."""
    engine = start_engine(groups=groups)
    tokens = prompt(4 * C)
    engine.generate(tokens)
    assert pins(kvdock) == {}
    if forget:
        engine.forget()
    longer = tokens + prompt(C, seed=1)
    outcome = engine.generate(longer, kv_transfer_params=params(pin="mine"))
    assert extra(outcome) >= (4 * C if forget else 0)
    evict_all(kvdock)
    engine.forget()
    assert extra(engine.generate([*longer, 7], kv_transfer_params=ASK)) == 5 * C


def test_low_priority_is_evicted_first_and_high_is_told_of_what_is_there(
    engine: SimulatedEngine, kvdock: Any
) -> None:
    engine.generate(prompt(2 * C))
    engine.generate(prompt(2 * C, seed=1), kv_transfer_params=params(priority="low"))
    with Client(kvdock.address) as client:
        before = client.status().pool.used_bytes
        client.evict(before // 2)
    engine.forget()
    told = params(store=False)
    assert extra(engine.generate([*prompt(2 * C), 7], kv_transfer_params=told)) == 2 * C
    assert extra(engine.generate([*prompt(2 * C, seed=1), 7], kv_transfer_params=told)) == 0
    engine.forget()
    # What the server has is offered once more, though it is a hit, so that its priority rises.
    engine.counted.clear()
    engine.generate(prompt(2 * C), kv_transfer_params=params(priority="high"))
    assert engine.counted["existing_chunks"] == 2


def test_what_pins_may_not_keep_is_stored_all_the_same(
    start_server: Any,
    start_engine: StartEngine,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transfers.base, "_has_warned", False)
    server = start_server("--chunk-tokens", str(C), "--pin-share", "0")
    engine = start_engine(address=server.address)
    with caplog.at_level(logging.WARNING):
        outcome = engine.generate(prompt(4 * C), kv_transfer_params=params(pin="mine"))
        engine.generate(prompt(4 * C, seed=1), kv_transfer_params=params(pin="mine"))
    assert outcome.finish_reason is not None
    now = status(server)
    assert (now.index.chunks, now.pins.pins, now.counters.refused_keeps) == (8, 0, 8)
    assert caplog.text.count("not kept for pin mine") == 1


def test_a_wrong_say_is_answered_and_the_request_goes_on(
    engine: SimulatedEngine, kvdock: Any
) -> None:
    says: list[Any] = [{"store": "no"}, "nonsense", {"pin": ["a"]}, {"kep_seconds": 1}, [1, 2]]
    for seed, words in enumerate(says):
        tokens = prompt(3 * C, seed=seed)
        outcome = engine.generate(tokens, kv_transfer_params={"kvdock": words})
        assert outcome.tokens == engine.expected(tokens, 1)
        assert len(ignored(outcome)) == 1
        assert status(kvdock).index.chunks == 3 * (seed + 1)
    outcome = engine.generate(prompt(C, seed=9), kv_transfer_params={"kvdock": {"store": True}})
    assert outcome.kv_transfer_params is None, "what is understood is not answered"

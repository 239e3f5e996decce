"""Several requests with one prefix: one of them loads it, the others wait and take it from vLLM.

The simulated engine checks the bytes of all that its requests see.
"""

from __future__ import annotations

import gc
import threading
import time
import weakref
from concurrent.futures import Future
from typing import Any

import pytest
from simkit import ASK, C, StartEngine, assert_nothing_held, extra, kill_before_a_load, prompt
from simkit import status as server_status
from simulator import BLOCK_TOKENS, Layers, SimulatedEngine
from vllm.distributed.kv_transfer.kv_connector.v1.base import SupportsHMA

from kvdock_vllm.connector import KVDockConnector
from kvdock_vllm.engine import load_waits
from kvdock_vllm.engine.load_jobs import LoadJob

PREFIX = prompt(6 * C)
"""24 blocks."""
NAMES = [f"r{n}" for n in range(8)]


class HeldLoads:
    """Which requests' loads do not begin to copy yet."""

    def __init__(self) -> None:
        self._events: dict[str, threading.Event] = {}

    def hold(self, *names: str) -> None:
        for name in names:
            self._events[name] = threading.Event()

    def go_on(self, *names: str) -> None:
        for name in names or self._events:
            self._events[name].set()

    def wait(self, name: str) -> None:
        if (event := self._events.get(name)) is not None:
            assert event.wait(30)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> HeldLoads:
    loads = HeldLoads()
    real = LoadJob._work

    def late(job: LoadJob) -> None:
        loads.wait(job.request_id)
        real(job)

    monkeypatch.setattr(LoadJob, "_work", late)
    return loads


@pytest.fixture(autouse=True)
def _no_wait_is_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine is."""
    monkeypatch.setattr(load_waits, "_MOST_SECONDS", 60.0)


def question(n: int, prefix: list[int] = PREFIX) -> list[int]:
    """The prefix, and less than a block that no other question has."""
    return prefix + prompt(5, seed=100 + n)


def add(engine: SimulatedEngine, *names: str) -> None:
    for name in names:
        number = NAMES.index(name)
        engine.add(name, question(number), max_tokens=8, kv_transfer_params=ASK)


def step_until_loading(engine: SimulatedEngine, *names: str) -> None:
    """Steps until just these requests load, and all others are answered and wait."""
    half = engine.connector.scheduler_half
    deadline = time.monotonic() + 20
    while set(half.loads.under_way) != set(names) or not all(
        record.lookup is None or record.lookup in half.waits._waits
        for record in half.records.values()
    ):
        assert time.monotonic() < deadline, list(half.loads.under_way)
        engine.step()


def load_and_wait(engine: SimulatedEngine, held: HeldLoads, *others: str) -> None:
    """r0 loads, and its load is held until it may go on. The others wait for it."""
    held.hold("r0")
    add(engine, "r0")
    step_until_loading(engine, "r0")
    add(engine, *others)
    step_until_loading(engine, "r0")


def assert_answers(engine: SimulatedEngine, *names: str) -> None:
    for name in names:
        expected = engine.expected(question(NAMES.index(name)), 8)
        assert engine.outcomes[name].tokens == expected


def loaded_shards(kvdock: Any) -> int:
    return int(server_status(kvdock).counters.retrieved_shards)


@pytest.mark.parametrize(("async_scheduling", "tensor_size"), [(False, 1), (True, 1), (True, 2)])
def test_one_prefix_that_eight_requests_ask_for_at_once(
    start_engine: StartEngine,
    kvdock: Any,
    held: HeldLoads,
    async_scheduling: bool,
    tensor_size: int,
) -> None:
    start_engine(tensor_size=tensor_size).generate(PREFIX)
    engine = start_engine(async_scheduling=async_scheduling, tensor_size=tensor_size)
    pool = engine.scheduler.kv_cache_manager.block_pool
    used = [0]
    engine.between_schedule_and_forward = lambda: used.append(
        engine.kv_cache_config.num_blocks - 1 - pool.get_num_free_blocks()
    )
    load_and_wait(engine, held, *NAMES[1:])
    held.go_on()
    engine.run()
    assert_answers(engine, *NAMES)
    assert loaded_shards(kvdock) == 6 * tensor_size
    assert engine.counted["loaded_tokens"] == 6 * C
    assert engine.counted["load_waits"] == 7
    assert max(used) == 24 + 8
    assert [extra(engine.outcomes[name]) for name in NAMES] == [6 * C] + [0] * 7
    assert {engine.outcomes[name].num_cached_tokens for name in NAMES} == {6 * C}


def test_while_some_wait_others_go_on(
    start_engine: StartEngine, kvdock: Any, held: HeldLoads
) -> None:
    start_engine().generate(PREFIX)
    engine = start_engine()
    load_and_wait(engine, held, "r1", "r2")
    engine.add("no hit", prompt(3 * C, seed=7), max_tokens=4)
    engine.add("too short to ask", prompt(9, seed=8), max_tokens=4)
    while engine.outcomes["no hit"].finish_reason is None:
        engine.step()
    assert engine.outcomes["too short to ask"].finish_reason == "length"
    assert not engine.outcomes["r1"].tokens
    held.go_on()
    engine.run()
    assert_answers(engine, "r0", "r1", "r2")
    assert loaded_shards(kvdock) == 6


def test_an_engine_that_only_waits_does_not_spin(
    start_engine: StartEngine, held: HeldLoads
) -> None:
    start_engine().generate(PREFIX)
    engine = start_engine()
    load_and_wait(engine, held, "r1")
    engine.ranks[0].connector.worker_half._idle_wait = 20.0
    threading.Timer(0.3, held.go_on).start()
    steps = 0
    while not engine.outcomes["r1"].tokens:
        engine.step()
        steps += 1
    assert steps < 10
    engine.run()


# -- when the load comes to nothing ---------------------------------------------------------------


def test_the_first_one_is_aborted(start_engine: StartEngine, kvdock: Any, held: HeldLoads) -> None:
    start_engine().generate(PREFIX)
    engine = start_engine()
    load_and_wait(engine, held, *NAMES[1:])
    held.hold("r1")
    engine.abort("r0")
    step_until_loading(engine, "r0", "r1")
    held.go_on()
    engine.run()
    assert_answers(engine, *NAMES[1:])
    assert engine.counted["loaded_tokens"] == 2 * 6 * C
    assert loaded_shards(kvdock) == 12
    assert_nothing_held(kvdock)


def test_one_that_waits_is_aborted(start_engine: StartEngine, kvdock: Any, held: HeldLoads) -> None:
    start_engine().generate(PREFIX)
    engine = start_engine()
    load_and_wait(engine, held, "r1", "r2")
    engine.abort("r1")
    held.go_on()
    engine.run()
    assert_answers(engine, "r0", "r2")
    assert loaded_shards(kvdock) == 6
    assert_nothing_held(kvdock)


@pytest.mark.parametrize("good_chunks", [0, 2])
def test_the_first_load_fails(
    start_engine: StartEngine, kvdock: Any, held: HeldLoads, good_chunks: int
) -> None:
    """Its request computes what is missing, and the others take that too, or load it."""
    start_engine().generate(PREFIX)
    engine = start_engine()
    load_and_wait(engine, held, *NAMES[1:])
    lookup = engine.connector.scheduler_half.loads.under_way["r0"].lookup
    assert lookup is not None
    assert lookup.live.session.free_locks(lookup.lease_id, good_chunks, 6) == 6 - good_chunks
    held.go_on()
    engine.run()
    assert_answers(engine, *NAMES)
    assert extra(engine.outcomes["r0"]) == good_chunks * C
    assert engine.counted["failed_loads"] == 1
    assert loaded_shards(kvdock) <= 6
    assert_nothing_held(kvdock)


def test_the_session_is_lost(start_engine: StartEngine, kvdock: Any, held: HeldLoads) -> None:
    start_engine().generate(PREFIX)
    engine = start_engine()
    load_and_wait(engine, held, *NAMES[1:])
    kvdock.kill()
    while any(not engine.outcomes[name].tokens for name in NAMES[1:]):
        engine.step()
    assert not engine.outcomes["r0"].tokens, "the others do not wait for the end of its load"
    held.go_on()
    engine.run()
    assert_answers(engine, *NAMES)


def test_a_load_of_an_earlier_session_is_not_waited_for(
    start_engine: StartEngine, held: HeldLoads
) -> None:
    start_engine().generate(PREFIX)
    engine = start_engine()
    load_and_wait(engine, held, "r1", "r2")
    held.hold("r1")
    engine.connector.scheduler_half.link._link.renew(10)
    step_until_loading(engine, "r0", "r1")
    held.go_on()
    engine.run()
    assert_answers(engine, "r0", "r1", "r2")


def test_the_server_dies_before_the_load(start_engine: StartEngine, kvdock: Any) -> None:
    start_engine().generate(PREFIX)
    engine = start_engine()
    add(engine, *NAMES)
    kill_before_a_load(kvdock, engine)
    engine.run()
    assert_answers(engine, *NAMES)


def test_preempted_requests_wait_for_the_first_that_loads_again(
    start_engine: StartEngine, kvdock: Any
) -> None:
    start_engine().generate(PREFIX)
    engine = start_engine()
    add(engine, *NAMES)
    while any(len(engine.outcomes[name].tokens) < 2 for name in NAMES):
        engine.step()
    assert engine.preempt_all()
    engine.run()
    assert_answers(engine, *NAMES)
    assert loaded_shards(kvdock) == 12


def test_the_first_one_is_preempted_as_soon_as_it_has_loaded(
    start_engine: StartEngine, kvdock: Any, held: HeldLoads
) -> None:
    start_engine().generate(PREFIX)
    engine = start_engine()
    load_and_wait(engine, held, *NAMES[1:])
    held.go_on()
    while not engine.scheduler.running:
        engine.step()
    assert engine.preempt_all()
    engine.run()
    assert_answers(engine, *NAMES)
    assert loaded_shards(kvdock) == 12


def test_nobody_waits_longer_than_the_limit(
    start_engine: StartEngine, kvdock: Any, held: HeldLoads, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_engine().generate(PREFIX)
    engine = start_engine()
    load_and_wait(engine, held, "r1", "r2")
    held.hold("r1", "r2")
    monkeypatch.setattr(load_waits, "_MOST_SECONDS", 0.0)
    step_until_loading(engine, "r0", "r1", "r2")
    held.go_on()
    engine.run()
    assert_answers(engine, "r0", "r1", "r2")


def test_one_that_was_asked_about_before_the_first_one_is_cached(
    start_engine: StartEngine, kvdock: Any, held: HeldLoads
) -> None:
    """vLLM 0.26 asks in the order of arrival, also about those whose load has just ended."""
    start_engine().generate(PREFIX)
    engine = start_engine()
    held.hold("r1")
    add(engine, "r0")
    lookup = engine.connector.scheduler_half.records["r0"].lookup
    assert lookup is not None
    answer, lookup._future, lookup._deadline = lookup._future, Future(), time.monotonic() + 60
    add(engine, "r1")
    while not engine.connector.scheduler_half.loads.under_way:
        engine.step()
    lookup._future = answer
    step_until_loading(engine, "r1")
    held.go_on()
    engine.run()
    assert_answers(engine, "r0", "r1")
    assert loaded_shards(kvdock) == 6


# -- who does not wait ----------------------------------------------------------------------------


def test_without_prefix_cache_nobody_waits(start_engine: StartEngine, kvdock: Any) -> None:
    start_engine().generate(PREFIX)
    engine = start_engine(enable_prefix_caching=False)
    add(engine, *NAMES)
    engine.run()
    assert_answers(engine, *NAMES)
    assert loaded_shards(kvdock) == 8 * 6
    assert "load_waits" not in engine.counted


@pytest.mark.parametrize(("first", "second"), [(10, 4), (4, 10)])
def test_who_shares_little_does_not_wait(
    start_engine: StartEngine, held: HeldLoads, first: int, second: int
) -> None:
    """One whole is ten chunks. The other one leaves it after four."""
    whole = prompt(10 * C)
    questions = {10: whole + prompt(5, seed=1), 4: whole[: 4 * C] + prompt(5, seed=2)}
    start_engine().generate(whole)
    engine = start_engine()
    held.hold("first", "second")
    engine.add("first", questions[first], max_tokens=4)
    engine.add("second", questions[second], max_tokens=4)
    step_until_loading(engine, "first", "second")
    engine.add("third", questions[4], max_tokens=4)
    held.go_on()
    engine.run()
    for name, chunks in (("first", first), ("second", second), ("third", 4)):
        assert engine.outcomes[name].tokens == engine.expected(questions[chunks], 4)


@pytest.mark.parametrize(("first", "second"), [(6, 10), (10, 6)])
def test_who_shares_more_than_half_waits_and_loads_the_rest(
    start_engine: StartEngine, kvdock: Any, held: HeldLoads, first: int, second: int
) -> None:
    whole = prompt(10 * C)
    start_engine().generate(whole)
    engine = start_engine()
    held.hold("first")
    engine.add("first", whole[: first * C] + prompt(5, seed=1), max_tokens=4)
    while not engine.connector.scheduler_half.loads.under_way:
        engine.step()
    engine.add("second", whole[: second * C] + prompt(5, seed=2), max_tokens=4)
    step_until_loading(engine, "first")
    held.go_on()
    engine.run()
    assert loaded_shards(kvdock) == 10


def test_who_has_waited_keeps_nothing_of_the_load(
    start_engine: StartEngine, kvdock: Any, held: HeldLoads
) -> None:
    start_engine().generate(PREFIX)
    engine = start_engine()
    held.hold("short", "long")
    engine.add("short", PREFIX[: 4 * C])
    step_until_loading(engine, "short")
    half = engine.connector.scheduler_half
    waited_for = weakref.ref(half.loads.under_way["short"].lookup)
    engine.add("long", PREFIX)
    step_until_loading(engine, "short")
    held.go_on("short")
    step_until_loading(engine, "long")
    engine.step()
    gc.collect()
    assert waited_for() is None
    held.go_on()
    engine.run()
    assert engine.counted["load_waits"] == 1


def test_one_prompt_many_times(start_engine: StartEngine, held: HeldLoads) -> None:
    """vLLM's cache has all of it but the last block, which nobody needs to wait for."""
    start_engine().generate(PREFIX)
    engine = start_engine()
    held.hold("r0")
    for name in NAMES:
        engine.add(name, PREFIX, max_tokens=8)
        step_until_loading(engine, "r0")
    held.go_on()
    engine.run()
    for name in NAMES:
        assert engine.outcomes[name].tokens == engine.expected(PREFIX, 8)
    assert engine.counted["loaded_tokens"] == 6 * C + 7 * BLOCK_TOKENS
    assert engine.counted["load_waits"] == 7


# -- several groups -------------------------------------------------------------------------------


@pytest.mark.skipif(
    not issubclass(KVDockConnector, SupportsHMA), reason="this version of vLLM has one group"
)
@pytest.mark.parametrize(
    "groups",
    [
        (Layers(), Layers(32, window=150)),
        (Layers(32, window=70), Layers(), Layers(16, window=17)),
        (Layers(16, window=100),),
        (Layers(), Layers(32)),
    ],
)
def test_hybrid_models(
    start_engine: StartEngine, held: HeldLoads, groups: tuple[Layers, ...]
) -> None:
    start_engine(groups=groups).generate(question(9))
    engine = start_engine(groups=groups)
    load_and_wait(engine, held, *NAMES[1:])
    held.go_on()
    engine.run()
    assert_answers(engine, *NAMES)
    assert engine.counted["loaded_tokens"] == 6 * C
    assert engine.counted["load_waits"] == 7


@pytest.mark.skipif(
    not issubclass(KVDockConnector, SupportsHMA), reason="this version of vLLM has one group"
)
@pytest.mark.parametrize(("shared", "own"), [(5, 5), (6, 0)])
def test_of_a_load_that_ends_later_a_window_has_nothing_to_share(
    start_engine: StartEngine, held: HeldLoads, shared: int, own: int
) -> None:
    """It has what is needed at the load's end alone, and vLLM computes a prompt's last token."""
    groups = (Layers(), Layers(16, window=100))
    start_engine(groups=groups).generate(PREFIX + prompt(5, seed=1))
    engine = start_engine(groups=groups)
    held.hold("longer", "shorter")
    engine.add("longer", PREFIX + prompt(5, seed=1), max_tokens=4)
    while not engine.connector.scheduler_half.loads.under_way:
        engine.step()
    engine.add("shorter", PREFIX[: shared * C] + prompt(own, seed=2), max_tokens=4)
    step_until_loading(engine, "longer", "shorter")
    held.go_on()
    engine.run()

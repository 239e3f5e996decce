"""The connector under vLLM's scheduler: right bytes, exact numbers, nothing left behind.

Every step of the simulated engine checks the bytes of every computed token (simulator.py), so each
of these tests also proves that what was loaded is right.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
import pytest
from simkit import (
    ASK,
    C,
    StartEngine,
    StartServer,
    assert_nothing_held,
    extra,
    kill_before_a_load,
    prompt,
    slow_copies,
    status,
)
from simulator import BLOCK_TOKENS, SimulatedEngine
from vllm.lora.request import LoRARequest

from kvdock import Client, Session
from kvdock_vllm import scheduler as scheduler_module
from kvdock_vllm import worker as worker_module
from kvdock_vllm.engine import affinity, store_jobs
from kvdock_vllm.engine.copier import Copier
from kvdock_vllm.engine.load_jobs import LoadJob
from kvdock_vllm.engine.parallel import ParallelStrategy
from kvdock_vllm.engine.specs import Target
from kvdock_vllm.vllm_parallel import parallel_strategy

# -- hits -------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [C - 1, C, C + 1, 3 * C - 1, 3 * C, 3 * C + 1, 3 * C + 40])
def test_a_second_engine_gets_what_the_first_stored(start_engine: StartEngine, tokens: int) -> None:
    cold = start_engine().generate(prompt(tokens), max_tokens=6)
    warm = start_engine().generate(prompt(tokens), max_tokens=6, kv_transfer_params=ASK)
    assert warm.tokens == cold.tokens
    assert extra(warm) == warm.num_cached_tokens == tokens // C * C


@pytest.mark.parametrize("shared", [C - 1, C, C + 1, 2 * C + 17, 4 * C])
def test_a_prefix_hit_that_continues_differently(engine: SimulatedEngine, shared: int) -> None:
    common = prompt(shared)
    engine.generate(common + prompt(2 * C, seed=1), max_tokens=2)
    engine.forget()
    other = engine.generate(common + prompt(2 * C, seed=2), kv_transfer_params=ASK)
    assert extra(other) == shared // C * C


def test_what_the_engine_has_is_not_loaded_again(engine: SimulatedEngine, kvdock: Any) -> None:
    whole = prompt(5 * C)
    engine.generate(whole)
    engine.forget()
    # Now the engine has one and a half chunks of its own.
    engine.generate(whole[: C + C // 2], max_tokens=1)
    locks: list[int] = []

    def look() -> None:
        if engine.connector.scheduler_half.loads.under_way and not locks:
            deadline = time.monotonic() + 3
            while status(kvdock).index.locks != 4 and time.monotonic() < deadline:
                time.sleep(0.01)
            locks.append(status(kvdock).index.locks)

    engine.between_schedule_and_forward = look
    outcome = engine.generate(whole, kv_transfer_params=ASK)
    assert locks == [4], "a chunk that is not going to be loaded needs no lock"
    assert outcome.num_cached_tokens == 5 * C
    assert extra(outcome) == 5 * C - (C + C // 2)


def test_a_longer_hit_of_the_engines_own_counts_as_nothing_of_ours(engine: SimulatedEngine) -> None:
    engine.generate(prompt(2 * C + 33))
    outcome = engine.generate(prompt(2 * C + 33), kv_transfer_params=ASK)
    assert outcome.num_cached_tokens == 2 * C + 32
    assert extra(outcome) == 0


def test_generated_tokens_are_stored_too(start_engine: StartEngine) -> None:
    first = start_engine().generate(prompt(C // 2), max_tokens=2 * C)
    whole = prompt(C // 2) + first.tokens
    # The last generated token was never computed: 2.5 chunks less one token.
    warm = start_engine().generate(whole, kv_transfer_params=ASK)
    assert extra(warm) == 2 * C


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_last_chunk_that_ends_with_the_last_computed_token(
    start_engine: StartEngine, async_scheduling: bool
) -> None:
    first = start_engine(async_scheduling=async_scheduling).generate(prompt(C + 1), max_tokens=C)
    warm = start_engine().generate(prompt(C + 1) + first.tokens, kv_transfer_params=ASK)
    assert extra(warm) == 2 * C


def test_generated_tokens_are_not_stored_where_that_is_off(start_engine: StartEngine) -> None:
    first = start_engine(extra_config={"kvdock.save_decode": False}).generate(
        prompt(C + C // 2), max_tokens=2 * C
    )
    warm = start_engine().generate(prompt(C + C // 2) + first.tokens, kv_transfer_params=ASK)
    assert extra(warm) == C


def test_chunks_of_another_size_by_request(start_engine: StartEngine) -> None:
    setting = {"kvdock.chunk_tokens": 100}
    start_engine(extra_config=setting).generate(prompt(300))
    warm = start_engine(extra_config=setting).generate(prompt(300), kv_transfer_params=ASK)
    assert extra(warm) == 2 * 112, "the smallest number of whole blocks that is at least 100"


def test_two_engines_at_once(start_engine: StartEngine) -> None:
    one, other = start_engine(), start_engine()
    for engine in (one, other):
        for n in range(6):
            engine.add(f"r{n}", prompt(3 * C, seed=n // 2) + prompt(C, seed=n), max_tokens=8)
    while one.scheduler.has_requests() or other.scheduler.has_requests():
        one.step()
        other.step()
    assert [o.tokens for o in one.outcomes.values()] == [o.tokens for o in other.outcomes.values()]


# -- what is asked ----------------------------------------------------------------------------


def test_one_request_is_one_lookup_however_often_the_scheduler_asks(
    start_engine: StartEngine, kvdock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_engine().generate(prompt(8 * C))
    asked = status(kvdock).counters.lookups
    go_on = threading.Event()
    real = LoadJob._work

    def held(job: LoadJob) -> None:
        go_on.wait(30)
        real(job)

    monkeypatch.setattr(LoadJob, "_work", held)
    # Room for one load at a time, so that the second request is asked about again and again.
    engine = start_engine(num_blocks=8 * C // BLOCK_TOKENS + 8)
    engine.add("a", prompt(8 * C), max_tokens=30, kv_transfer_params=ASK)
    # The answers of lookups may overtake one another.
    step_until_loading(engine)
    engine.add("b", prompt(8 * C), max_tokens=30, kv_transfer_params=ASK)
    for _ in range(10):
        engine.step()
    go_on.set()
    engine.run()
    assert status(kvdock).counters.lookups == asked + 2
    assert engine.outcomes["a"].tokens == engine.outcomes["b"].tokens
    assert extra(engine.outcomes["a"]) == 8 * C
    assert extra(engine.outcomes["b"]) == BLOCK_TOKENS, "the engine has all but the last block"


def test_a_request_that_may_not_read_the_cache_is_not_looked_up(
    engine: SimulatedEngine, kvdock: Any
) -> None:
    engine.generate(prompt(2 * C))
    engine.forget()
    asked = status(kvdock).counters.lookups
    outcome = engine.generate(prompt(2 * C), kv_transfer_params=ASK, skip_reading_prefix_cache=True)
    assert outcome.num_cached_tokens == extra(outcome) == 0
    assert status(kvdock).counters.lookups == asked


def test_a_prompt_shorter_than_a_chunk_asks_nothing(engine: SimulatedEngine, kvdock: Any) -> None:
    engine.generate(prompt(C - 1))
    assert status(kvdock).counters.lookups == 0


def test_an_engine_that_has_all_itself_waits_for_no_answer(
    engine: SimulatedEngine, kvdock: Any
) -> None:
    question = prompt(4 * C + BLOCK_TOKENS // 2)
    engine.generate(question)
    half = engine.connector.scheduler_half
    stored = half.stores._num_jobs
    os.kill(kvdock.process.pid, signal.SIGSTOP)
    try:
        engine.add("short", question, kv_transfer_params=ASK)
        engine.add("long", question, max_tokens=C, kv_transfer_params=ASK)
        for _ in range(3):
            engine.step()
        assert extra(engine.outcomes["short"]) == 0
        assert len(engine.outcomes["long"].tokens) == 3
        awaited = half.records["long"].lookup
        assert awaited is not None
        assert half.stores._num_jobs == stored, "what is there already is not known yet"
    finally:
        os.kill(kvdock.process.pid, signal.SIGCONT)
    awaited._future.result(10)
    engine.run()
    assert half.stores._num_jobs == stored + 1, "only what was generated"
    assert status(kvdock).index.chunks == 5
    assert_nothing_held(kvdock)


def test_what_is_stored_is_not_copied_again(engine: SimulatedEngine, kvdock: Any) -> None:
    engine.generate(prompt(4 * C))
    for _ in range(2):
        engine.forget()
        engine.generate(prompt(4 * C))
    assert status(kvdock).counters.stored_shards == 4


def test_tenants_and_adapters_keep_apart(start_engine: StartEngine, tmp_path: Path) -> None:
    adapters = []
    for number, name in ((1, "a"), (2, "b")):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "adapter_model.safetensors").write_text(name)
        adapters.append(LoRARequest(name, number, str(folder)))
    engine = start_engine()
    kinds: list[dict[str, Any]] = [
        {},
        {"cache_salt": "a"},
        {"cache_salt": "b"},
        {"lora": adapters[0]},
        {"lora": adapters[1]},
    ]
    for kind in kinds:
        # vLLM 0.26 takes a salt for an adapter of the same name, in its own cache.
        engine.forget()
        assert extra(engine.generate(prompt(2 * C), kv_transfer_params=ASK, **kind)) == 0
    for kind in kinds:
        engine.forget()
        assert extra(engine.generate(prompt(2 * C), kv_transfer_params=ASK, **kind)) == 2 * C


# -- what comes in between --------------------------------------------------------------------


def test_an_abort_before_scheduling(engine: SimulatedEngine, kvdock: Any) -> None:
    engine.generate(prompt(4 * C))
    engine.forget()
    engine.add("gone", prompt(4 * C), kv_transfer_params=ASK)
    engine.abort("gone")
    engine.run()
    assert_nothing_held(kvdock)


def test_an_abort_after_the_answer(engine: SimulatedEngine, kvdock: Any) -> None:
    engine.generate(prompt(4 * C))
    engine.forget()
    engine.add("gone", prompt(4 * C))
    deadline = time.monotonic() + 3
    while not status(kvdock).index.leases:
        assert time.monotonic() < deadline
    engine.abort("gone")
    engine.run()
    assert_nothing_held(kvdock)


def test_an_abort_while_loading(engine: SimulatedEngine, kvdock: Any) -> None:
    engine.generate(prompt(4 * C))
    engine.forget()
    engine.add("gone", prompt(4 * C))
    engine.add("stays", prompt(4 * C, seed=1), max_tokens=4)
    step_until_loading(engine)
    engine.abort("gone")
    engine.run()
    assert_nothing_held(kvdock)
    assert engine.outcomes["stays"].finish_reason == "length"
    assert extra(engine.generate(prompt(4 * C), kv_transfer_params=ASK)) == 4 * C


def step_until_loading(engine: SimulatedEngine) -> None:
    """Steps until a load is under way, without collecting its end."""
    half = engine.connector.scheduler_half
    deadline = time.monotonic() + 5
    go_on = threading.Event()
    real = LoadJob._work

    def held(job: LoadJob) -> None:
        go_on.wait(30)
        real(job)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LoadJob, "_work", held)
        while not half.loads.under_way:
            assert time.monotonic() < deadline
            engine.step()
    go_on.set()


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_an_abort_after_any_step(
    start_engine: StartEngine, kvdock: Any, async_scheduling: bool
) -> None:
    engine = start_engine(async_scheduling=async_scheduling)
    engine.generate(prompt(4 * C))
    for steps in range(1, 12):
        engine.forget()
        engine.add(f"gone{steps}", prompt(5 * C), max_tokens=40)
        for _ in range(steps):
            engine.step()
        engine.abort(f"gone{steps}")
        engine.run()
        assert_nothing_held(kvdock)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_preempted_requests_are_resumed_from_what_was_stored(
    start_engine: StartEngine, kvdock: Any, async_scheduling: bool
) -> None:
    # Six requests grow to 20 blocks each, and there are 60.
    engine = start_engine(num_blocks=61, async_scheduling=async_scheduling)
    for n in range(6):
        engine.add(f"r{n}", prompt(3 * C, seed=n), max_tokens=2 * C, kv_transfer_params=ASK)
    engine.run(60)
    preemptions = sum(_preemptions.values())
    assert preemptions > 0
    again = start_engine()
    for n in range(6):
        outcome = engine.outcomes[f"r{n}"]
        # Counted is what was loaded when the request was first admitted.
        assert extra(outcome) == 0
        whole = prompt(3 * C, seed=n) + outcome.tokens
        warm = again.generate(whole, kv_transfer_params=ASK)
        assert extra(warm) == (len(whole) - 1) // C * C


_preemptions: dict[int, int] = {}


@pytest.fixture(autouse=True)
def _count_preemptions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts what vLLM's scheduler does."""
    from vllm.v1.core.sched.scheduler import Scheduler

    _preemptions.clear()
    real = Scheduler._preempt_request

    def counting(self: Any, *arguments: Any, **named: Any) -> None:
        _preemptions[id(self)] = _preemptions.get(id(self), 0) + 1
        real(self, *arguments, **named)

    monkeypatch.setattr(Scheduler, "_preempt_request", counting)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_blocks_given_away_while_a_store_reads_them(
    start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch, async_scheduling: bool
) -> None:
    # Copies take longer than preempted blocks may be read, so that stores are given up.
    slow_copies(monkeypatch, 0.03)
    monkeypatch.setattr(store_jobs, "_FLUSH_SECONDS", 0.001)
    engine = start_engine(num_blocks=61, async_scheduling=async_scheduling)
    for n in range(6):
        engine.add(f"r{n}", prompt(3 * C, seed=n), max_tokens=2 * C)
    engine.run(120)
    assert sum(_preemptions.values()) > 0
    again = start_engine()
    for n in range(6):
        # Whatever is there is right: the second engine checks the bytes.
        again.generate(prompt(3 * C, seed=n) + engine.outcomes[f"r{n}"].tokens)


def test_a_copy_that_cannot_be_stopped_is_not_committed(
    start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_FLUSH_SECONDS", "_STOP_SECONDS"):
        monkeypatch.setattr(store_jobs, name, 0.001)
    reached, go_on = threading.Event(), threading.Event()
    real = Copier._pieces

    def held(self: Copier, *arguments: Any) -> Iterator[Any]:
        for piece in real(self, *arguments):
            reached.set()
            go_on.wait(30)
            yield piece

    monkeypatch.setattr(Copier, "_pieces", held)
    # 12 blocks, of which the request has 5.
    engine = start_engine(num_blocks=13)
    engine.add("r", prompt(C + 9), max_tokens=7)
    # No step more than the store needs to begin: a request that ends has nothing to be preempted.
    worker = engine.ranks[0].connector.worker_half
    while not worker.stores.under_way:
        engine.step()
    assert reached.wait(30)
    (blocks,) = engine.scheduler.kv_cache_manager.get_block_ids("r")
    copied = set(blocks[: C // BLOCK_TOKENS])
    assert engine.preempt_all()
    others = step_until_it_has_blocks(engine, "r")
    assert not copied & set(others)
    # Whoever gets the blocks now writes there, while the copy goes on.
    engine.add("heir", prompt(7 * BLOCK_TOKENS - 1, seed=1), max_tokens=2)
    inherited = step_until_it_has_blocks(engine, "heir")
    go_on.set()
    assert copied <= set(inherited)
    engine.run()
    warm = start_engine().generate(prompt(C + 9), max_tokens=7, kv_transfer_params=ASK)
    assert warm.tokens == engine.outcomes["r"].tokens
    assert extra(warm) == C, "what the resumed request stored is there"


def test_a_waiting_request_gets_the_blocks_of_a_finished_one_that_is_being_stored(
    start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached, go_on = threading.Event(), threading.Event()
    real = Copier._pieces

    def held(self: Copier, *arguments: Any) -> Iterator[Any]:
        for piece in real(self, *arguments):
            reached.set()
            go_on.wait(30)
            yield piece

    monkeypatch.setattr(Copier, "_pieces", held)
    # Of 15 blocks the first request has 6, and its only store, which begins at its end, reads 4.
    engine = start_engine(num_blocks=16)
    engine.add("first", prompt(C // 2), max_tokens=C)
    while not engine.outcomes["first"].finish_reason:
        engine.step()
    engine.step()
    assert reached.wait(30)
    engine.add("second", prompt(10 * BLOCK_TOKENS, seed=1), max_tokens=2)
    assert len(step_until_it_has_blocks(engine, "second")) == 10
    assert len(engine.connector.scheduler_half.holds) == 1
    go_on.set()
    engine.run()
    longer = prompt(C // 2) + engine.outcomes["first"].tokens
    warm = start_engine().generate(longer, kv_transfer_params=ASK)
    assert extra(warm) == C
    assert warm.tokens == engine.expected(longer, 1), "what was read while others ran is right"


def step_until_it_has_blocks(engine: SimulatedEngine, name: str) -> list[int]:
    """Steps until the request is scheduled, which takes an answer from the server; its blocks."""
    while True:
        engine.step()
        (blocks,) = engine.scheduler.kv_cache_manager.get_block_ids(name)
        if blocks:
            return list(blocks)


def test_requests_preempted_and_resumed_in_one_step(engine: SimulatedEngine) -> None:
    for n in range(3):
        engine.add(f"r{n}", prompt(4 * C, seed=n), max_tokens=C)
    for n in range(30):
        engine.step()
        if n % 5 == 4:
            engine.preempt_all()
    assert sum(_preemptions.values()) > 0
    engine.run()
    cold = {name: outcome.tokens for name, outcome in engine.outcomes.items()}
    engine.forget()
    for n in range(3):
        assert engine.generate(prompt(4 * C, seed=n), max_tokens=C).tokens == cold[f"r{n}"]


# -- failures ---------------------------------------------------------------------------------


def test_a_server_that_dies_between_the_hit_and_the_load(
    engine: SimulatedEngine, kvdock: Any
) -> None:
    cold = engine.generate(prompt(4 * C), max_tokens=4)
    engine.forget()
    engine.add("r", prompt(4 * C), max_tokens=4, kv_transfer_params=ASK)

    kill_before_a_load(kvdock, engine)
    engine.run()
    assert kvdock.process.poll() is not None
    assert engine.outcomes["r"].tokens == cold.tokens
    assert extra(engine.outcomes["r"]) == 0


def test_a_load_that_fails_in_part_counts_what_was_loaded(
    engine: SimulatedEngine, kvdock: Any
) -> None:
    cold = engine.generate(prompt(6 * C), max_tokens=4)
    engine.forget()
    engine.add("r", prompt(6 * C), max_tokens=4, kv_transfer_params=ASK)

    def lose_chunk_four() -> None:
        for load in engine.connector.scheduler_half.loads.under_way.values():
            engine.between_schedule_and_forward = lambda: None
            assert load.lookup is not None
            session = load.lookup.live.session
            assert session.free_locks(load.lookup.lease_id, 4, 5) == 1

    engine.between_schedule_and_forward = lose_chunk_four
    engine.run()
    assert engine.outcomes["r"].tokens == cold.tokens
    assert extra(engine.outcomes["r"]) == 4 * C
    # Each request asked once, and this one not again because its load failed.
    assert status(kvdock).counters.lookups == 2


def test_a_load_that_fails_from_its_first_block_is_not_tried_again(
    engine: SimulatedEngine, kvdock: Any
) -> None:
    cold = engine.generate(prompt(3 * C), max_tokens=4)
    engine.forget()
    engine.add("r", prompt(3 * C), max_tokens=4, kv_transfer_params=ASK)

    def lose_all() -> None:
        for load in engine.connector.scheduler_half.loads.under_way.values():
            engine.between_schedule_and_forward = lambda: None
            assert load.lookup is not None
            load.lookup.live.session.free_locks(load.lookup.lease_id)

    engine.between_schedule_and_forward = lose_all
    engine.run()
    assert engine.outcomes["r"].tokens == cold.tokens
    assert extra(engine.outcomes["r"]) == 0
    assert status(kvdock).counters.lookups == 2


def test_where_that_is_set_a_load_that_fails_ends_its_request(start_engine: StartEngine) -> None:
    engine = start_engine(extra_config={"kvdock.load_failure_policy": "fail"})
    cold = engine.generate(prompt(6 * C), max_tokens=4)
    engine.forget()
    engine.add("r", prompt(6 * C), max_tokens=4)
    engine.add("other", prompt(2 * C, seed=1), max_tokens=4)

    def lose_chunk_four() -> None:
        for load in engine.connector.scheduler_half.loads.under_way.values():
            engine.between_schedule_and_forward = lambda: None
            assert load.lookup is not None
            load.lookup.live.session.free_locks(load.lookup.lease_id, 4, 5)

    engine.between_schedule_and_forward = lose_chunk_four
    engine.run()
    assert engine.outcomes["r"].finish_reason == "error"
    assert engine.outcomes["r"].tokens == []
    assert engine.outcomes["other"].finish_reason == "length"
    assert engine.generate(prompt(6 * C), max_tokens=4).tokens == cold.tokens


def test_hits_resume_after_a_restart_of_the_server(engine: SimulatedEngine, kvdock: Any) -> None:
    cold = engine.generate(prompt(4 * C), max_tokens=4)
    kvdock.kill()
    engine.forget()
    assert engine.generate(prompt(4 * C), max_tokens=4).tokens == cold.tokens
    kvdock.start()
    _wait_connected(engine)
    engine.forget()
    first = engine.generate(prompt(4 * C), max_tokens=4, kv_transfer_params=ASK)
    engine.forget()
    second = engine.generate(prompt(4 * C), max_tokens=4, kv_transfer_params=ASK)
    assert first.tokens == second.tokens == cold.tokens
    assert (extra(first), extra(second)) == (0, 4 * C)


def _wait_connected(engine: SimulatedEngine, seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while engine.connector.scheduler_half.link.current is None:
        assert time.monotonic() < deadline, "not connected again in time"
        time.sleep(0.01)


def test_a_restart_in_the_middle_of_requests(engine: SimulatedEngine, kvdock: Any) -> None:
    cold = [engine.generate(prompt(6 * C, seed=n), max_tokens=C).tokens for n in range(3)]
    engine.forget()
    for n in range(3):
        engine.add(f"again{n}", prompt(6 * C, seed=n), max_tokens=C)
    for n in range(60):
        engine.step()
        if n in (2, 20, 40):
            kvdock.restart()
    engine.run()
    assert [engine.outcomes[f"again{n}"].tokens for n in range(3)] == cold


def test_a_server_that_appears_later(model: Path, start_server: StartServer) -> None:
    kvdock = start_server("--chunk-tokens", str(C))
    kvdock.stop()
    began = time.monotonic()
    with SimulatedEngine(model, kvdock.address) as engine:
        assert time.monotonic() - began < 3
        cold = engine.generate(prompt(4 * C), kv_transfer_params=ASK)
        kvdock.start()
        _wait_connected(engine)
        engine.generate(prompt(4 * C, seed=1))
        engine.forget()
        warm = engine.generate(prompt(4 * C, seed=1), kv_transfer_params=ASK)
        assert (extra(cold), extra(warm)) == (0, 4 * C)


def test_a_stopped_server_costs_each_request_a_moment_at_most(
    start_engine: StartEngine, kvdock: Any
) -> None:
    engine = start_engine(extra_config={"kvdock.lookup_timeout_ms": 100})
    engine.generate(prompt(2 * C))
    engine.forget()
    os.kill(kvdock.process.pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        engine.add("first", prompt(2 * C))
        while engine.outcomes["first"].finish_reason is None:
            engine.step()
        first = time.monotonic() - began
        assert first < 0.5, "a lookup may take 0.1 s"
        began = time.monotonic()
        for n in range(20):
            engine.add(f"r{n}", prompt(2 * C, seed=n))
        while any(engine.outcomes[f"r{n}"].finish_reason is None for n in range(20)):
            engine.step()
        assert time.monotonic() - began < 0.5, "who waited in vain does not wait again at once"
        # Stores that were begun hold blocks until they are given up; and they are.
        engine.run(15)
    finally:
        os.kill(kvdock.process.pid, signal.SIGCONT)
    deadline = time.monotonic() + 10
    while True:
        engine.forget()
        if extra(engine.generate(prompt(2 * C), kv_transfer_params=ASK)) == 2 * C:
            break
        assert time.monotonic() < deadline, "the server answers again and is not used"
        time.sleep(0.1)


def test_nothing_that_answers_is_as_good_as_nobody(model: Path, tmp_path: Path) -> None:
    import socket

    listener = socket.socket(socket.AF_UNIX)
    path = Path(f"/tmp/kvdock-test-{os.getpid()}.sock")
    listener.bind(str(path))
    listener.listen()
    try:
        began = time.monotonic()
        with SimulatedEngine(model, f"unix://{path}") as engine:
            assert time.monotonic() - began < 5
            assert engine.generate(prompt(2 * C)).finish_reason == "length"
    finally:
        listener.close()
        path.unlink()


@pytest.fixture
def other_server(request: pytest.FixtureRequest) -> Iterator[str]:
    """Address of a program that is no KVDock server."""
    if request.param == "HTTP":
        web = ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
        threading.Thread(target=web.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{web.server_port}"
        web.shutdown()
        web.server_close()
    else:
        service = grpc.server(ThreadPoolExecutor(1))
        port = service.add_insecure_port("127.0.0.1:0")
        service.start()
        yield f"127.0.0.1:{port}"
        service.stop(None)


@pytest.mark.parametrize("other_server", ["HTTP", "gRPC"], indirect=True)
def test_another_program_is_as_good_as_nobody(
    model: Path, other_server: str, caplog: pytest.LogCaptureFixture
) -> None:
    with SimulatedEngine(model, other_server) as engine:
        assert engine.generate(prompt(2 * C)).finish_reason == "length"
    assert f"goes on trying to connect to {other_server}" in caplog.text


def test_a_pool_smaller_than_the_working_set(model: Path, start_server: StartServer) -> None:
    # A chunk takes 24 KiB; 1 MiB holds 42.
    kvdock = start_server("--chunk-tokens", str(C), memory="1MiB")
    with SimulatedEngine(model, kvdock.address) as engine:
        for _ in range(2):
            for n in range(10):
                engine.generate(prompt(8 * C, seed=n))
                engine.forget()
        assert status(kvdock).counters.evicted_parts > 0
        last = engine.generate(prompt(8 * C, seed=9), kv_transfer_params=ASK)
        assert extra(last) == 8 * C
        assert_nothing_held(kvdock)


def test_a_request_larger_than_the_pool(model: Path, start_server: StartServer) -> None:
    kvdock = start_server("--chunk-tokens", str(C), memory="1MiB")
    with SimulatedEngine(model, kvdock.address, num_blocks=300, max_model_len=4096) as engine:
        for _ in range(3):
            outcome = engine.generate(prompt(60 * C), max_tokens=C, kv_transfer_params=ASK)
            engine.forget()
        assert extra(outcome) <= 42 * C
        assert_nothing_held(kvdock)


# -- what the workers say ---------------------------------------------------------------------


def strategies(monkeypatch: pytest.MonkeyPatch, use_mla: Callable[[int | None], bool]) -> None:
    """Of the scheduler (None) and of each worker: is every layer of latent attention?"""

    def build(*arguments: Any, is_worker: bool) -> ParallelStrategy:
        strategy = parallel_strategy(*arguments, is_worker=is_worker)
        worker = strategy.worker_id if is_worker else None
        return dataclasses.replace(strategy, use_mla=use_mla(worker))

    for module in (scheduler_module, worker_module):
        monkeypatch.setattr(module, "parallel_strategy", build)


def test_a_draft_model_that_the_scheduler_does_not_see(
    start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM tells the scheduler of the first layer of a group, here one of latent attention."""
    strategies(monkeypatch, lambda worker: worker is None)
    engine = start_engine(tensor_size=2)
    engine.generate(prompt(4 * C))
    engine.forget()
    assert extra(engine.generate(prompt(4 * C), kv_transfer_params=ASK)) == 4 * C
    assert engine.counted["stored_chunks"] == 8
    assert not engine.counted.get("failed_loads")


def test_a_draft_model_of_one_stage_alone_is_refused(
    start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    strategies(monkeypatch, lambda worker: worker != 1)
    engine = start_engine(tensor_size=2)
    engine.generate(prompt(4 * C))
    assert "some stages divide their KV cache" in caplog.text
    assert not engine.counted.get("lookups")
    assert not engine.counted.get("stored_chunks")


# -- reset ------------------------------------------------------------------------------------


def test_a_reset_clears_the_server_too(start_engine: StartEngine, kvdock: Any) -> None:
    engine = start_engine()
    engine.generate(prompt(4 * C))
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    assert status(kvdock).index.chunks == 0
    assert extra(engine.generate(prompt(4 * C), kv_transfer_params=ASK)) == 0
    engine.forget()
    assert extra(engine.generate(prompt(4 * C), kv_transfer_params=ASK)) == 4 * C


def test_what_runs_on_through_a_reset_is_not_stored_again(
    start_engine: StartEngine, kvdock: Any
) -> None:
    """It was computed with what the reset is for: other weights, mostly."""
    engine = start_engine()
    engine.add("runs", prompt(3 * C), max_tokens=20 * C)
    for _ in range(C // 2):
        engine.step()
    assert not engine.scheduler.reset_prefix_cache(reset_connector=True), "blocks are in use"
    half = engine.connector.scheduler_half
    deadline = time.monotonic() + 10
    while half.link.usable is None:
        assert time.monotonic() < deadline
        if half.link.resets.await_stores:
            engine.step()
        time.sleep(0.01)
    for _ in range(2 * C):
        engine.step()
    assert status(kvdock).index.chunks == 0
    assert engine.preempt_all()
    engine.run()
    assert status(kvdock).index.chunks > 3, "after preemption all is computed anew"


def test_a_reset_reaches_stores_that_are_under_way(
    start_engine: StartEngine, kvdock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start_engine()
    slow_copies(monkeypatch, 0.2)
    engine.add("r", prompt(2 * C))
    while engine.outcomes["r"].finish_reason is None:
        engine.step()
    assert engine.connector.reset_cache()
    engine.run()
    _wait_connected(engine)
    assert status(kvdock).index.chunks == 0
    engine.forget()
    assert extra(engine.generate(prompt(2 * C), kv_transfer_params=ASK)) == 0


def test_a_second_reset_waits_for_the_renewal_that_the_first_brought_about(
    start_engine: StartEngine,
    kvdock: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Two in a row with stores under way, as reinforcement learning does."""
    engine, other = start_engine(), start_engine()
    half = engine.connector.scheduler_half
    slow_copies(monkeypatch, 0.2)
    engine.add("r", prompt(2 * C))
    while engine.outcomes["r"].finish_reason is None:
        engine.step()
    assert engine.connector.reset_cache()
    clears = half.link.resets._wanted
    prepare = half.link._link._prepare

    def prepare_after_the_second_reset(client: Client, session: Session) -> Target:
        deadline = time.monotonic() + 10
        while half.link.resets._wanted < clears + 2:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        return prepare(client, session)

    monkeypatch.setattr(half.link._link, "_prepare", prepare_after_the_second_reset)
    while half.link.resets.await_stores:
        engine.step()
    assert half.link.current is None
    assert engine.connector.reset_cache()
    assert status(kvdock).index.chunks == 0
    assert half.link.current is not None
    assert "could not be reset" not in caplog.text
    engine.run()
    assert extra(other.generate(prompt(2 * C), kv_transfer_params=ASK)) == 0


def test_a_reset_without_server_says_so_and_is_made_up_for(
    engine: SimulatedEngine, kvdock: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM's sleep and pause raise where a reset answers False."""
    engine.generate(prompt(2 * C))
    os.kill(kvdock.process.pid, signal.SIGSTOP)
    link = engine.connector.scheduler_half.link._link
    try:
        link._current = None
        assert engine.connector.reset_cache() is True
        assert "could not be reset now" in caplog.text
    finally:
        os.kill(kvdock.process.pid, signal.SIGCONT)
    _wait_connected(engine)
    assert status(kvdock).index.chunks == 0


# -- ranks ------------------------------------------------------------------------------------


@pytest.mark.parametrize("mla", [False, True])
def test_tensor_parallel_ranks(start_engine: StartEngine, kvdock: Any, mla: bool) -> None:
    cold = start_engine(tensor_size=2, mla=mla).generate(prompt(4 * C + 9), max_tokens=C)
    stored = status(kvdock).counters.stored_shards
    assert stored == (5 if mla else 10), "with MLA one rank stores, without each its own"
    warm = start_engine(tensor_size=2, mla=mla).generate(
        prompt(4 * C + 9), max_tokens=C, kv_transfer_params=ASK
    )
    assert warm.tokens == cold.tokens
    assert extra(warm) == 4 * C
    assert status(kvdock).counters.retrieved_shards == 8, "each rank loads"
    assert status(kvdock).counters.stored_shards == stored


def test_ranks_that_the_handshake_left_out(start_engine: StartEngine) -> None:
    engine = start_engine(tensor_size=2, handshake=False)
    assert engine.connector.scheduler_half.link.current is None
    engine.generate(prompt(C))
    _wait_connected(engine)
    engine.generate(prompt(2 * C))
    engine.forget()
    assert extra(engine.generate(prompt(2 * C), kv_transfer_params=ASK)) == 2 * C


# As vLLM has it for its reference kernels of MLA on CPUs.
MLA_ON_CPU: dict[str, Any] = {
    "mla": True,
    "enable_chunked_prefill": False,
    "max_num_batched_tokens": 2048,
    "extra_config": {"kvdock.mla_on_cpu": True},
}


def test_an_engine_whose_answers_a_hit_would_change_is_served_without_cache(
    start_engine: StartEngine, kvdock: Any, caplog: pytest.LogCaptureFixture
) -> None:
    engine = start_engine(**{**MLA_ON_CPU, "extra_config": {}})
    assert "KVDock does nothing for this engine" in caplog.text
    assert "kvdock.mla_on_cpu" in caplog.text
    for _ in range(2):
        outcome = engine.generate(prompt(2 * C), max_tokens=C, kv_transfer_params=ASK)
        assert outcome.tokens == engine.expected(prompt(2 * C), C)
        assert extra(outcome) == 0
        assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    assert not status(kvdock).sessions
    assert "no server answers" not in caplog.text


@pytest.mark.parametrize(
    ("tokens", "loaded"), [(2 * C - 1, 0), (2 * C, 2 * C), (2 * C + 1, 2 * C), (2 * C + 2, 0)]
)
def test_an_engine_that_cannot_continue_prompts_gets_whole_ones(
    start_engine: StartEngine, tokens: int, loaded: int
) -> None:
    start_engine(**MLA_ON_CPU).generate(prompt(tokens))
    warm = start_engine(**MLA_ON_CPU).generate(prompt(tokens), kv_transfer_params=ASK)
    assert extra(warm) == loaded


def test_an_engine_that_cannot_continue_prompts_gets_all_or_nothing(
    start_engine: StartEngine,
) -> None:
    engine = start_engine(**MLA_ON_CPU)
    cold = engine.generate(prompt(4 * C), max_tokens=4)
    engine.forget()
    engine.add("r", prompt(4 * C), max_tokens=4, kv_transfer_params=ASK)

    def lose_chunk_two() -> None:
        for load in engine.connector.scheduler_half.loads.under_way.values():
            engine.between_schedule_and_forward = lambda: None
            assert load.lookup is not None
            load.lookup.live.session.free_locks(load.lookup.lease_id, 2, 3)

    engine.between_schedule_and_forward = lose_chunk_two
    engine.run()
    assert engine.outcomes["r"].tokens == cold.tokens
    assert extra(engine.outcomes["r"]) == 0


def test_a_rank_that_cannot_load_makes_all_compute(start_engine: StartEngine, kvdock: Any) -> None:
    engine = start_engine(tensor_size=2)
    cold = engine.generate(prompt(4 * C), max_tokens=4)
    engine.forget()
    engine.add("r", prompt(4 * C), max_tokens=4, kv_transfer_params=ASK)

    def lose_for_one() -> None:
        for load in engine.connector.scheduler_half.loads.under_way.values():
            engine.between_schedule_and_forward = lambda: None
            assert load.lookup is not None
            session = load.lookup.live.session
            assert session.free_locks(load.lookup.lease_id, 2, 3, reader=1) == 1

    engine.between_schedule_and_forward = lose_for_one
    engine.run()
    assert engine.outcomes["r"].tokens == cold.tokens
    assert extra(engine.outcomes["r"]) == 2 * C


@pytest.mark.parametrize(
    ("refused", "loaded"),
    [("processors", 2), ("mark", 0), ("load thread", 0), ("store thread", 2)],
)
def test_what_cannot_even_begin_ends(
    start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch, refused: str, loaded: int
) -> None:
    """vLLM waits for the end of each load and store, however it fails."""
    start_engine().generate(prompt(2 * C))

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError("not permitted")

    if refused == "processors":
        monkeypatch.setattr(affinity, "_allowed", {0})
        monkeypatch.setattr(os, "sched_setaffinity", refuse)
    engine = start_engine()
    (rank,) = (rank.connector.worker_half for rank in engine.ranks)
    if refused == "mark":
        monkeypatch.setattr(rank.link.transfers, "mark", refuse)
    elif refused == "load thread":
        monkeypatch.setattr(rank.loads._threads, "submit", refuse)
    elif refused == "store thread":
        monkeypatch.setattr(rank.stores._threads, "submit", refuse)
    deadline = time.monotonic() + 10
    while engine.connector.scheduler_half.link.usable is None:  # so the first step also stores
        assert time.monotonic() < deadline
        time.sleep(0.001)
    answer = engine.generate(prompt(4 * C), max_tokens=2)
    assert answer.tokens == engine.expected(prompt(4 * C), 2)
    assert engine.counted.get("loaded_chunks", 0) == loaded


# -- answers ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "answered"),
    [
        (None, None),
        ({}, None),
        ({"do_remote_decode": True}, None),
        ({"num_kvdock_extra_cached_tokens": 0}, {"num_kvdock_extra_cached_tokens": 2 * C}),
        ({"num_lmcache_extra_cached_tokens": 0}, {"num_lmcache_extra_cached_tokens": 2 * C}),
    ],
)
def test_the_number_comes_where_it_was_asked_for(
    engine: SimulatedEngine, asked: dict[str, Any] | None, answered: dict[str, Any] | None
) -> None:
    engine.generate(prompt(2 * C))
    engine.forget()
    assert engine.generate(prompt(2 * C), kv_transfer_params=asked).kv_transfer_params == answered


def test_vllm_is_told_what_was_counted(engine: SimulatedEngine) -> None:
    engine.generate(prompt(3 * C))
    engine.forget()
    engine.generate(prompt(4 * C))
    counted = dict(engine.counted)
    assert counted.pop("load_seconds") > 0
    assert counted.pop("store_seconds") > 0
    chunk_bytes = 3 * C * 128
    assert counted == {
        "lookups": 2,
        "hit_tokens": 3 * C,
        "loaded_tokens": 3 * C,
        "loaded_chunks": 3,
        "loaded_bytes": 3 * chunk_bytes,
        "stored_chunks": 4,
        "stored_bytes": 4 * chunk_bytes,
        "shared_mode_workers": 1,
    }


def test_workers_hear_of_the_server_once_and_before_any_request(engine: SimulatedEngine) -> None:
    connector: Any = engine.scheduler.connector
    assert connector.has_pending_push_work()
    assert engine.scheduler.has_requests(), "an idle engine would not step"
    engine.step()
    assert not connector.has_pending_push_work()
    assert not engine.scheduler.has_requests()


@pytest.mark.parametrize("tensor_size", [1, 2])
def test_a_step_that_brings_news_of_a_load_does_not_wait_for_the_next(
    start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch, tensor_size: int
) -> None:
    """vLLM takes note of a load that has ended on all ranks only when one more step is done."""
    cold = start_engine(tensor_size=tensor_size)
    for n in range(2):
        cold.generate(prompt(3 * C, seed=n))
    engine = start_engine(tensor_size=tensor_size, async_scheduling=True)
    ranks = [rank.connector.worker_half for rank in engine.ranks]
    go_on, first_may_end, others_may_end = (threading.Event() for _ in range(3))
    real = LoadJob.run

    def held(self: LoadJob) -> None:
        if self.request_id == "second":
            go_on.wait(30)
        elif self in ranks[0].loads.under_way:
            first_may_end.wait(30)
        else:
            others_may_end.wait(30)
        real(self)

    monkeypatch.setattr(LoadJob, "run", held)
    for rank in ranks:
        rank._idle_wait = 0.0
    for n, name in enumerate(["first", "second"]):
        engine.add(name, prompt(3 * C, seed=n), max_tokens=2)
    # Their lookups are answered in any order.
    while len(ranks[0].loads.under_way) < 2:
        engine.step()
    # The other ranks are too slow for the step in which the first rank's load ends.
    ranks[0]._idle_wait = 20.0
    first_may_end.set()
    began = time.monotonic()
    while not engine.outcomes["first"].tokens:
        engine.step()
        if ranks[0]._steps_with_news and not others_may_end.is_set():
            others_may_end.set()
            while not all(rank.link.something_ended.is_set() for rank in ranks[1:]):
                time.sleep(0.001)
    assert time.monotonic() - began < 10
    go_on.set()
    engine.run()

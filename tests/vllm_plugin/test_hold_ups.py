"""Stores that wait, for their turn or for the server, workers without session, stages that are not
told when to save, blocks that are zeroed before anybody is asked: none of them holds an engine up,
or makes it answer wrongly."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from modelkit import random_prompt
from simkit import C, StartEngine, slow_copies
from simulator import BLOCK_TOKENS, SimulatedEngine
from vllm.v1.core.sched.interface import PauseState

from kvdock.errors import PoolUnmappable
from kvdock_vllm import scheduler
from kvdock_vllm.engine import stores
from kvdock_vllm.engine.parallel import ParallelStrategy
from kvdock_vllm.engine.transfers import shared
from kvdock_vllm.engine.transfers.shared import SharedTransfers
from kvdock_vllm.vllm_parallel import parallel_strategy


def pressed(engine: SimulatedEngine) -> list[int]:
    """Two requests of which the first one's stores are under way, in a cache that is too small for
    both; the second one's prompt."""
    engine.add("large", random_prompt(8 * C, seed=1), max_tokens=100)
    for _ in range(20):
        engine.step()
        if engine.connector.scheduler_half.stores.under_way:
            break
    engine.step()
    small = random_prompt(C + 2, seed=2)
    engine.add("small", small, max_tokens=100)
    return small


def test_a_store_that_waits_behind_another_does_not_stop_a_step(
    start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start_engine(num_blocks=42, max_num_batched_tokens=2 * C)
    engine.generate(random_prompt(2 * C, seed=9))
    engine.forget()
    with monkeypatch.context() as patch:
        slow_copies(patch, 0.3)
        pressed(engine)
        longest = 0.0
        for _ in range(150):
            began = time.monotonic()
            engine.step()
            longest = max(longest, time.monotonic() - began)
    assert engine.overwritten
    # The store that copies has two chunks of the prompt, and 0.25 s pass for the turn.
    assert longest < 2 * 0.3 + 0.25 + 0.4
    engine.run()


def idle_seconds() -> float:
    """What this thread has waited so far: its garbage collection may take a second."""
    return time.monotonic() - time.thread_time()


@contextmanager
def standing_still(server: Any) -> Iterator[None]:
    os.kill(server.process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(server.process.pid, signal.SIGCONT)


def test_a_step_that_preempts_does_not_wait_for_a_server_that_stands_still(
    start_engine: StartEngine, kvdock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "_GENERATED_TOKENS", C)  # so that much is being stored
    engine = start_engine(num_blocks=40)
    engine.generate(random_prompt(2 * C, seed=9))
    engine.forget()
    with standing_still(kvdock):
        for number in range(7):
            engine.add(str(number), random_prompt(C // 2 + number, seed=number), max_tokens=300)
        longest = 0.0
        while engine.overwritten < 3:
            began = idle_seconds()
            engine.step()
            longest = max(longest, idle_seconds() - began)
        # A store waits that long for the server.
        assert longest < shared._STORE_RPC_SECONDS / 4
    engine.run()


def test_blocks_held_for_a_server_that_stands_still_are_given_to_who_waits_for_blocks(
    start_engine: StartEngine, kvdock: Any
) -> None:
    engine = start_engine(num_blocks=40, extra_config={"kvdock.lookup_timeout_ms": 100})
    engine.generate(random_prompt(2 * C, seed=9))
    engine.forget()
    with standing_still(kvdock):
        names = [str(number) for number in range(12)]
        for name in names:
            engine.add(name, random_prompt(2 * C, seed=int(name)), max_tokens=2)
        longest, last = 0.0, idle_seconds()
        while any(engine.outcomes[name].finish_reason is None for name in names):
            count = sum(len(engine.outcomes[name].tokens) for name in names)
            engine.step()
            if sum(len(engine.outcomes[name].tokens) for name in names) > count:
                longest, last = max(longest, idle_seconds() - last), idle_seconds()
        assert longest < shared._STORE_RPC_SECONDS / 4
    engine.run()


def test_an_engine_ends_although_the_server_stands_still(model: Path, kvdock: Any) -> None:
    with SimulatedEngine(model, kvdock.address) as engine:
        engine.generate(random_prompt(2 * C, seed=9))
        with standing_still(kvdock):
            engine.add("one", random_prompt(2 * C, seed=1), max_tokens=2)
            while engine.outcomes["one"].finish_reason is None:
                engine.step()
            began = time.monotonic()
            for rank in engine.ranks:
                rank.connector.shutdown()
            assert time.monotonic() - began < 0.7 * shared._STORE_RPC_SECONDS


@pytest.mark.parametrize(("v2", "zeroing", "expected"), [(True, True, True), (True, False, False),
                                                         (False, True, False)])  # fmt: skip
def test_who_zeroes_blocks_unasked(v2: bool, zeroing: bool, expected: bool) -> None:
    config: Any = SimpleNamespace(use_v2_model_runner=v2)
    caches: Any = SimpleNamespace(needs_kv_cache_zeroing=zeroing)
    assert scheduler._zeroes_blocks_unasked(config, caches) is expected


def zeroes(*configs: Any) -> bool:
    return True


def test_blocks_that_are_zeroed_too_early_are_not_stored_as_they_are_then(
    start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As of a model with layers of two precisions, on vLLM's V2 runner, which needs a GPU.
    config = "vllm.v1.kv_cache_interface.KVCacheConfig.needs_kv_cache_zeroing"
    monkeypatch.setattr(config, property(lambda self: True))
    monkeypatch.setattr(scheduler, "_zeroes_blocks_unasked", zeroes)
    engine = start_engine(num_blocks=42, max_num_batched_tokens=1024)
    batch = engine._batch

    def zero_and_batch(output: Any) -> Any:
        for block in output.new_block_ids_to_zero or ():
            for rank in engine.ranks:
                for view in rank.views[0]:
                    view[block * BLOCK_TOKENS : (block + 1) * BLOCK_TOKENS] = 0
        return batch(output)

    monkeypatch.setattr(engine, "_batch", zero_and_batch)
    engine.generate(random_prompt(2 * C, seed=9))
    engine.forget()
    with monkeypatch.context() as patch:
        slow_copies(patch, 0.05)
        small = pressed(engine)
        for _ in range(150):
            engine.step()
    engine.run()
    engine.forget()
    other = start_engine()
    extra = {"num_kvdock_extra_cached_tokens": None}
    outcome = other.generate(small, kv_transfer_params=extra)  # which checks the bytes
    assert outcome.kv_transfer_params == {"num_kvdock_extra_cached_tokens": C}


def test_a_worker_without_session_holds_nobody_up(
    start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: SharedTransfers, session: Any) -> None:
        raise PoolUnmappable("there is no /dev/shm here")

    monkeypatch.setattr(SharedTransfers, "prepare", refuse)
    engine = start_engine(num_blocks=64)
    began = time.monotonic()
    for number in range(20):
        engine.add(str(number), random_prompt(2 * C, seed=number), max_tokens=2)
    engine.run()
    assert time.monotonic() - began < 15
    assert all(len(outcome.tokens) == 2 for outcome in engine.outcomes.values())


def test_a_stage_that_is_never_told_to_save_stores_with_its_next_step(
    start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start_engine(tensor_size=2)
    monkeypatch.setattr(engine.ranks[0].connector, "wait_for_save", lambda: None)
    engine.generate(random_prompt(2 * C, seed=9))
    engine.forget()
    engine.add("long", random_prompt(C, seed=1), max_tokens=400)
    while not engine.outcomes["long"].tokens:
        engine.step()
    for number in range(6):
        engine.add(str(number), random_prompt(2 * C, seed=10 + number), max_tokens=2)
    short = [outcome for name, outcome in engine.outcomes.items() if name != "long"]

    def held() -> bool:
        return any(request.is_finished() for request in engine.scheduler.requests.values())

    while held() or any(outcome.finish_reason is None for outcome in short):
        engine.step()
    assert engine.outcomes["long"].finish_reason is None
    engine.run()


def test_only_who_steps_alone_waits_in_a_step() -> None:
    def strategy(**sizes: int) -> ParallelStrategy:
        settings = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "rank": 0} | sizes
        settings["world_size"] = (
            settings["tensor_parallel_size"] * settings["pipeline_parallel_size"]
        )
        config: Any = SimpleNamespace(parallel_config=SimpleNamespace(**settings))
        caches: Any = SimpleNamespace(kv_cache_groups=[])
        return parallel_strategy(config, caches, is_worker=True)

    assert strategy().steps_alone
    assert strategy(tensor_parallel_size=2).steps_alone
    assert not strategy(pipeline_parallel_size=2).steps_alone
    assert not strategy(data_parallel_size=2).steps_alone


def test_an_engine_goes_to_sleep_when_nothing_reads_its_blocks(
    start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start_engine()
    engine.generate(random_prompt(2 * C, seed=9))
    engine.forget()
    slow_copies(monkeypatch, 0.1)
    engine.add("one", random_prompt(4 * C, seed=1), max_tokens=300)
    while not engine.connector.scheduler_half.stores.under_way:
        engine.step()
    engine.scheduler.set_pause_state(PauseState.PAUSED_ALL)  # what sleep(mode="keep") does
    deadline = time.monotonic() + 20
    while engine.scheduler.has_requests():
        engine.step()
        assert time.monotonic() < deadline
    assert not engine.connector.scheduler_half.stores.under_way
    (rank,) = engine.ranks
    assert not any(rank.connector.worker_half.stores.under_way)
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    engine.run()

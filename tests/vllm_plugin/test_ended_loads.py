"""A request is computed in the step after the one in which its load ended."""

from __future__ import annotations

import gc

import pytest
from simkit import C, StartEngine, prompt, slow_copies
from simulator import SimulatedEngine

from kvdock_vllm import ended_loads
from kvdock_vllm.ended_loads import EndedLoads


def steps_until_computed(engine: SimulatedEngine, *, busy: bool = False) -> int:
    """The steps from the one in which a load ends to the one that computes its request."""
    tokens = prompt(4 * C)
    engine.generate(tokens)
    engine.forget()
    if busy:
        engine.add("runs", prompt(5, seed=1), max_tokens=1000)
    request = engine.add("loads", tokens)
    loads = engine.ranks[0].connector.worker_half.loads
    while request.status.name == "WAITING":
        engine.step()
    assert request.status.name == "WAITING_FOR_REMOTE_KVS"
    while loads.under_way:
        engine.step()
    steps = 0
    while request.status.name == "WAITING_FOR_REMOTE_KVS":
        engine.step()
        steps += 1
    if busy:
        engine.abort("runs")
    engine.run()
    outcome = engine.outcomes["loads"]
    assert outcome.tokens == engine.expected(tokens, 1)
    assert outcome.num_cached_tokens == 4 * C
    return steps


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("busy", [False, True])
def test_vllm_computes_in_the_step_after_a_load_has_ended(
    start_engine: StartEngine,
    monkeypatch: pytest.MonkeyPatch,
    async_scheduling: bool,
    busy: bool,
) -> None:
    slow_copies(monkeypatch, 0.02)
    engine = start_engine(async_scheduling=async_scheduling)
    assert steps_until_computed(engine, busy=busy) == 1


def test_a_scheduler_in_another_process_hears_it_from_vllm(
    start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_copies(monkeypatch, 0.02)
    engine = start_engine(async_scheduling=True)
    engine.connector.scheduler_half._ended_loads = None
    engine.ranks[0].connector.worker_half._ended_loads.has_reader = False
    assert steps_until_computed(engine) == 2


class FailedStart:
    """A worker of an engine whose scheduler was never made."""

    def __init__(self) -> None:
        self.loads = EndedLoads(self.take)
        ended_loads.offer("failed", self.loads)

    def take(self) -> set[str]:
        return set()


def test_a_failed_start_leaves_nothing_behind() -> None:
    worker = FailedStart()
    assert "failed" in ended_loads._offered
    del worker
    gc.collect()
    assert ended_loads.find("failed") is None

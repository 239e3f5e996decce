"""How many tokens a request is told to have got from here: the exact number in every case.

vLLM's own scheduler decides; the connector is spoken to through vLLM's hooks alone. The numbers are
what the response carries, which is what vLLM's scheduler is given when the request ends.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from modelkit import Llama, make_checkpoint
from simulator import CHUNK_TOKENS, SimulatedEngine
from vllm.v1.core.sched.scheduler import Scheduler

from kvdock import Client

C = CHUNK_TOKENS
OURS, THEIRS = "num_kvdock_extra_cached_tokens", "num_lmcache_extra_cached_tokens"
BOTH = {OURS: None, THEIRS: None}


@dataclass
class Case:
    """An engine and its server, and what vLLM was told of each request that ended."""

    engine: SimulatedEngine
    server: Any
    answers: dict[str, dict[str, Any] | None]
    leases: list[int] = field(default_factory=list)
    """Of the loads that were sent to the workers."""

    def store(self, tokens: list[int]) -> None:
        """The server has it, the engine has not."""
        self.engine.generate(tokens)
        self.engine.forget()

    def ask(self, tokens: list[int], **arguments: Any) -> None:
        """Gives the engine the request that is counted."""
        self.engine.add("r", tokens, **{"kv_transfer_params": BOTH, **arguments})

    def when_it_loads(self, act: Callable[[], None]) -> None:
        """Acts when a load has been decided on, and before the workers begin it."""

        before = len(self.leases)

        def look() -> None:
            if len(self.leases) > before:
                self.engine.between_schedule_and_forward = lambda: None
                act()

        self.engine.between_schedule_and_forward = look

    def lose(self, first: int, end: int) -> None:
        """Takes the locks on some chunks of a load away."""

        def free() -> None:
            engine_id = self.engine.config.kv_transfer_config.engine_id
            with Client(self.server.address) as client:
                session = client.session(engine_id, role="scheduler")
                assert session.free_locks(self.leases[-1], first, end) == end - first
                session.close()

        self.when_it_loads(free)

    def step_until_tokens(self, count: int) -> None:
        while len(self.engine.outcomes["r"].tokens) < count:
            self.engine.step()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("models") / "tiny", Llama(layers=1))


@pytest.fixture(params=[False, True], ids=["steps", "overlapping-steps"])
def case(
    request: pytest.FixtureRequest,
    model: Path,
    start_server: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Case]:
    answers: dict[str, dict[str, Any] | None] = {}
    real = Scheduler._connector_finished

    def noting(self: Scheduler, ended: Any) -> tuple[bool, dict[str, Any] | None]:
        delay, answer = real(self, ended)
        answers[ended.request_id] = answer
        return delay, answer

    monkeypatch.setattr(Scheduler, "_connector_finished", noting)
    server = start_server("--chunk-tokens", str(C))
    with SimulatedEngine(model, server.address, async_scheduling=request.param) as engine:
        case = Case(engine, server, answers)
        connector: Any = engine.scheduler.connector
        build = connector.build_connector_meta

        def noting_leases(output: Any) -> Any:
            metadata = build(output)
            case.leases += [load.groups[0].lease_id for load in metadata.loads]
            return metadata

        monkeypatch.setattr(connector, "build_connector_meta", noting_leases)
        yield case


def prompt(tokens: int, seed: int = 0) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(3, 2000) for _ in range(tokens)]


def nothing_stored(case: Case) -> None:
    case.ask(prompt(4 * C))


def shorter_than_a_chunk(case: Case) -> None:
    case.store(prompt(4 * C))
    case.ask(prompt(C - 1))


def full_hit(case: Case) -> None:
    case.store(prompt(4 * C))
    case.ask(prompt(4 * C))


def full_hit_of_a_prompt_that_ends_in_a_chunk(case: Case) -> None:
    case.store(prompt(4 * C + 17))
    case.ask(prompt(4 * C + 17))


def partial_hit(case: Case) -> None:
    case.store(prompt(3 * C) + prompt(C, seed=1))
    case.ask(prompt(3 * C) + prompt(2 * C, seed=2))


def the_engine_has_a_part(case: Case) -> None:
    case.store(prompt(5 * C))
    case.engine.generate(prompt(C + C // 2))
    case.ask(prompt(5 * C))


def the_engine_has_as_much(case: Case) -> None:
    case.store(prompt(4 * C))
    case.engine.generate(prompt(4 * C))
    case.ask(prompt(4 * C) + prompt(9, seed=1))


def the_engine_has_more(case: Case) -> None:
    case.engine.generate(prompt(2 * C + 33))
    case.ask(prompt(2 * C + 33))


def may_not_read_a_cache(case: Case) -> None:
    case.store(prompt(4 * C))
    case.ask(prompt(4 * C), skip_reading_prefix_cache=True)


def aborted_before_it_was_scheduled(case: Case) -> None:
    case.store(prompt(4 * C))
    case.ask(prompt(4 * C))
    case.engine.abort("r")


def aborted_while_it_waits_for_room(case: Case) -> None:
    case.store(prompt(4 * C))
    for n in range(8):
        # They ask for no lookup, whose answer would come in a later step for some than for others.
        case.engine.add(
            f"before{n}", prompt(C, seed=n + 1), max_tokens=20, skip_reading_prefix_cache=True
        )
    while len(case.engine.scheduler.running) < 8:
        case.engine.step()
    case.ask(prompt(4 * C))
    for _ in range(6):
        case.engine.step()
    assert not case.leases, "there was room"
    case.engine.abort("r")


def aborted_while_it_loads(case: Case) -> None:
    case.store(prompt(4 * C))
    case.ask(prompt(4 * C))
    case.when_it_loads(lambda: case.engine.abort("r"))


def aborted_when_it_answers(case: Case) -> None:
    case.store(prompt(4 * C))
    case.ask(prompt(4 * C), max_tokens=30)
    case.step_until_tokens(3)
    case.engine.abort("r")


def preempted_after_a_hit(case: Case) -> None:
    # It comes back with what it has generated stored as well, and loads that: counted is the
    # first time.
    case.store(prompt(3 * C))
    case.ask(prompt(3 * C), max_tokens=2 * C)
    case.step_until_tokens(C + 20)
    assert case.engine.preempt_all()


def preempted_after_a_miss(case: Case) -> None:
    case.ask(prompt(3 * C), max_tokens=2 * C)
    case.step_until_tokens(C + 20)
    assert case.engine.preempt_all()


def load_failed_in_part(case: Case) -> None:
    case.store(prompt(6 * C))
    case.ask(prompt(6 * C))
    case.lose(4, 5)


def load_failed_in_whole(case: Case) -> None:
    case.store(prompt(6 * C))
    case.ask(prompt(6 * C))
    case.lose(0, 6)


def load_beyond_the_engines_own_failed_in_part(case: Case) -> None:
    case.store(prompt(6 * C))
    case.engine.generate(prompt(2 * C))
    case.ask(prompt(6 * C))
    case.lose(3, 4)


def server_lost_before_the_load(case: Case) -> None:
    case.store(prompt(4 * C))
    case.ask(prompt(4 * C))
    case.when_it_loads(case.server.kill)


@pytest.mark.parametrize(
    ("happens", "extra"),
    [
        (nothing_stored, 0),
        (shorter_than_a_chunk, 0),
        (full_hit, 4 * C),
        (full_hit_of_a_prompt_that_ends_in_a_chunk, 4 * C),
        (partial_hit, 3 * C),
        (the_engine_has_a_part, 5 * C - (C + C // 2)),
        (the_engine_has_as_much, 0),
        (the_engine_has_more, 0),
        (may_not_read_a_cache, 0),
        (aborted_before_it_was_scheduled, 0),
        (aborted_while_it_waits_for_room, 0),
        (aborted_while_it_loads, 0),
        (aborted_when_it_answers, 4 * C),
        (preempted_after_a_hit, 3 * C),
        (preempted_after_a_miss, 0),
        (load_failed_in_part, 4 * C),
        (load_failed_in_whole, 0),
        (load_beyond_the_engines_own_failed_in_part, C),
        (server_lost_before_the_load, 0),
    ],
)
def test_the_number(case: Case, happens: Callable[[Case], None], extra: int) -> None:
    happens(case)
    case.engine.run()
    assert case.answers["r"] == {OURS: extra, THEIRS: extra}


@pytest.mark.parametrize(
    ("asked", "keys"),
    [
        (None, []),
        ({}, []),
        ({"do_remote_decode": True}, []),
        ({OURS: None}, [OURS]),
        ({THEIRS: None}, [THEIRS]),
        (BOTH, [OURS, THEIRS]),
        ({OURS: 7, "other": 1}, [OURS]),
    ],
    ids=str,
)
@pytest.mark.parametrize("ending", ["answered", "aborted"])
@pytest.mark.parametrize("case", [False], indirect=True, ids=["steps"])
def test_it_is_told_under_the_keys_that_ask(
    case: Case, asked: dict[str, Any] | None, keys: list[str], ending: str
) -> None:
    case.store(prompt(2 * C))
    case.ask(prompt(2 * C), kv_transfer_params=asked)
    if ending == "aborted":
        case.engine.abort("r")
    case.engine.run()
    extra = 0 if ending == "aborted" else 2 * C
    assert case.answers["r"] == (dict.fromkeys(keys, extra) or None)


@pytest.mark.parametrize(
    ("happens", "cached"),
    [
        (nothing_stored, 0),
        (full_hit, 4 * C),
        (the_engine_has_a_part, 5 * C),
        (load_failed_in_part, 4 * C),
        (load_failed_in_whole, 0),
        (load_beyond_the_engines_own_failed_in_part, 3 * C),
        (server_lost_before_the_load, 0),
    ],
)
def test_vllms_own_count_of_cached_tokens(
    case: Case, happens: Callable[[Case], None], cached: int
) -> None:
    happens(case)
    case.engine.run()
    assert case.engine.outcomes["r"].num_cached_tokens == cached


@pytest.mark.parametrize("ends_last", ["1_r", "0_r"])
def test_all_samples_of_a_prompt_are_told_what_one_of_them_loaded(
    case: Case, ends_last: str
) -> None:
    # vLLM makes a request of each sample, and tells what the last one to end was told.
    tokens = prompt(4 * C + 1)
    case.store(tokens)
    lengths = {"0_r": 6, "1_r": 6, ends_last: 12}
    engine = case.engine
    engine.add("1_r", tokens, max_tokens=lengths["1_r"], kv_transfer_params=BOTH)
    while not engine.outcomes["1_r"].tokens:
        engine.step()
    # It finds in the engine what the other has loaded.
    engine.add("0_r", tokens, max_tokens=lengths["0_r"], kv_transfer_params=BOTH)
    engine.add("other", tokens, kv_transfer_params=BOTH)
    engine.run()
    assert list(case.answers)[-1] == ends_last
    assert case.answers["0_r"] == case.answers["1_r"] == {OURS: 4 * C, THEIRS: 4 * C}
    assert case.answers["other"] == {OURS: 0, THEIRS: 0}, "another request with the same prompt"
    # Of a prompt that has ended nothing is left.
    engine.generate(tokens, "2_r", kv_transfer_params=BOTH)
    assert case.answers["2_r"] == {OURS: 0, THEIRS: 0}

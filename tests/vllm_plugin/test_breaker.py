"""Who does not answer in time is spared, until it answers in time."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from simkit import ASK, C, StartEngine, extra, prompt, status

from kvdock import Client, Session
from kvdock.address import parse
from kvdock.errors import SessionLost
from kvdock_vllm.engine import breaker as breaker_module
from kvdock_vllm.engine.breaker import Breaker
from kvdock_vllm.engine.link import Link


def eventually(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture
def link(server: Any) -> Iterator[Link[None]]:
    """To a real server."""

    def open_session(client: Client, on_lost: Callable[[str], None]) -> Session:
        return client.session("engine", on_lost=on_lost)

    link: Link[None] = Link(
        "test", parse(server.address), open_session, lambda client, session: None
    )
    link.start(5)
    yield link
    link.close()


class Heartbeats:
    """A link whose session is answered by hand."""

    def __init__(self) -> None:
        self.sent: list[Future[Any]] = []
        self.current = SimpleNamespace(session=self)

    def submit(self, request: object) -> Future[Any]:
        self.sent.append(Future())
        return self.sent[-1]


def test_one_event_is_one_failure_and_over_with_the_first_answer(
    server: Any, link: Link[None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(breaker_module, "_FIRST_SECONDS", 60)
    monkeypatch.setattr(breaker_module, "_LONGEST_SECONDS", 60)
    breaker = Breaker(link, 1.0)
    assert not breaker.is_open
    server.process.send_signal(signal.SIGSTOP)
    asked = [time.monotonic() for _ in range(8)]
    assert [breaker.failed(asked_at) for asked_at in asked] == [True] + 7 * [False]
    assert breaker.is_open
    server.process.send_signal(signal.SIGCONT)
    eventually(lambda: not breaker.is_open)
    assert breaker.succeeded()
    assert not breaker.succeeded()


def test_it_stays_open_as_long_as_heartbeats_are_answered_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr("kvdock_vllm.engine.breaker.time.monotonic", lambda: now)
    heartbeats: Any = Heartbeats()
    breaker = Breaker(heartbeats, 0.05)
    breaker.failed(now)
    for number in range(3):
        assert len(heartbeats.sent) == number + 1
        now += 0.1
        heartbeats.sent[-1].set_result("late")
        assert breaker.is_open
    heartbeats.sent[-1].set_result("in time")
    assert not breaker.is_open
    assert len(heartbeats.sent) == 4


def test_the_end_of_the_session_ends_it() -> None:
    heartbeats: Any = Heartbeats()
    breaker = Breaker(heartbeats, 0.05)
    breaker.failed(time.monotonic())
    heartbeats.sent[-1].set_exception(SessionLost("silent for 20 s"))
    assert not breaker.is_open, "the next session is opened by an answer"
    heartbeats.current = None
    breaker = Breaker(heartbeats, 0.05)
    breaker.failed(time.monotonic())
    assert not breaker.is_open, "there is nobody to ask"


def test_questions_that_fail_although_heartbeats_do_not_are_tried_less_and_less(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr("kvdock_vllm.engine.breaker.time.monotonic", lambda: now)
    heartbeats: Any = Heartbeats()
    breaker = Breaker(heartbeats, 0.1)
    open_for = []
    for number in range(7):
        now += 1
        assert breaker.failed(now) is (number == 0)
        heartbeats.sent[-1].set_result("in time")
        failed_at = now
        while breaker.is_open:
            now += 0.25
        open_for.append(now - failed_at)
    assert open_for == [0, 0.5, 1, 2, 4, 5, 5]
    assert breaker.succeeded()
    now += 1
    assert breaker.failed(now)
    heartbeats.sent[-1].set_result("in time")
    assert not breaker.is_open, "an answer makes it begin anew"


def test_a_pause_of_the_server_costs_no_more_cache_than_it_lasts(
    start_engine: StartEngine, kvdock: Any
) -> None:
    engine = start_engine(extra_config={"kvdock.lookup_timeout_ms": 100})
    engine.generate(prompt(2 * C))
    began = time.monotonic()
    os.kill(kvdock.process.pid, signal.SIGSTOP)
    try:
        for number in range(8):
            engine.add(f"in flight {number}", prompt(2 * C, seed=1 + number))
        while engine.counted.get("lookup_timeouts", 0) < 8 or time.monotonic() - began < 1:
            engine.step()
    finally:
        os.kill(kvdock.process.pid, signal.SIGCONT)
    status(kvdock)
    answers = time.monotonic()
    engine.run()
    while True:
        engine.forget()
        if extra(engine.generate(prompt(2 * C), kv_transfer_params=ASK)) == 2 * C:
            break
        assert time.monotonic() - answers < answers - began

"""How long steps wait for answers to lookups. bench/lookup_wait.py measures it in an engine."""

from __future__ import annotations

import pytest

from kvdock_vllm.engine.answer_wait import MOST_SECONDS, AnswerWait

NOW = 1000.0


def busy(wait: AnswerWait, now: float = NOW) -> float:
    """The budget of a step of an engine that computes."""
    wait.begin_step(now, is_idle=False)
    return wait.seconds_left


def test_all_requests_of_a_step_share_one_budget() -> None:
    wait = AnswerWait(idle_steps_wait=True)
    assert busy(wait) == MOST_SECONDS
    wait.waited(NOW, 0.0015, in_vain=False)
    assert wait.seconds_left == pytest.approx(0.0005)
    wait.waited(NOW, 0.0006, in_vain=False)
    assert wait.seconds_left == 0


def test_a_step_waits_no_longer_than_recent_answers_took() -> None:
    wait = AnswerWait(idle_steps_wait=True)
    for _ in range(100):
        wait.heard(0.0004)
    assert busy(wait) == 0.0004
    # One slow answer of many changes nothing, several do.
    wait.heard(0.05)
    assert busy(wait) == 0.0004
    wait.heard(0.05)
    assert busy(wait) == MOST_SECONDS


def test_steps_that_wait_in_vain_wait_for_two_milliseconds_in_all_and_then_pause() -> None:
    wait = AnswerWait(idle_steps_wait=True)
    for _ in range(20):
        wait.heard(0.0004)
    lost = 0.0
    now = NOW
    while (seconds := busy(wait, now)) > 0:
        wait.waited(now, seconds, in_vain=True)
        lost += seconds
        now += 0.01
    assert lost == pytest.approx(MOST_SECONDS)
    assert busy(wait, now + 0.4) == 0
    # Each further trial costs as much, and they become rare.
    trials = 0
    while now < NOW + 60:
        if (seconds := busy(wait, now)) > 0:
            wait.waited(now, seconds, in_vain=True)
            trials += 1
        now += 0.01
    assert trials / 5 < 12


def test_an_answer_in_time_ends_the_pause_and_a_late_one_does_not() -> None:
    wait = AnswerWait(idle_steps_wait=True)
    busy(wait)
    wait.waited(NOW, MOST_SECONDS, in_vain=True)
    wait.heard(0.004)
    assert busy(wait) == 0
    wait.heard(0.0019)
    assert busy(wait) > 0


def test_idle_steps_wait_unless_others_wait_for_them() -> None:
    for alone in (True, False):
        wait = AnswerWait(idle_steps_wait=alone)
        busy(wait)
        wait.waited(NOW, MOST_SECONDS, in_vain=True)
        wait.begin_step(NOW, is_idle=True)
        assert wait.seconds_left == (MOST_SECONDS if alone else 0)

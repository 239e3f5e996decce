"""How long steps wait for answers to lookups. bench/lookup_wait.py measures it in an engine."""

from __future__ import annotations

import pytest

from kvdock_vllm.engine.answer_wait import MOST_SECONDS, AnswerWait

NOW = 1000.0


def busy(wait: AnswerWait, now: float = NOW) -> float:
    """The budget of a step of an engine that computes."""
    wait.begin_step(now, is_idle=False)
    return wait.seconds_left


def in_vain(wait: AnswerWait, now: float = NOW) -> float:
    """A step that waits in vain for as long as it may; how long that is."""
    seconds = busy(wait, now)
    if seconds:
        wait.waited(now, seconds, in_vain=True)
    return seconds


def test_all_requests_of_a_step_share_one_budget() -> None:
    wait = AnswerWait(idle_steps_wait=True)
    assert busy(wait) == MOST_SECONDS
    wait.spend(0.0001)
    wait.waited(NOW, 0.0014, in_vain=False)
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


def test_a_server_that_stands_still_costs_one_wait() -> None:
    wait = AnswerWait(idle_steps_wait=True)
    for _ in range(20):
        wait.heard(0.001)
    assert sum(in_vain(wait, NOW + second) for second in range(100)) == 0.001
    wait.heard(100.0)
    assert busy(wait, NOW + 100) > 0


def test_answers_that_are_always_late_are_soon_not_waited_for() -> None:
    wait = AnswerWait(idle_steps_wait=True)
    waits = []
    for step in range(6000):  # a minute of them
        waits.append(in_vain(wait, NOW + step / 100) > 0)
        wait.heard(0.005)
    assert 3 < sum(waits[:10]) < 8
    assert sum(waits[10:]) < 12


def test_late_answers_now_and_then_do_not_end_the_waits() -> None:
    wait = AnswerWait(idle_steps_wait=True)
    for step in range(100):
        assert busy(wait, NOW + step / 100) > 0
        wait.waited(NOW, 0.0015, in_vain=step % 3 == 0)
        wait.heard(0.0025 if step % 3 == 0 else 0.0015)


def test_a_trial_that_helps_ends_the_pause() -> None:
    wait = AnswerWait(idle_steps_wait=True)
    for _ in range(20):
        in_vain(wait)
        wait.heard(0.005)
    assert busy(wait) == busy(wait, NOW + 0.4) == 0
    assert busy(wait, NOW + 0.6) > 0
    wait.waited(NOW + 0.6, 0.001, in_vain=False)
    wait.heard(0.001)
    for step in range(3):
        assert in_vain(wait, NOW + 0.6) > 0, step
        wait.heard(0.003)


def test_what_is_in_vain_after_other_answers_came_in_the_step_does_not_count() -> None:
    wait = AnswerWait(idle_steps_wait=True)
    for _ in range(50):
        assert busy(wait) > 0
        wait.waited(NOW, 0.0015, in_vain=False)
        wait.heard(0.0015)
        wait.waited(NOW, 0.0005, in_vain=True)


def test_idle_steps_wait_unless_others_wait_for_them() -> None:
    for alone in (True, False):
        wait = AnswerWait(idle_steps_wait=alone)
        in_vain(wait)
        wait.begin_step(NOW, is_idle=True)
        assert wait.seconds_left == (MOST_SECONDS if alone else 0)

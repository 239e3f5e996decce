"""Who gives the blocks of stores away waits for their copies, and not for the server."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from kvdock_vllm import store_jobs
from kvdock_vllm.copier import CopyStoppedError
from kvdock_vllm.store_jobs import StoreJob, StoreJobs

LONG = 60.0
SPEC: Any = None


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> StoreJobs:
    monkeypatch.setattr(store_jobs, "_ANSWER_SECONDS", 0.05)
    return StoreJobs()


def waits(jobs: StoreJobs, *waiting: StoreJob) -> bool:
    """Whether they let go; AssertionError if that takes the whole time."""
    began = time.monotonic()
    answer = jobs.wait(waiting, LONG)
    assert time.monotonic() - began < LONG / 2
    return answer


def test_a_store_that_the_server_keeps_waiting_is_not_waited_for_nor_who_is_behind_it(
    jobs: StoreJobs,
) -> None:
    first, second = StoreJob(SPEC), StoreJob(SPEC)
    assert not jobs.is_late
    jobs.begin(first)
    assert not waits(jobs, first)
    assert not waits(jobs, second)
    assert jobs.is_late
    jobs.give_up(first)
    assert waits(jobs, first), "it reads nothing, and never will"
    with pytest.raises(CopyStoppedError), jobs.reading(first):
        pass
    jobs.end(first)
    assert not jobs.is_late
    jobs.end(second)
    assert waits(jobs, second)


def test_who_waits_sees_that_the_thread_begins_another_and_that_the_server_is_late(
    jobs: StoreJobs,
) -> None:
    job = StoreJob(SPEC)
    waited: list[bool] = []
    engine = threading.Thread(target=lambda: waited.append(waits(jobs, job)))
    engine.start()
    while not jobs._changed._waiters:  # type: ignore[attr-defined]
        time.sleep(0.001)
    jobs.begin(job)
    engine.join()
    assert waited == [False]


def test_a_copy_is_waited_for_also_when_it_was_given_up(jobs: StoreJobs) -> None:
    job = StoreJob(SPEC)
    reading, go_on = threading.Event(), threading.Event()

    def copy() -> None:
        jobs.begin(job)
        with jobs.reading(job):
            reading.set()
            assert go_on.wait(LONG)

    thread = threading.Thread(target=copy)
    thread.start()
    assert reading.wait(LONG)
    assert not jobs.wait([job], 4 * store_jobs._ANSWER_SECONDS)
    assert not jobs.is_late
    jobs.give_up(job)
    assert not jobs.wait([job], 4 * store_jobs._ANSWER_SECONDS)
    go_on.set()
    assert waits(jobs, job)
    thread.join()

"""How many lookups are answered in time when clients ask for more than the server can answer.

    python bench/overload.py [--quick] [--rate N]

Two client processes ask for 128 cached keys at a time and give up after 0.1 s, as the connector
does. First they ask as fast as the answers come, which shows the sustainable rate. Then they ask at
given rates, whether or not answers come: at the sustainable rate, at twice that rate, and at the
sustainable rate again. ``--rate`` gives the sustainable rate, so that two versions can be asked at
the same rates. Prints a table; exit status 1 if a bound is missed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from report import Row, print_report
from serverkit import ServerProcess

from kvdock import Client, Group, Namespace, Session
from kvdock.v1 import cache_pb2

CHUNKS = 128
NAMESPACE = Namespace("bench", 256, 1, (Group(shard_bytes=(4096,)),))
KEYS = [index.to_bytes(4, "big") * 8 for index in range(1, CHUNKS + 1)]

CLIENTS = 2
PATIENCE_SECONDS = 0.1
WINDOW = 8
"""Lookups that a client has under way while the sustainable rate is measured."""
MARGIN = 0.7
"""The sustainable rate over the highest: clients that keep to a rate do more work for a lookup."""
LEASES_A_FREE = 16
START_SECONDS = 3.0
STEP_SECONDS = 0.1

GOODPUT_BOUND = 0.3
"""Of the sustainable rate."""
RECOVERED = 0.9
"""Of the lookups that were answered in time before the overload."""
RECOVERY_BOUND_SECONDS = 1.0
RECOVERY_STEP_SECONDS = 0.5


@dataclass(frozen=True)
class Phase:
    """A rate at which to ask: lookups a second of all clients together, for ``seconds``."""

    seconds: float
    rate: float


@dataclass(frozen=True)
class Counts:
    """Lookups asked for in each step of 0.1 s, and how many of them were answered in time."""

    asked: list[int]
    good: list[int]

    def rate(self, counts: Sequence[int], begin: float, end: float) -> float:
        first, last = round(begin / STEP_SECONDS), round(end / STEP_SECONDS)
        return sum(counts[first:last]) / (end - begin)


def main() -> int:
    parser = argparse.ArgumentParser(description="Benchmark of an overloaded server.")
    parser.add_argument("--quick", action="store_true", help="measure for less time")
    parser.add_argument("--rate", type=float, help="lookups a second taken as sustainable")
    arguments = parser.parse_args()
    quick = arguments.quick
    with (
        tempfile.TemporaryDirectory(prefix="kvdock-bench-") as folder,
        ServerProcess(Path(folder), memory="64MiB") as server,
    ):
        with Client(server.address) as client:
            client.register_namespace(NAMESPACE)
            client.put(NAMESPACE.name, KEYS, [bytes(4096)] * CHUNKS)
        most = sum(each(as_fast_as_answered, server.address, 1.0 if quick else 3.0))
        rate = arguments.rate or MARGIN * most
        before, overload, after = (1.0, 2.0, 3.0) if quick else (3.0, 10.0, 30.0)
        phases = [Phase(before, rate), Phase(overload, 2 * rate), Phase(after, rate)]
        counts = together(each(at_given_rates, server.address, phases))
    rows = [
        Row("highest rate", f"{most:,.0f} lookups/s"),
        Row("sustainable rate: answered in 0.1 s", of(counts, 0, before)),
        overload_row(counts, rate, before + overload / 2, before + overload),
        recovery_row(counts, before, before + overload, before + overload + after),
    ]
    return print_report("overload", rows)


def of(counts: Counts, begin: float, end: float) -> str:
    """How many of the lookups asked for were answered in time, as text."""
    asked, good = (counts.rate(each, begin, end) for each in (counts.asked, counts.good))
    return f"{good:,.0f} of {asked:,.0f} lookups/s"


def overload_row(counts: Counts, sustainable: float, begin: float, end: float) -> Row:
    ratio = counts.rate(counts.good, begin, end) / sustainable
    return Row(
        "twice that: answered in 0.1 s",
        of(counts, begin, end),
        f"{sustainable:,.0f}",
        f"{ratio:.2f} x",
        f">= {GOODPUT_BOUND} x",
        ratio >= GOODPUT_BOUND,
    )


def recovery_row(counts: Counts, before: float, begin: float, end: float) -> Row:
    """How long after the overload as many lookups are answered in time as before it."""
    wanted = RECOVERED * counts.rate(counts.good, 0, before)
    now = begin
    while now + RECOVERY_STEP_SECONDS <= end:
        if counts.rate(counts.good, now, now + RECOVERY_STEP_SECONDS) >= wanted:
            break
        now += STEP_SECONDS
    took = now - begin
    is_back = now + RECOVERY_STEP_SECONDS <= end
    return Row(
        "the load halved: back after",
        f"{took:.1f} s" if is_back else f"not within {end - begin:.0f} s",
        bound=f"<= {RECOVERY_BOUND_SECONDS:.0f} s",
        holds=is_back and took <= RECOVERY_BOUND_SECONDS,
    )


def each(client: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Run the client processes, which begin at the same time; what each returns."""
    context = multiprocessing.get_context("spawn")
    start = time.time() + START_SECONDS
    with ProcessPoolExecutor(CLIENTS, mp_context=context) as pool:
        futures = [pool.submit(client, start, *arguments) for _ in range(CLIENTS)]
        return [future.result() for future in futures]


def together(each: Sequence[Counts]) -> Counts:
    return Counts(
        [sum(step) for step in zip(*(counts.asked for counts in each), strict=True)],
        [sum(step) for step in zip(*(counts.good for counts in each), strict=True)],
    )


class Leases:
    """Frees the locks of answers, some at a time. Used by the session's reader thread."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._held: list[cache_pb2.LockRange] = []

    def free(self, answer: cache_pb2.LookupResponse) -> None:
        self._held.append(cache_pb2.LockRange(lease_id=answer.lease_id))
        if len(self._held) == LEASES_A_FREE:
            self._session.submit(cache_pb2.FreeLocksRequest(locks=self._held))
            self._held.clear()


def as_fast_as_answered(start: float, address: str, seconds: float) -> float:
    """Lookups a second of one client that always has WINDOW lookups under way."""
    count = 0
    room = threading.Semaphore(WINDOW)
    with Client(address) as client, client.session(role="scheduler") as session:
        leases = Leases(session)

        def answered(future: Future[cache_pb2.LookupResponse]) -> None:
            nonlocal count
            room.release()
            if future.exception() is None:
                count += 1
                leases.free(future.result())

        lookup = cache_pb2.LookupRequest(namespace=NAMESPACE.name, keys=KEYS)
        time.sleep(max(0.0, start - time.time()))
        while time.time() < start + seconds:
            room.acquire()
            session.submit(lookup).add_done_callback(answered)
        for _ in range(WINDOW):
            room.acquire()
    return count / seconds


def at_given_rates(start: float, address: str, phases: Sequence[Phase]) -> Counts:
    """Ask at one client's share of the rates, and give up late lookups; how many were in time."""
    steps = round(sum(phase.seconds for phase in phases) / STEP_SECONDS)
    counts = Counts([0] * steps, [0] * steps)
    asked: deque[tuple[float, Future[Any]]] = deque()
    with Client(address) as client, client.session(role="scheduler") as session:
        leases = Leases(session)
        lookup = cache_pb2.LookupRequest(
            namespace=NAMESPACE.name, keys=KEYS, timeout_ms=round(PATIENCE_SECONDS * 1000)
        )

        def ask(now: float, step: int) -> None:
            def answered(future: Future[cache_pb2.LookupResponse]) -> None:
                if not future.cancelled() and future.exception() is None:
                    counts.good[step] += time.time() - now <= PATIENCE_SECONDS
                    leases.free(future.result())

            counts.asked[step] += 1
            future = session.submit(lookup)
            future.add_done_callback(answered)
            asked.append((now, future))

        due = begin = start
        for phase in phases:
            begin += phase.seconds
            while due < begin:
                now = time.time()
                while asked and asked[0][0] + PATIENCE_SECONDS < now:
                    asked.popleft()[1].cancel()
                if now < due:
                    time.sleep(min(due - now, 0.002))
                    continue
                ask(now, min(int((due - start) / STEP_SECONDS), steps - 1))
                due += CLIENTS / phase.rate
    return counts


if __name__ == "__main__":
    sys.exit(main())

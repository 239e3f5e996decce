"""What the runs of bench/multiturn.py come to: figures, bounds, and whether answers are equal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from conversations import Request, Run
from report import Row, percentile

PLAIN, KVDOCK, SHARED = "plain", "kvdock", "kvdock-shared"
PEERS = ("native", "lmcache", "pegaflow")
LEAST_RATE_OVER_PEER = 1.0
MOST_FIRST_OVER_PLAIN = 1.03
MOST_LATER_OVER_PEER = 0.75
MOST_P99_OVER_PEER = 1.0
LEAST_CACHED = 0.925
LEAST_SHARED_RATE = 0.95


@dataclass(frozen=True)
class Figures:
    """One engine. Times are in seconds."""

    total: float
    rate: float
    """Generated tokens a second."""
    first_p50: float
    """Time to first token of first turns."""
    later_p50: float
    later_p90: float
    later_p99: float
    by_turn: list[float]
    """The median time to first token of each turn."""
    gap_p50: float
    """Between two tokens of a request."""
    gap_p99: float
    cached_share: float
    """Of the prompt tokens of later turns, those that were not computed."""


def figures(run: Run) -> Figures:
    """Of all requests of a run."""
    first = [request.ttft for request in run.requests if not request.turn]
    later = [request for request in run.requests if request.turn]
    later_ttfts = [request.ttft for request in later]
    by_turn: dict[int, list[float]] = {}
    for request in run.requests:
        by_turn.setdefault(request.turn, []).append(request.ttft)
    return Figures(
        total=run.total_seconds,
        rate=sum(len(request.answer) for request in run.requests) / run.total_seconds,
        first_p50=_percentile(first, 50),
        later_p50=_percentile(later_ttfts, 50),
        later_p90=_percentile(later_ttfts, 90),
        later_p99=_percentile(later_ttfts, 99),
        by_turn=[percentile(by_turn[turn], 50) for turn in sorted(by_turn)],
        gap_p50=_percentile(run.gaps, 50),
        gap_p99=_percentile(run.gaps, 99),
        cached_share=(
            sum(request.cached_tokens for request in later)
            / max(1, sum(request.prompt_tokens for request in later))
        ),
    )


def _percentile(values: Sequence[float], percent: float) -> float:
    return percentile(values, percent) if values else math.nan


def parts_of(request: Request) -> dict[str, float]:
    """Where a request's time to its first token went, in seconds, in the order in which it passed.

    What did not happen is left out, and its time is part of what came next.
    """
    points = [
        ("until vLLM asked for a hit", request.lookup),
        ("until the answer", request.answered),
        ("until there were blocks", request.allocated),
        ("until it was loaded", request.loaded),
        ("until a step computed it", request.scheduled),
        ("until the first token", request.first_token),
    ]
    parts, since = {}, request.asked
    for title, point in points:
        if point is not None:
            parts[title] = point - since
            since = point
    return parts


def slowest(run: Run, percent: float = 95) -> list[Request]:
    """The later turns whose first tokens took longest."""
    later = sorted((r for r in run.requests if r.turn), key=lambda request: request.ttft)
    return later[int(len(later) * percent / 100) :]


def mean_parts(requests: Sequence[Request]) -> dict[str, float]:
    """The mean of :func:`parts_of`, in seconds; what some did not pass counts as nothing there."""
    sums: dict[str, float] = {}
    for request in requests:
        for title, seconds in parts_of(request).items():
            sums[title] = sums.get(title, 0.0) + seconds
    return {title: seconds / len(requests) for title, seconds in sums.items()}


def bound_rows(all_figures: Mapping[str, Figures]) -> list[Row]:
    """KVDock beside the engine without connector, and beside the best peer of each figure."""
    rows: list[Row] = []
    ours, plain = all_figures.get(KVDOCK), all_figures.get(PLAIN)
    peers = [all_figures[name] for name in PEERS if name in all_figures]
    if ours is not None and plain is not None:
        rows.append(
            _at_most("first turns, p50", ours.first_p50, plain.first_p50, MOST_FIRST_OVER_PLAIN)
        )
        rows.append(_at_least("tokens a second, beside none", ours.rate, plain.rate, None))
    if ours is not None and peers:
        best = max(peer.rate for peer in peers)
        rows.append(_at_least("tokens a second", ours.rate, best, LEAST_RATE_OVER_PEER))
        best = min(peer.later_p50 for peer in peers)
        rows.append(_at_most("later turns, p50", ours.later_p50, best, MOST_LATER_OVER_PEER))
        best = min(peer.later_p99 for peer in peers)
        rows.append(_at_most("later turns, p99", ours.later_p99, best, MOST_P99_OVER_PEER))
    if ours is not None:
        rows.append(
            Row(
                "KVDock: share of later turns' tokens that was cached",
                f"{ours.cached_share:.3f}",
                bound=f">= {LEAST_CACHED}",
                holds=ours.cached_share >= LEAST_CACHED,
            )
        )
    shared = all_figures.get(SHARED)
    if ours is not None and shared is not None:
        rows.append(
            _at_least(
                "tokens a second in shared mode, over server mode",
                shared.rate,
                ours.rate,
                LEAST_SHARED_RATE,
            )
        )
    return rows


def _at_most(what: str, value: float, base: float, bound: float) -> Row:
    ratio = value / base
    return Row(
        f"KVDock: {what}",
        f"{value * 1e3:.1f} ms",
        f"{base * 1e3:.1f} ms",
        f"{ratio:.3f}",
        f"<= {bound}",
        ratio <= bound,
    )


def _at_least(what: str, value: float, base: float, bound: float | None) -> Row:
    ratio = value / base
    return Row(
        f"KVDock: {what}",
        f"{value:.0f}",
        f"{base:.0f}",
        f"{ratio:.3f}",
        "" if bound is None else f">= {bound}",
        bound is None or ratio >= bound,
    )


def answer_rows(runs: Mapping[str, Run], *, exact: bool) -> list[Row]:
    """Whether the answers are right.

    Under load, requests meet in other batches in each engine. In bfloat16 these round differently,
    so that answers may differ and nothing is wrong. In float32 that difference is far below the
    distance between the best two tokens: with ``exact``, all answers must be equal.
    """
    rows = []
    base = _answers(runs[PLAIN]) if PLAIN in runs else None
    for name, run in runs.items():
        same = sum(check.before == check.after for check in run.checks)
        rows.append(
            Row(
                f"{name}: prompts asked alone, after the load answered as before",
                f"{same} of {len(run.checks)}",
                bound="all",
                holds=same == len(run.checks) > 0,
            )
        )
        if base is None or name == PLAIN:
            continue
        equal, compared = equal_answers(base, _answers(run))
        rows.append(
            Row(
                f"{name}: answers to equal prompts, as without connector",
                f"{equal} of {compared}",
                bound="all" if exact else "",
                holds=not exact or equal == compared == len(base),
            )
        )
    return rows


Answers = dict[tuple[int, int], list[int]]
"""By user and turn."""


def _answers(run: Run) -> Answers:
    return {(request.user, request.turn): request.answer for request in run.requests}


def equal_answers(base: Answers, other: Answers) -> tuple[int, int]:
    """How many answers are equal, of how many to equal prompts.

    A turn's prompt holds the answers before it, so what follows another answer is not compared.
    """
    equal = compared = 0
    for (user, turn), answer in base.items():
        before = range(turn)
        if all(base[user, t] == other.get((user, t)) for t in before) and (user, turn) in other:
            compared += 1
            equal += answer == other[user, turn]
    return equal, compared

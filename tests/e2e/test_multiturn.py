"""bench/multiturn.py: the load runs on a real engine, and its figures are what happened."""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import conversations
import lineplot
import multiturn
import multiturn_figures as of
import pytest
from conversations import Check, Request, Run, Work

WORK = Work(users=2, turns=2, in_flight=2)


@pytest.mark.e2e
@pytest.mark.timeout(600)
@pytest.mark.skipif(
    "KVDOCK_LONG_TESTS" not in os.environ, reason="takes a minute: set KVDOCK_LONG_TESTS"
)
def test_on_the_cpu_all_answers_are_those_without_connector(tmp_path: Path) -> None:
    plot, found = tmp_path / "plot.svg", tmp_path / "found.json"
    command = [sys.executable, str(Path(multiturn.__file__)), "--cpu"]
    command += ["--json", str(found), "--plot", str(plot)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "18 of 18" in result.stdout
    assert plot.stat().st_size
    assert found.stat().st_size


def request(turn: int, user: int, ttft: float, answer: list[int]) -> Request:
    """Asked at 1 s; half of its 100 prompt tokens are cached from the second turn on."""
    cached = 50 if turn else 0
    return Request(
        turn, user, 100, 1.0, first_token=1.0 + ttft, cached_tokens=cached, answer=answer
    )


def run(*, slower: float = 1.0, answers: int = 0) -> Run:
    """Two users, two turns. ``answers`` changes what user 1 is told first."""
    requests = [
        request(0, 0, 0.1 * slower, [1, 2]),
        request(0, 1, 0.2 * slower, [3, 4 + answers]),
        request(1, 0, 0.3 * slower, [5, 6]),
        request(1, 1, 0.5 * slower, [7, 8]),
    ]
    gaps = [0.01, 0.02, 0.03, 0.04]
    checks = [Check([1], [1], 9)]
    return Run(1.0, 1.0, "", "runner", 2.0 * slower, 0.0, requests, gaps, checks)


def test_figures() -> None:
    found = of.figures(run())
    assert found.rate == 4.0
    assert (found.first_p50, found.later_p50, found.later_p99) == pytest.approx((0.2, 0.5, 0.5))
    assert found.by_turn == pytest.approx([0.2, 0.5])
    assert (found.gap_p50, found.gap_p99) == (0.03, 0.04)
    assert found.cached_share == 0.5


def test_where_the_time_of_a_request_went() -> None:
    slow = replace(
        request(1, 0, 1.0, []), lookup=1.1, answered=1.3, allocated=1.3, loaded=1.7, scheduled=1.8
    )
    parts = of.parts_of(slow)
    assert list(parts.values()) == pytest.approx([0.1, 0.2, 0.0, 0.4, 0.1, 0.2])
    assert sum(parts.values()) == pytest.approx(slow.ttft)
    without = of.parts_of(request(0, 0, 1.0, []))
    assert list(without.values()) == pytest.approx([1.0])
    assert of.slowest(run(), 50) == [run().requests[3]]


def missed(**runs: Run) -> set[str]:
    names = {name.replace("_", "-"): of.figures(run) for name, run in runs.items()}
    return {row.what for row in of.bound_rows(names) if not row.holds}


def test_bounds() -> None:
    fast = run(slower=0.5)
    for one in fast.requests:
        one.cached_tokens = 93
    assert not missed(plain=run(), kvdock=fast, native=run(), pegaflow=run(slower=2))
    assert missed(kvdock=run(slower=0.5)) == {
        "KVDock: share of later turns' tokens that was cached"
    }
    # The best peer counts, whichever it is; and a tie is no quarter less.
    assert missed(kvdock=fast, native=run(slower=0.5), pegaflow=run()) == {
        "KVDock: later turns, p50"
    }
    assert len(missed(kvdock=fast, native=run(slower=0.4), pegaflow=run())) == 3
    assert missed(plain=run(slower=0.4), kvdock=fast) == {"KVDock: first turns, p50"}
    slow = "KVDock: tokens a second in shared mode, over server mode"
    assert missed(kvdock=fast, kvdock_shared=run(slower=0.54)) == {slow}
    assert not missed(kvdock=fast, kvdock_shared=run(slower=0.52))


def wrong(*, exact: bool, **runs: Run) -> set[str]:
    return {row.what for row in of.answer_rows(runs, exact=exact) if not row.holds}


def test_a_wrong_answer_is_found() -> None:
    assert not wrong(exact=True, plain=run(), kvdock=run())
    assert len(wrong(exact=True, plain=run(), kvdock=run(answers=1))) == 1
    assert not wrong(exact=False, plain=run(), kvdock=run(answers=1))
    lost = run()
    lost.checks[0].after = [2]
    assert len(wrong(exact=False, plain=run(), kvdock=lost)) == 1


def test_what_follows_another_answer_is_not_compared() -> None:
    base = {(0, 0): [1], (0, 1): [2], (1, 0): [3], (1, 1): [4]}
    assert of.equal_answers(base, base) == (4, 4)
    assert of.equal_answers(base, {**base, (0, 1): [9]}) == (3, 4)
    assert of.equal_answers(base, {**base, (0, 0): [9]}) == (2, 3)


def test_all_first_turns_come_before_the_second() -> None:
    assert WORK.order() == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert WORK.opening(0, 999)[:1024] == WORK.opening(1, 999)[:1024]
    assert WORK.opening(0, 999)[1024:] != WORK.opening(1, 999)[1024:]
    assert len(WORK.addition(0, 1, 999)) == 512
    for work in (Work(), conversations.SMALL):
        longest = work.system_tokens + work.first_tokens
        longest += (work.turns - 1) * (work.next_tokens + work.answer_tokens)
        assert work.users * longest > 1.8 * work.cache_tokens, "others push a conversation out"
        assert work.fillers * work.filler_tokens > work.cache_tokens
        assert work.checked_tokens % work.step_tokens == 1


def test_each_chunk_size_is_a_column() -> None:
    names = [column.name for column in multiturn.columns("plain,kvdock,kvdock-shared", "64,16")]
    assert names == ["plain", "kvdock", "kvdock:16", "kvdock-shared"]
    with pytest.raises(SystemExit, match="'vllm' is none of plain"):
        multiturn.columns("plain,vllm", "")


def test_a_plot_has_its_lines_inside() -> None:
    lines = [lineplot.Line("a < b", [100, 250, 90]), lineplot.Line("c", [0, 1])]
    text = lineplot.line_plot("title", "turn", "ms", ["1", "2", "3"], lines)
    root = ET.fromstring(text)
    paths = [e.attrib["d"] for e in root.iter() if e.attrib.get("class") == "line"]
    points = [[float(n) for n in path.strip("M").replace("L", " ").split()] for path in paths[::2]]
    assert [len(one) for one in points] == [6, 4]
    assert points[0][1] > points[0][3] < points[0][5], "higher values stand higher"
    flat = [number for one in points for number in one]
    assert all(lineplot.LEFT <= across <= lineplot.WIDTH for across in flat[::2])
    assert all(lineplot.TOP <= down <= lineplot.HEIGHT for down in flat[1::2])


@pytest.mark.parametrize(
    ("least", "step"), [(0, 1), (0.03, 0.05), (1, 1), (50, 50), (51, 100), (230, 500)]
)
def test_round_steps(least: float, step: float) -> None:
    assert lineplot.round_step(least) == pytest.approx(step)

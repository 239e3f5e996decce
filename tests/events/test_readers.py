"""The reader check of reader_check.py, short; by hand it publishes a million events."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from reader_check import BAD, LOG, Result, check

EVENT_DATA = 2_500
NOISE = 16 << 20


def is_cheap(result: Result) -> bool:
    """By the server's own work, which waiting for a processor does not lengthen."""
    work = {name: ratios["32 MiB"] for name, ratios in result.work_ratios.items()}
    return work[BAD] < 1.2 * work["8 readers"] and work["log, no reader"] < 1.4


def test_bad_readers_cost_the_others_nothing_and_the_server_a_bounded_amount() -> None:
    result = check(events=100_000, rounds=5)
    if not is_cheap(result):
        # Other processes take caches from the server's in some rounds. Then more rounds decide.
        result = check(events=100_000, rounds=11)
    assert result.published >= 100_000
    assert is_cheap(result), result.work_ratios
    # A server that waits works no more. They do shift these, so only what is blatant is found.
    rates = {name: ratios["32 MiB"] for name, ratios in result.rate_ratios.items()}
    assert rates[BAD] > 0.7 * rates["8 readers"]
    assert rates["log, no reader"] > 0.7

    def grown(name: str) -> int:
        before, after = result.rss[name]
        return after - before

    # For each bad reader the window of its connection, 4 MiB and a bit.
    assert grown(BAD) - grown("8 readers") < 2 * (8 << 20) + NOISE
    # What the log may take, and the event data of every chunk that the pool holds (128 Ki).
    assert result.rss_end - result.rss[BAD][0] < LOG + (1 << 17) * EVENT_DATA + NOISE

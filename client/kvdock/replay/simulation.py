"""Plays a trace to policies, at several sizes of the pool."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from kvdock.replay.bound import Optimum
from kvdock.replay.memory import LruWithMemory
from kvdock.replay.policies import AdaptiveReplacement, LeastRecentlyUsed, Policy, S3Fifo
from kvdock.replay.trace import Trace

MakePolicy: TypeAlias = Callable[[int, Trace], Policy]
Advance: TypeAlias = Callable[[int], None]
"""Is called with how many more blocks have been played."""

LRU: Final = "lru"
MEMORY: Final = "lru-with-memory"
BOUND: Final = "optimum"

POLICIES: Final[Mapping[str, MakePolicy]] = {
    LRU: lambda size, trace: LeastRecentlyUsed(size),
    MEMORY: lambda size, trace: LruWithMemory(size, trace),
    "s3-fifo": lambda size, trace: S3Fifo(size),
    "arc": lambda size, trace: AdaptiveReplacement(size),
    BOUND: Optimum,
}

_BLOCKS_A_REPORT: Final = 10_000


@dataclass(frozen=True)
class Outcome:
    """How many blocks a pool of ``size`` blocks had when they were asked for."""

    policy: str
    size: int
    hits: int


def play(policy: Policy, prompts: Iterable[Sequence[int]], advance: Advance) -> int:
    """How many blocks of the prompts the policy's pool had."""
    hits = untold = 0
    for prompt in prompts:
        hits += policy.use(prompt)
        untold += len(prompt)
        if untold >= _BLOCKS_A_REPORT:
            advance(untold)
            untold = 0
    advance(untold)
    return hits


def simulate(
    trace: Trace, policies: Sequence[str], sizes: Sequence[int], advance: Advance
) -> list[Outcome]:
    """The outcome of each policy at each size."""
    return [
        Outcome(name, size, play(POLICIES[name](size, trace), trace.prompts, advance))
        for name in policies
        for size in sizes
    ]


def smallest_for(trace: Trace, hits: int) -> int:
    """The smallest size of pool at which LRU has at least ``hits`` of the blocks.

    A larger pool never has fewer, so this takes few runs.
    """

    def at(size: int) -> int:
        return play(LeastRecentlyUsed(size), trace.prompts, lambda blocks: None)

    return 1 + bisect_left(range(1, trace.distinct), hits, key=at)


def default_sizes(trace: Trace) -> list[int]:
    """Six sizes, from a hundredth of all that the trace would store to half of it."""
    shares = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5)
    return sorted({max(1, round(share * trace.distinct)) for share in shares})

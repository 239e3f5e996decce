"""What follows from the outcomes: how much memory to give a server, and which policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvdock.replay.simulation import LRU, MEMORY, Outcome, smallest_for
from kvdock.replay.trace import Trace

ENOUGH: Final = 0.95
"""The size is enough that finds this share of what a pool without limit would find."""

_WORTH_IT: Final = 1.01
"""The other policy is worth it where it finds so many times what LRU finds."""


@dataclass(frozen=True)
class Advice:
    """``size``: the smallest pool, in blocks, with which LRU finds ENOUGH; it finds ``hits``.

    ``compared`` has each size at which the server's other policy was tried, with its hits over
    those of LRU.
    """

    size: int
    hits: int
    compared: dict[int, float]

    @property
    def better(self) -> dict[int, float]:
        """The sizes at which the other policy is worth it."""
        return {size: ratio for size, ratio in self.compared.items() if ratio > _WORTH_IT}

    @property
    def worse(self) -> dict[int, float]:
        """The sizes at which the other policy costs hits."""
        return {size: ratio for size, ratio in self.compared.items() if ratio < 1 / _WORTH_IT}


def advise(trace: Trace, outcomes: Sequence[Outcome]) -> Advice:
    """What to do for this trace."""
    wanted = -(-trace.repeated * round(100 * ENOUGH) // 100)
    lru = {outcome.size: outcome.hits for outcome in outcomes if outcome.policy == LRU}
    compared = {
        outcome.size: outcome.hits / lru[outcome.size]
        for outcome in outcomes
        if outcome.policy == MEMORY and lru.get(outcome.size)
    }
    return Advice(smallest_for(trace, wanted), wanted, compared)

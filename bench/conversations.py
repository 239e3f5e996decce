"""The work of bench/multiturn.py, and what is noted of each of its requests. Knows no vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from modelkit import random_prompt


@dataclass(frozen=True)
class Work:
    """Conversations of several turns. A turn's prompt is all that was said before, and new tokens.

    All users have their first turn before any has a second, and so on: when a conversation goes on,
    others have used the engine's own cache meanwhile.
    """

    users: int = 40
    turns: int = 5
    in_flight: int = 16
    """Requests at once. The next one is asked when one has been answered."""
    system_tokens: int = 1024
    """The beginning of all conversations."""
    first_tokens: int = 4976
    """More of a first turn."""
    next_tokens: int = 512
    """What is new in a later turn."""
    answer_tokens: int = 64
    cache_tokens: int = 98_304
    """Of the engine's own cache, a fraction of what the conversations come to."""
    step_tokens: int = 2048
    """What one step of the engine may compute."""
    filler_tokens: int = 34_000
    """Prompts that take the engine's own cache before the load begins."""
    checked_tokens: int = 4097
    """Prompts that are asked alone, before and after the load: whole steps, and one token."""

    @property
    def fillers(self) -> int:
        """How many fillers leave nothing else in the engine's own cache."""
        return -(-5 * self.cache_tokens // (4 * self.filler_tokens))

    def order(self) -> list[tuple[int, int]]:
        """Turn and user of each request, in the order in which they are asked."""
        return [(turn, user) for turn in range(self.turns) for user in range(self.users)]

    def opening(self, user: int, vocab: int) -> list[int]:
        """A user's first prompt."""
        system = random_prompt(self.system_tokens, seed=1, vocab=vocab)
        return system + random_prompt(self.first_tokens, seed=1000 + user, vocab=vocab)

    def addition(self, user: int, turn: int, vocab: int) -> list[int]:
        """What a user says in a later turn."""
        return random_prompt(self.next_tokens, seed=1000 * (turn + 1) + user, vocab=vocab)


SMALL = Work(
    users=6,
    turns=3,
    in_flight=3,
    system_tokens=128,
    first_tokens=368,
    next_tokens=64,
    answer_tokens=16,
    cache_tokens=1792,
    step_tokens=512,
    filler_tokens=1200,
    checked_tokens=513,
)
"""For a CPU. The same relations, but for answers, which are longer: they are compared."""


@dataclass
class Request:
    """One turn of one conversation. Times are in seconds from the beginning of the load.

    A time is None where the engine passed no such point: without connector there is no lookup, and
    without hit no load.
    """

    turn: int
    user: int
    prompt_tokens: int
    asked: float
    """When the engine was given the request."""
    lookup: float | None = None
    """When vLLM's scheduler first asked the connector what is cached."""
    lookups: int = 0
    """How often it asked until there was an answer; each but the last put the request off."""
    answered: float | None = None
    """When the connector's answer was there."""
    local_tokens: int = 0
    """Found in the engine's own cache."""
    promised_tokens: int = 0
    """What the connector promised to load."""
    allocated: float | None = None
    """When vLLM had blocks for the request, so that a load could begin."""
    loaded: float | None = None
    """When vLLM heard that the load was done."""
    scheduled: float | None = None
    """When a step was first planned that computes some of the prompt."""
    first_token: float | None = None
    finished: float | None = None
    cached_tokens: int = 0
    """Prompt tokens that were not computed, as vLLM says."""
    answer: list[int] = field(default_factory=list)

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        assert self.first_token is not None
        return self.first_token - self.asked


@dataclass
class Check:
    """A prompt that was asked alone."""

    before: list[int]
    """Its answer before the load, from the engine's own cache."""
    after: list[int]
    """Its answer after it."""
    cached_tokens: int
    """Of them, after the load."""


@dataclass
class Run:
    """What one engine did."""

    start_seconds: float
    warm_up_seconds: float
    pinned: str
    """How long the load waited for the pool to be pinned."""
    runner: str
    total_seconds: float = 0.0
    settle_seconds: float = 0.0
    """From the last answer until the engine had nothing to do."""
    requests: list[Request] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    """Seconds between two tokens of a request."""
    checks: list[Check] = field(default_factory=list)

    @classmethod
    def of(cls, found: dict[str, Any]) -> Run:
        """What ``dataclasses.asdict`` made."""
        return cls(
            **{
                **found,
                "requests": [Request(**request) for request in found["requests"]],
                "checks": [Check(**check) for check in found["checks"]],
            }
        )

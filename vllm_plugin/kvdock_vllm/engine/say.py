"""What a request says for itself: whether and how much of it is stored, and how long that is kept.

A wrong value never harms the request: it is left out, and the answer tells.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from kvdock.pin import DEFAULT_PIN, Keep
from kvdock.types import EvictionPriority

_MOST_SECONDS = 30 * 86_400
_PIN = re.compile(r"[!-~]{1,128}")
_MOST_CHARACTERS = 80
_MOST_FAULTS = 8
_MOST_KEYS = 16


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that a request said and that was left out."""

    kind: str
    """The key whose value is wrong; empty for a key that is not known, and for what is no say."""
    message: str


@dataclass(frozen=True, slots=True)
class Say:
    """What one request says. The defaults are those of a request that says nothing."""

    store: bool = True
    """``store``: false stores nothing of it, neither prompt nor generated tokens. It may load."""
    store_tokens: int | None = None
    """``store_tokens``: only whole chunks within so many tokens from the first on are stored."""
    pin: str | None = None
    """``pin``: the name under which what is stored, and what is there, is kept."""
    keep_seconds: float | None = None
    """``keep_seconds``: for at least so long. Alone it is for the pin "default"."""
    priority: EvictionPriority = EvictionPriority.NORMAL
    """``priority``: how soon what is stored is evicted, "low", "normal" or "high"."""
    faults: tuple[Fault, ...] = ()

    @property
    def keep(self) -> Keep | None:
        """How the server is to keep what is stored; None if it need not."""
        if self.pin is None and self.keep_seconds is None:
            return None
        return Keep(self.pin or DEFAULT_PIN, self.keep_seconds)

    @property
    def names_what_is_there(self) -> bool:
        """Whether the server is to be told also of chunks that it has."""
        return self.keep is not None or self.priority is EvictionPriority.HIGH

    def tokens_to_store(self, num_tokens: int) -> int:
        """How many of a request's first ``num_tokens`` tokens may be stored."""
        if not self.store:
            return 0
        return num_tokens if self.store_tokens is None else min(num_tokens, self.store_tokens)

    def with_words(self, words: object) -> Say:
        """This say, with what ``words`` say in its place: a mapping with the keys above."""
        if not isinstance(words, Mapping):
            return self._with_fault("", f"{_shown(words)} is no object with keys and values")
        say = self
        # Whatever a client sends costs a step of the engine no time that matters.
        for key, value in islice(words.items(), _MOST_KEYS):
            if key not in _KEYS:
                say = say._with_fault("", _unknown(key))
                continue
            try:
                read = _KEYS[key](value)
            except ValueError as error:
                say = say._with_fault(key, f"{key} is {_shown(value)}: it must be {error}")
            else:
                say = replace(say, **{key: read})
        if len(words) > _MOST_KEYS:
            say = say._with_fault("", f"only {_MOST_KEYS} of {len(words)} keys are read")
        return say

    def _with_fault(self, kind: str, message: str) -> Say:
        if len(self.faults) == _MOST_FAULTS:
            return self
        return replace(self, faults=(*self.faults, Fault(kind, message)))


NOTHING_SAID = Say()


def _switch(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError("true or false")
    return value


def _tokens(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError("a whole number of tokens, at least 0")
    return value


def _pin(value: object) -> str:
    if not (isinstance(value, str) and _PIN.fullmatch(value)):
        raise ValueError("a name of 1 to 128 printable ASCII characters without space")
    return value


def _seconds(value: object) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (is_number and 0 < value <= _MOST_SECONDS):  # type: ignore[operator]
        raise ValueError(f"a number of seconds above 0, at most {_MOST_SECONDS} (30 days)")
    return float(value)  # type: ignore[arg-type]


def _priority(value: object) -> EvictionPriority:
    if not (isinstance(value, str) and value in _PRIORITIES):
        raise ValueError(f"one of {', '.join(_PRIORITIES)}")
    return _PRIORITIES[value]


_PRIORITIES = {each.name.lower(): each for each in EvictionPriority if each}
_KEYS: dict[str, Callable[[Any], Any]] = {
    "store": _switch,
    "store_tokens": _tokens,
    "pin": _pin,
    "keep_seconds": _seconds,
    "priority": _priority,
}
"""The function that reads each key's value. Raises ValueError with what the value must be."""


def _unknown(key: object) -> str:
    near = difflib.get_close_matches(_shown(key).strip("'"), _KEYS, n=1)
    hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(_KEYS)}"
    return f"{_shown(key)} is not known: {hint}"


def _shown(value: object) -> str:
    """The value for people, in few characters."""
    if isinstance(value, str):
        shown = repr(value[:_MOST_CHARACTERS])
        return shown if len(value) <= _MOST_CHARACTERS else f"{shown}..."
    if value is None or isinstance(value, bool | float):
        return repr(value)
    if isinstance(value, int):
        return repr(value) if value.bit_length() < 128 else "a huge number"
    return f"a value of type {type(value).__name__}"

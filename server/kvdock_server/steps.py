"""Work in steps, so that other calls can be served between two steps.

Steps are a generator, which yields after each fraction of a millisecond's work. After a yield
nothing may be as it was before. A generator that is closed before its end undoes what it has to.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from typing import Final, TypeAlias, TypeVar

T = TypeVar("T")
Steps: TypeAlias = Generator[None, None, T]

_FIRST_STEPS: Final = 8


def at_once(steps: Steps[T]) -> T:
    """Carry out all steps with nothing between them; their result."""
    while True:
        try:
            next(steps)
        except StopIteration as ended:
            result: T = ended.value
            return result


class Backlog:
    """Work that is left to do for calls that were answered. All of it goes on in turn.

    ``has_come`` is called when work is added.
    """

    def __init__(self) -> None:
        self.has_come: Callable[[], None] = lambda: None
        self._waiting: deque[Steps[None]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, steps: Steps[None]) -> None:
        """Carry out the first steps at once, and keep the rest."""
        for _ in range(_FIRST_STEPS):
            try:
                next(steps)
            except StopIteration:
                return
        self._waiting.append(steps)
        self.has_come()

    def step(self) -> bool:
        """Carry out one step; False if no work is left."""
        while self._waiting:
            steps = self._waiting.popleft()
            try:
                next(steps)
            except StopIteration:
                continue
            self._waiting.append(steps)
            return True
        return False

    def all_steps(self) -> Steps[None]:
        """All work that is left, and what is added meanwhile."""
        while self.step():
            yield

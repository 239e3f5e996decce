"""Work in steps, so that whoever carries it out can serve others in between.

Steps are a generator. It yields after a fraction of a millisecond's work, where others may have
their turn. Whatever it knew before a yield may have changed after it. If it is closed before its
end, it undoes what it has to.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from typing import Final, TypeAlias, TypeVar

T = TypeVar("T")
Steps: TypeAlias = Generator[None, None, T]

_FIRST_STEPS: Final = 8


def at_once(steps: Steps[T]) -> T:
    """Carry out all steps with nothing in between; their result."""
    while True:
        try:
            next(steps)
        except StopIteration as ended:
            result: T = ended.value
            return result


class Backlog:
    """What is left to do for calls that were answered. All of it goes on in turn.

    ``has_come`` is called when something is left.
    """

    def __init__(self) -> None:
        self.has_come: Callable[[], None] = lambda: None
        self._waiting: deque[Steps[None]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, steps: Steps[None]) -> None:
        """Do the first steps of something, and leave the rest to the backlog."""
        for _ in range(_FIRST_STEPS):
            try:
                next(steps)
            except StopIteration:
                return
        self._waiting.append(steps)
        self.has_come()

    def step(self) -> bool:
        """Carry out one step; False if nothing is left."""
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
        """Everything that is left."""
        while self.step():
            yield

"""Work in steps, so that whoever carries it out can serve others in between.

Steps are a generator that yields wherever others may have their turn, after a fraction of a
millisecond's work. Whatever it knew before a yield may have changed after it. Closed before its end
it undoes what it has to.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from typing import Final, TypeAlias, TypeVar

T = TypeVar("T")
Steps: TypeAlias = Generator[None, None, T]

_STEPS_AT_ONCE: Final = 1_000


def at_once(steps: Steps[T]) -> T:
    """Carry out all steps with nothing in between; their result."""
    while True:
        try:
            next(steps)
        except StopIteration as ended:
            result: T = ended.value
            return result


class Backlog:
    """What is left to do for calls that were answered, in the order in which it came.

    ``has_come`` is called when something is left.
    """

    def __init__(self) -> None:
        self.has_come: Callable[[], None] = lambda: None
        self._waiting: deque[Steps[None]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, steps: Steps[None]) -> None:
        """Begin with something, and leave it to the backlog if it takes long."""
        begin = not self._waiting
        self._waiting.append(steps)
        for _ in range(_STEPS_AT_ONCE if begin else 0):
            if not self.step():
                return
        self.has_come()

    def step(self) -> bool:
        """Carry out one step; False if nothing is left."""
        while self._waiting:
            try:
                next(self._waiting[0])
            except StopIteration:
                self._waiting.popleft()
            except BaseException:
                self._waiting.popleft()
                raise
            else:
                return True
        return False

    def all_steps(self) -> Steps[None]:
        """Everything that is left."""
        while self.step():
            yield

"""How long a step of the scheduler may wait for answers to lookups. Pure.

A request whose lookup is not answered when the scheduler asks is put off by a whole step, which may
take 50 ms. Its answer is usually there in less than one. So a step waits a little, but only as long
as the server is known to answer in that time.
"""

from __future__ import annotations

from collections import deque

MOST_SECONDS = 0.002
"""No step waits longer than this."""
_RECENT = 64
_SHARE = 0.95


class AnswerWait:
    """The wait of one scheduler. One budget for all requests of a step. Used by one thread."""

    def __init__(self, *, idle_steps_wait: bool) -> None:
        """``idle_steps_wait``: a step waits the full time if the one before computed nothing, since
        nobody is kept from computing. An empty step would take longer than the wait.
        """
        self._idle_steps_wait = idle_steps_wait
        self._recent: deque[float] = deque(maxlen=_RECENT)
        """Seconds that the latest answers took."""
        self._are_late = False
        """The last wait was in vain, and no answer came in time since."""
        self.seconds_left = MOST_SECONDS
        """How long this step may still wait."""

    def begin_step(self, *, is_idle: bool) -> None:
        """Begins a step. ``is_idle``: the engine computed nothing in the step before."""
        if is_idle and self._idle_steps_wait:
            self.seconds_left = MOST_SECONDS
        elif self._are_late:
            self.seconds_left = 0.0
        else:
            self.seconds_left = min(MOST_SECONDS, self._usual_seconds())

    def waited(self, seconds: float, *, in_vain: bool) -> None:
        """Notes a wait. If it was in vain, the step waits no more: other answers are as late."""
        self.seconds_left = 0.0 if in_vain else max(0.0, self.seconds_left - seconds)
        self._are_late = self._are_late or in_vain

    def heard(self, seconds: float) -> None:
        """Notes that an answer came ``seconds`` after its question, whether or not it was awaited."""
        self._recent.append(seconds)
        self._are_late = seconds > MOST_SECONDS

    def _usual_seconds(self) -> float:
        """What all but the slowest recent answers took."""
        if not self._recent:
            return MOST_SECONDS
        return sorted(self._recent)[int(_SHARE * (len(self._recent) - 1))]

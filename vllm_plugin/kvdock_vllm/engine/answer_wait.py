"""How long a step of the scheduler may wait for answers to lookups. Pure.

A request whose lookup is not answered when the scheduler asks is put off by a whole step, which may
take 50 ms. Its answer usually comes in less than 2 ms. So a step waits a little, as long as
waiting usually helps.
"""

from __future__ import annotations

from collections import deque

MOST_SECONDS = 0.002
"""No step waits longer than this."""
_ANSWERS = 20
_SHARE = 0.95
_WAITS = 8
_FIRST_PAUSE_SECONDS = 0.5
_LONGEST_PAUSE_SECONDS = 8.0


class AnswerWait:
    """The wait of one scheduler: one budget for all requests of a step. Used by one thread.

    After a wait in vain no step waits until an answer has come, so a server that stands still costs
    one wait. If more than half of the last waits were in vain, steps do not wait for a while, twice
    as long after each further wait in vain. How long answers take tells less: while an engine
    computes, the threads of its process that read them run late.
    """

    def __init__(self, *, idle_steps_wait: bool) -> None:
        """``idle_steps_wait``: a step always waits if the one before computed nothing, since nobody
        is kept from computing. An empty step would take longer than the wait.
        """
        self._idle_steps_wait = idle_steps_wait
        self._answers: deque[float] = deque(maxlen=_ANSWERS)
        """Seconds that the latest answers took."""
        self._waits: deque[bool] = deque([True] * _WAITS, maxlen=_WAITS)
        """Whether the latest waits brought an answer."""
        self._is_silent = False
        """No answer has come since the last wait in vain."""
        self._helped_in_step = False
        self._pause = _FIRST_PAUSE_SECONDS
        self._paused_until = 0.0
        self.seconds_left = MOST_SECONDS
        """How long this step may still wait."""

    def begin_step(self, now: float, *, is_idle: bool) -> None:
        """Begins a step. ``is_idle``: the engine computed nothing in the step before."""
        self._helped_in_step = False
        if is_idle and self._idle_steps_wait:
            self.seconds_left = MOST_SECONDS
        elif self._is_silent or now < self._paused_until:
            self.seconds_left = 0.0
        else:
            self.seconds_left = min(MOST_SECONDS, self._usual_seconds())

    def spend(self, seconds: float) -> None:
        """Takes seconds off the step's budget."""
        self.seconds_left = max(0.0, self.seconds_left - seconds)

    def waited(self, now: float, seconds: float, *, in_vain: bool) -> None:
        """Notes a wait for an answer that ended at ``now``."""
        self.spend(seconds)
        if not in_vain:
            self._helped_in_step = True
            if self._paused_until:  # a trial
                self._waits.extend([True] * _WAITS)
                self._pause, self._paused_until = _FIRST_PAUSE_SECONDS, 0.0
            self._waits.append(True)
        elif not self._helped_in_step:
            self._is_silent = True
            self._waits.append(False)
            if 2 * sum(self._waits) < _WAITS:
                self._paused_until = now + self._pause
                self._pause = min(2 * self._pause, _LONGEST_PAUSE_SECONDS)

    def heard(self, seconds: float) -> None:
        """Notes that an answer came ``seconds`` after its question, awaited or not."""
        self._answers.append(seconds)
        self._is_silent = False

    def _usual_seconds(self) -> float:
        """What all but the slowest recent answers took."""
        if not self._answers:
            return MOST_SECONDS
        return sorted(self._answers)[int(_SHARE * (len(self._answers) - 1))]

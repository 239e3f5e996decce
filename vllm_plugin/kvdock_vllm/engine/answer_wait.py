"""How long a step of the scheduler may wait for answers to lookups. Pure.

A request whose lookup is not answered when the scheduler asks is put off by a whole step, which may
take 50 ms. Its answer usually comes in less than one. So a step waits a little, but only as long as
answers come in that time.
"""

from __future__ import annotations

from collections import deque

MOST_SECONDS = 0.002
"""No step waits longer than this."""
_RECENT = 20
_SHARE = 0.95
_FIRST_PAUSE_SECONDS = 0.5
_LONGEST_PAUSE_SECONDS = 8.0


class AnswerWait:
    """The wait of one scheduler: one budget for all requests of a step. Used by one thread.

    Steps that wait in vain wait ``MOST_SECONDS`` in all. Then no step waits for a while, which is
    twice as long each time. An answer that took no longer than ``MOST_SECONDS`` ends the pause. A
    slower answer proves nothing: while an engine computes, other threads of its process run late.
    """

    def __init__(self, *, idle_steps_wait: bool) -> None:
        """``idle_steps_wait``: a step always waits if the one before computed nothing, since nobody
        is kept from computing. An empty step would take longer than the wait.
        """
        self._idle_steps_wait = idle_steps_wait
        self._recent: deque[float] = deque(maxlen=_RECENT)
        """Seconds that the latest answers took."""
        self._in_vain = 0.0
        """Seconds waited without an answer since the last answer in time, or since the pause."""
        self._pause = _FIRST_PAUSE_SECONDS
        self._paused_until = 0.0
        self.seconds_left = MOST_SECONDS
        """How long this step may still wait."""

    def begin_step(self, now: float, *, is_idle: bool) -> None:
        """Begins a step. ``is_idle``: the engine computed nothing in the step before."""
        if is_idle and self._idle_steps_wait:
            self.seconds_left = MOST_SECONDS
        elif now < self._paused_until:
            self.seconds_left = 0.0
        else:
            self.seconds_left = max(0.0, min(self._usual_seconds(), MOST_SECONDS - self._in_vain))

    def waited(self, now: float, seconds: float, *, in_vain: bool) -> None:
        """Notes a wait that ended at ``now``."""
        self.seconds_left = max(0.0, self.seconds_left - seconds)
        if not in_vain:
            return
        self._in_vain += seconds
        if self._in_vain >= MOST_SECONDS:
            self._in_vain = 0.0
            self._paused_until = now + self._pause
            self._pause = min(2 * self._pause, _LONGEST_PAUSE_SECONDS)

    def heard(self, seconds: float) -> None:
        """Notes that an answer came ``seconds`` after its question, awaited or not."""
        self._recent.append(seconds)
        if seconds <= MOST_SECONDS:
            self._in_vain, self._pause, self._paused_until = 0.0, _FIRST_PAUSE_SECONDS, 0.0

    def _usual_seconds(self) -> float:
        """What all but the slowest recent answers took."""
        if not self._recent:
            return MOST_SECONDS
        return sorted(self._recent)[int(_SHARE * (len(self._recent) - 1))]

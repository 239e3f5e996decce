"""A limit on how long a transfer may stand still.

The time a transfer takes depends on its size, which the side that reads does not know beforehand.
So what is limited is not the whole but each pause.
"""

from __future__ import annotations

import threading
from typing import Protocol, Self


class Cancellable(Protocol):
    def cancel(self) -> object: ...


class IdleLimit:
    """Context in which ``call`` is cancelled once :meth:`touch` was not called for a while.

    That is noticed after ``seconds`` at the earliest and twice that at the latest.
    """

    def __init__(self, call: Cancellable, seconds: float) -> None:
        self.seconds = seconds
        self.exceeded = False
        self.paused = False
        """True while it is the reader that takes its time."""
        self._call = call
        self._touched = False
        self._done = threading.Event()

    def touch(self) -> None:
        """Says that the transfer moves."""
        self._touched = True

    def __enter__(self) -> Self:
        threading.Thread(target=self._watch, name="kvdock-idle-limit", daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._done.set()

    def _watch(self) -> None:
        while not self._done.wait(self.seconds):
            if not (self._touched or self.paused):
                self.exceeded = True
                self._call.cancel()
                return
            self._touched = False

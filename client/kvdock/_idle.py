"""A limit on how long a transfer may stand still.

How long a transfer takes depends on its size, which the reading side does not know beforehand. So
each pause is limited, and not the whole.
"""

from __future__ import annotations

import threading
from typing import Protocol, Self


class Cancellable(Protocol):
    def cancel(self) -> object: ...


class IdleLimit:
    """A context that cancels ``call`` when :meth:`touch` is not called for ``seconds``.

    A pause may last twice as long before it is noticed.
    """

    def __init__(self, call: Cancellable, seconds: float) -> None:
        self.seconds = seconds
        self.exceeded = False
        self.paused = False
        """True while the reader takes its time, which is no pause of the transfer."""
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

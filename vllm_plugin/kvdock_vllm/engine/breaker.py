"""Spares callers the wait for a server that does not answer in time.

Callers that are spared would not notice that the server answers again. So the breaker asks the
server by heartbeats, for which nobody waits.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from typing import Any

from kvdock.v1 import session_pb2
from kvdock_vllm.engine.link import Link

_FIRST_SECONDS = 0.5
_LONGEST_SECONDS = 5.0


class Breaker:
    """Opens when an answer is late, and closes when the server answers a heartbeat in time. Any
    thread.

    Heartbeats go the way of other requests on the session, one at a time, so they take as long as
    the requests before them. If a heartbeat is answered and the next question is not, the breaker
    also stays open for a while: twice as long after each further failure, up to a limit.
    """

    def __init__(self, link: Link[Any], answer_seconds: float) -> None:
        """A heartbeat on the link's session is in time within ``answer_seconds``."""
        self._link = link
        self._answer_seconds = answer_seconds
        # Reentrant: a session that is over answers within the call that sends the heartbeat.
        self._lock = threading.RLock()
        self._heartbeat: Future[Any] | None = None
        self._failed_at = 0.0
        self._pause = 0.0
        """How long the next failure opens the breaker at least; 0 after an answer."""
        self._open_until = 0.0

    @property
    def is_open(self) -> bool:
        """Whether callers should not even ask."""
        return self._heartbeat is not None or time.monotonic() < self._open_until

    def failed(self, asked_at: float) -> bool:
        """Notes that a question was not answered in time. ``asked_at`` is its time.monotonic().
        True for the first failure since the last answer.

        One outage may catch many questions. Those asked before the last failure tell nothing new.
        """
        with self._lock:
            if asked_at <= self._failed_at:
                return False
            is_first = not self._pause
            self._failed_at = time.monotonic()
            self._open_until = self._failed_at + self._pause
            self._pause = min(max(2 * self._pause, _FIRST_SECONDS), _LONGEST_SECONDS)
            self._ask()
            return is_first

    def succeeded(self) -> bool:
        """Notes an answer. True if an earlier question had failed."""
        with self._lock:
            recovered = self._pause > 0
            self._pause = 0.0
            self._open_until = 0.0
            self._heartbeat = None
            return recovered

    def _ask(self) -> None:
        """Sends a heartbeat. Without session there is nobody to ask: the next one is an answer."""
        live = self._link.current
        if live is None:
            self._heartbeat = None
            return
        asked_at = time.monotonic()
        self._heartbeat = live.session.submit(session_pb2.HeartbeatRequest())
        self._heartbeat.add_done_callback(lambda heartbeat: self._answered(heartbeat, asked_at))

    def _answered(self, heartbeat: Future[Any], asked_at: float) -> None:
        """Runs on the session's thread."""
        with self._lock:
            if heartbeat is not self._heartbeat:
                return
            is_late = time.monotonic() - asked_at > self._answer_seconds
            if is_late and heartbeat.exception() is None:
                self._ask()
            else:
                self._heartbeat = None

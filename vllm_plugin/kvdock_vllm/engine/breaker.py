"""Spares callers the wait for a server that does not answer in time.

Who is spared does not find out that the server answers again. So this asks it all the time, with
heartbeats, for which nobody waits.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from typing import Any

from kvdock.v1 import session_pb2
from kvdock_vllm.engine.link import Link


class Breaker:
    """Open from an answer that did not come in time until the server answers a heartbeat in time.

    Heartbeats go the way of other requests on the session, one at a time, so that they take as long
    as what is before them. Where they are answered and the next question is not, it also stays open
    for a while, twice as long after each further failure, up to a limit. Any thread.
    """

    def __init__(
        self,
        link: Link[Any],
        answer_seconds: float,
        *,
        first_seconds: float = 0.5,
        longest_seconds: float = 5.0,
    ) -> None:
        """``answer_seconds`` is what "in time" means for a heartbeat on the link's session."""
        self._link = link
        self._answer_seconds = answer_seconds
        self._first_seconds = first_seconds
        self._longest_seconds = longest_seconds
        # Reentrant: a session that is over answers within the call that asks it.
        self._lock = threading.RLock()
        self._heartbeat: Future[Any] | None = None
        self._failed_at = 0.0
        self._pause = 0.0
        """Seconds for which the next failure opens it at least; 0 after an answer to a question."""
        self._open_until = 0.0

    @property
    def is_open(self) -> bool:
        """True: do not even try."""
        return self._heartbeat is not None or time.monotonic() < self._open_until

    def failed(self, asked_at: float) -> bool:
        """Notes that a question of that time, as of ``time.monotonic``, was not answered in time.
        True for the first since the last answer.

        One event may catch many questions: those asked before the last failure tell nothing new.
        """
        with self._lock:
            if asked_at <= self._failed_at:
                return False
            is_first = not self._pause
            self._failed_at = time.monotonic()
            self._open_until = self._failed_at + self._pause
            self._pause = min(max(2 * self._pause, self._first_seconds), self._longest_seconds)
            self._ask()
            return is_first

    def succeeded(self) -> bool:
        """Notes the answer to a question. True if one before had not come."""
        with self._lock:
            recovered = self._pause > 0
            self._pause = 0.0
            self._open_until = 0.0
            self._heartbeat = None
            return recovered

    def _ask(self) -> None:
        """Sends a heartbeat. Without session there is nothing to ask: the next one is an answer."""
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

"""Until when a server that did not answer may write to this worker's blocks.

A server may stand still, stopped or starved, and later go on with old requests. Meanwhile nobody
can take the worker's memory away from it. It writes no more for a request in three cases: it has
answered the request; its process has ended; it has answered the registration of the worker's next
session, for which it lets go of the memory of the last one. Where the server's end cannot be seen,
because its pool's file is in another /dev/shm, a time limit has to do.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from kvdock import Session
from kvdock.errors import SessionLost
from kvdock.liveness import ServerProcess

_UNSEEN_SECONDS = 30.0
"""Three times the limit of a load. The server gives a load up by itself unless it stands still."""


class Fence:
    """For all sessions of one worker. Any thread."""

    def __init__(self) -> None:
        self._latest: Session | None = None
        self._servers: weakref.WeakKeyDictionary[Session, ServerProcess] = (
            weakref.WeakKeyDictionary()
        )

    def registered(self, session: Session) -> None:
        """The server has answered this session's registration of the worker's memory."""
        self._servers[session] = ServerProcess(session.info.segments)
        self._latest = session

    def passed(self, session: Session, request: Future[Any]) -> Callable[[], bool]:
        """Makes a function that is true once the server writes no more for this request."""
        server = self._servers[session]
        began = time.monotonic()

        def is_over() -> bool:
            if request.done() and not isinstance(request.exception(), SessionLost):
                return True
            has_ended = server.has_ended()
            if has_ended is None and time.monotonic() - began >= _UNSEEN_SECONDS:
                return True
            latest = self._latest
            if has_ended or latest is None or latest is session:
                return bool(has_ended)
            # A session of another epoch: the old server has given its address up.
            return latest.epoch == session.epoch or has_ended is None

        return is_over

"""Whether the process of a server has ended, which the end of a session does not tell.

A session also ends when the server stands still for too long. Such a server may go on later, with
the copies that it was asked for. But every server holds a lock on its pool's file for as long as
its process lives.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Sequence

from kvdock.errors import KVDockError
from kvdock.trust import open_segment
from kvdock.types import Segment

_log = logging.getLogger(__name__)

# The kernel releases the lock before the GPU's driver has ended the copies that the process had
# queued, which takes some milliseconds.
_AFTERMATH_SECONDS = 0.2


class ServerProcess:
    """One server's process. Make this while the server lives: its file may vanish with it."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        """``segments`` are the session's (SessionInfo.segments)."""
        self._file = None
        self._gone_since: float | None = None
        if segments:
            try:
                self._file = os.fdopen(open_segment(segments[0], os.O_RDONLY), "rb", buffering=0)
            except (OSError, KVDockError) as error:
                _log.info("the end of a server will not be seen, for want of its pool: %s", error)

    def has_ended(self) -> bool | None:
        """True once the process has ended, and all its copies with it. None if unknown.

        Never waits. May be called on any thread.
        """
        if self._gone_since is None:
            if self._file is None:
                return None
            try:
                fcntl.flock(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            # Given back at once: to a server that starts, a locked file is that of a living server.
            fcntl.flock(self._file, fcntl.LOCK_UN)
            self._gone_since = time.monotonic()
        return time.monotonic() - self._gone_since >= _AFTERMATH_SECONDS

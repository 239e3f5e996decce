"""Which processors background threads may use.

vLLM's CPU backend pins each computing thread to one processor, the main thread too, and threads
that the main thread starts later inherit its processor. A copy thread would share it with the
engine while other processors idle. So the process's processors are noted before vLLM pins anything,
and background threads return to them.
"""

from __future__ import annotations

import logging
import os

_log = logging.getLogger(__name__)

_allowed: set[int] | None = None


def remember() -> None:
    """Notes the processors of the calling thread. Only the first call counts."""
    global _allowed
    if _allowed is None and hasattr(os, "sched_getaffinity"):
        _allowed = os.sched_getaffinity(0)


def restore() -> None:
    """Gives the calling thread the noted processors, if there are any and the system allows it."""
    if _allowed is None:
        return
    try:
        os.sched_setaffinity(0, _allowed)
    except OSError as error:
        # A cpuset that changed meanwhile, a strict seccomp profile: copies may be slower.
        _log.info("thread stays on the processors it has: %s", error)

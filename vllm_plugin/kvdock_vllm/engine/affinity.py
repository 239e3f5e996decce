"""Which processors background threads may use.

vLLM's CPU backend pins the threads that compute, among them the main thread, to one processor
each; whatever the main thread starts afterwards inherits that. A copy thread would then take turns
with the engine on one processor while others idle. So the process's processors are remembered
before vLLM pins anything, and background threads go back to them.
"""

from __future__ import annotations

import logging
import os

_log = logging.getLogger(__name__)

_allowed: set[int] | None = None


def remember() -> None:
    """Notes the processors of the calling thread. The first call counts."""
    global _allowed
    if _allowed is None and hasattr(os, "sched_getaffinity"):
        _allowed = os.sched_getaffinity(0)


def restore() -> None:
    """Gives the calling thread the processors noted, if any were and the system allows it."""
    if _allowed is None:
        return
    try:
        os.sched_setaffinity(0, _allowed)
    except OSError as error:
        # A cpuset that changed meanwhile, a strict seccomp profile: copies may be slower.
        _log.info("thread stays on the processors it has: %s", error)

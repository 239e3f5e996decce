"""Processes that were forked from one that uses gRPC.

gRPC makes itself usable in them, unless ``GRPC_ENABLE_FORK_SUPPORT=0`` tells it not to. Then it
waits there for threads that only its parent has: a call hangs, whatever its deadline.
The child cannot see that any more, so this module looks before each fork, once it is imported.
"""

from __future__ import annotations

import os
import weakref
from pathlib import Path

from kvdock.errors import Forked

_VARIABLE = "GRPC_ENABLE_FORK_SUPPORT"
# As gRPC reads it.
_OFF = ("0", "f", "false", "n", "no")

# One of these runs for as long as gRPC is in use, whoever in this process uses it. They have these
# names a moment after they began; our own channels are known at once.
_GRPC_THREADS = ("event_engine", "grpc_global_tim")
_channels: weakref.WeakSet[object] = weakref.WeakSet()

_is_breaking = False
_is_broken = False


def refuse_broken_fork() -> None:
    """Raises Forked where gRPC would hang. To be called before a channel is made."""
    if _is_broken:
        raise Forked(
            f"process {os.getpid()} was forked from one that uses gRPC, with {_VARIABLE}="
            f"{os.environ.get(_VARIABLE)}: calls would hang here. Unset {_VARIABLE}, or start such "
            f"processes by spawn, or before anything uses gRPC"
        )


def remember(channel: object) -> None:
    """Notes that gRPC is in use for as long as this channel lives."""
    _channels.add(channel)


def refuse_fork_of(pid: int) -> None:
    """Raises Forked if this is not process ``pid``, to which a client belongs.

    gRPC would write into the parent's connection.
    """
    if os.getpid() != pid:
        raise Forked(
            f"this client belongs to process {pid}, this is its fork {os.getpid()}: make another "
            f"here"
        )


def _grpc_runs() -> bool:
    for thread in Path("/proc/self/task").iterdir():
        try:
            if (thread / "comm").read_text().strip() in _GRPC_THREADS:
                return True
        except OSError:
            continue  # it ended meanwhile
    return False


def _before() -> None:
    global _is_breaking
    is_off = os.environ.get(_VARIABLE, "").lower() in _OFF
    _is_breaking = is_off and (len(_channels) > 0 or _grpc_runs())


def _in_child() -> None:
    global _is_broken
    _is_broken = _is_broken or _is_breaking


os.register_at_fork(before=_before, after_in_child=_in_child)

"""Processes that were forked from one that uses gRPC.

gRPC works in a forked process, unless ``GRPC_ENABLE_FORK_SUPPORT=0`` is set. With that it waits for
threads that only the parent has: a call hangs, whatever its deadline. The child cannot find this
out, so this module looks in the parent, before each fork after its import.
"""

from __future__ import annotations

import os
import weakref
from pathlib import Path

from kvdock.errors import Forked

_VARIABLE = "GRPC_ENABLE_FORK_SUPPORT"
# As gRPC reads it.
_OFF = ("0", "f", "false", "n", "no")

# One of these threads runs while anything in this process uses gRPC. A thread gets its name only a
# moment after its start, so our own channels are noted as well.
_GRPC_THREADS = ("event_engine", "grpc_global_tim")
_channels: weakref.WeakSet[object] = weakref.WeakSet()

_is_breaking = False
_is_broken = False


def refuse_broken_fork() -> None:
    """Raises Forked if gRPC would hang here. To be called before a channel is made."""
    if _is_broken:
        raise Forked(
            f"process {os.getpid()} was forked from one that uses gRPC, with {_VARIABLE}="
            f"{os.environ.get(_VARIABLE)}: calls would hang here. Unset {_VARIABLE}, or start such "
            f"processes by spawn, or before anything uses gRPC"
        )


def remember(channel: object) -> None:
    """Notes that gRPC is in use while this channel lives."""
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
            continue  # the thread ended meanwhile
    return False


def _before() -> None:
    global _is_breaking
    is_off = os.environ.get(_VARIABLE, "").lower() in _OFF
    _is_breaking = is_off and (len(_channels) > 0 or _grpc_runs())


def _in_child() -> None:
    global _is_broken
    _is_broken = _is_broken or _is_breaking


os.register_at_fork(before=_before, after_in_child=_in_child)

"""Keeps gRPC's poller alive once a server has stopped taking what is sent to it."""

from __future__ import annotations

import functools

import grpc.aio


@functools.cache
def keep_poller() -> None:
    """To be called when a call is given up that may still be writing.

    With the last channel of a process gRPC ends its poller, and waits on the event loop, for ever
    if need be, until all that was being written is taken. This holds what counts as one channel.
    """
    grpc.aio.init_grpc_aio()  # type: ignore[attr-defined]  # which the stubs lack

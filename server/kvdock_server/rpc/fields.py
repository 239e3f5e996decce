"""Fields that Store and Retrieve have in common, checked."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvdock.v1 import cache_pb2 as pb
from kvdock_server.errors import invalid
from kvdock_server.transfer import I64, GroupMemory

EVENT_HANDLE_BYTES = 64


def ready_event(ipc_handle: bytes) -> bytes:
    """The handle of an event, or none; RequestError if it is no handle."""
    if len(ipc_handle) not in (0, EVENT_HANDLE_BYTES):
        raise invalid(f"ready_event of {len(ipc_handle)} bytes: {EVENT_HANDLE_BYTES}, or none")
    return ipc_handle


def seconds(timeout_ms: int) -> float:
    """Of a timeout; without end if there is none."""
    return timeout_ms / 1000 if timeout_ms else float("inf")


def deadline(request: pb.StoreRequest | pb.RetrieveRequest, now: float) -> float:
    """When a copy is given up; RequestError if its deadline_ns cannot be of our clock."""
    timeout = seconds(request.timeout_ms)
    if not request.deadline_ns:
        return now + timeout
    ahead = request.deadline_ns / 1e9 - now
    if ahead > timeout:
        raise invalid(
            f"deadline_ns {request.deadline_ns} is {ahead:.3f} s ahead, and timeout_ms is "
            f"{request.timeout_ms}: it must be of this host's CLOCK_MONOTONIC (do both processes "
            "have the same time namespace?)"
        )
    return now + ahead


def block_ids(named: Sequence[int], layout: GroupMemory, chunks: int, *, skip_blocks: int) -> I64:
    """Block ids as (chunks, blocks a chunk), 0 for those to skip; RequestError if wrong."""
    try:
        ids = layout.block_ids(named, chunks, skip_blocks)
    except ValueError as error:
        raise invalid(str(error)) from error
    blocks = np.zeros(skip_blocks + len(ids), dtype=np.int64)
    blocks[skip_blocks:] = ids
    return blocks.reshape(chunks, layout.blocks_per_chunk)

"""A copy from or to a worker's blocks, as its caller describes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvdock_server.errors import invalid
from kvdock_server.transfer import I64, GroupMemory

EVENT_HANDLE_BYTES = 64


def deadline(timeout_ms: int, deadline_ns: int, now: float) -> float:
    """When a call is given up, in seconds of CLOCK_MONOTONIC like ``now``.

    ``timeout_ms`` counts from now. ``deadline_ns`` is a time of CLOCK_MONOTONIC. 0 means no limit.
    RequestError if ``deadline_ns`` cannot be of this host's clock.
    """
    timeout = timeout_ms / 1000 if timeout_ms else float("inf")
    if not deadline_ns:
        return now + timeout
    ahead = deadline_ns / 1e9 - now
    if ahead > timeout:
        raise invalid(
            f"deadline_ns {deadline_ns} is {ahead:.3f} s ahead, and timeout_ms is {timeout_ms}: it "
            "must be of this host's CLOCK_MONOTONIC (do both processes have the same time "
            "namespace?)",
            "deadline_ns",
        )
    return now + ahead


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Which blocks to copy, what to wait for first, and when to give up.

    ``block_ids`` come chunk by chunk, without the first ``skip_blocks``. ``ready_event`` is the
    handle of an event that must be done before the copy begins, or empty. ``timeout_ms`` counts
    from the arrival of the call. ``deadline_ns`` is a time of CLOCK_MONOTONIC. 0 means no limit.
    """

    block_ids: Sequence[int] = ()
    skip_blocks: int = 0
    ready_event: bytes = b""
    timeout_ms: int = 0
    deadline_ns: int = 0

    @property
    def names_blocks(self) -> bool:
        """True if anything is set that only a copy by the server needs."""
        return bool(self.block_ids or self.skip_blocks or self.ready_event)

    def deadline(self, now: float) -> float:
        """When the copy is given up, in seconds of CLOCK_MONOTONIC like ``now``.

        RequestError if ``deadline_ns`` cannot be of this host's clock.
        """
        return deadline(self.timeout_ms, self.deadline_ns, now)

    def blocks(self, layout: GroupMemory, chunks: int) -> I64:
        """Block ids in the shape (chunks, blocks a chunk), 0 for blocks to skip.

        RequestError if the ids do not fit the group, or if ``ready_event`` is no handle.
        """
        try:
            ids = layout.block_ids(self.block_ids, chunks, self.skip_blocks)
        except ValueError as error:
            raise invalid(str(error), "block_ids") from error
        if len(self.ready_event) not in (0, EVENT_HANDLE_BYTES):
            raise invalid(
                f"ready_event of {len(self.ready_event)} bytes: {EVENT_HANDLE_BYTES}, or none",
                "ready_event",
                EVENT_HANDLE_BYTES,
            )
        blocks = np.zeros(self.skip_blocks + len(ids), dtype=np.int64)
        blocks[self.skip_blocks :] = ids
        return blocks.reshape(chunks, layout.blocks_per_chunk)

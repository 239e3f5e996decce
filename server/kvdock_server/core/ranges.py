"""Ranges of a lease's chunks, as calls name them."""

from __future__ import annotations

from typing import NamedTuple


class LeaseRange(NamedTuple):
    """The chunks [first_chunk, end_chunk) of one group of a lease.

    An ``end_chunk`` of 0 means the end of the group's locked chunks.
    """

    lease_id: int
    group_idx: int | None = None
    first_chunk: int = 0
    end_chunk: int = 0


class LockRange(NamedTuple):
    """The locks of a lease on the chunks [first_chunk, end_chunk).

    An ``end_chunk`` of 0 means the end of the hit. A ``reader`` of None means all readers, a
    ``group_idx`` of None all groups.
    """

    lease_id: int
    first_chunk: int = 0
    end_chunk: int = 0
    reader: int | None = None
    group_idx: int | None = None

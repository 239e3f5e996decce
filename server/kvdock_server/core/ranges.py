"""Ranges of a lease's chunks, as calls name them."""

from __future__ import annotations

from typing import NamedTuple


class LeaseRange(NamedTuple):
    """The chunks [first_chunk, end_chunk) of one group of a lease.

    An ``end_chunk`` of None means the end of the group's locked chunks. If it is not above
    ``first_chunk``, the range is empty.
    """

    lease_id: int
    group_idx: int | None = None
    first_chunk: int = 0
    end_chunk: int | None = None


class LockRange(NamedTuple):
    """The locks of a lease on the chunks [first_chunk, end_chunk).

    An ``end_chunk`` of None means the end of the hit. If it is not above ``first_chunk``, the range
    is empty. A ``reader`` of None means all readers, a ``group_idx`` of None all groups.
    """

    lease_id: int
    first_chunk: int = 0
    end_chunk: int | None = None
    reader: int | None = None
    group_idx: int | None = None

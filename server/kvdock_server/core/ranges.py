"""What calls name: ranges of a lease's chunks."""

from __future__ import annotations

from typing import NamedTuple


class LeaseRange(NamedTuple):
    """The chunks [first_chunk, end_chunk) of one group of a lease.

    An ``end_chunk`` of 0: to the end of what the group has locked.
    """

    lease_id: int
    group_idx: int | None = None
    first_chunk: int = 0
    end_chunk: int = 0


class LockRange(NamedTuple):
    """The locks of a lease on [first_chunk, end_chunk), 0 for the end of the hit.

    Of all readers and of all groups if None is named.
    """

    lease_id: int
    first_chunk: int = 0
    end_chunk: int = 0
    reader: int | None = None
    group_idx: int | None = None

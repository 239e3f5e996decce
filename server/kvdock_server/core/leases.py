"""Leases: who has locked which parts.

A lock is (lease, part, reader). A lease keeps, for each group's span of parts and each reader, the
locks still held as the bits of one integer, so that giving back is idempotent by nature and exact:
a bit that is not set frees nothing. The lease pins each part once, until no reader holds it.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Final, TypeVar

from kvdock_server.errors import Reason, RequestError
from kvdock_server.ids import new_id
from kvdock_server.index.chunk import NamespaceIndex
from kvdock_server.index.index import HitSpan, Index
from kvdock_server.steps import Steps

_CHUNKS_A_STEP: Final = 512

K = TypeVar("K")


@dataclass
class LockedSpan:
    """The locks of one lease on one group's parts; ``held[reader]`` has bit i for ``parts[i]``."""

    span: HitSpan
    held: list[int]

    def held_by_any(self) -> int:
        """The parts that at least one reader holds, as bits."""
        return functools.reduce(operator.or_, self.held)


@dataclass(eq=False)
class Lease:
    """What one Lookup granted.

    ``owner`` is the session of the scheduler that asked, ``engine_id`` its engine; both are None
    for a lease that was asked for by hand, which anybody may use until ``expires_at``. ``copying``
    has the readers that were told where the parts lie and still hold locks.
    """

    lease_id: int
    space: NamespaceIndex
    owner: int | None
    engine_id: str | None
    expires_at: float | None
    readers: int
    spans: list[LockedSpan] = field(default_factory=list)
    copying: set[int] = field(default_factory=set)

    @property
    def locks(self) -> int:
        """Locks still held."""
        return sum(bits.bit_count() for locked in self.spans for bits in locked.held)


class LeaseTable:
    """All leases of a server. ``locks`` counts what they hold."""

    def __init__(self, index: Index) -> None:
        self.locks = 0
        self.index = index
        self._leases: dict[int, Lease] = {}
        self._by_engine: dict[str | None, dict[int, Lease]] = {}
        self._by_owner: dict[int | None, dict[int, Lease]] = {}
        self._by_expiry: list[tuple[float, int]] = []  # a heap; some may be gone

    def __len__(self) -> int:
        return len(self._leases)

    def __iter__(self) -> Iterator[Lease]:
        return iter(list(self._leases.values()))

    def grant(
        self,
        space: NamespaceIndex,
        spans: Sequence[HitSpan],
        readers: int,
        *,
        owner: int | None = None,
        engine_id: str | None = None,
        expires_at: float | None = None,
    ) -> Lease:
        """Lock every part of the spans once for each reader."""
        lease_id = new_id(taken=self._leases)
        lease = Lease(lease_id, space, owner, engine_id, expires_at, readers)
        for span in spans:
            self.index.pin(span.parts)
            lease.spans.append(LockedSpan(span, [(1 << len(span.parts)) - 1] * readers))
            self.locks += len(span.parts) * readers
        self._leases[lease_id] = lease
        self._by_engine.setdefault(engine_id, {})[lease_id] = lease
        self._by_owner.setdefault(owner, {})[lease_id] = lease
        if expires_at is not None:
            heappush(self._by_expiry, (expires_at, lease_id))
        return lease

    def get(self, lease_id: int, engine_id: str | None) -> Lease | None:
        """The lease, or None if it ended or never was.

        Raises RequestError (FOREIGN_LEASE) if it belongs to an engine that is not ``engine_id``.
        """
        lease = self._leases.get(lease_id)
        if lease is not None and lease.engine_id is not None and lease.engine_id != engine_id:
            raise RequestError(
                Reason.FOREIGN_LEASE,
                f"lease {lease_id} belongs to another engine: only that engine's sessions may use "
                "it",
            )
        return lease

    def release(
        self,
        lease: Lease,
        first: int = 0,
        end: int | None = None,
        *,
        readers: Sequence[int] | None = None,
        position: int | None = None,
    ) -> int:
        """Free locks on the chunks [first, end), of all readers and groups if none are named.

        Returns how many were held. A lease without locks is gone.
        """
        chosen = [
            reader
            for reader in (range(lease.readers) if readers is None else readers)
            if reader < lease.readers
        ]
        released = 0
        for locked in lease.spans:
            if position is None or locked.span.position == position:
                released += self._release(locked, chosen, first, end)
        if released:
            self.locks -= released
            lease.copying = {
                reader
                for reader in lease.copying
                if any(locked.held[reader] for locked in lease.spans)
            }
            if not any(locked.held_by_any() for locked in lease.spans):
                self._forget(lease)
        return released

    def release_in_steps(
        self,
        lease: Lease,
        first: int = 0,
        end: int | None = None,
        *,
        readers: Sequence[int] | None = None,
        position: int | None = None,
    ) -> Steps[int]:
        """Likewise."""
        last = max(locked.span.first + len(locked.span.parts) for locked in lease.spans)
        end = last if end is None else min(end, last)
        released = 0
        for begin in range(first, end, _CHUNKS_A_STEP):
            step_end = min(begin + _CHUNKS_A_STEP, end)
            released += self.release(lease, begin, step_end, readers=readers, position=position)
            yield
        return released

    def of_owner(self, owner: int) -> list[Lease]:
        """The leases of a scheduler's session."""
        return list(self._by_owner.get(owner, {}).values())

    def count_of_owner(self, owner: int) -> int:
        """How many leases a scheduler's session has."""
        return len(self._by_owner.get(owner, {}))

    def of_engine(self, engine_id: str) -> list[Lease]:
        """The leases of an engine."""
        return list(self._by_engine.get(engine_id, {}).values())

    def expire(self, now: float) -> Steps[None]:
        """End the leases without session whose time is up."""
        while self._by_expiry and self._by_expiry[0][0] <= now:
            _, lease_id = heappop(self._by_expiry)
            lease = self._leases.get(lease_id)
            if lease is not None:
                yield from self.release_in_steps(lease)
            yield

    def _release(
        self, locked: LockedSpan, readers: Sequence[int], first: int, end: int | None
    ) -> int:
        parts = locked.span.parts
        low = min(max(first - locked.span.first, 0), len(parts))
        high = len(parts) if end is None else min(max(end - locked.span.first, low), len(parts))
        mask = (1 << high) - (1 << low)
        before = locked.held_by_any()
        released = 0
        for reader in readers:
            released += (locked.held[reader] & mask).bit_count()
            locked.held[reader] &= ~mask
        if released:
            free = before & ~locked.held_by_any()
            unpin = self.index.unpin
            # Text is the fastest way to walk the bits of a long integer.
            for index, bit in enumerate(reversed(f"{free >> low:b}"), low):
                if bit == "1":
                    unpin(parts[index])
        return released

    def _forget(self, lease: Lease) -> None:
        self._leases.pop(lease.lease_id, None)
        _remove(self._by_engine, lease.engine_id, lease.lease_id)
        _remove(self._by_owner, lease.owner, lease.lease_id)


def _remove(groups: dict[K, dict[int, Lease]], key: K, lease_id: int) -> None:
    group = groups.get(key)
    if group is not None:
        group.pop(lease_id, None)
        if not group:
            del groups[key]

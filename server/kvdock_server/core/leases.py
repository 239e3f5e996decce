"""Leases: who has locked which parts.

A lock is (lease, part, reader). For each group and reader a lease has one integer, with a bit for
each part whose lock the reader still holds. Freeing a lock clears its bit, so freeing it again does
nothing. The lease pins each part once, until no reader holds a lock on the part.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Final, TypeVar

from kvdock_server.core.sessions import Session
from kvdock_server.errors import Reason, RequestError
from kvdock_server.ids import new_id
from kvdock_server.index.chunk import NamespaceIndex
from kvdock_server.index.index import HitSpan, Index
from kvdock_server.steps import Steps

_CHUNKS_A_STEP: Final = 256

K = TypeVar("K")


@dataclass
class LockedSpan:
    """The locks of one lease on one group's parts; ``held[reader]`` has bit i for ``parts[i]``."""

    span: HitSpan
    held: list[int]

    def held_by_any(self) -> int:
        """The parts that at least one reader holds, as bits."""
        return functools.reduce(operator.or_, self.held)

    def bits(self, first: int, end: int) -> int:
        """The bits of the chunks [first, end), as far as they are in the span."""
        parts = len(self.span.parts)
        low = min(max(first - self.span.first, 0), parts)
        high = min(max(end - self.span.first, low), parts)
        return (1 << high) - (1 << low)


@dataclass(eq=False)
class Lease:
    """What one Lookup granted.

    ``owner`` is the session_id of the scheduler that asked, and ``engine_id`` its engine. Both are
    None for a lease that was asked for without a session: anybody may use such a lease until
    ``expires_at``. ``copying`` has the readers that were told where the parts lie and still hold
    locks.
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
        self._by_expiry: list[tuple[float, int]] = []  # a heap; some of the leases may be gone
        self._copying: set[Lease] = set()

    def __len__(self) -> int:
        return len(self._leases)

    def __iter__(self) -> Iterator[Lease]:
        return iter(list(self._leases.values()))

    @property
    def is_copying(self) -> bool:
        """True if a reader was told where parts lie and still holds locks on them."""
        return bool(self._copying)

    def grant(
        self,
        space: NamespaceIndex,
        spans: Sequence[HitSpan],
        readers: int,
        session: Session | None,
        expires_at: float | None,
    ) -> Lease:
        """Lock every part of the spans once for each reader.

        The lease belongs to ``session``. Without a session it ends at ``expires_at``.
        """
        lease_id = new_id(taken=self._leases)
        owner = session.session_id if session is not None else None
        engine_id = session.engine_id if session is not None else None
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
                lease_id=lease_id,
            )
        return lease

    def note_copying(self, lease: Lease, reader: int) -> None:
        """The reader, which holds locks, is told where the parts lie."""
        lease.copying.add(reader)
        self._copying.add(lease)

    def release_in_steps(
        self,
        lease: Lease,
        first: int = 0,
        end: int | None = None,
        *,
        readers: Sequence[int] | None = None,
        position: int | None = None,
    ) -> Steps[int]:
        """Free locks on the chunks [first, end), of all readers and groups if none are named.

        Returns how many were held. A lease without locks is gone.
        """
        chosen = [
            reader
            for reader in (range(lease.readers) if readers is None else readers)
            if reader < lease.readers
        ]
        spans = [each for each in lease.spans if position in (None, each.span.position)]
        last = max(locked.span.first + len(locked.span.parts) for locked in lease.spans)
        end = last if end is None else min(end, last)
        released = 0
        for begin in range(first, end, _CHUNKS_A_STEP):
            step_end = min(begin + _CHUNKS_A_STEP, end)
            freed = sum(self._release(locked, chosen, begin, step_end) for locked in spans)
            if freed:
                released += freed
                self.locks -= freed
                self._note_freed(lease)
            yield
        return released

    def of_owner(self, owner: int) -> list[Lease]:
        """The leases of a scheduler's session."""
        return list(self._by_owner.get(owner, {}).values())

    def of_engine(self, engine_id: str) -> list[Lease]:
        return list(self._by_engine.get(engine_id, {}).values())

    def expire(self, now: float) -> Steps[None]:
        """End the leases without session whose time is up."""
        while self._by_expiry and self._by_expiry[0][0] <= now:
            _, lease_id = heappop(self._by_expiry)
            lease = self._leases.get(lease_id)
            if lease is not None:
                yield from self.release_in_steps(lease)
            yield

    def _release(self, locked: LockedSpan, readers: Sequence[int], first: int, end: int) -> int:
        bits = locked.bits(first, end)
        before = locked.held_by_any()
        released = 0
        for reader in readers:
            released += (locked.held[reader] & bits).bit_count()
            locked.held[reader] &= ~bits
        if released:
            freed = set_bits(before & ~locked.held_by_any())
            self.index.unpin([locked.span.parts[index] for index in freed])
        return released

    def _note_freed(self, lease: Lease) -> None:
        for reader in list(lease.copying):
            if not any(locked.held[reader] for locked in lease.spans):
                lease.copying.remove(reader)
        if not lease.copying:
            self._copying.discard(lease)
        if not any(locked.held_by_any() for locked in lease.spans):
            self._leases.pop(lease.lease_id, None)
            _remove(self._by_engine, lease.engine_id, lease.lease_id)
            _remove(self._by_owner, lease.owner, lease.lease_id)


def set_bits(bits: int) -> Iterable[int]:
    """The numbers of the bits that are set, in ascending order."""
    lowest = max((bits & -bits).bit_length() - 1, 0)
    bits >>= lowest
    if not bits & (bits + 1):  # all in a row, as they mostly are
        return range(lowest, lowest + bits.bit_length())
    # Text is the fastest way to walk the bits of a long integer.
    text = reversed(f"{bits:b}")
    return (number for number, bit in enumerate(text, lowest) if bit == "1")


def _remove(groups: dict[K, dict[int, Lease]], key: K, lease_id: int) -> None:
    group = groups.get(key)
    if group is not None:
        group.pop(lease_id, None)
        if not group:
            del groups[key]

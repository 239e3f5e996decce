"""Memory that sessions have reserved and write to by themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvdock_server.core.sessions import Reservation, Session
from kvdock_server.errors import Reason, RequestError, invalid
from kvdock_server.ids import new_id
from kvdock_server.index.index import Index, Slot
from kvdock_server.steps import Steps


class ReservationTable:
    """All reservations of a server.

    ``seal`` is called for each slot that is committed. ``still_mapped`` is asked about a session
    whose stream ended: True if the session's process may still be writing into the pool.
    """

    def __init__(
        self,
        index: Index,
        seal: Callable[[Slot], bool],
        still_mapped: Callable[[Session], bool],
    ) -> None:
        self._index = index
        self._seal = seal
        self._still_mapped = still_mapped
        self._owners: dict[int, Session] = {}
        self._ended: list[Session] = []

    def open(self, session: Session, slots: dict[int, Slot]) -> Reservation:
        """Hand slots over to a session. ``slots`` are by the chunk's index in the request."""
        reservation = Reservation(new_id(taken=self._owners), slots)
        session.reservations[reservation.reservation_id] = reservation
        self._owners[reservation.reservation_id] = session
        return reservation

    def commit_in_steps(
        self, session: Session, reservation_id: int, chunks: Sequence[int]
    ) -> Steps[list[bool]]:
        """Seal ``chunks`` of a reservation, or all open ones if none are named.

        The result has one entry for each chunk. False: the chunk was cleared, or it was aborted or
        lost by the session between two steps.
        """
        reservation = self._reservation(session, reservation_id)
        if reservation is None:
            raise RequestError(
                Reason.UNKNOWN_RESERVATION,
                f"reservation {reservation_id} is not open: it was committed or aborted, or its "
                "session ended; reserve again",
                reservation_id=reservation_id,
            )
        wanted = list(chunks) or list(reservation.open)
        missing = [chunk for chunk in wanted if chunk not in reservation.open]
        if missing or len(set(wanted)) != len(wanted):
            raise invalid(
                f"chunks {', '.join(map(str, missing[:8] or wanted[:8]))} of reservation "
                f"{reservation_id} are not open: commit each reserved chunk once",
                "chunks",
            )
        sealed = []
        for chunk in wanted:
            slot = reservation.open.pop(chunk, None) if not session.orphaned else None
            self._forget_if_done(session, reservation)
            sealed.append(slot is not None and self._seal(slot))
            yield
        return sealed

    def abort_in_steps(self, session: Session, reservation_id: int) -> Steps[int]:
        """Give back what a reservation still holds; how many chunks it held."""
        reservation = self._reservation(session, reservation_id)
        aborted = 0
        while reservation is not None and reservation.open and not session.orphaned:
            _, slot = reservation.open.popitem()
            self._forget_if_done(session, reservation)
            self._index.abort(slot)
            aborted += 1
            yield
        return aborted

    def orphan(self, session: Session) -> Steps[None]:
        """Let others store what a session was storing. The session's memory stays reserved."""
        for reservation in list(session.reservations.values()):
            while reservation.open:
                _, slot = reservation.open.popitem()
                self._index.orphan(slot)
                reservation.orphaned.append(slot)
                yield

    def end(self, session: Session) -> Steps[None]:
        """A session's stream ended: free its memory when its process cannot write any more."""
        yield from self.orphan(session)
        self._ended.append(session)
        yield from self.free_unmapped()

    def free_unmapped(self) -> Steps[None]:
        """Free the memory of ended sessions whose processes cannot write any more."""
        ready: list[Session] = []
        waiting: list[Session] = []
        for session in self._ended:
            mapped = session.reservations and self._still_mapped(session)
            (waiting if mapped else ready).append(session)
        self._ended = waiting
        for session in ready:
            for reservation in list(session.reservations.values()):
                while reservation.orphaned:
                    self._index.free(reservation.orphaned.pop())
                    yield
                self._forget_if_done(session, reservation)

    def _reservation(self, session: Session, reservation_id: int) -> Reservation | None:
        owner = self._owners.get(reservation_id)
        if owner is None:
            return None
        if owner is not session:
            raise RequestError(
                Reason.FOREIGN_RESERVATION,
                f"reservation {reservation_id} belongs to another session",
                reservation_id=reservation_id,
            )
        return session.reservations[reservation_id]

    def _forget_if_done(self, session: Session, reservation: Reservation) -> None:
        if not reservation.slots:
            session.reservations.pop(reservation.reservation_id, None)
            self._owners.pop(reservation.reservation_id, None)

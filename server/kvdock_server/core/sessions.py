"""Sessions: what each connected process holds."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from itertools import count

from kvdock_server.errors import Reason, RequestError, invalid
from kvdock_server.ids import new_id
from kvdock_server.index.index import Slot

DEFAULT_TTL_MS = 30_000
MIN_TTL_MS = 1_000
MAX_TTL_MS = 600_000
TOKEN_BYTES = 16


class Role(Enum):
    """The part of an engine that a session stands for. The values are those of the protocol."""

    SCHEDULER = 1
    WORKER = 2
    TOOL = 3


class Mode(Enum):
    """How a session's bytes move. The values are those of the protocol."""

    SERVER = 1
    SHARED = 2
    INLINE = 3


@dataclass(eq=False)
class Reservation:
    """Memory that a session is writing to.

    ``open`` has the slots by the chunk's index in the request. When the session is lost, its open
    slots become ``orphaned`` one by one: others may store those chunks, but the memory is not free
    yet, since the session's process may still be writing to it.
    """

    reservation_id: int
    open: dict[int, Slot]
    orphaned: list[Slot] = field(default_factory=list)

    @property
    def slots(self) -> int:
        """How many slots the reservation holds."""
        return len(self.open) + len(self.orphaned)


@dataclass(eq=False)
class Session:
    """One connected process.

    ``session_id`` is a public name. ``token`` is a secret: it stands for the session in calls
    outside its stream, and only the process that opened the session is told it.
    ``last_seen`` is the loop's clock in seconds, and ``ttl`` is in seconds.
    ``guard`` is the byte of the pool's file that the process keeps locked while it has the pool
    mapped.
    ``orphaned``: what the session has reserved will not be committed any more.
    ``home`` is the socket of the process's device, as an index; None where it is not known.
    ``is_held_up``: the server reads no request of the session, so its silence means nothing.
    """

    session_id: int
    token: bytes = field(repr=False)
    engine_id: str
    role: Role
    worker_id: int
    kv_worker_id: int
    ttl: float
    client: str
    last_seen: float
    guard: int
    mode: Mode = Mode.SHARED
    mode_reason: str = "the client copies by itself"
    home: int | None = None
    expired: bool = False
    orphaned: bool = False
    is_held_up: bool = False
    reservations: dict[int, Reservation] = field(default_factory=dict)

    @property
    def reserved_chunks(self) -> int:
        return sum(reservation.slots for reservation in self.reservations.values())

    def refuse_if_expired(self) -> None:
        """RequestError (SESSION_EXPIRED) if the session was silent for longer than its TTL."""
        if self.expired:
            raise RequestError(
                Reason.SESSION_EXPIRED,
                f"session {self.session_id} was silent for more than {self.ttl:g} s and lost what "
                "it held: open another one",
                session_id=self.session_id,
                limit=round(self.ttl * 1000),
            )


class SessionTable:
    def __init__(self) -> None:
        self._sessions: dict[int, Session] = {}
        self._by_token: dict[bytes, Session] = {}
        self._guards = count()

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._sessions.values()))

    def __len__(self) -> int:
        return len(self._sessions)

    def open(
        self,
        now: float,
        *,
        engine_id: str,
        role: Role,
        worker_id: int,
        kv_worker_id: int,
        ttl_ms: int,
        client: str,
    ) -> Session:
        """Open a session; RequestError where a field is out of its limits."""
        if not 1 <= len(engine_id) <= 256:
            raise invalid(
                f"engine_id of {len(engine_id)} characters: from 1 to 256", "engine_id", 256
            )
        if len(client) > 256:
            raise invalid(f"client of {len(client)} characters: at most 256", "client", 256)
        if role is not Role.WORKER and (worker_id or kv_worker_id):
            raise invalid(
                f"worker_id {worker_id} and kv_worker_id {kv_worker_id} of a {role.name} session: "
                "both must be 0",
                "worker_id",
                0,
            )
        ttl_ms = ttl_ms or DEFAULT_TTL_MS
        if not MIN_TTL_MS <= ttl_ms <= MAX_TTL_MS:
            raise invalid(
                f"ttl_ms {ttl_ms}: from {MIN_TTL_MS} to {MAX_TTL_MS}, or 0", "ttl_ms", MAX_TTL_MS
            )
        session = Session(
            session_id=new_id(taken=self._sessions),
            token=secrets.token_bytes(TOKEN_BYTES),
            engine_id=engine_id,
            role=role,
            worker_id=worker_id,
            kv_worker_id=kv_worker_id,
            ttl=ttl_ms / 1000,
            client=client,
            last_seen=now,
            guard=next(self._guards),
        )
        self._sessions[session.session_id] = session
        self._by_token[session.token] = session
        return session

    def close(self, session: Session) -> None:
        self._sessions.pop(session.session_id, None)
        self._by_token.pop(session.token, None)

    def with_token(self, token: bytes) -> Session:
        """A live session; RequestError (UNKNOWN_SESSION, SESSION_EXPIRED) otherwise."""
        session = self._by_token.get(token)
        if session is None:
            raise RequestError(
                Reason.UNKNOWN_SESSION,
                f"no open session has this session_token of {len(token)} bytes: its session ended "
                "or is of another server; open a session and use its token",
            )
        session.refuse_if_expired()
        return session

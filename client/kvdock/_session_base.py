"""What a session of either face knows without asking the server."""

from __future__ import annotations

import weakref
from typing import Any, Generic, TypeVar

from kvdock import _verbs
from kvdock._stream_base import StreamBase
from kvdock.address import Address
from kvdock.pool import Pool
from kvdock.types import SessionInfo

StreamT = TypeVar("StreamT", bound=StreamBase[Any])


class SessionBase(Generic[StreamT]):
    """An open session: its stream, what the server told when it opened, and the mapped pool."""

    def __init__(
        self, stream: StreamT, info: SessionInfo, *, address: Address, timeout: float
    ) -> None:
        self.info = info
        self._stream = stream
        self._timeout = timeout
        self._pool = Pool(
            info.segments, guard=info.guard, server=str(address), is_local=address.is_local
        )
        self._finalizer = weakref.finalize(self, stream.abandon)

    @property
    def id(self) -> int:
        """The session's public name, as Status shows it."""
        return self.info.id

    @property
    def epoch(self) -> int:
        """The server's epoch. One session never sees two: a restart ends it."""
        return self.info.epoch

    @property
    def chunk_tokens(self) -> int:
        """The chunk size that engines of this host should use, in tokens."""
        return self.info.chunk_tokens

    @property
    def server_version(self) -> str:
        """The server's version."""
        return self.info.server_version

    @property
    def alive(self) -> bool:
        """False once no request can succeed any more."""
        return self._stream.over is None

    @property
    def lost(self) -> str | None:
        """Why the session is not alive; None while it is."""
        over = self._stream.over
        return None if over is None else over.message

    @property
    def pool(self) -> Pool:
        """The server's memory. Closed with the session; views taken before stay valid."""
        return self._pool

    def _seconds(self, timeout: float | None) -> float:
        return self._timeout if timeout is None else _verbs.limited(timeout)

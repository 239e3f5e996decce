"""The server's clock, estimated from its answers. Pure.

The server must know how long a request was under way, so that it does not work for a caller who has
gone. Client and server have no common clock if they are on different hosts or time namespaces. So
the server alone cannot measure the time: a request that was sent long ago looks the same to it as
one whose client has a clock that is behind. The client can measure it, since it knows when it sent
a request and when the answer came.
"""

from __future__ import annotations


class ServerClock:
    """How far the server's clock (milliseconds) is ahead of this process's clock (seconds)."""

    def __init__(self) -> None:
        self._ahead: float | None = None

    def heard(self, answered_ms: int, sent: float, came: float) -> None:
        """Learns from an answer; SessionResponse.answered_ms in session.proto explains how.

        ``sent`` and ``came`` are when the request went and the answer came, on our clock.
        """
        if not answered_ms:
            return
        least, most = answered_ms - 1000 * came, answered_ms - 1000 * sent
        self._ahead = most if self._ahead is None else max(min(self._ahead, most), least)

    def at(self, when: float) -> int:
        """What the server's clock shows when ours shows ``when``; 0 before the first answer."""
        return 0 if self._ahead is None else max(1, round(1000 * when + self._ahead))

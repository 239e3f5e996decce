"""The server's clock, as far as its answers tell it. Pure.

The server must know how long a request was under way, so that it does not work for a caller who has
gone. It has no clock in common with a client of another host, or of another time namespace. Nor can
it measure the way by itself: a request that waited long looks like one from a client whose clock
stood still. The client sees the difference, since it knows when the answer came.
"""

from __future__ import annotations


class ServerClock:
    """How far the server's clock, in milliseconds, is ahead of ours, in seconds."""

    def __init__(self) -> None:
        self._ahead: float | None = None

    def heard(self, answered_ms: int, sent: float, came: float) -> None:
        """Learns from the answer to a request: SessionResponse.answered_ms says how."""
        if not answered_ms:
            return
        least, most = answered_ms - 1000 * came, answered_ms - 1000 * sent
        self._ahead = most if self._ahead is None else max(min(self._ahead, most), least)

    def at(self, when: float) -> int:
        """What the server's clock shows at a time of ours; 0 while nothing is known of it."""
        return 0 if self._ahead is None else max(1, round(1000 * when + self._ahead))

"""What the clients of both faces have in common: everything but calls."""

from __future__ import annotations

import os

from kvdock import _verbs
from kvdock.address import default_address, parse
from kvdock.channel import Options, options
from kvdock.errors import DeadlineExceeded, Unavailable
from kvdock.events.messages import MISSED_SIGNS
from kvdock.fork import refuse_broken_fork, refuse_fork_of
from kvdock.trust import Gatekeeper

DEFAULT_TIMEOUT = 5.0
"""Seconds."""


class ClientBase:
    """Which server a client talks to, who may be that server, and how long a call may take."""

    def __init__(self, address: str | None, timeout: float, channel_options: Options) -> None:
        self.address = parse(default_address() if address is None else address)
        self.timeout = timeout
        self._gatekeeper = Gatekeeper(self.address)
        self._pid = os.getpid()
        self._channel_options = [*options(self.address), *channel_options]
        refuse_broken_fork()

    def _check_server(self) -> None:
        """To be called before each call. Raises Forked, UntrustedServer or Unavailable."""
        refuse_fork_of(self._pid)
        self._gatekeeper.check()

    def _seconds(self, timeout: float | None) -> float:
        return _verbs.limited(self.timeout if timeout is None else timeout)

    def _longest_silence(self, progress_interval: float) -> float:
        """Seconds without a message after which the server of an event stream counts as lost."""
        return max(MISSED_SIGNS * progress_interval, self.timeout)

    def _stalled(self, seconds: float) -> DeadlineExceeded:
        return DeadlineExceeded(f"nothing moved from or to {self.address} for {seconds:g} s")


def closed() -> Unavailable:
    """The error of a call on a client that was closed."""
    return Unavailable("this client was closed; make another")

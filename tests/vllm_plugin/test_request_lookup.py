"""A lookup against a server that stands still."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from kvdock import Client
from kvdock_vllm.engine.link import Live
from kvdock_vllm.engine.request_lookup import Lookup, State
from kvdock_vllm.engine.specs import Target


def test_a_lookup_that_the_server_calls_too_late_has_timed_out(server: Any) -> None:
    """Whoever looks first, the scheduler or the server: its time is over, and it did not fail."""
    with Client(server.address) as client, client.session(role="scheduler") as session:
        live = Live(client, session, Target(session.epoch, "n", 16))
        os.kill(server.process.pid, signal.SIGSTOP)
        try:
            lookup = Lookup(live, [bytes(32)], readers=1, timeout=0.1)
            time.sleep(0.5)  # on its way
        finally:
            os.kill(server.process.pid, signal.SIGCONT)
        lookup._future.exception(5)
        assert lookup.poll()
        assert lookup.state is State.TIMED_OUT
        assert client.status().counters.lookups == 0

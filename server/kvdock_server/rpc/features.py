"""What this server does that not every server of the protocol does, by the protocol's names."""

from __future__ import annotations

from kvdock_server.core import Core

EVENT_LOG = "event_log"

MOST_FEATURES = 64
"""Of one client. Each has at most so many characters, too."""


def features(core: Core) -> list[str]:
    return [EVENT_LOG] if core.events is not None else []

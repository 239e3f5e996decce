"""What this server does that not every server of the protocol does, by the protocol's names."""

from __future__ import annotations

from kvdock_server.core import Core

EVENT_LOG = "event_log"

MOST_FEATURES = 64
"""The most that a client may name."""
MOST_FEATURE_CHARACTERS = 64
"""The longest name of a feature."""


def features(core: Core) -> list[str]:
    return [EVENT_LOG] if core.events is not None else []

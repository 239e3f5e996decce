"""What became of each chunk of a call."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Final

from kvdock_server.core import ReserveStatus


class ChunkStatus(Enum):
    """ChunkStatus of types.proto, with its values."""

    STORED = 1
    RESERVED = 2
    EXISTS = 3
    NO_SPACE = 4
    PARENT_MISSING = 5
    RETRIEVED = 6
    NOT_FOUND = 7
    NOT_LOCKED = 8
    FAILED = 9


OF_RESERVE: Final[Mapping[ReserveStatus, ChunkStatus]] = {
    status: ChunkStatus[status.name] for status in ReserveStatus
}

"""What a server has done since its start."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Counters:
    """Totals since the server's start. The index has some more."""

    lookups: int = 0
    lookup_chunks: int = 0
    hit_chunks: int = 0
    stored_shards: int = 0
    stored_bytes: int = 0
    retrieved_shards: int = 0
    retrieved_bytes: int = 0
    host_to_device_bytes: int = 0
    device_to_host_bytes: int = 0
    device_to_device_bytes: int = 0

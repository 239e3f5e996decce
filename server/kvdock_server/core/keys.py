"""What a list of chunk keys must be like."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvdock_server.core.reading import MAX_KEYS
from kvdock_server.errors import invalid

KEY_BYTES: Final = 32


def check_keys(keys: Sequence[bytes]) -> None:
    """RequestError unless there are 1 to MAX_KEYS keys of 32 bytes."""
    check_number(keys)
    check_sizes(keys)


def check_number(keys: Sequence[bytes]) -> None:
    if not 1 <= len(keys) <= MAX_KEYS:
        raise invalid(f"{len(keys)} keys: from 1 to {MAX_KEYS}", "keys", MAX_KEYS)


def check_sizes(keys: Sequence[bytes], first: int = 0) -> None:
    """RequestError unless all keys from ``first`` on have 32 bytes."""
    if not set(map(len, keys[first:])) <= {KEY_BYTES}:
        index, key = next((i, key) for i, key in enumerate(keys) if len(key) != KEY_BYTES)
        raise invalid(
            f"key {index} has {len(key)} bytes: each has {KEY_BYTES} (see docs/keys.md for the "
            "recipe)",
            "keys",
            KEY_BYTES,
        )

"""Ids that the server makes: of sessions, leases, reservations, and of its own life (the epoch)."""

from __future__ import annotations

import secrets
from collections.abc import Container

_BITS = 53
"""JavaScript, for one, holds no larger integer exactly."""


def new_id(taken: Container[int] = ()) -> int:
    """A number from 1 to 2^53 - 1 that is not ``taken``.

    It is random, so that an id of an earlier epoch is unknown instead of somebody else's.
    """
    while True:
        made = secrets.randbits(_BITS)
        if made and made not in taken:
            return made

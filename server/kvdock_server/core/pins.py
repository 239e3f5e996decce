"""Pins by name: what callers ask to be kept, and for how long."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Final

from kvdock_server.core.keys import check_keys
from kvdock_server.errors import invalid
from kvdock_server.index.chunk import NamespaceIndex, Pin
from kvdock_server.index.index import Index, ReserveStatus, Slot
from kvdock_server.index.keeping import Keep, Keeper, keep_until
from kvdock_server.steps import Steps

DEFAULT_PIN: Final = "default"
MAX_PIN_NAME: Final = 128
MAX_PIN_TTL_MS: Final = 30 * 86_400_000
_TRIES: Final = 8
_NAME: Final = re.compile(rf"[!-~]{{1,{MAX_PIN_NAME}}}")


class Pins:
    """The pins of a server."""

    def __init__(self, index: Index, clock: Callable[[], float]) -> None:
        self._index = index
        self._clock = clock

    def wish(self, pin: str, ttl_ms: int) -> Keep:
        """The wish to keep parts for ``ttl_ms`` from now on, with 0 until they are released.

        An empty name means DEFAULT_PIN. RequestError if name or time is out of its limits.
        """
        if ttl_ms > MAX_PIN_TTL_MS:
            raise invalid(
                f"ttl_ms {ttl_ms} of a pin: at most {MAX_PIN_TTL_MS} (30 days), 0 means until "
                "Unpin",
                "ttl_ms",
                MAX_PIN_TTL_MS,
            )
        name = pin_name(pin) if pin else DEFAULT_PIN
        return Keep(name, keep_until(self._clock(), ttl_ms / 1000))

    def pin_in_steps(self, namespace: str, keys: Sequence[bytes], wish: Keep) -> Steps[None]:
        """Keep all that a lookup of these keys would lock; ``wish`` is told how many chunks.

        Raises RequestError (PIN_LIMIT) if pins may not keep so much. Then nothing more is kept.
        """
        check_keys(keys)
        # Some of it may be evicted before its turn comes. Then less is a hit.
        for _ in range(_TRIES):
            space = self._index.space(namespace)
            spans = self._index.find(space, keys)
            runs = [span.parts for span in spans if span.parts]
            if not runs:
                return
            # The windows last: without its full attention no part of them could be kept.
            runs.sort(key=lambda parts: not parts[0].is_full_attention)
            if (yield from self._index.keeping.keep_all(space, runs, wish)):
                wish.kept = spans[0].first + len(spans[0].parts)
                return

    def unpin_in_steps(self, pins: Sequence[Pin]) -> Steps[tuple[int, int]]:
        """End pins; how many parts no pin keeps any more, and their bytes."""
        parts = nbytes = 0
        for pin in pins:
            if not pin.is_released:
                released = yield from self._index.keeping.release(pin)
                parts += released[0]
                nbytes += released[1]
        return parts, nbytes

    def named(self, namespace: str | None = None, name: str | None = None) -> list[Pin]:
        """The pins of one namespace or of all, of one name or of all."""
        return [
            pin
            for pin in self._index.keeping.pins
            if namespace in (None, pin.space.namespace.name) and name in (None, pin.name)
        ]

    # While parts are stored

    def keeper(self, space: NamespaceIndex, wish: Keep | None) -> Keeper | None:
        """Keeps the parts of one call as it wishes, until ``end``."""
        return None if wish is None else Keeper(self._index.keeping, space, wish)

    def end(self, keeper: Keeper | None) -> None:
        if keeper is not None:
            keeper.end()

    def tell(self, wish: Keep, keeper: Keeper, outcomes: Sequence[ReserveStatus | Slot]) -> None:
        """Tell the call how much is kept of what is there, and count the rest."""
        wish.kept = keeper.kept
        there = sum(each is ReserveStatus.EXISTS or isinstance(each, Slot) for each in outcomes)
        self._index.totals.refused_keeps += there - keeper.kept


def pin_name(name: str) -> str:
    """The name; RequestError if no pin can have it."""
    if not _NAME.fullmatch(name):
        raise invalid(
            f"pin {name[:80]!r}: use 1 to {MAX_PIN_NAME} printable ASCII characters without space",
            "pin",
            MAX_PIN_NAME,
        )
    return name

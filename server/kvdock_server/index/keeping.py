"""Pins: names under which parts are kept from eviction, for a time or until they are released.

A kept part counts once against the limit, whichever pins keep it. Whoever wants a chunk kept wants
its prefix, too, without which nobody could hit it. And a part of full attention is never evicted
before what extends it. So a pin that keeps a part keeps the full attention before it, for at least
as long: what the limit does not count is not kept.

Each part of a pin has a time of its own, so that many prompts may share a pin. All calls are made
on one thread, and none waits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final

from kvdock_server.errors import Reason, RequestError
from kvdock_server.index.chunk import Chunk, NamespaceIndex, Part, Pin
from kvdock_server.steps import Steps
from kvdock_server.tiers.host.slots import SlotAllocator

DEFAULT_PIN_SHARE: Final = 0.25
MAX_PINS: Final = 4_096
MAX_ENTRIES: Final = 1 << 18
"""A part counts here for each pin that keeps it."""

_TTL_STEPS: Final = 16


@dataclass(slots=True)
class Keep:
    """A wish: the name of a pin, and until when it is to keep parts; ``math.inf``: until Unpin.

    ``kept`` is the answer: how many chunks of the call, from the first on, are kept.
    """

    pin: str
    until: float
    kept: int = 0


def keep_until(now: float, ttl: float) -> float:
    """When a pin of ``ttl`` seconds, made now, lets go; 0: never by itself.

    It is rounded up, so that the calls of one request mostly agree on it. Otherwise each of them
    would have to look at all of the prompt that is kept already.
    """
    if not ttl:
        return math.inf
    step = max(1.0, ttl / _TTL_STEPS)
    return math.ceil((now + ttl) / step) * step


class Keeping:
    """All pins of a server. ``offer`` is told chunks of which parts may be evicted again."""

    def __init__(
        self, slots: SlotAllocator, offer: Callable[[Chunk], None], limit_bytes: int
    ) -> None:
        self.limit_bytes = limit_bytes
        self.parts = 0
        self.nbytes = 0
        self._slots = slots
        self._offer = offer
        self._entries = 0
        self._pins: dict[tuple[str, str], Pin] = {}

    @property
    def pins(self) -> Sequence[Pin]:
        """All pins, in the order in which they were made."""
        return list(self._pins.values())

    def keep_all(
        self, space: NamespaceIndex, runs: Sequence[Sequence[Part]], wish: Keep
    ) -> Steps[bool]:
        """Keep visible parts, runs of full attention first; False if some left meanwhile.

        Raises RequestError (PIN_LIMIT) if it is beyond the limits. In both cases nothing more is
        kept.
        """
        before = self.nbytes
        keeper = Keeper(self, space, wish)
        try:
            yield from keeper.begin(runs[0][0].chunk.parent)
            for part in chain.from_iterable(runs):
                keeper.keep(part)
                if keeper.has_failed:
                    break
                yield
            if keeper.has_failed:
                yield from keeper.undo()
        finally:
            keeper.end()
        if keeper.was_refused:
            raise RequestError(
                Reason.PIN_LIMIT,
                f"pins keep {before} bytes of {self.limit_bytes}, and these chunks do not fit in "
                f"the rest (or there are {MAX_PINS} pins): unpin something, or start the server "
                "with a larger pin_share",
                limit=self.limit_bytes,
                namespace=space.namespace.name,
            )
        return not keeper.has_failed

    def release(self, pin: Pin) -> Steps[tuple[int, int]]:
        """End a pin; how many parts no pin keeps any more, and their bytes."""
        pin.is_released = True
        self._pins.pop((pin.space.namespace.name, pin.name), None)
        parts = nbytes = 0
        while pin.due:
            bucket = pin.due[next(reversed(pin.due))]
            released = self.let_go(pin, next(reversed(bucket)))
            parts += released > 0
            nbytes += released
            yield
        return parts, nbytes

    def expire(self, now: float) -> Steps[None]:
        """Let go of the parts whose time is up."""
        for pin in self.pins:
            for until in sorted(each for each in pin.due if each <= now):
                while bucket := pin.due.get(until):
                    self.let_go(pin, next(reversed(bucket)))
                    yield
            self._forget_if_empty(pin)
            yield

    def forget(self, part: Part) -> None:
        """A part has left the index."""
        space = part.chunk.space
        if space.priorities:
            space.priorities.pop(part, None)
        if not space.kept or space.is_cleared:
            return
        for pin in space.kept.get(part, ()):
            self._drop(pin, part)
            self._forget_if_empty(pin)

    def clear(self, space: NamespaceIndex) -> None:
        """A namespace was cleared: its pins are over."""
        self.parts -= len(space.kept)
        self.nbytes -= space.kept_bytes
        for place, pin in list(self._pins.items()):
            if pin.space is space:
                pin.is_released = True
                self._entries -= len(pin.until)
                pin.until, pin.due = {}, {}
                del self._pins[place]

    # What the calls of a Keeper, and of this class, have in common

    def open(self, space: NamespaceIndex, name: str) -> Pin | None:
        """The pin of that name, until ``close``; None if there can be none more."""
        place = space.namespace.name, name
        pin = self._pins.get(place)
        if pin is None:
            if space.is_cleared or len(self._pins) >= MAX_PINS:
                return None
            pin = self._pins[place] = Pin(space, name)
        pin.calls += 1
        return pin

    def close(self, pin: Pin) -> None:
        """A call is over. A pin that keeps nothing then is forgotten."""
        pin.calls -= 1
        self._forget_if_empty(pin)

    def keep(self, pin: Pin, part: Part, until: float) -> bool:
        """Keep a part for at least so long. False if that is not possible."""
        if pin.is_released or part.is_gone:
            return False
        known = pin.until.get(part)
        if known is not None:
            if until > known:
                pin.remove(part)
                pin.add(part, until)
            return True
        space = part.chunk.space
        others = space.kept.get(part)
        nbytes = self._part_bytes(part)
        if not nbytes or self._entries >= MAX_ENTRIES:
            return False
        if others is None:
            if self.nbytes + nbytes > self.limit_bytes:
                return False
            space.kept_bytes += nbytes
            self.nbytes += nbytes
            self.parts += 1
        space.kept[part] = pin.only if others is None else (*others, pin)
        self._entries += 1
        pin.nbytes += nbytes
        pin.add(part, until)
        return True

    def let_go(self, pin: Pin, part: Part) -> int:
        """Take a part from a pin; its bytes if no other pin keeps it, else 0."""
        nbytes = self._drop(pin, part)
        # As with a lock: what has children is offered when it has lost them.
        if nbytes and not (part.is_full_attention and part.chunk.first_child is not None):
            self._offer(part.chunk)
        return nbytes

    def _drop(self, pin: Pin, part: Part) -> int:
        space = part.chunk.space
        nbytes = self._part_bytes(part)
        pin.remove(part)
        pin.nbytes -= nbytes
        self._entries -= 1
        if space.is_cleared:
            return 0  # the limit does not count it any more
        others = tuple(other for other in space.kept[part] if other is not pin)
        if others:
            space.kept[part] = others
            return 0
        del space.kept[part]
        space.kept_bytes -= nbytes
        self.nbytes -= nbytes
        self.parts -= 1
        return nbytes

    def _forget_if_empty(self, pin: Pin) -> None:
        if not (pin.until or pin.calls or pin.is_released):
            pin.is_released = True
            del self._pins[pin.space.namespace.name, pin.name]

    def _part_bytes(self, part: Part) -> int:
        """Of all its shards, at the size of slots; 0 if not all sizes are known."""
        sizes = part.chunk.space.namespace.groups[part.position].shard_bytes
        return sum(map(self._slots.slot_bytes, sizes)) if all(sizes) else 0


class Keeper:
    """Keeps the parts that one call names, in their order, until one cannot be kept.

    ``kept`` counts them. ``has_failed``: one could not be kept. ``was_refused``: since that is
    beyond the limits. ``end`` must follow.
    """

    def __init__(self, keeping: Keeping, space: NamespaceIndex, wish: Keep) -> None:
        self.kept = 0
        self._keeping = keeping
        self._until = wish.until
        self._pin = keeping.open(space, wish.pin)
        # Each part with until when it was kept before; None: it was not.
        self._changed: list[tuple[Part, float | None]] = []
        self.has_failed = self.was_refused = self._pin is None

    def begin(self, chunk: Chunk | None) -> Steps[None]:
        """Keep the full attention of a chunk and of all before it."""
        before: list[Chunk] = []
        while chunk is not None and not self.has_failed and not self._is_kept(chunk):
            before.append(chunk)
            chunk = chunk.parent
            yield
        while before and not self.has_failed:
            chunk = before.pop()
            if chunk.is_known:
                self._keep_full_attention(chunk)
            else:
                self.has_failed = True
            yield

    def keep(self, part: Part) -> None:
        """Keep a part. The full attention of all chunks before must be kept."""
        if not part.is_full_attention:
            self._keep_full_attention(part.chunk)
        self._keep(part)
        self.kept += not self.has_failed

    def undo(self) -> Steps[None]:
        """Let go of what was not kept before, or not so long."""
        while self._changed:
            part, before = self._changed.pop()
            if self._pin is not None and part in self._pin.until:
                if before is None:
                    self._keeping.let_go(self._pin, part)
                else:
                    self._pin.remove(part)
                    self._pin.add(part, before)
            yield

    def end(self) -> None:
        if self._pin is not None:
            self._keeping.close(self._pin)

    def _is_kept(self, chunk: Chunk) -> bool:
        """True if the full attention of a chunk is kept long enough: then all before it is, too."""
        parts = [part for part in chunk.parts if part is not None and part.is_full_attention]
        known = self._pin.until if self._pin is not None else {}
        return bool(parts) and all(known.get(part, 0.0) >= self._until for part in parts)

    def _keep_full_attention(self, chunk: Chunk) -> None:
        for part in chunk.parts:
            if part is not None and part.is_full_attention:
                self._keep(part)

    def _keep(self, part: Part) -> None:
        if self.has_failed or self._pin is None:
            return
        before = self._pin.until.get(part)
        self.has_failed = not self._keeping.keep(self._pin, part, self._until)
        self.was_refused = self.has_failed and not (self._pin.is_released or part.is_gone)
        if not self.has_failed:
            self._changed.append((part, before))

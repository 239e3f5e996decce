"""What one call wishes for the parts that it stores, beyond their being there."""

from __future__ import annotations

from enum import IntEnum

from kvdock_server.index.chunk import Chunk, NamespaceIndex, Part
from kvdock_server.index.keeping import Keeper
from kvdock_server.steps import Steps


class Priority(IntEnum):
    """How many fillings of the pool a part's last use counts as later. See ``Part.priority``."""

    LOW = -1
    NORMAL = 0
    HIGH = 1


class Terms:
    """The priority of the parts of one call, and who keeps them."""

    def __init__(
        self, space: NamespaceIndex, priority: Priority, keeper: Keeper | None = None
    ) -> None:
        self._priorities = space.priorities
        self._priority = priority
        self._keeper = keeper

    def begin(self, parent: Chunk | None) -> Steps[None]:
        """Keep what is before the call's chunks."""
        if self._keeper is not None:
            yield from self._keeper.begin(parent)

    def apply(self, part: Part) -> None:
        """The part is reserved, or exists."""
        # A part that nobody has stored any of, and that one writer has, is that writer's.
        is_new = not part.sealed_shards and not part.writing & (part.writing - 1)
        if is_new or self._priority > self._priorities.get(part, Priority.NORMAL):
            if self._priority is Priority.NORMAL:
                self._priorities.pop(part, None)
            else:
                self._priorities[part] = self._priority
        if self._keeper is not None:
            self._keeper.keep(part)

"""Slots that are being filled."""

from __future__ import annotations

from collections.abc import Callable

from kvdock_server.index.index import Slot
from kvdock_server.steps import Steps


class Writing:
    """The slots of one store.

    ``open`` has the slots by the number of their chunk. Code that takes a slot out of ``open`` owns
    the slot.
    """

    def __init__(self, seal: Callable[[Slot], bool], slots: dict[int, Slot]) -> None:
        self.open = slots
        self._seal = seal

    def seal(self, chunk: int) -> bool:
        """Seal a chunk's slot, whose bytes are complete.

        False if the chunk was cleared meanwhile.
        """
        return self._seal(self.open.pop(chunk))

    def seal_all(self) -> Steps[list[int]]:
        """Seal all open slots; the chunks that were not cleared meanwhile."""
        sealed = []
        for chunk in list(self.open):
            if self.seal(chunk):
                sealed.append(chunk)
            yield
        return sealed

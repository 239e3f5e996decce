"""Slots that are being filled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType

from kvdock_server.index.index import Index, ReserveStatus, Slot
from kvdock_server.steps import Steps


class Writing:
    """The slots of one store. A context manager.

    Whatever is still ``open`` when the block ends is aborted, however it ends. ``open`` has the
    slots by the number of their chunk; whoever takes one out of it owns it.
    """

    def __init__(
        self, index: Index, seal: Callable[[Slot], bool], outcomes: Sequence[ReserveStatus | Slot]
    ) -> None:
        self.open = {i: outcome for i, outcome in enumerate(outcomes) if isinstance(outcome, Slot)}
        self._index = index
        self._seal = seal

    def __enter__(self) -> Writing:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Abort what is open."""
        slots, self.open = self.open, {}
        self._index.abort_all(slots.values())

    def seal(self, chunk: int) -> bool:
        """All bytes of a chunk's slot are there. False if the chunk was cleared meanwhile."""
        return self._seal(self.open.pop(chunk))

    def seal_all(self) -> Steps[list[int]]:
        """All bytes of all slots are there; which chunks were not cleared meanwhile."""
        sealed = []
        for chunk in list(self.open):
            if self.seal(chunk):
                sealed.append(chunk)
            yield
        return sealed

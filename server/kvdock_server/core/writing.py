"""Slots that are being filled."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from kvdock_server.core import Core
from kvdock_server.index.index import ReserveStatus, Slot


class Writing:
    """The slots of one store, by the number of their chunk. A context manager.

    Whatever is not sealed when the block ends is given back, however it ends.
    """

    def __init__(self, core: Core, outcomes: Sequence[ReserveStatus | Slot]) -> None:
        self._core = core
        self.open = {i: outcome for i, outcome in enumerate(outcomes) if isinstance(outcome, Slot)}
        """What is neither sealed nor given back yet."""

    def __enter__(self) -> Writing:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._core.give_back_all(self.open.values())
        self.open.clear()

    def seal(self, chunk: int) -> bool:
        """All bytes of a chunk's slot are there. False if the chunk was cleared meanwhile."""
        return self._core.seal(self.open.pop(chunk))

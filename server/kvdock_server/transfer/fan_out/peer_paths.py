"""All paths between workers' memory, for the event loop."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from kvdock_server.transfer.devices.mapped_memory import MappedMemory
from kvdock_server.transfer.fan_out.peer_path import NoPeerPathError, PeerPath

logger = logging.getLogger(__name__)

_OPEN_SECONDS = 5.0
"""The first path of all may have to wait until its kernel is compiled."""


class PeerPaths:
    """Opens each path when it is first wanted. Methods belong to the event loop."""

    def __init__(self, driver_threads: ThreadPoolExecutor) -> None:
        self._driver_threads = driver_threads
        self._opened: dict[tuple[MappedMemory, MappedMemory], asyncio.Task[PeerPath | None]] = {}

    def between(
        self, sender: MappedMemory, receiver: MappedMemory
    ) -> asyncio.Future[PeerPath | None]:
        """The path, None if there is none. ``close`` must not have been called for either."""
        opened = self._opened.get((sender, receiver))
        if opened is None:
            # Entered before it is open, so that ``close`` finds it if it comes meanwhile.
            opened = asyncio.create_task(self._open(sender, receiver))
            self._opened[sender, receiver] = opened
        return asyncio.shield(opened)

    async def open_in_time(
        self, sender: MappedMemory, receivers: Sequence[MappedMemory], deadline: float
    ) -> list[PeerPath | None]:
        """The path to each receiver; None where there is none, or none yet.

        Waits for half of the time until ``deadline`` (time.monotonic) at most.
        """
        paths = [self.between(sender, receiver) for receiver in receivers]
        if paths:
            await asyncio.wait(paths, timeout=min(_OPEN_SECONDS, (deadline - time.monotonic()) / 2))
        return [path.result() if path.done() else None for path in paths]

    async def close(self, memory: MappedMemory) -> None:
        """Close every path from a worker's memory and to it. Nothing may be under way there."""
        for pair in [pair for pair in self._opened if memory in pair]:
            # The worker at the other end may be closing at the same time.
            opened = self._opened.pop(pair, None)
            path = await opened if opened is not None else None
            if path is not None:
                await asyncio.wrap_future(self._driver_threads.submit(path.close))

    async def _open(self, sender: MappedMemory, receiver: MappedMemory) -> PeerPath | None:
        try:
            path = await asyncio.wrap_future(
                self._driver_threads.submit(PeerPath, sender, receiver)
            )
        except NoPeerPathError as error:
            logger.info("each reader gets its own copy from the pool: %s", error)
            return None
        except Exception:
            logger.exception("each reader gets its own copy from the pool")
            return None
        logger.info("what %s loads goes on to %s", sender.device.uuid, receiver.device.uuid)
        return path

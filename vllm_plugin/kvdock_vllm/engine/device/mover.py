"""Shared mode on GPUs: copies between blocks and the pinned pool, on the worker's own streams."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvdock import Session
from kvdock.types import Location
from kvdock_vllm.engine.copier import HostBlocks, Stop
from kvdock_vllm.engine.device.pinning import PinnedMemory
from kvdock_vllm.engine.device.staged_copier import STAGING_BYTES, DeviceCopier, Staging
from kvdock_vllm.engine.layout import GroupLayout
from kvdock_vllm.engine.transfers.shared import Mover


@dataclass(frozen=True, slots=True)
class _Copiers:
    """Each direction has its own buffers, so a load never waits for stores."""

    groups: list[DeviceCopier]
    stores: Staging
    loads: Staging


class DeviceMover(Mover):
    """Copies blocks of one device. Its first session allocates four staging buffers."""

    def __init__(
        self,
        layouts: Sequence[GroupLayout],
        device: torch.device,
        staging_bytes: int = STAGING_BYTES,
    ) -> None:
        self._layouts = layouts
        self._device = device
        self._staging_bytes = max(staging_bytes, *(layout.block_bytes for layout in layouts))
        self._lock = threading.Lock()
        self._copiers: _Copiers | None = None
        self._pinned: dict[Session, PinnedMemory] = {}

    def open(self, session: Session) -> None:
        """Raises PoolUnmappable, or what torch raises if the device is out of memory."""
        memory = [
            session.pool.array(Location(segment.segment_id, 0, segment.nbytes))
            for segment in session.pool.segments
        ]
        device = self._device
        with self._lock:
            if self._copiers is None:
                self._copiers = _Copiers(
                    [DeviceCopier(layout, device, self._staging_bytes) for layout in self._layouts],
                    stores=Staging(device, self._staging_bytes),
                    loads=Staging(device, self._staging_bytes),
                )
            self._pinned[session] = PinnedMemory(memory, device.index or 0)

    def close(self, session: Session) -> None:
        with self._lock:
            self._pinned.pop(session).close()

    def gather(self, position: int, parts: Sequence[HostBlocks], stop: Stop) -> None:
        assert self._copiers is not None, "gather before open"
        self._copiers.groups[position].gather(parts, self._copiers.stores, stop)

    def scatter(self, position: int, parts: Sequence[HostBlocks], stop: Stop) -> None:
        assert self._copiers is not None, "scatter before open"
        self._copiers.groups[position].scatter(parts, self._copiers.loads, stop)

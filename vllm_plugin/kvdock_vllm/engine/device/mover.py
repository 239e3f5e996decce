"""Shared mode on GPUs: copies on the worker's own streams, from and to the pinned pool."""

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
    """Stores never make a load wait: each direction has buffers of its own."""

    groups: list[DeviceCopier]
    stores: Staging
    loads: Staging


class DeviceMover(Mover):
    """For blocks on one device. It takes four staging buffers, with its first session."""

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
        """Raises PoolUnmappable, or what torch raises if the device has no memory left."""
        memory = [
            session.pool.array(Location(segment.segment_id, 0, segment.nbytes))
            for segment in session.pool.segments
        ]
        with self._lock:
            if self._copiers is None:
                self._copiers = self._make_copiers()
            self._pinned[session] = PinnedMemory(memory, self._device.index or 0)

    def close(self, session: Session) -> None:
        with self._lock:
            self._pinned.pop(session).close()

    def gather(self, position: int, parts: Sequence[HostBlocks], stop: Stop) -> None:
        assert self._copiers is not None, "gather before open"
        self._copiers.groups[position].gather(parts, self._copiers.stores, stop)

    def scatter(self, position: int, parts: Sequence[HostBlocks], stop: Stop) -> None:
        assert self._copiers is not None, "scatter before open"
        self._copiers.groups[position].scatter(parts, self._copiers.loads, stop)

    def _make_copiers(self) -> _Copiers:
        return _Copiers(
            [DeviceCopier(layout, self._device, self._staging_bytes) for layout in self._layouts],
            stores=Staging(self._device, self._staging_bytes),
            loads=Staging(self._device, self._staging_bytes),
        )

"""The server copies between its pool and the GPU memory that the worker exported."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvdock import Session
from kvdock.types import ChunkStatus, TransferMode
from kvdock.v1 import cache_pb2
from kvdock_vllm.copier import CopyStoppedError
from kvdock_vllm.layout import GroupLayout, GroupShape, blocks_per_chunk
from kvdock_vllm.metadata import GroupLoad, GroupStore, Target
from kvdock_vllm.parallel import ParallelStrategy
from kvdock_vllm.transfers.base import Stop, Transfers, answer

if TYPE_CHECKING:
    import torch

_log = logging.getLogger(__name__)

# Within these the server copies. Then it stops by itself, at the latest with the piece it is at.
_LOAD_SECONDS = 10.0
_STORE_SECONDS = 4.0
_PIECE_SECONDS = 1.0
_REGISTER_SECONDS = 10.0


class DeviceTransfers(Transfers):
    """Has the server copy between its pool and this worker's GPU memory."""

    def __init__(
        self,
        layouts: Sequence[GroupLayout],
        shapes: Sequence[GroupShape],
        device: torch.device,
        strategy: ParallelStrategy,
    ) -> None:
        from kvdock_vllm.device_memory import ReadyEvents

        self._layouts = layouts
        self._shapes = shapes
        self._device = device
        self._strategy = strategy
        self._events = ReadyEvents(device)
        self._lock = threading.Lock()
        self._registered: tuple[Session, str] | None = None
        self._not_exportable = False

    def prepare(self, session: Session) -> None:
        """The memory is handed over when its namespace is known."""

    def expect(self, session: Session, target: Target) -> None:
        self._register(session, target)

    def mark(self) -> bytes:
        return self._events.record()

    def load(
        self,
        session: Session,
        target: Target,
        lease_id: int,
        group: GroupLoad,
        ready: bytes,
        stop: Stop,
    ) -> list[bool]:
        self._register(session, target)
        if stop():
            raise CopyStoppedError
        request = cache_pb2.RetrieveRequest(
            lease_id=lease_id,
            group_idx=group.group_idx,
            first_chunk=group.first_chunk,
            end_chunk=group.end_chunk,
            kv_worker_id=self._strategy.kv_worker_id,
            reader=self._strategy.worker_id,
            block_ids=group.block_ids,
            skip_blocks=group.skip_blocks,
            ready_event=ready,
            timeout_ms=round(_LOAD_SECONDS * 1000),
        )
        seconds = _LOAD_SECONDS + _PIECE_SECONDS
        response = answer(session.submit(request), "Retrieve", seconds)
        return [chunk.status == ChunkStatus.RETRIEVED.value for chunk in response.chunks]

    def store(
        self, session: Session, target: Target, group: GroupStore, ready: bytes, stop: Stop
    ) -> list[ChunkStatus]:
        self._register(session, target)
        if stop():
            raise CopyStoppedError
        request = cache_pb2.StoreRequest(
            namespace=target.namespace,
            group_idx=group.group_idx,
            parent_key=group.parent,
            keys=group.keys,
            block_ids=group.block_ids,
            ready_event=ready,
            event_data=[data.to_proto() for data in group.event_data],
            timeout_ms=round(_STORE_SECONDS * 1000),
        )
        seconds = _STORE_SECONDS + _PIECE_SECONDS
        response = answer(session.submit(request), "Store", seconds)
        return [ChunkStatus(status) for status in response.statuses]

    def wait_for_end(self, session: Session) -> None:
        """The server lets go of the memory when the session's stream ends."""

    def _register(self, session: Session, target: Target) -> None:
        """Hands the KV cache to the server, once a session and namespace.

        Raises CopyStoppedError if CUDA cannot export it.
        """
        from kvdock_vllm.device_memory import ExportedGroup, NotExportableError, export_memory

        with self._lock:
            if self._registered == (session, target.namespace):
                return
            if self._not_exportable:
                raise CopyStoppedError
            groups = [
                ExportedGroup(shape.group_idx, layout, blocks_per_chunk(target.chunk_tokens, shape))
                for shape, layout in zip(self._shapes, self._layouts, strict=True)
            ]
            try:
                memory = export_memory(groups, self._device.index or 0)
            except NotExportableError as error:
                self._not_exportable = True
                _log.warning("KVDock does not cache for this worker: %s", error)
                raise CopyStoppedError from error
            began = time.monotonic()
            registration = session.register_memory(
                target.namespace,
                memory.allocations,
                memory.groups,
                mode=TransferMode.SERVER,
                timeout=_REGISTER_SECONDS,
            )
            self._registered = (session, target.namespace)
            _log.info(
                "KVDock copies by the server: %s (%.0f ms)",
                registration.reason,
                (time.monotonic() - began) * 1e3,
            )

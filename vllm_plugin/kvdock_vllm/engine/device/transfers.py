"""Transfers of GPU memory: in server mode where possible, otherwise in shared mode.

The server can open memory that CUDA IPC exports, if it has CUDA itself, sees the device, and shares
the worker's IPC namespace. Only trying shows whether it can, so each session tries anew, with its
first load or store.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from kvdock import Session
from kvdock.errors import DeviceMemory, PoolUnmappable
from kvdock.types import ChunkStatus, TransferMode
from kvdock_server.transfer.devices.driver import CudaError, CudaUnavailableError
from kvdock_vllm.engine.copier import CopyStoppedError
from kvdock_vllm.engine.device.memory import (
    ExportedGroup,
    ExportedMemory,
    NotExportableError,
    ReadyEvents,
    export_memory,
)
from kvdock_vllm.engine.device.mover import DeviceMover
from kvdock_vllm.engine.groups import GroupShape
from kvdock_vllm.engine.layout import GroupLayout
from kvdock_vllm.engine.parallel import ParallelStrategy
from kvdock_vllm.engine.specs import GroupLoad, GroupStore, Target
from kvdock_vllm.engine.transfers.base import (
    ChunkTransfers,
    CopyRequest,
    CountWorkers,
    Mark,
    Transfers,
)
from kvdock_vllm.engine.transfers.fence import Fence
from kvdock_vllm.engine.transfers.server import ServerChunkTransfers
from kvdock_vllm.engine.transfers.shared import SharedTransfers

_log = logging.getLogger(__name__)

_REGISTER_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class _Choice:
    """How a session's bytes move."""

    namespace: str
    transfers: ChunkTransfers | None
    """None: not at all."""


class DeviceTransfers(Transfers):
    """Copies memory of one device in the wanted mode, or in the best possible mode."""

    def __init__(
        self,
        layouts: Sequence[GroupLayout],
        shapes: Sequence[GroupShape],
        device: torch.device,
        strategy: ParallelStrategy,
        wanted: TransferMode,
        count_workers: CountWorkers,
    ) -> None:
        """``wanted`` UNSPECIFIED means SERVER if possible, else SHARED."""
        self._layouts = layouts
        self._shapes = shapes
        self._device = device
        self._wanted = wanted
        self._count_workers = count_workers
        self._fence = Fence()
        self._server = ServerChunkTransfers(strategy, self._fence)
        self._shared = SharedTransfers(
            DeviceMover(layouts, device.index or 0), layouts, shapes, strategy, count_workers
        )
        self._events: ReadyEvents | None = None
        self._not_exportable = ""
        """Why the server cannot be asked to open memory; empty if it can."""
        if wanted is not TransferMode.SHARED and device.type == "cuda":
            try:
                self._events = ReadyEvents(device)
            except RuntimeError as error:
                self._not_exportable = f"CUDA exports no events: {error}"
        self._lock = threading.Lock()
        self._choices: dict[Session, _Choice] = {}
        self._over: weakref.WeakSet[Session] = weakref.WeakSet()

    def prepare(self, session: Session) -> None:
        """Does nothing: the namespace is not known yet."""

    def expect(self, session: Session, target: Target) -> None:
        self._transfers_of(session, target)

    def mark(self) -> Mark:
        if self._events is not None:
            event, handle = self._events.record()
            return Mark(event.query, handle)
        if self._device.type != "cuda":
            return Mark()  # nothing is ever queued
        make_event: Any = torch.cuda.Event  # its signature has no types
        event = make_event()
        event.record()
        return Mark(event.query)

    def load(self, request: CopyRequest[GroupLoad]) -> list[bool]:
        with self._chosen(request.session, request.target) as transfers:
            return transfers.load(request)

    def store(self, request: CopyRequest[GroupStore]) -> list[ChunkStatus]:
        with self._chosen(request.session, request.target) as transfers:
            return transfers.store(request)

    def wait_for_end(self, session: Session) -> None:
        with self._lock:
            self._over.add(session)
            self._end(session)

    def _transfers_of(self, session: Session, target: Target) -> ChunkTransfers:
        """The session's transfers. Raises KVDockError; CopyStoppedError if there are none."""
        with self._lock:
            if session in self._over:
                raise CopyStoppedError
            choice = self._choices.get(session)
            if choice is None or choice.namespace != target.namespace:
                self._end(session)
                choice = _Choice(target.namespace, self._choose(session, target))
                self._choices[session] = choice
            if choice.transfers is None:
                raise CopyStoppedError
            return choice.transfers

    @contextmanager
    def _chosen(self, session: Session, target: Target) -> Iterator[ChunkTransfers]:
        """The session's transfers, as :meth:`_transfers_of`.

        If the server can no longer use the memory, the next load or store chooses anew.
        """
        transfers = self._transfers_of(session, target)
        try:
            yield transfers
        except DeviceMemory:
            with self._lock:
                choice = self._choices.get(session)
                if choice is not None and choice.transfers is transfers:
                    self._end(session)
            raise

    def _end(self, session: Session) -> None:
        """Ends what was chosen for the session, if anything."""
        choice = self._choices.pop(session, None)
        if choice is None:
            return
        if choice.transfers is self._shared:
            self._shared.wait_for_end(session)
        elif choice.transfers is self._server:
            # The server lets go of the memory when the session's stream ends.
            self._count_workers(TransferMode.SERVER, -1)

    def _choose(self, session: Session, target: Target) -> ChunkTransfers | None:
        """Hands the memory to the server, or agrees with it on shared mode. None if neither is
        possible.

        Logs the choice and its reason.
        """
        began = time.monotonic()
        memory, reason = self._export(target)
        if reason and self._wanted is TransferMode.SERVER:
            return self._no_way(reason)
        try:
            registration = session.register_memory(
                target.namespace,
                memory.allocations,
                memory.groups,
                mode=self._wanted,
                timeout=_REGISTER_SECONDS,
            )
            self._fence.registered(session)
            if registration.mode is TransferMode.SHARED:
                self._shared.prepare(session)
        except (DeviceMemory, PoolUnmappable) as error:
            self._fence.registered(session)  # a refusal is an answer, too
            return self._no_way(error.message)
        except (CudaError, CudaUnavailableError) as error:
            return self._no_way(f"this process cannot copy by itself: {error}")
        _log.info(
            "KVDock copies in %s mode: %s (%.0f ms)",
            registration.mode.name.lower(),
            reason or registration.reason,
            (time.monotonic() - began) * 1e3,
        )
        if registration.mode is TransferMode.SHARED:
            return self._shared
        self._count_workers(TransferMode.SERVER, 1)
        return self._server

    def _export(self, target: Target) -> tuple[ExportedMemory, str]:
        """The memory that the server is to open; or nothing, and why."""
        nothing = ExportedMemory([], [])
        if self._wanted is TransferMode.SHARED or self._not_exportable:
            return nothing, self._not_exportable
        groups = [
            ExportedGroup(shape.group_idx, layout, shape.part_blocks(target.chunk_tokens))
            for shape, layout in zip(self._shapes, self._layouts, strict=True)
        ]
        try:
            return export_memory(groups, self._device.index or 0), ""
        except NotExportableError as error:
            return nothing, str(error)

    @staticmethod
    def _no_way(reason: str) -> ChunkTransfers | None:
        _log.warning("KVDock does not cache for this worker: %s", reason)
        return None

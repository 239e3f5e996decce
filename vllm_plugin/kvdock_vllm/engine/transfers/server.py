"""Server mode: the server copies between its pool and the GPU memory that the worker exported."""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future, wait
from typing import Any

from kvdock import Session
from kvdock.errors import DeviceMemory, SessionLost
from kvdock.types import ChunkStatus, chunk_status
from kvdock.v1 import cache_pb2
from kvdock_vllm.engine.copier import CopyStoppedError
from kvdock_vllm.engine.parallel import ParallelStrategy
from kvdock_vllm.engine.specs import GroupLoad, GroupStore
from kvdock_vllm.engine.transfers.base import (
    ChunkTransfers,
    CopyRequest,
    UnansweredError,
    answer,
    warn_of_limit,
)
from kvdock_vllm.engine.transfers.fence import Fence

_log = logging.getLogger(__name__)

# Deadlines. The server stops by then, or at the end of the piece that it is copying.
_LOAD_SECONDS = 10.0
_STORE_SECONDS = 4.0
_PIECE_SECONDS = 1.0
_POLL_SECONDS = 0.02


class ServerChunkTransfers(ChunkTransfers):
    """Has the server copy. The session must have registered the worker's memory.

    Of workers that read the same shard one loads for all (``ParallelStrategy.fills``), so the bytes
    cross the link to the host once. The others ask for the outcome.
    """

    def __init__(self, strategy: ParallelStrategy, fence: Fence) -> None:
        """``fence`` knows the sessions that registered."""
        self._strategy = strategy
        self._fence = fence

    def load(self, request: CopyRequest[GroupLoad]) -> list[bool]:
        if request.stop():
            raise CopyStoppedError
        group = request.group
        wanted: dict[str, Any] = {
            "lease_id": group.lease_id,
            "group_idx": group.group_idx,
            "first_chunk": group.first_chunk,
            "end_chunk": group.end_chunk,
            "kv_worker_id": self._strategy.kv_worker_id,
            "reader": self._strategy.worker_id,
            "timeout_ms": round(_LOAD_SECONDS * 1000),
            "deadline_ns": _deadline_ns(_LOAD_SECONDS),
        }
        if self._strategy.filled_by is not None:
            asking = cache_pb2.AwaitFillRequest(filled_by=self._strategy.filled_by, **wanted)
            try:
                return self._ask(request.session, asking)
            except DeviceMemory as refused:
                # The other worker is in another mode, or its memory is not registered yet.
                _log.debug("this worker loads by itself: %s", refused.message)
        # This worker's event stands for the others too. In every layer their attention comes before
        # an all-reduce that this worker's queued kernels wait for. So blocks that this worker no
        # longer uses are no longer used by the others either.
        message = cache_pb2.RetrieveRequest(
            block_ids=group.block_ids,
            skip_blocks=group.skip_blocks,
            ready_event=request.ready.event,
            also_fill=self._strategy.fills,
            **wanted,
        )
        return self._ask(request.session, message)

    def store(self, request: CopyRequest[GroupStore]) -> list[ChunkStatus]:
        if request.stop():
            raise CopyStoppedError
        group = request.group
        message = cache_pb2.StoreRequest(
            namespace=request.target.namespace,
            group_idx=group.group_idx,
            parent_key=group.parent,
            keys=group.keys,
            block_ids=group.block_ids,
            ready_event=request.ready.event,
            event_data=[data.to_proto() for data in group.event_data],
            timeout_ms=round(_STORE_SECONDS * 1000),
            deadline_ns=_deadline_ns(_STORE_SECONDS),
            keep=group.keep.to_proto() if group.keep is not None else None,
            priority=group.priority.to_proto(),
        )
        with request.reading():
            future = request.session.submit(message)
            wait([future], _STORE_SECONDS)
            # The server may not know that the session is lost, and could store until the deadline.
            while _is_lost(future) and time.monotonic_ns() < message.deadline_ns:
                time.sleep(_POLL_SECONDS)
        response = answer(future, "a Store past its deadline", _PIECE_SECONDS)
        statuses = [chunk_status(chunk.status) for chunk in response.chunks]
        warn_of_limit(group, statuses, response.kept_chunks)
        return statuses

    def _ask(
        self, session: Session, message: cache_pb2.RetrieveRequest | cache_pb2.AwaitFillRequest
    ) -> list[bool]:
        """Sends a Retrieve or an AwaitFill. Tells for each chunk whether its blocks are filled."""
        future = session.submit(message)
        is_over = self._fence.passed(session, future)
        seconds = _LOAD_SECONDS + _PIECE_SECONDS
        try:
            response = future.result(seconds)
        except TimeoutError:
            call = type(message).__name__.removesuffix("Request")
            why = f"the server did not answer {call} within {seconds:g} s"
            raise UnansweredError(why, is_over) from None
        except SessionLost as lost:
            raise UnansweredError(lost.message, is_over) from lost
        retrieved = ChunkStatus.RETRIEVED.value
        return [chunk.status == retrieved for chunk in response.chunks]


def _is_lost(future: Future[Any]) -> bool:
    return future.done() and isinstance(future.exception(), SessionLost)


def _deadline_ns(seconds: float) -> int:
    return time.monotonic_ns() + round(seconds * 1e9)

"""Server mode: the server copies between its pool and the GPU memory that the worker exported."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvdock import Session
from kvdock.types import ChunkStatus
from kvdock.v1 import cache_pb2
from kvdock_vllm.copier import CopyStoppedError
from kvdock_vllm.parallel import ParallelStrategy
from kvdock_vllm.transfers.base import Copies, Mark, Stop, answer

if TYPE_CHECKING:
    from kvdock_vllm.metadata import GroupLoad, GroupStore, Target

# Within these the server copies. Then it stops by itself, at the latest with the piece it is at.
_LOAD_SECONDS = 10.0
_STORE_SECONDS = 4.0
_PIECE_SECONDS = 1.0


class ServerCopies(Copies):
    """Has the server copy. The session must have registered the memory."""

    def __init__(self, strategy: ParallelStrategy) -> None:
        self._strategy = strategy

    def load(
        self,
        session: Session,
        target: Target,
        lease_id: int,
        group: GroupLoad,
        ready: Mark,
        stop: Stop,
    ) -> list[bool]:
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
            ready_event=ready.event,
            timeout_ms=round(_LOAD_SECONDS * 1000),
        )
        seconds = _LOAD_SECONDS + _PIECE_SECONDS
        response = answer(session.submit(request), "Retrieve", seconds)
        return [chunk.status == ChunkStatus.RETRIEVED.value for chunk in response.chunks]

    def store(
        self, session: Session, target: Target, group: GroupStore, ready: Mark, stop: Stop
    ) -> list[ChunkStatus]:
        if stop():
            raise CopyStoppedError
        request = cache_pb2.StoreRequest(
            namespace=target.namespace,
            group_idx=group.group_idx,
            parent_key=group.parent,
            keys=group.keys,
            block_ids=group.block_ids,
            ready_event=ready.event,
            event_data=[data.to_proto() for data in group.event_data],
            timeout_ms=round(_STORE_SECONDS * 1000),
        )
        seconds = _STORE_SECONDS + _PIECE_SECONDS
        response = answer(session.submit(request), "Store", seconds)
        return [ChunkStatus(status) for status in response.statuses]

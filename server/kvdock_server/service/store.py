"""Store in server mode: out of a worker's device memory into the pool.

The slots of a copy are sealed or aborted only when the copy is over.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from kvdock_server.core import Core, Keep, Mode, Priority, Session, Slot, check_session
from kvdock_server.service.block_copy import BlockCopy
from kvdock_server.service.chunk_status import OF_RESERVE, ChunkStatus
from kvdock_server.service.memory import RegisteredMemory
from kvdock_server.service.turns import in_turns
from kvdock_server.transfer import DeviceMemoryError, TransferFailedError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StoreCall:
    """What a Store asks for. The last three: see ``Core.reserve_in_steps``."""

    namespace: str
    group_idx: int | None
    parent_key: bytes
    keys: Sequence[bytes]
    copy: BlockCopy
    event_data: Sequence[bytes] = ()
    keep: Keep | None = None
    priority: Priority = Priority.NORMAL


async def store(
    core: Core, memory: RegisteredMemory, session: Session | None, call: StoreCall
) -> list[ChunkStatus]:
    """Copy chunks out of the session's device memory; what became of each."""
    session = check_session(session, Mode.SERVER)
    group = memory.of(session, call.namespace, call.group_idx)
    blocks = call.copy.blocks(group.layout, len(call.keys))
    deadline = call.copy.deadline(core.clock())
    outcomes = await in_turns(
        core.reserve_in_steps(
            session,
            call.namespace,
            call.group_idx,
            session.kv_worker_id,
            call.parent_key,
            call.keys,
            call.event_data,
            call.keep,
            call.priority,
        )
    )
    statuses = [
        ChunkStatus.FAILED if isinstance(outcome, Slot) else OF_RESERVE[outcome]
        for outcome in outcomes
    ]
    with core.writing(outcomes) as writing:
        chunks = list(writing.open)
        if not chunks:
            return statuses
        try:
            await group.registration.store(
                call.group_idx,
                blocks[chunks].ravel(),
                [slot.offset for slot in writing.open.values()],
                call.copy.ready_event,
                deadline - core.clock(),
            )
            # This process may have stood still, while the worker went on and reused its blocks.
            if core.clock() >= deadline:
                raise TransferFailedError("the copy ended after the deadline")
        except (TransferFailedError, DeviceMemoryError) as error:
            logger.warning("a store of %d chunks failed: %s", len(chunks), error)
            return statuses
        core.counters.device_to_host_bytes += len(chunks) * group.layout.chunk_bytes
        for chunk in await in_turns(writing.seal_all()):
            statuses[chunk] = ChunkStatus.STORED
    return statuses

"""Device memory that workers have registered for the server's copies."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakSet

from kvdock_server.core import Core, Mode, Role, Session
from kvdock_server.errors import Reason, RequestError, group_name, invalid
from kvdock_server.transfer import (
    DeviceAllocation,
    DeviceMemoryError,
    GpuTransfers,
    GroupMemory,
    LayoutError,
    Registration,
)

logger = logging.getLogger(__name__)

SETTLED_SECONDS = 1.0
"""After one worker of an engine has registered, the others mostly register within this time."""


@dataclass(frozen=True, slots=True)
class ExportedMemory:
    """What a worker exports: its blocks of one namespace. ``groups`` are by group_idx."""

    namespace: str
    groups: Mapping[int | None, GroupMemory]
    allocations: Sequence[DeviceAllocation]


class ModeChoice(NamedTuple):
    """How a session's bytes move, and why."""

    mode: Mode
    reason: str


class RegisteredGroup(NamedTuple):
    """A worker's opened memory, and how its blocks of one group lie in it."""

    registration: Registration
    layout: GroupMemory


@dataclass(frozen=True, slots=True)
class WorkerMemory:
    """What a worker exported, opened."""

    exported: ExportedMemory
    registration: Registration


class RegisteredMemory:
    """What the workers of all engines have registered."""

    def __init__(self, core: Core, transfers: GpuTransfers) -> None:
        self._core = core
        self._transfers = transfers
        self._memory: dict[Session, WorkerMemory] = {}
        self._closing: dict[asyncio.Task[None], Session] = {}
        """Tasks that close a session's memory. Until one is done, copies may touch the memory."""
        self._answered: WeakSet[Session] = WeakSet()
        self._has_answered = asyncio.Condition()

    async def register(
        self, session: Session | None, wanted: Mode | None, exported: ExportedMemory | None
    ) -> ModeChoice:
        """Open what a worker exports. If that fails and no mode is ``wanted``, choose SHARED.

        In a wanted mode other than SERVER nothing is opened. RequestError if the session is no
        worker's, if what it exports is wrong, or if SERVER is wanted and the memory cannot be used.
        """
        try:
            return await self._register(session, wanted, exported)
        finally:
            if session is not None:
                self._answered.add(session)
                async with self._has_answered:
                    self._has_answered.notify_all()

    async def wait_for(self, session: Session, readers: Iterable[int], deadline: float) -> None:
        """Wait for readers of the same engine that have connected and not registered yet.

        Waits for SETTLED_SECONDS at most, and for half of the time until ``deadline`` at most. The
        workers of an engine register at about the same time, and load soon after.
        """
        wanted = set(readers)

        def are_settled() -> bool:
            return not any(
                worker.worker_id in wanted
                and worker.engine_id == session.engine_id
                and worker.role is Role.WORKER
                and not worker.expired
                and worker not in self._answered
                for worker in self._core.sessions
            )

        if are_settled():
            return
        with contextlib.suppress(TimeoutError):
            seconds = min(SETTLED_SECONDS, (deadline - self._core.clock()) / 2)
            async with asyncio.timeout(seconds), self._has_answered:
                await self._has_answered.wait_for(are_settled)

    async def _register(
        self, session: Session | None, wanted: Mode | None, exported: ExportedMemory | None
    ) -> ModeChoice:
        if session is None or session.role is not Role.WORKER:
            raise invalid("only a worker's session has memory to register")
        await self._release_earlier(session)
        memory = None
        mode, reason = wanted or Mode.SHARED, "the client asked for it"
        if exported is not None and wanted in (None, Mode.SERVER):
            try:
                memory = await self._open(session, exported)
                mode, reason = Mode.SERVER, memory.registration.description
            except DeviceMemoryError as error:
                if wanted is Mode.SERVER:
                    raise RequestError(Reason.DEVICE_MEMORY, str(error)) from error
                reason = str(error)
            except LayoutError as error:
                raise invalid(str(error)) from error
        elif wanted is None:
            reason = "the client has no device memory to export"
        try:
            while session in self._memory:  # another call of the session may be here, too
                await self.release(session)
        except BaseException:  # the session's end, mostly
            if memory is not None:
                await memory.registration.close()
            raise
        if memory is not None:
            self._memory[session] = memory
            loop = asyncio.get_running_loop()
            loop.call_later(SETTLED_SECONDS, self._expect_followers, session)
        session.mode, session.mode_reason = mode, reason
        session.home = memory.registration.socket if memory is not None else None
        logger.info("worker %d of %s: %s mode: %s", session.worker_id, session.engine_id,
                    mode.name.lower(), reason)  # fmt: skip
        return ModeChoice(mode, reason)

    async def release(self, session: Session) -> None:
        """End a session's copies and close its device memory."""
        memory = self._memory.pop(session, None)
        if memory is not None:
            closing = asyncio.create_task(memory.registration.close())
            self._closing[closing] = session
            closing.add_done_callback(self._closing.pop)
            await asyncio.shield(closing)

    async def _release_earlier(self, session: Session) -> None:
        """End the copies of the same worker's earlier sessions."""

        def is_earlier(other: Session) -> bool:
            return other is not session and (other.engine_id, other.worker_id) == (
                session.engine_id,
                session.worker_id,
            )

        for other in [other for other in self._memory if is_earlier(other)]:
            await self.release(other)
        closing = [task for task, other in self._closing.items() if is_earlier(other)]
        if closing:
            await asyncio.wait(closing)

    def of(self, session: Session, namespace: str, group_idx: int | None) -> RegisteredGroup:
        """A session's memory for a group; RequestError if it registered none."""
        layout = self._group(session, namespace, group_idx)
        if layout is None:
            memory = self._memory.get(session)
            failure = memory.registration.failure if memory is not None else None
            raise RequestError(
                Reason.DEVICE_MEMORY,
                f"this session registered no memory for {group_name(group_idx)} of namespace "
                f"{namespace!r}: send register_memory first"
                if failure is None
                else f"the device of this session's memory failed ({failure}): send "
                "register_memory again, which says what is left to do",
                namespace=namespace,
                session_id=session.session_id,
            )
        return RegisteredGroup(self._memory[session].registration, layout)

    def reader(
        self, session: Session, reader: int, namespace: str, group_idx: int | None
    ) -> Session | None:
        """The session of a reader of the same engine, if it has registered memory for the group."""
        for worker in reversed(self._memory):  # the latest first
            if (worker.engine_id, worker.worker_id) == (session.engine_id, reader):
                has_group = self._group(worker, namespace, group_idx) is not None
                return worker if has_group else None
        return None

    def _expect_followers(self, session: Session) -> None:
        """Open the paths from the first reader of the session's shard to the others.

        The first reader is the one that will likely lead the others' loads.
        """
        if session not in self._memory:
            return
        registered = {
            worker.worker_id: memory.registration
            for worker, memory in self._memory.items()
            if (worker.engine_id, worker.kv_worker_id, memory.exported.namespace)
            == (session.engine_id, session.kv_worker_id, self._memory[session].exported.namespace)
        }
        leader = registered.pop(min(registered))
        for follower in registered.values():
            leader.expect_follower(follower)

    async def _open(self, session: Session, exported: ExportedMemory) -> WorkerMemory:
        self._core.index.space(exported.namespace)  # raises if there is none
        for group_idx, layout in exported.groups.items():
            shard_bytes = self._core.shard_bytes(
                exported.namespace, group_idx, session.kv_worker_id
            )
            if layout.chunk_bytes != shard_bytes:
                raise invalid(
                    f"{group_name(group_idx)}: {layout.blocks_per_chunk} blocks of "
                    f"{layout.block_bytes} bytes a chunk, but its shards have {shard_bytes} bytes",
                    "groups",
                    shard_bytes,
                )
        registration = await self._transfers.register(exported.allocations, exported.groups)
        return WorkerMemory(exported, registration)

    def _group(self, session: Session, namespace: str, group_idx: int | None) -> GroupMemory | None:
        """The layout of a session's memory for a group; None if none is registered and usable."""
        memory = self._memory.get(session)
        if memory is None or memory.exported.namespace != namespace:
            return None
        if memory.registration.failure is not None:
            return None
        return memory.exported.groups.get(group_idx)

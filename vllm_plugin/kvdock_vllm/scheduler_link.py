"""The scheduler's link to the server. It registers the engine's namespace in each session."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from kvdock import Client, Session
from kvdock.errors import ServerError
from kvdock.types import Namespace, SessionRole
from kvdock_vllm.config import Config
from kvdock_vllm.engine.autostart import Autostart
from kvdock_vllm.engine.breaker import Breaker
from kvdock_vllm.engine.groups import GroupShape, chunk_tokens
from kvdock_vllm.engine.link import Link, Live
from kvdock_vllm.engine.parallel import ParallelStrategy
from kvdock_vllm.engine.resets import Resets
from kvdock_vllm.engine.specs import Target
from kvdock_vllm.events import Relay
from kvdock_vllm.metadata import WorkerDescription
from kvdock_vllm.namespace import derive_namespace, model_facts

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_log = logging.getLogger(__name__)

# How long the engine's start, or a reset, waits for the server.
_START_SECONDS = 3.0
_RESET_SECONDS = 5.0


class SchedulerLink:
    """Used by the scheduler's thread, except for :meth:`_prepare_session`."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        strategy: ParallelStrategy,
        shapes: Sequence[GroupShape],
        config: Config,
        relay: Relay | None,
    ) -> None:
        """Does not connect yet: see :meth:`describe_workers`. No ``relay`` without KV events."""
        transfer: Any = vllm_config.kv_transfer_config
        self._vllm_config = vllm_config
        self._strategy = strategy
        self._shapes = shapes
        self._chunk_tokens = config.chunk_tokens
        self.relay = relay
        self._engine_id = str(transfer.engine_id)
        # Read now, soon after the model was loaded: its files may be replaced later.
        self._model_facts = model_facts(vllm_config)
        self._namespaces: dict[int, Namespace] = {}
        self._workers: dict[int, WorkerDescription] = {}
        self._is_connecting = False
        self._announced: Live[Target] | None = None
        """The session that the workers were told of."""
        self.resets = Resets()
        self._link: Link[Target] = Link(
            "scheduler",
            config.address,
            self._open_session,
            self._prepare_session,
            autostart=Autostart(config.address) if config.autostart else None,
        )
        self.breaker = Breaker(self._link, config.lookup_timeout)

    def describe_workers(self, descriptions: Iterable[WorkerDescription], at_start: bool) -> None:
        """Takes descriptions of workers, and begins to connect when all workers are described.

        ``at_start`` waits a moment for the connection, so that the first request finds the cache.
        """
        if self._is_connecting:
            return
        self._workers.update((worker.worker_id, worker) for worker in descriptions)
        if len(self._workers) < self._strategy.world_size:
            _log.info(
                "%d of %d workers have described their KV cache; the others will with their first "
                "step",
                len(self._workers),
                self._strategy.world_size,
            )
            return
        self._is_connecting = True
        self._link.start(_START_SECONDS if at_start else 0)

    @property
    def current(self) -> Live[Target] | None:
        return self._link.current

    @property
    def usable(self) -> Live[Target] | None:
        """The open session. None too while stores from before a reset are under way."""
        return None if self.resets.await_stores else self.current

    @property
    def has_news(self) -> bool:
        """Whether :meth:`take_news` has something to tell."""
        return self.current not in (None, self._announced)

    def take_news(self) -> Target | None:
        """The target of a new session, once."""
        live = self.current
        if live is None or live is self._announced:
            return None
        self._announced = live
        return live.prepared

    def reset(self, under_way: Iterable[int]) -> None:
        """Has the server clear the namespace. ``under_way`` are the job_ids of stores under way.

        If no server answers now, the namespace is cleared before the next session is used.
        """
        self.resets.begin(under_way)
        if self.relay is not None:
            self.relay.forget()
        if not self._link.renew(_RESET_SECONDS):
            _log.warning(
                "KVDock's cache could not be reset now (%s); it will be before it is used again",
                self._link.failure or f"no session within {_RESET_SECONDS:g} s",
            )

    def note_end(self, job_id: int) -> None:
        """Notes the end of a store. After the last one from before a reset, clears again."""
        if self.resets.note_end(job_id):
            self._link.renew(0)

    def close(self) -> None:
        """Ends the session, and with it all leases."""
        self._link.close()

    def _open_session(self, client: Client, on_lost: Callable[[str], None]) -> Session:
        return client.session(self._engine_id, role=SessionRole.SCHEDULER, on_lost=on_lost)

    def _prepare_session(self, client: Client, session: Session) -> Target:
        """Registers the namespace. Runs on the link's thread."""
        if not self._chunk_tokens and session.chunk_tokens < 1:
            raise ServerError("the server announced chunks of 0 tokens; set kvdock.chunk_tokens")
        tokens = chunk_tokens(session.chunk_tokens, self._chunk_tokens, self._shapes)
        if tokens not in self._namespaces:
            self._namespaces[tokens] = derive_namespace(
                self._vllm_config,
                self._model_facts,
                self._strategy.as_workers_say(worker.use_mla for worker in self._workers.values()),
                self._shapes,
                self._workers,
                tokens,
            )
        namespace = self._namespaces[tokens]
        session.register_namespace(namespace)
        self.resets.clear(client, namespace.name)
        _log.info("namespace %s, chunks of %d tokens", namespace.name, tokens)
        if self.relay is not None:
            self.relay.follow(namespace.name, has_log=session.info.event_log)
        return Target(session.epoch, namespace.name, tokens, session.info.event_log)

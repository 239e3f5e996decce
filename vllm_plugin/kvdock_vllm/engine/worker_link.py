"""A worker's link to the server, and what its loads and stores share."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from kvdock import Client, Session
from kvdock.address import Address
from kvdock.errors import KVDockError
from kvdock.types import SessionRole
from kvdock_vllm.engine.breaker import Breaker
from kvdock_vllm.engine.copier import CopyStoppedError
from kvdock_vllm.engine.groups import GroupShape
from kvdock_vllm.engine.layout import GroupLayout
from kvdock_vllm.engine.link import Link, Live
from kvdock_vllm.engine.parallel import ParallelStrategy
from kvdock_vllm.engine.specs import Target
from kvdock_vllm.engine.transfers.base import Transfers

_log = logging.getLogger(__name__)

# The scheduler's session is open, so this one is only a moment behind.
_SESSION_SECONDS = 2.0
# A server that answers a heartbeat within this time also answers loads and stores.
_HEARTBEAT_SECONDS = 1.0


class WorkerLink:
    """One worker's link. Any thread may use it."""

    transfers: Transfers
    layouts: Sequence[GroupLayout]

    def __init__(
        self,
        engine_id: str,
        strategy: ParallelStrategy,
        shapes: Sequence[GroupShape],
        address: Address,
    ) -> None:
        """Does not connect yet: see :meth:`start`."""
        self.shapes = shapes
        self.something_ended = threading.Event()
        """Set whenever a load or a store ends."""
        self._engine_id = engine_id
        self._strategy = strategy
        self._link: Link[None] = Link(
            f"worker {strategy.worker_id}",
            address,
            self._open_session,
            lambda client, session: self.transfers.prepare(session),
            before_close=lambda session: self.transfers.wait_for_end(session),
        )
        self.breaker = Breaker(self._link, _HEARTBEAT_SECONDS)
        self._unconnected_epoch = 0
        """Epoch of the server for which the lack of a session was logged last."""
        self._closing = threading.Event()

    def start(self) -> None:
        """Begins to connect. ``transfers`` and ``layouts`` must have been set."""
        self._link.start()

    @property
    def current(self) -> Live[None] | None:
        return self._link.current

    def session(self, target: Target) -> Session:
        """The session for ``target``. Raises CopyStoppedError if there is none in time."""
        if self.breaker.is_open or self._closing.is_set():
            raise CopyStoppedError
        live = self._link.wait(target.epoch, _SESSION_SECONDS)
        if live is None:
            if target.epoch != self._unconnected_epoch:
                self._unconnected_epoch = target.epoch
                _log.warning(
                    "worker %d is not connected to the server that the scheduler found: it loads "
                    "and stores nothing until it is",
                    self._strategy.worker_id,
                )
            raise CopyStoppedError
        return live.session

    def must_stop(self, session: Session) -> bool:
        """Whether to give up copies of this session."""
        return self._closing.is_set() or not session.alive

    def expect(self, target: Target) -> None:
        """Prepares for the first load or store of a namespace, ahead of it."""
        live = self._link.wait(target.epoch, _SESSION_SECONDS)
        try:
            if live is not None:
                self.transfers.expect(live.session, target)
        except CopyStoppedError:
            _log.debug("nothing is copied of namespace %s", target.namespace)
        except KVDockError as error:
            _log.info("preparing for namespace %s failed: %s", target.namespace, error.message)
        except Exception:
            _log.exception("preparing for namespace %s failed", target.namespace)

    def stop_copies(self) -> None:
        """From now on nothing is loaded or stored."""
        self._closing.set()

    def close(self) -> None:
        self._link.close()

    def _open_session(self, client: Client, on_lost: Callable[[str], None]) -> Session:
        return client.session(
            self._engine_id,
            role=SessionRole.WORKER,
            worker_id=self._strategy.worker_id,
            kv_worker_id=self._strategy.kv_worker_id,
            on_lost=on_lost,
        )

"""Follows a server's log for an engine, and hands over what the engine is to publish of it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from kvdock.address import Address
from kvdock.errors import KVDockError, NoEventLog
from kvdock.events import Filter, Follower, Index
from kvdock.keys import LoRA
from kvdock_vllm.engine import affinity
from kvdock_vllm.events.describer import adapter_scheme, hash_scheme
from kvdock_vllm.events.published import Published
from kvdock_vllm.events.vllm_events import Adapter, GroupLabel, label_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.kv_cache_interface import KVCacheConfig

_log = logging.getLogger(__name__)

# A server that is away for longer has nothing for this engine, as far as consumers can tell.
_GONE_SECONDS = 5.0
_PROGRESS_SECONDS = 2.0
_JOIN_SECONDS = 3.0


def publishes_events(vllm_config: VllmConfig) -> bool:
    """Whether this engine was told to publish KV events."""
    config: Any = getattr(vllm_config, "kv_events_config", None)
    return bool(config and config.enable_kv_cache_events)


class Relay:
    """Follows the server's log and hands vLLM's events to the scheduler."""

    def __init__(
        self,
        address: Address,
        scheme: Callable[[], str],
        labels: Mapping[int | None, GroupLabel],
    ) -> None:
        self._address = address
        self._scheme = scheme
        self._published = Published(scheme, labels)
        self._follower: Follower | None = None
        self._thread: threading.Thread | None = None
        self._namespace = ""
        self._said_no_log = False

    @classmethod
    def of_engine(
        cls, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, address: Address
    ) -> Relay:
        """The relay of one engine. Connects to nothing yet."""
        groups = kv_cache_config.kv_cache_groups
        labels: dict[int | None, GroupLabel] = {
            index: label_of(index, group.kv_cache_spec) for index, group in enumerate(groups)
        }
        if len(groups) == 1:
            # Where there is only one group KVDock has none, and vLLM calls it 0.
            labels[None] = labels[0]
        return cls(address, lambda: hash_scheme(vllm_config), labels)

    def watch_pool(self, pool: BlockPool) -> None:
        """The engine's own blocks, whose clearing is to be noticed."""
        self._published.watch_pool(pool)

    def forget(self) -> None:
        """Nothing is known of the server until :meth:`follow`: its namespace is being cleared."""
        self._published.begin(None)

    def follow(self, namespace: str, *, has_log: bool) -> None:
        """There is a server, and this engine's namespace there. Returns at once.

        Called again and again, whenever there is a new session, always on one thread.
        """
        running = self._thread is not None and self._thread.is_alive()
        if running and namespace == self._namespace and self._published.is_told_by(self._follower):
            return
        if not has_log:
            if not self._said_no_log:
                self._said_no_log = True
                _log.warning(
                    "KV events tell nothing of KVDock's cache: the server at %s keeps no event log "
                    "(start it with --event-log 256MiB)",
                    self._address,
                )
            return
        self._stop()
        self._namespace = namespace
        index = Index(Filter(namespaces=(namespace,)))
        self._follower = Follower(index, str(self._address), progress_interval=_PROGRESS_SECONDS)
        self._published.begin(self._follower)
        self._thread = threading.Thread(
            target=self._run, args=(self._follower,), name="kvdock-events", daemon=True
        )
        self._thread.start()

    def know_adapter(self, request: Any, adapter: LoRA | None) -> None:
        """The engine has the adapter of this request; None: it is not cached."""
        lora = request.lora_request
        if lora is None:
            return
        known = None
        if adapter is not None:
            known = Adapter(lora.adapter_id, adapter_scheme(self._scheme(), request, adapter))
        self._published.know_adapter(lora.lora_name, known)

    def take(self) -> list[KVCacheEvent]:
        """What is to be published next; the rest comes with later steps. Never waits."""
        return self._published.take()

    def close(self) -> None:
        """Ends the following."""
        self._stop()

    def _stop(self) -> None:
        follower, self._follower = self._follower, None
        if follower is not None and self._thread is not None:
            follower.close()
            self._thread.join(_JOIN_SECONDS)

    def _run(self, follower: Follower) -> None:
        affinity.restore()
        lost_since: float | None = None
        try:
            for update in follower:
                self._published.note(update.changes, follower)
                if update.lost is None:
                    lost_since = None
                    continue
                now = time.monotonic()
                lost_since = lost_since or now
                if now - lost_since > _GONE_SECONDS and len(follower.index):
                    _log.info("no KVDock server for %g s: publishing that", _GONE_SECONDS)
                    self._published.note(follower.index.forget(), follower)
        except NoEventLog as error:
            _log.warning("KV events tell nothing more of KVDock's cache: %s", error.message)
        except KVDockError as error:
            _log.error("KV events tell nothing more of KVDock's cache: %s", error.message)
        finally:
            self._published.note(follower.index.forget(), follower)

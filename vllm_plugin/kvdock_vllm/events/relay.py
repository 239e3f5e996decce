"""Follows a server's log, and hands over the events that the engine is to publish."""

from __future__ import annotations

import logging
import threading
import time
from functools import partial
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

# A server that is away for longer is told to consumers as having nothing.
_GONE_SECONDS = 5.0
_PROGRESS_SECONDS = 2.0
_JOIN_SECONDS = 3.0


def publishes_events(vllm_config: VllmConfig) -> bool:
    """Whether the user had this engine publish KV events."""
    config: Any = getattr(vllm_config, "kv_events_config", None)
    return bool(config and config.enable_kv_cache_events)


class Relay:
    """The relay of one engine."""

    def __init__(
        self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, address: Address
    ) -> None:
        """Does not connect yet: see :meth:`follow`."""
        groups = kv_cache_config.kv_cache_groups
        labels: dict[int | None, GroupLabel] = {
            index: label_of(index, group.kv_cache_spec) for index, group in enumerate(groups)
        }
        if len(groups) == 1:
            # KVDock has no group_idx for the only group, and vLLM calls it 0.
            labels[None] = labels[0]
        self._address = address
        self._scheme = partial(hash_scheme, vllm_config)
        self._published = Published(self._scheme, labels)
        self._follower: Follower | None = None
        self._thread: threading.Thread | None = None
        self._namespace = ""
        self._said_no_log = False

    def watch_pool(self, pool: BlockPool) -> None:
        """Takes the engine's own blocks, to notice when they are cleared."""
        self._published.watch_pool(pool)

    def forget(self) -> None:
        """Forgets what the server has until :meth:`follow`: its namespace is being cleared."""
        self._published.begin(None)

    def follow(self, namespace: str, *, has_log: bool) -> None:
        """Follows the log of the server, which has this engine's namespace. Returns at once.

        Called for each new session, always on one thread.
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
        self.close()
        self._namespace = namespace
        index = Index(Filter(namespaces=(namespace,)))
        self._follower = Follower(index, str(self._address), progress_interval=_PROGRESS_SECONDS)
        self._published.begin(self._follower)
        self._thread = threading.Thread(
            target=self._run, args=(self._follower,), name="kvdock-events", daemon=True
        )
        self._thread.start()

    def know_adapter(self, request: Any, adapter: LoRA | None) -> None:
        """Notes the adapter of a request, which the engine now has. None: it is not cached."""
        lora = request.lora_request
        if lora is None:
            return
        known = None
        if adapter is not None:
            known = Adapter(lora.adapter_id, adapter_scheme(self._scheme(), request, adapter))
        self._published.know_adapter(lora.lora_name, known)

    def take(self) -> list[KVCacheEvent]:
        """The next events to publish. The rest comes with later steps. Never waits."""
        return self._published.take()

    def close(self) -> None:
        """Ends :meth:`follow`."""
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

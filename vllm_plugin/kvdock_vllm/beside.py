"""What a KVDockConnector knows of the other connectors of its engine.

vLLM's MultiConnector gives each of its children a copy of the engine's config, in which nothing
tells of the others. So our own form of it (multi_connector.py) tells them here while it makes them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

_log = logging.getLogger(__name__)

# The connectors that KVDock has run beside in real engines.
_KNOWN = frozenset({"ExampleConnector", "NixlPullConnector"})


@dataclass(frozen=True)
class Beside:
    """The other connectors of one engine."""

    names: tuple[str, ...]
    """Their classes' names, in the order in which vLLM asks them."""
    transfer: Any
    """The kv_transfer_config that the engine reads. Each connector has another one."""


_told: ContextVar[Beside | None] = ContextVar("kvdock_beside", default=None)


@contextmanager
def telling(beside: Beside) -> Iterator[None]:
    """Tells all connectors that are made or asked meanwhile."""
    token = _told.set(beside)
    try:
        yield
    finally:
        _told.reset(token)


def others() -> Beside | None:
    """The other connectors, of a connector that is being made. None if it is alone."""
    return _told.get()


def is_untold(transfer: Any) -> bool:
    """Whether a worker's connector with this config has others beside it, and nobody told.

    That is so where vLLM loads KVDock by its module's path, and not its plugin.
    """
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    if others() is not None or config is None or config.kv_transfer_config is None:
        return False
    return config.kv_transfer_config is not transfer and (
        config.kv_transfer_config.kv_connector == "MultiConnector"
    )


def warn(beside: Beside) -> None:
    """Says once, at the start, what has not been tried."""
    unknown = [name for name in beside.names if name not in _KNOWN]
    if unknown:
        _log.warning(
            "KVDock has not been run beside %s. Where that connector loads or stores "
            "asynchronously, it must heed the blocks that it is told of in "
            "update_state_after_alloc with 0 tokens: KVDock writes to them",
            ", ".join(unknown),
        )


def warn_untold() -> None:
    """Says what does not hold where nobody told of the others."""
    _log.warning(
        "KVDock is under vLLM's MultiConnector, but vLLM has not loaded KVDock's plugin: let "
        "VLLM_PLUGINS contain kvdock. Without it a failed load ends its request, unless "
        'kv_load_failure_policy is recompute beside "connectors", and the layouts that the '
        "connectors wish may clash"
    )

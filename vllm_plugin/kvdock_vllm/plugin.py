"""The entry point that vLLM calls first in each of its processes."""

from __future__ import annotations

import logging
from typing import Final

from kvdock.printable import PrintableLog
from kvdock_vllm import offloading_alias
from kvdock_vllm.engine import affinity

NAME: Final = "KVDockConnector"
_MODULE: Final = "kvdock_vllm.connector"
_MULTI_NAME: Final = "MultiConnector"
_MULTI_MODULE: Final = "kvdock_vllm.multi_connector"


def register() -> None:
    """Registers the connector with vLLM as ``KVDockConnector``, and our form of vLLM's own
    ``MultiConnector``. May be called repeatedly.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    affinity.remember()
    _log_below_vllm()
    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, _MODULE, NAME)
        # vLLM refuses to register a name twice, so its own entry goes first.
        KVConnectorFactory._registry.pop(_MULTI_NAME, None)
        KVConnectorFactory.register_connector(_MULTI_NAME, _MULTI_MODULE, _MULTI_NAME)
    if offloading_alias.wanted():
        offloading_alias.install(_MODULE, NAME)


def _log_below_vllm() -> None:
    """Puts our logger below vLLM's, since vLLM shows only what is logged there."""
    ours, theirs = logging.getLogger("kvdock_vllm"), logging.getLogger("vllm")
    ours.parent = theirs
    # Loggers remember what their parents let through. This makes them forget it.
    ours.setLevel(ours.level)
    # Without any handler Python itself prints warnings. A handler of ours would stop that.
    if theirs.hasHandlers() and not any(isinstance(one, PrintableLog) for one in ours.handlers):
        ours.addHandler(PrintableLog())

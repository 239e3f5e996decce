"""What vLLM calls in each of its processes before it does anything else."""

from __future__ import annotations

import logging
from typing import Final

from kvdock.printable import PrintableLog
from kvdock_vllm import offloading_alias
from kvdock_vllm.engine import affinity

NAME: Final = "KVDockConnector"
_MODULE: Final = "kvdock_vllm.connector"


def register() -> None:
    """Makes ``"kv_connector": "KVDockConnector"`` known to vLLM. May be called repeatedly."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    affinity.remember()
    _log_below_vllm()
    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, _MODULE, NAME)
    if offloading_alias.wanted():
        offloading_alias.install(_MODULE, NAME)


def _log_below_vllm() -> None:
    """vLLM only shows what is logged below its own logger."""
    ours, theirs = logging.getLogger("kvdock_vllm"), logging.getLogger("vllm")
    ours.parent = theirs
    # Where nobody writes logs, Python itself writes warnings, but not if it finds any handler.
    if theirs.hasHandlers() and not any(isinstance(one, PrintableLog) for one in ours.handlers):
        ours.addHandler(PrintableLog())

"""What vLLM calls in each of its processes before it does anything else."""

from __future__ import annotations

import logging
from typing import Final

from kvdock_vllm import affinity, offloading_alias

NAME: Final = "KVDockConnector"
_MODULE: Final = "kvdock_vllm.connector"


def register() -> None:
    """Makes ``"kv_connector": "KVDockConnector"`` known to vLLM. May be called repeatedly."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    affinity.remember()
    # vLLM only shows what is logged below its own logger.
    logging.getLogger("kvdock_vllm").parent = logging.getLogger("vllm")
    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, _MODULE, NAME)
    if offloading_alias.wanted():
        offloading_alias.install(_MODULE, NAME)

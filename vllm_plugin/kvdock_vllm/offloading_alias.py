"""KVDock under the name that one of vLLM's own flags selects.

``--kv-offloading-size N --kv-offloading-backend lmcache`` selects a connector by name, and vLLM has
no such flag for other connectors. With ``KVDOCK_OFFLOADING_BACKEND=1`` in the environment, the name
stands for KVDock.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_log = logging.getLogger(__name__)

ENVIRONMENT_VARIABLE: Final = "KVDOCK_OFFLOADING_BACKEND"

SELECTED_NAME: Final = "LMCacheMPConnector"
"""The connector that the flag selects, in vLLM 0.26 and later."""


def wanted() -> bool:
    """Whether the user set the variable to 1. Raises ValueError for a value other than 0 or 1."""
    value = os.environ.get(ENVIRONMENT_VARIABLE, "0")
    if value not in ("0", "1"):
        raise ValueError(f"{ENVIRONMENT_VARIABLE} is {value!r}: it must be 0 or 1")
    return value == "1"


def install(module: str, class_name: str) -> None:
    """Registers ``class_name`` of ``module`` under the name."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    # vLLM refuses to register a name twice, so the old entry goes first.
    KVConnectorFactory._registry.pop(SELECTED_NAME, None)
    KVConnectorFactory.register_connector(SELECTED_NAME, module, class_name)


def explain(vllm_config: VllmConfig) -> None:
    """Warns that the flag's size is not used, if the flag selected KVDock."""
    transfer: Any = vllm_config.kv_transfer_config
    if transfer.kv_connector == SELECTED_NAME:
        _log.warning(
            "KVDock serves as vLLM's offloading backend. Its capacity is that of the KVDock server "
            "(kvdock serve --memory); --kv-offloading-size %s is not used",
            getattr(vllm_config.cache_config, "kv_offloading_size", None),
        )

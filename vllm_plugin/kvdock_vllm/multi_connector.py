"""vLLM's MultiConnector, in the form that stands in its place where KVDock's plugin is loaded.

Without KVDock among its children it is vLLM's own. With KVDock it differs in what vLLM leaves open:

* It tells KVDock of the other children, and of the config that the engine reads (beside.py).
* Each child gets the handshake metadata of its own workers. vLLM gives all children that of the
  first which has any, and some raise for what is not theirs.
* What cannot work is refused in plain words.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.config.kv_transfer import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import multi_connector
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorRole,
)

from kvdock_vllm import beside
from kvdock_vllm.connector import KVDockConnector

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


@dataclass(frozen=True)
class Handshakes(KVConnectorHandshakeMetadata):
    """What the children of one worker say, each for the same child in the scheduler."""

    of_children: tuple[KVConnectorHandshakeMetadata | None, ...]


class MultiConnector(multi_connector.MultiConnector):
    """Several connectors of one engine."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        """Raises ValueError if KVDock is among the children, and they cannot work together."""
        found = _beside_kvdock(vllm_config.kv_transfer_config)
        self._has_kvdock = found is not None
        if found is None:
            super().__init__(vllm_config, role, kv_cache_config)
            return
        with beside.telling(found):
            super().__init__(vllm_config, role, kv_cache_config)

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        found = _beside_kvdock(vllm_config.kv_transfer_config)
        if found is None:
            return super().get_required_kvcache_layout(vllm_config)
        with beside.telling(found):
            return super().get_required_kvcache_layout(vllm_config)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        if not self._has_kvdock:
            return super().get_handshake_metadata()
        of_children = tuple(child.get_handshake_metadata() for child in self._connectors)
        return Handshakes(of_children) if any(of_children) else None

    def set_xfer_handshake_metadata(
        self, metadata: Mapping[Any, KVConnectorHandshakeMetadata]
    ) -> None:
        if not self._has_kvdock:
            super().set_xfer_handshake_metadata(dict(metadata))
            return
        for child, own in zip(self._connectors, self._own(metadata), strict=True):
            if own:
                child.set_xfer_handshake_metadata(own)

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: Mapping[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        if not self._has_kvdock:
            super().set_xfer_handshake_metadata_pp_aware(dict(metadata))
            return
        for child, own in zip(self._connectors, self._own(metadata), strict=True):
            if own:
                child.set_xfer_handshake_metadata_pp_aware(own)

    def _own(
        self, metadata: Mapping[Any, KVConnectorHandshakeMetadata]
    ) -> list[dict[Any, KVConnectorHandshakeMetadata]]:
        """For each child what its own workers said."""
        own: list[dict[Any, KVConnectorHandshakeMetadata]] = [{} for _ in self._connectors]
        for rank, of_rank in metadata.items():
            if isinstance(of_rank, Handshakes):
                for mine, said in zip(own, of_rank.of_children, strict=True):
                    if said is not None:
                        mine[rank] = said
        return own


def _beside_kvdock(transfer: Any) -> beside.Beside | None:
    """Those beside KVDock in a MultiConnector's config. None if KVDock is not among them.

    Raises ValueError for what cannot work.
    """
    children = transfer.kv_connector_extra_config.get("connectors") or []
    classes = [
        KVConnectorFactory.get_connector_class(
            KVTransferConfig(**{"engine_id": transfer.engine_id, **child})
        )
        for child in children
    ]
    num_ours = sum(issubclass(one, KVDockConnector) for one in classes)
    if not num_ours:
        return None
    if num_ours > 1:
        raise ValueError(
            f"MultiConnector has {num_ours} KVDockConnectors: an engine has one KVDock server, so "
            "leave one of them"
        )
    for child in children:
        if "engine_id" in child:
            raise ValueError(
                f"engine_id {child['engine_id']!r} stands in an entry of MultiConnector's "
                'connectors: move it beside "connectors", because all of them have the engine\'s'
            )
    names = tuple(one.__name__ for one in classes if not issubclass(one, KVDockConnector))
    return beside.Beside(names, transfer)

"""Another connector, for tests beside KVDock's: it keeps blocks in this process, by their prefix.

It does what makes life hard for a neighbour. It loads in the step that begins (``sync``) or over
several steps (``async``), and in between its blocks hold garbage. It reads the blocks of a finished
request late (``hold_steps``), and checks that nobody has written to them. Its loads fail for
requests that a test names. It wishes a layout, and it raises for handshake metadata of others.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

GARBAGE = 0xEE

SHELVES: dict[str, dict[tuple[int, bytes], list[Any]]] = defaultdict(dict)
"""By name what is kept: for each rank and prefix the block's bytes, layer by layer."""

FAILING: set[str] = set()
"""Requests whose load fails."""


def child(name: str, **settings: Any) -> dict[str, Any]:
    """An entry of MultiConnector's ``connectors``. ``name`` is the shelf's."""
    return {
        "kv_connector": "OtherConnector",
        "kv_connector_module_path": "other_connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shelf": name, **settings},
    }


@dataclass
class Load:
    request_id: str
    keys: list[bytes]
    block_ids: list[int]


@dataclass
class Metadata(KVConnectorMetadata):
    loads: list[Load] = field(default_factory=list)
    saves: list[Load] = field(default_factory=list)
    finished: list[Load] = field(default_factory=list)


@dataclass
class Handshake(KVConnectorHandshakeMetadata):
    rank: int


@dataclass
class _Held:
    """A finished request's blocks, which are read when ``steps`` is 0."""

    what: Load
    copies: list[list[Any]]
    steps: int


class OtherConnector(KVConnectorBase_V1, SupportsHMA):
    """For models of one group. With ``load`` none and without ``hold_steps`` it does nothing, for
    any model.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        settings = vllm_config.kv_transfer_config.kv_connector_extra_config
        self.shelf = SHELVES[settings["shelf"]]
        self.is_async = settings.get("load", "async") == "async"
        self.loads_nothing = settings.get("load") == "none"
        self.load_steps = settings.get("load_steps", 3)
        self.hold_steps = settings.get("hold_steps", 0)
        self.block_tokens = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        self.rank = vllm_config.parallel_config.rank
        self.requests: dict[str, Any] = {}
        self.loading: dict[str, Load] = {}
        self.computed: dict[str, int] = {}
        self.tables: dict[str, list[int]] = {}
        self.handshakes: dict[Any, Handshake] = {}
        self.seen_finished: set[str] = set()
        """Requests that update_connector_output told of, whoever loaded them."""
        self.loaded_tokens = 0
        self.next = Metadata()
        self.caches: list[torch.Tensor] = []
        self.under_way: list[list[Any]] = []
        self.held: list[_Held] = []
        self.failed_blocks: set[int] = set()

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        settings = vllm_config.kv_transfer_config.kv_connector_extra_config
        layout: str | None = settings.get("layout")
        return layout

    # -- scheduler --------------------------------------------------------------------------------

    def set_xfer_handshake_metadata(self, metadata: Any) -> None:
        for rank, one in metadata.items():
            if not isinstance(one, Handshake):
                raise ValueError(f"rank {rank} sent {one!r}: not mine")
            self.handshakes[rank] = one

    def on_new_request(self, request: Any) -> None:
        self.requests[request.request_id] = request

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        self.requests[request.request_id] = request
        self.computed[request.request_id] = num_computed_tokens
        if self.loads_nothing:
            return 0, False
        keys = list(self._keys(request, request.num_tokens - 1))
        found = 0
        while found < len(keys) and (0, keys[found]) in self.shelf:
            found += 1
        tokens = max(0, found * self.block_tokens - num_computed_tokens)
        return tokens, tokens > 0 and self.is_async

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if not num_external_tokens:
            return
        (table,) = blocks.get_block_ids()
        self.loaded_tokens += num_external_tokens
        keys = list(self._keys(request, request.num_tokens - 1))
        first = self.computed[request.request_id] // self.block_tokens
        end = first + num_external_tokens // self.block_tokens
        load = Load(request.request_id, keys[first:end], list(table)[first:end])
        self.next.loads.append(load)
        if self.is_async:
            self.loading[request.request_id] = load

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        metadata, self.next = self.next, Metadata()
        if self.loads_nothing and not self.hold_steps:
            return metadata
        computed = {}
        for new in scheduler_output.scheduled_new_reqs:
            (table,) = new.block_ids
            self.tables[new.req_id] = list(table)
            computed[new.req_id] = new.num_computed_tokens
        cached = scheduler_output.scheduled_cached_reqs
        for name, blocks, before in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            if name in cached.resumed_req_ids:
                self.tables[name] = []
            self.tables[name] += blocks[0] if blocks is not None else []
            computed[name] = before
        for name, before in computed.items():
            end = before + scheduler_output.num_scheduled_tokens[name]
            request = self.requests[name]
            if before < request.num_prompt_tokens <= end and not self.hold_steps:
                keys = list(self._keys(request, request.num_prompt_tokens))
                metadata.saves.append(Load(name, keys, self.tables[name][: len(keys)]))
        return metadata

    def update_connector_output(self, connector_output: Any) -> None:
        for request_id in connector_output.finished_recving or ():
            self.seen_finished.add(request_id)
            self.loading.pop(request_id, None)

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, Any]:
        return self.request_finished(request, block_ids[0])

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, Any]:
        self.requests.pop(request.request_id, None)
        ended = request.status.name in ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED")
        if not ended or not self.hold_steps:
            # Of an aborted request vLLM frees the blocks when its load has ended, whoever loads.
            return False, None
        keys = list(self._keys(request, request.num_prompt_tokens))
        self.next.finished.append(Load(request.request_id, keys, list(block_ids)[: len(keys)]))
        return True, None

    def has_pending_push_work(self) -> bool:
        return False

    def _keys(self, request: Any, num_tokens: int) -> Iterator[bytes]:
        size = self.block_tokens
        tip = hashlib.sha256(repr(request.cache_salt).encode())
        tokens = list(request.all_token_ids)
        for start in range(0, num_tokens // size * size, size):
            tip.update(repr(tokens[start : start + size]).encode())
            yield tip.digest()

    # -- worker -----------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.caches = list(kv_caches.values())

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return Handshake(self.rank)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, Metadata)
        for load in metadata.loads:
            for block in load.block_ids:
                self._write(block, None)
            if self.is_async:
                self.under_way.append([load, self.load_steps])
            else:
                self._finish(load)

    def _finish(self, load: Load) -> None:
        if load.request_id in FAILING:
            self.failed_blocks.update(load.block_ids)
            return
        for key, block in zip(load.keys, load.block_ids, strict=True):
            self._write(block, self.shelf[self.rank, key])

    def _write(self, block: int, layers: list[Any] | None) -> None:
        for index, cache in enumerate(self.caches):
            target = cache[block].numpy().view(np.uint8).reshape(-1)
            target[:] = GARBAGE if layers is None else layers[index]

    def _read(self, block: int) -> list[Any]:
        return [cache[block].numpy().view(np.uint8).reshape(-1).copy() for cache in self.caches]

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, *arguments: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, Metadata)
        for save in metadata.saves:
            if save.request_id not in FAILING:
                self._keep(save)
        for done in metadata.finished:
            copies = [self._read(block) for block in done.block_ids]
            self.held.append(_Held(done, copies, self.hold_steps))

    def _keep(self, save: Load) -> None:
        for key, block in zip(save.keys, save.block_ids, strict=True):
            self.shelf[self.rank, key] = self._read(block)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        loaded, read = set(), set()
        for load in list(self.under_way):
            load[1] -= 1
            if load[1] <= 0:
                self.under_way.remove(load)
                self._finish(load[0])
                loaded.add(load[0].request_id)
        for held in list(self.held):
            held.steps -= 1
            if held.steps <= 0:
                self.held.remove(held)
                for block, copy in zip(held.what.block_ids, held.copies, strict=True):
                    now = self._read(block)
                    assert all((a == b).all() for a, b in zip(now, copy, strict=True)), (
                        f"block {block} of {held.what.request_id} was written to while it was held"
                    )
                self._keep(held.what)
                read.add(held.what.request_id)
        return read or None, loaded or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self.failed_blocks = self.failed_blocks, set()
        return failed

"""Which requests are cached, and to what their keys commit beside the tokens.

A chunk's key must commit to everything that changes its KV: the adapter, pictures, embeddings, and
the salt that keeps tenants apart. If that is not known for sure, a request is not cached, or only
up to the uncertain token.
"""

from __future__ import annotations

import hashlib
import logging
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvdock.keys import CacheSalt, Extra, LoRA, MultiModalItem, PromptEmbeds
from kvdock_vllm.engine.records import CacheScope
from kvdock_vllm.weights import files_digest, last_change, local_folder

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.lora.request import LoRARequest
    from vllm.v1.request import Request

_log = logging.getLogger(__name__)

# vLLM names an item by a digest of its content and processing, behind the adapter's name if the
# adapter changes the encoder. A name of another form was chosen by a user or counted up, and may
# stand for another item in another process.
_CONTENT_DIGEST = re.compile(r"(.*:)?[0-9a-f]{32,}", re.DOTALL)


NOT_CACHED = CacheScope((), 0)


@dataclass(frozen=True, slots=True)
class _Adapter:
    """What the name of an adapter stands for."""

    place: tuple[int, str]
    """Its number in the engine and the path of its files."""
    key: LoRA | None
    """None if requests with the adapter are not cached."""


class ScopeReader:
    """Reads the scope of requests. One per engine, since it remembers loaded adapters."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        self._model_dtype: Any = vllm_config.model_config.dtype
        self._items_are_named_by_content = _items_are_named_by_content(vllm_config)
        self._adapters: dict[str, _Adapter] = {}
        self._began = time.time()

    def scope(self, request: Request, chunk_tokens: int) -> CacheScope:
        """The scope of ``request`` for chunks of ``chunk_tokens`` tokens."""
        if request.pooling_params is not None or getattr(request, "resumable", False):
            # Pooling parameters may change what the model sees, later input the tokens.
            return NOT_CACHED
        extras: list[Extra] = []
        limit: int | None = None
        if request.lora_request is not None:
            adapter = self._adapter(request.lora_request)
            if adapter is None:
                return NOT_CACHED
            extras.append(adapter)
        if request.cache_salt:
            extras.append(CacheSalt(request.cache_salt))
        for feature in request.mm_features:
            place = feature.mm_position
            named = self._items_are_named_by_content and _CONTENT_DIGEST.fullmatch(
                feature.identifier or ""
            )
            if not named:
                limit = place.offset if limit is None else min(limit, place.offset)
            elif place.length > 0:
                extras.append(MultiModalItem(feature.identifier, place.offset, place.length))
        if request.prompt_embeds is not None:
            extras.extend(_embeds(request, chunk_tokens, self._model_dtype))
        return CacheScope(tuple(extras), limit)

    def _adapter(self, lora: LoRARequest) -> LoRA | None:
        """What keys say of an adapter. None if it is uncertain which weights run or ran under its
        name.

        Nothing tells when the engine loads an adapter: at its start, by a call, or with a request.
        So two cases are certain: files that have not changed since the engine's start, and files
        that this request itself has the engine load (``load_inplace``).

        vLLM's own cache knows an adapter by its name, in later versions also by its path. So it may
        hold KV of the name's earlier weights, which would be stored as KV of the present ones.
        Hence a name whose weights changed is not cached any more.
        """
        known = self._adapters.get(lora.lora_name)
        loads_now = bool(getattr(lora, "load_inplace", False))
        place = (lora.lora_int_id, lora.lora_path)
        if known is not None and known.place == place and not loads_now:
            return known.key
        key, why = self._read_adapter(lora, loads_now)
        if known is not None and known.key != key:
            key, why = None, "other weights had its name before; give new ones a new name"
        if key is None and (known is None or known.key is not None):
            _log.warning("requests with adapter %s are not cached: %s", lora.lora_name, why)
        self._adapters[lora.lora_name] = _Adapter(place, key)
        return key

    def _read_adapter(self, lora: LoRARequest, loads_now: bool) -> tuple[LoRA | None, str]:
        """The identity of the adapter's files now; or None, and why they are not certain."""
        folder = local_folder(lora.lora_path)
        if folder is None:
            return None, f"{lora.lora_path} is no folder of this host"
        if not loads_now and last_change(folder) >= self._began:
            return None, (
                f"{folder} was changed after the engine's start, so that it is not certain which "
                "weights it has loaded; restart it, or load them with load_inplace under a new name"
            )
        return LoRA(lora.lora_name, files_digest(folder)), ""


def _items_are_named_by_content(vllm_config: VllmConfig) -> bool:
    """Whether vLLM names multimodal items by content. Without a prefix cache and a processor cache
    it counts them, alike in each process.
    """
    multimodal: Any = getattr(vllm_config.model_config, "multimodal_config", None)
    no_processor_cache = getattr(multimodal, "mm_processor_cache_gb", 0) == 0
    return not no_processor_cache or bool(vllm_config.cache_config.enable_prefix_caching)


def _embeds(request: Request, chunk_tokens: int, dtype: torch.dtype) -> Iterator[PromptEmbeds]:
    """The runs of positions that are embeddings, cut where chunks end."""
    import torch

    embeds: Any = request.prompt_embeds
    is_token = getattr(request, "prompt_is_token_ids", None) or [False] * len(embeds)
    start = 0
    for end in range(1, len(is_token) + 1):
        if end == len(is_token) or end % chunk_tokens == 0 or is_token[end] != is_token[start]:
            if not is_token[start]:
                rows = embeds[start:end].detach().to("cpu", dtype).contiguous()
                digest = hashlib.sha256(rows.view(torch.uint8).numpy()).digest()
                yield PromptEmbeds(digest, start, end - start)
            start = end

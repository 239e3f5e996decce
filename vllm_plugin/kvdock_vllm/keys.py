"""Which requests are cached, and what their keys commit to beside the tokens.

Whatever changes a token's KV must be in its chunk's key: the adapter, the picture, the embeddings,
and the salt that keeps tenants apart. Where a request has something of which that cannot be said
for certain, it is not cached, or only up to there.
"""

from __future__ import annotations

import hashlib
import logging
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvdock.keys import CacheSalt, Extra, LoRA, MultiModalItem, PromptEmbeds
from kvdock_vllm.namespace import files_digest, last_change

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.lora.request import LoRARequest
    from vllm.v1.request import Request

_log = logging.getLogger(__name__)

# vLLM names an item by a digest of its content and processing, behind the adapter's name where the
# adapter changes the encoder. A name of another form was chosen by somebody, or is only counted up,
# and may stand for something else in another process.
_CONTENT_DIGEST = re.compile(r"(.*:)?[0-9a-f]{32,}", re.DOTALL)


@dataclass(frozen=True, slots=True)
class CacheScope:
    """How far a request may be cached, and the extras of its keys."""

    extras: tuple[Extra, ...]
    limit: int | None
    """Tokens from the first on that may be cached. None: all."""


NOT_CACHED = CacheScope((), 0)


class ScopeReader:
    """Reads the scope of requests. One an engine, since it remembers which adapter was loaded."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        self._model_dtype: Any = vllm_config.model_config.dtype
        self._items_are_named_by_content = _items_are_named_by_content(vllm_config)
        self._adapters: dict[tuple[str, int, str], LoRA | None] = {}
        self._began = time.time()

    def scope(self, request: Request, chunk_tokens: int) -> CacheScope:
        """The scope of ``request`` for chunks of ``chunk_tokens`` tokens."""
        if request.pooling_params is not None or getattr(request, "resumable", False):
            # Pooling parameters may change what the model sees; a resumable request's tokens may
            # be replaced by later input.
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
        """None if it is not certain which weights run.

        Nobody tells when the engine loads an adapter: at its start, by a call, or with a request.
        Files that have not changed since the start are what it loaded, and those of a request that
        has it load them anew. What is written there later is not what runs.
        """
        name = (lora.lora_name, lora.lora_int_id, lora.lora_path)
        loads_now = bool(getattr(lora, "load_inplace", False))
        if name not in self._adapters or loads_now:
            folder = _adapter_folder(lora.lora_path)
            if folder is None or (not loads_now and last_change(folder) >= self._began):
                _log.warning(
                    "requests with adapter %s are not cached: %s",
                    lora.lora_name,
                    f"{lora.lora_path} is no folder of this host"
                    if folder is None
                    else f"{folder} was changed after the engine's start, so that it is not "
                    "certain which weights it has loaded; restart it, or load with load_inplace",
                )
                self._adapters[name] = None
            else:
                self._adapters[name] = LoRA(lora.lora_name, files_digest(folder))
        return self._adapters[name]


def _adapter_folder(path: str) -> Path | None:
    """Where vLLM finds an adapter (vllm/lora/utils.py): a folder, perhaps under ~, or a repository
    of Hugging Face's hub in its local copy. None if neither is there.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if folder.is_absolute():
        return None
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repo_id=path, local_files_only=True))
    except Exception as error:  # of the hub's many kinds: a bad name, nothing there
        _log.info("adapter %s is not in the hub's local copies: %s", path, error)
        return None


def _items_are_named_by_content(vllm_config: VllmConfig) -> bool:
    """Without either cache vLLM names multimodal items by a counter, the same in each process."""
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

"""Describes stored chunks as vLLM's own events would."""

from __future__ import annotations

import hashlib
import logging
import sys
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvdock.keys import LoRA
from kvdock.types import ChunkEventData
from kvdock_vllm.engine.groups import GroupShape

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

_log = logging.getLogger(__name__)

# The protocol's limit for one chunk, and a limit for one store, whose message must stay below 4
# MiB. No store may fail for its descriptions.
_MOST_CHUNK_BYTES = 1 << 20
_MOST_STORE_BYTES = 3 << 20


def hash_scheme(vllm_config: VllmConfig) -> str:
    """Names how this engine makes block hashes. Call it once the engine is up."""
    import vllm
    from vllm.v1.core import kv_cache_utils

    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    # What hashes commit to beside the tokens differs between versions.
    version = ".".join(vllm.__version__.split(".")[:2])
    return f"vllm-{version}/{algorithm}/{bytes(kv_cache_utils.NONE_HASH).hex()[:16]}"


def adapter_scheme(scheme: str, request: Request, adapter: LoRA) -> str:
    """Names how hashes of a request with an adapter are made.

    vLLM hashes an adapter's name, in later versions its path as well, but not its weights. So the
    scheme commits to the weights: this engine could not load KV of others.
    """
    from vllm.v1.core import kv_cache_utils

    keys, _ = kv_cache_utils.generate_block_hash_extra_keys(request, 0, 0, 0)
    hashed = keys[0] if keys else None
    content = hashlib.sha256(repr((hashed, adapter.source)).encode())
    return f"{scheme}/{content.hexdigest()[:16]}"


class EventDescriber:
    def __init__(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

        self._vllm_config = vllm_config
        _, self._hash_tokens = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
        self._scheme: str | None = None
        self._said_left_out = False

    def describe(
        self,
        request: Request,
        adapter: LoRA | None,
        shape: GroupShape,
        chunks: range,
        chunk_tokens: int,
    ) -> tuple[ChunkEventData, ...]:
        """Describes one group's parts of these chunks of a request with that adapter.

        Empty if vLLM has not hashed all of their blocks, or with hashes of another block size. A
        chunk that cannot be told as vLLM tells it gets an empty description, which nobody
        publishes.
        """
        block_tokens = shape.block_tokens
        step = block_tokens // self._hash_tokens
        # A hash commits to all tokens before its end, so a larger block has the hash of its end.
        hashes = request.block_hashes[step - 1 :: step] if step else []
        if len(hashes) < chunks.stop * shape.chunk_blocks(chunk_tokens):
            return ()
        if self._scheme is None:
            self._scheme = hash_scheme(self._vllm_config)
        scheme, lora_name = self._scheme, ""
        if adapter is not None:
            scheme, lora_name = adapter_scheme(scheme, request, adapter), adapter.name
        told = []
        room = _MOST_STORE_BYTES
        for chunk in chunks:
            part = shape.part(chunk, chunk_tokens)
            tokens = request.all_token_ids[part.start * block_tokens : part.stop * block_tokens]
            data = ChunkEventData(
                block_hashes=tuple(map(bytes, hashes[part])),
                parent_block_hash=bytes(hashes[part.start - 1]) if part.start else b"",
                token_ids=_to_bytes(tokens),
                block_size=block_tokens,
                lora_name=lora_name,
                hash_scheme=scheme,
                extra_keys=_extra_keys(request, part, block_tokens),
            )
            nbytes = self._message_bytes(data, min(room, _MOST_CHUNK_BYTES))
            room -= nbytes
            told.append(data if nbytes else ChunkEventData())
        return tuple(told)

    def _message_bytes(self, data: ChunkEventData, most: int) -> int:
        """Size of the message; 0 if it has no form in the protocol, or is larger than ``most``."""
        try:
            nbytes = data.to_proto().ByteSize()
            if nbytes <= most:
                return nbytes
            why = f"what is to be told of one takes {nbytes:,} bytes, and {most:,} are left"
        except ValueError as error:
            why = str(error)
        if not self._said_left_out:
            self._said_left_out = True
            _log.warning("KV events leave out chunks of which not all can be told: %s", why)
        return 0


def _extra_keys(request: Request, blocks: slice, block_tokens: int) -> tuple[tuple[Any, ...], ...]:
    """What vLLM's events tell of each block beside its tokens: adapter, pictures, salt, prompt
    embeddings. Empty if no block has any.
    """
    from vllm.v1.core import kv_cache_utils

    hashed: list[tuple[Any, ...] | None] = []
    picture = 0
    for block in range(blocks.start, blocks.stop):
        begin = block * block_tokens
        keys, picture = kv_cache_utils.generate_block_hash_extra_keys(
            request, begin, begin + block_tokens, picture
        )
        hashed.append(keys)
    if not any(hashed):
        return ()
    # From 0.32 on vLLM hashes more than it publishes: the kind of each key, and the adapter's path.
    published: Any = getattr(kv_cache_utils, "to_event_extra_keys", list)
    return tuple(keys or () for keys in published(hashed))


def _to_bytes(token_ids: Sequence[int]) -> bytes:
    """Little-endian uint32."""
    values = array("I", token_ids)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()

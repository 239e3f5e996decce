"""What speculative decoding leaves in the KV cache.

A drafter that reads the target's hidden states (EAGLE, MTP) has layers of its own in the cache.
What they hold of a token depends on the tokens that follow it: of EAGLE on the next one, of a chain
of MTP modules on as many as there are modules. A chunk's key does not commit to what follows. So of
the last tokens of a hit the draft layers may hold what was made for another prompt. No answer
changes, since the target verifies all drafts, but fewer of them are accepted. vLLM's own prefix
cache ends such hits a block earlier. A hit of KVDock ends those few tokens earlier. Inside a hit
both leave such tokens, where prompts once parted exactly at the end of a block or chunk.

What a rejected draft token left is never stored: it is no token of the request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_WITHOUT_KV = ("ngram", "ngram_gpu", "suffix")
"""The methods whose drafter keeps nothing in the KV cache, by vLLM's names."""


def tokens_read_ahead(vllm_config: VllmConfig) -> int:
    """How many of the following tokens a draft layer's KV of a token depends on. 0 without such."""
    speculative: Any = getattr(vllm_config, "speculative_config", None)
    if speculative is None or not speculative.use_eagle():
        return 0
    # vLLM 0.26 has neither, and drops for every method that uses_eagle.
    reads = getattr(speculative, "needs_eagle_block_drop", speculative.use_eagle)
    drops = getattr(speculative, "use_eagle_block_drop", speculative.use_eagle)
    if not reads() or not drops():
        return 0
    return max(1, int(getattr(vllm_config, "num_prefill_lookahead_tokens", 1)))


def has_kv_of_its_own(speculative_config: Any) -> bool:
    """Whether the drafter keeps anything in the KV cache."""
    return getattr(speculative_config, "method", None) not in _WITHOUT_KV

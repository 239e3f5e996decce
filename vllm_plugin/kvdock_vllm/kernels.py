"""What vLLM's attention kernels make of a cached prefix."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from kvdock_vllm.config import Config
from kvdock_vllm.engine.parallel import ParallelStrategy

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_log = logging.getLogger(__name__)


def cannot_continue_prompts(vllm_config: VllmConfig, strategy: ParallelStrategy) -> bool:
    """Whether the engine can only compute a prompt from its first token, or its very last token.

    vLLM's reference kernels for MLA on CPUs read no earlier tokens while they compute a prompt.
    vLLM therefore turns chunked prefill and its own prefix cache off for them, and a hit that ends
    inside a prompt would be answered wrongly. The last token alone is computed as generated tokens
    are, by a kernel that reads all. But that one comes to something else than the prompt's kernel
    does for the same token, by far more than rounding.
    """
    from vllm.platforms import current_platform

    chunked = bool(vllm_config.scheduler_config.enable_chunked_prefill)
    return current_platform.is_cpu() and strategy.use_mla and not chunked


def hits_change_answers(
    vllm_config: VllmConfig, strategy: ParallelStrategy, config: Config
) -> bool:
    """Whether any hit would change what the engine answers, and the user did not ask for that: the
    engine is then served without cache.
    """
    return not config.mla_on_cpu and cannot_continue_prompts(vllm_config, strategy)


def warn_of_no_hits(vllm_config: VllmConfig) -> None:
    """Says why the engine is served without cache."""
    _log.warning(
        "KVDock does nothing for this engine of %s: of multi-head latent attention (MLA) on this "
        "CPU vLLM's kernels answer a cached prompt otherwise than one that is computed, so that "
        "vLLM has turned its own prefix cache off. kvdock.mla_on_cpu=true uses hits nevertheless, "
        "and brings other tokens than without cache",
        vllm_config.model_config.model,
    )

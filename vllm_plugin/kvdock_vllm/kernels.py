"""Whether vLLM's attention kernels compute the same from a cached prefix."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from kvdock_vllm.config import Config
from kvdock_vllm.engine.parallel import ParallelStrategy

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_log = logging.getLogger(__name__)


def cannot_continue_prompts(vllm_config: VllmConfig, strategy: ParallelStrategy) -> bool:
    """Whether the engine can compute a prompt only from its first token on, or only its last token.

    vLLM's reference kernels for MLA on CPUs do not read earlier tokens while they compute a prompt.
    vLLM therefore turns chunked prefill and its own prefix cache off for them. A hit that ends
    inside a prompt would lead to a wrong answer.

    The last token alone is computed by the kernel for generated tokens, which reads all earlier
    ones. But for the same token the two kernels differ by far more than rounding.
    """
    from vllm.platforms import current_platform

    chunked = bool(vllm_config.scheduler_config.enable_chunked_prefill)
    return current_platform.is_cpu() and strategy.use_mla and not chunked


def hits_change_answers(
    vllm_config: VllmConfig, strategy: ParallelStrategy, config: Config
) -> bool:
    """Whether hits would change the engine's answers although the user did not allow it with
    ``kvdock.mla_on_cpu``. The engine is then served without cache.
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

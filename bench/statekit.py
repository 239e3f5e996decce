"""Small models with recurrent state, with weights for which the state matters.

As modelkit.py makes models of attention alone. These architectures name and pack their parameters
in many ways, so the weights are not in a file: ``prepare`` has vLLM fill the parameters of the
model that it built, each from its own name and shape. The model's code and the rest of vLLM are as
they are. A checkpoint's folder holds a file with one number, by which engines know the model.

The states of linear layers forget slowly, so that a lost state changes the tokens after it. A short
convolution remembers two tokens, so a prompt must end soon after the state that is to be seen.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

VOCAB = 2048
_HIDDEN = 256
_GAIN = 2.0
_DECAY = 0.02
"""The logarithm by which a state shrinks with a token, where the token's step is 1."""


@dataclass(frozen=True)
class StateModel:
    """An architecture with recurrent state."""

    architecture: str
    model_type: str
    settings: dict[str, Any] = field(default_factory=dict)
    dtype: str = "float32"
    needs_cpu_patch: bool = False
    """On a CPU vLLM's own plan for this model does not work: see ``prepare``."""
    block_tokens: int = 256
    """The blocks that vLLM chooses on a CPU."""

    @property
    def engine_arguments(self) -> dict[str, Any]:
        """For EngineProcess."""
        return {
            "dtype": self.dtype,
            "block_size": None,
            "enable_prefix_caching": True,
            "statekit": {"cpu_patch": self.needs_cpu_patch},
        }

    def config(self) -> dict[str, object]:
        return {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            "hidden_size": _HIDDEN,
            "vocab_size": VOCAB,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": False,
            "torch_dtype": self.dtype,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
            **self.settings,
        }


_ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}

MODELS = {
    "lfm2": StateModel(
        "Lfm2ForCausalLM",
        "lfm2",
        {
            **_ATTENTION,
            "num_hidden_layers": 4,
            "intermediate_size": 512,
            "block_auto_adjust_ff_dim": False,
            "conv_dim": _HIDDEN,
            "block_dim": _HIDDEN,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "layer_types": ["conv", "conv", "full_attention", "conv"],
        },
        block_tokens=128,
    ),
    "qwen3-next": StateModel(
        "Qwen3NextForCausalLM",
        "qwen3_next",
        {
            **_ATTENTION,
            "num_hidden_layers": 4,
            "intermediate_size": 512,
            "moe_intermediate_size": 128,
            "shared_expert_intermediate_size": 128,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
            "mlp_only_layers": [0, 1, 2],
        },
        dtype="bfloat16",
    ),
    "mamba2": StateModel(
        "Mamba2ForCausalLM",
        "mamba2",
        {
            "num_hidden_layers": 3,
            "num_heads": 8,
            "head_dim": 64,
            "state_size": 64,
            "n_groups": 1,
            "chunk_size": 64,
            "intermediate_size": 512,
        },
        needs_cpu_patch=True,
        block_tokens=16,
    ),
    "nemotron-h": StateModel(
        "NemotronHForCausalLM",
        "nemotron_h",
        {
            **_ATTENTION,
            "hybrid_override_pattern": "M-M*M-",
            "num_hidden_layers": 6,
            "intermediate_size": 512,
            "mamba_num_heads": 8,
            "mamba_head_dim": 64,
            "ssm_state_size": 64,
            "n_groups": 1,
            "chunk_size": 64,
        },
        needs_cpu_patch=True,
    ),
    "granite-4": StateModel(
        "GraniteMoeHybridForCausalLM",
        "granitemoehybrid",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "num_hidden_layers": 4,
            "layer_types": ["mamba", "mamba", "attention", "mamba"],
            "intermediate_size": 512,
            "shared_intermediate_size": 512,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "attention_multiplier": 0.125,
            "position_embedding_type": "nope",
            "mamba_n_heads": 8,
            "mamba_d_head": 64,
            "mamba_d_state": 64,
            "mamba_chunk_size": 64,
        },
        needs_cpu_patch=True,
    ),
}


def make_state_model(folder: Path, model: StateModel) -> Path:
    """Writes the model's folder, for an engine that has called ``prepare``, and returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(model.config(), indent=2))
    save_file({"made.by.statekit": torch.ones(1)}, folder / "model.safetensors")
    return folder


def prepare(*, cpu_patch: bool = False) -> None:
    """Has this process's vLLM fill the weights of the models above.

    ``cpu_patch``: Mamba 2 reserves blocks for states inside a step, which the CPU's kernel does not
    return. This has it reserve none. Prompts are then computed in steps that end where the states
    are needed.
    """
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    loader: Any = DefaultModelLoader
    loader.load_weights = lambda self, model, config: fill(model)
    if cpu_patch:
        _reserve_no_checkpoints()


def _reserve_no_checkpoints() -> None:
    import dataclasses

    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

    mixer: Any = MambaMixer2
    spec_of = mixer.get_kv_cache_spec
    mixer.get_kv_cache_spec = lambda self, config: dataclasses.replace(
        spec_of(self, config), num_prefill_checkpoint_blocks=0, prefill_checkpoint_alignment=None
    )


@torch.no_grad()
def fill(model: torch.nn.Module) -> None:
    """Fills every parameter, the same for the same name and shape."""
    for name, parameter in model.named_parameters():
        parameter.data.copy_(_value(name, parameter.shape).to(parameter.dtype))


def _value(name: str, shape: torch.Size) -> torch.Tensor:
    last = name.rsplit(".", 1)[-1]
    if last == "A":  # of Mamba 2, the logarithm's negative already taken
        return torch.full(shape, -_DECAY)
    if last == "A_log":
        return torch.full(shape, math.log(_DECAY))
    if last in ("dt_bias", "bias", "e_score_correction_bias"):
        return torch.zeros(shape)
    if len(shape) < 2 or "norm" in name:
        return torch.ones(shape)
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 1
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    if "embed" in name:
        return noise
    # With less the answers repeat one token. With so much their later tokens hang on rounding.
    gain = 1.0 if "lm_head" in name or "conv1d" in name else _GAIN
    return noise * (gain / math.sqrt(shape[-1]))

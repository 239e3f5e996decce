"""Small checkpoints made on the spot, with weights for which attention matters.

A model with vLLM's dummy weights gives the same answer whatever is in its KV cache, so it cannot
tell a right cache from a wrong one. The weights here are random, too, but scaled so that the cache
decides the answer. Queries and keys are so large that each head looks at a handful of a few
thousand tokens. Attention outputs are as large as the residual stream to which they are added. So a
lost or changed run of a few hundred cached tokens changes one of the first greedy tokens. And the
output does not repeat itself. tests/e2e/test_modelkit.py proves both.

Four families, for the kinds of cache that vLLM lays out differently: grouped-query attention
(Llama), latent attention (DeepSeek-V2), and beside full attention sliding windows (Gemma 3) and
chunked local attention (Llama 4). Two more are for GPUs or go with others: sparse latent attention
(DeepSeek-V3.2), a drafter (EAGLE) and a model with one of its own (GLM-4.5). But for that one all
layers are dense. Everything is seeded: the same shape
and seed give the same file.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Protocol

import torch
from safetensors.torch import save_file

QUERY_KEY_GAIN = 2.0
"""Standard deviation of a query's or key's elements; that of an attention logit is its square."""
VALUE_GAIN = 2.0
"""The gain of the value and output projections. It makes up for the averaging over tokens."""

Tensor = torch.Tensor


class Shape(Protocol):
    """A model's architecture and size, from which a checkpoint is made."""

    def config(self) -> dict[str, object]:
        """The contents of config.json."""

    def weights(self, noise: Noise) -> Iterator[tuple[str, Tensor]]:
        """Names and float32 tensors of the checkpoint, in a fixed order."""


class Noise:
    """Seeded Gaussian tensors."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, rows: int, columns: int, std: float) -> Tensor:
        return torch.randn(rows, columns, generator=self._generator) * std

    def linear(self, rows: int, columns: int, gain: float = 1.0) -> Tensor:
        """A projection from inputs of unit variance to outputs of standard deviation gain."""
        return self(rows, columns, gain / math.sqrt(columns))


@dataclass(frozen=True)
class Llama:
    """Grouped-query attention: one group of full attention."""

    layers: int = 4
    hidden: int = 256
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    intermediate: int = 512
    vocab: int = 2048
    max_position: int = 8192

    def config(self) -> dict[str, object]:
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "num_hidden_layers": self.layers,
            "hidden_size": self.hidden,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            **_common_config(self.vocab, self.max_position),
        }

    def weights(self, noise: Noise) -> Iterator[tuple[str, Tensor]]:
        yield "model.embed_tokens.weight", noise(self.vocab, self.hidden, 1.0)
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        for layer in range(self.layers):
            base = f"model.layers.{layer}."
            attention = base + "self_attn."
            yield attention + "q_proj.weight", noise.linear(queries, self.hidden, QUERY_KEY_GAIN)
            yield attention + "k_proj.weight", noise.linear(keys, self.hidden, QUERY_KEY_GAIN)
            yield attention + "v_proj.weight", noise.linear(keys, self.hidden, VALUE_GAIN)
            yield attention + "o_proj.weight", noise.linear(self.hidden, queries, VALUE_GAIN)
            yield from _mlp(noise, base, self.hidden, self.intermediate)
            yield base + "input_layernorm.weight", torch.ones(self.hidden)
            yield base + "post_attention_layernorm.weight", torch.ones(self.hidden)
        yield "model.norm.weight", torch.ones(self.hidden)
        yield "lm_head.weight", noise.linear(self.vocab, self.hidden)


@dataclass(frozen=True)
class DeepseekV2:
    """Latent attention (MLA): one cached vector a token and layer, the same for all heads.

    vLLM's CPU kernel decodes only with this kv_lora_rank and rope dimension, and block size 16.
    """

    layers: int = 3
    hidden: int = 256
    heads: int = 4
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 64
    qk_rope_head_dim: int = 64
    v_head_dim: int = 64
    intermediate: int = 512
    vocab: int = 2048
    max_position: int = 8192

    def config(self) -> dict[str, object]:
        return {
            "architectures": ["DeepseekV2ForCausalLM"],
            "model_type": "deepseek_v2",
            "num_hidden_layers": self.layers,
            "hidden_size": self.hidden,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
            "q_lora_rank": None,
            "kv_lora_rank": self.kv_lora_rank,
            "qk_nope_head_dim": self.qk_nope_head_dim,
            "qk_rope_head_dim": self.qk_rope_head_dim,
            "v_head_dim": self.v_head_dim,
            "intermediate_size": self.intermediate,
            "moe_intermediate_size": self.intermediate,
            # vLLM wants an integer here even where every layer is dense.
            "n_routed_experts": 1,
            "n_shared_experts": 1,
            "num_experts_per_tok": 1,
            "first_k_dense_replace": self.layers,
            "n_group": 1,
            "topk_group": 1,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            **_common_config(self.vocab, self.max_position),
        }

    def weights(self, noise: Noise) -> Iterator[tuple[str, Tensor]]:
        yield "model.embed_tokens.weight", noise(self.vocab, self.hidden, 1.0)
        queries = self.heads * (self.qk_nope_head_dim + self.qk_rope_head_dim)
        outputs = self.heads * self.v_head_dim
        for layer in range(self.layers):
            base = f"model.layers.{layer}."
            attention = base + "self_attn."
            yield attention + "q_proj.weight", noise.linear(queries, self.hidden, QUERY_KEY_GAIN)
            latent = noise.linear(self.kv_lora_rank, self.hidden)
            rope = noise.linear(self.qk_rope_head_dim, self.hidden, QUERY_KEY_GAIN)
            yield attention + "kv_a_proj_with_mqa.weight", torch.cat([latent, rope])
            yield attention + "kv_a_layernorm.weight", torch.ones(self.kv_lora_rank)
            per_head = [
                noise.linear(rows, self.kv_lora_rank, gain)
                for _ in range(self.heads)
                for rows, gain in (
                    (self.qk_nope_head_dim, QUERY_KEY_GAIN),
                    (self.v_head_dim, VALUE_GAIN),
                )
            ]
            yield attention + "kv_b_proj.weight", torch.cat(per_head)
            yield attention + "o_proj.weight", noise.linear(self.hidden, outputs, VALUE_GAIN)
            yield from _mlp(noise, base, self.hidden, self.intermediate)
            yield base + "input_layernorm.weight", torch.ones(self.hidden)
            yield base + "post_attention_layernorm.weight", torch.ones(self.hidden)
        yield "model.norm.weight", torch.ones(self.hidden)
        yield "lm_head.weight", noise.linear(self.vocab, self.hidden)


@dataclass(frozen=True)
class DeepseekV32:
    """Sparse latent attention: an indexer with a cache of its own chooses what a token sees.

    vLLM has kernels for it on GPUs only, for these dimensions of heads and indexer.
    """

    layers: int = 3
    hidden: int = 512
    heads: int = 64
    q_lora_rank: int = 512
    index_heads: int = 64
    index_head_dim: int = 128
    index_topk: int = 2048
    max_position: int = 8192

    def config(self) -> dict[str, object]:
        return {
            **self._latent.config(),
            "architectures": ["DeepseekV32ForCausalLM"],
            "model_type": "deepseek_v32",
            "q_lora_rank": self.q_lora_rank,
            "index_n_heads": self.index_heads,
            "index_head_dim": self.index_head_dim,
            "index_topk": self.index_topk,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "routed_scaling_factor": 1.0,
            "norm_topk_prob": True,
        }

    def weights(self, noise: Noise) -> Iterator[tuple[str, Tensor]]:
        low, indexed = self.q_lora_rank, self.index_heads * self.index_head_dim
        for name, tensor in self._latent.weights(noise):
            if not name.endswith("q_proj.weight"):
                yield name, tensor
                continue
            base = name.removesuffix("q_proj.weight")
            yield base + "q_a_proj.weight", noise.linear(low, self.hidden)
            yield base + "q_a_layernorm.weight", torch.ones(low)
            yield base + "q_b_proj.weight", noise.linear(len(tensor), low, QUERY_KEY_GAIN)
            base += "indexer."
            yield base + "wq_b.weight", noise.linear(indexed, low)
            yield base + "wk.weight", noise.linear(self.index_head_dim, self.hidden)
            yield base + "k_norm.weight", torch.ones(self.index_head_dim)
            yield base + "k_norm.bias", torch.zeros(self.index_head_dim)
            yield base + "weights_proj.weight", noise.linear(self.index_heads, self.hidden)

    @property
    def _latent(self) -> DeepseekV2:
        return DeepseekV2(self.layers, self.hidden, self.heads, max_position=self.max_position)


@dataclass(frozen=True)
class Gemma3:
    """Sliding windows with full attention in every third layer: a hybrid of two cache groups."""

    layers: int = 6
    hidden: int = 256
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    intermediate: int = 512
    window: int = 512
    full_every: int = 3
    vocab: int = 2048
    max_position: int = 8192

    def config(self) -> dict[str, object]:
        return {
            "architectures": ["Gemma3ForCausalLM"],
            "model_type": "gemma3_text",
            "num_hidden_layers": self.layers,
            "hidden_size": self.hidden,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate,
            "sliding_window": self.window,
            "layer_types": [
                "full_attention" if (layer + 1) % self.full_every == 0 else "sliding_attention"
                for layer in range(self.layers)
            ],
            "query_pre_attn_scalar": self.head_dim,
            "hidden_activation": "gelu_pytorch_tanh",
            "rms_norm_eps": 1e-6,
            "rope_parameters": {
                kind: {"rope_type": "default", "rope_theta": 10000.0}
                for kind in ("sliding_attention", "full_attention")
            },
            **_common_config(self.vocab, self.max_position),
            "tie_word_embeddings": True,
        }

    def weights(self, noise: Noise) -> Iterator[tuple[str, Tensor]]:
        # Gemma multiplies embeddings by sqrt(hidden) and also uses them as output matrix. If they
        # are not small beside what the layers add, the output repeats the last token for ever.
        yield "model.embed_tokens.weight", noise.linear(self.vocab, self.hidden, 0.25)
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        for layer in range(self.layers):
            base = f"model.layers.{layer}."
            attention = base + "self_attn."
            yield attention + "q_proj.weight", noise.linear(queries, self.hidden)
            yield attention + "k_proj.weight", noise.linear(keys, self.hidden)
            yield attention + "v_proj.weight", noise.linear(keys, self.hidden)
            yield attention + "o_proj.weight", noise.linear(self.hidden, queries)
            # Queries and keys pass through a norm each, so their gain is the norm's. The output of
            # attention is normed, too, which amplifies what all tokens have in common. Only sharp
            # attention keeps tokens apart.
            yield attention + "q_norm.weight", _gain(self.head_dim, QUERY_KEY_GAIN)
            yield attention + "k_norm.weight", _gain(self.head_dim, QUERY_KEY_GAIN)
            yield from _mlp(noise, base, self.hidden, self.intermediate)
            yield base + "input_layernorm.weight", _gain(self.hidden, 1.0)
            yield base + "post_attention_layernorm.weight", _gain(self.hidden, 1.0)
            yield base + "pre_feedforward_layernorm.weight", _gain(self.hidden, 1.0)
            yield base + "post_feedforward_layernorm.weight", _gain(self.hidden, 1.0)
        yield "model.norm.weight", _gain(self.hidden, 1.0)


@dataclass(frozen=True)
class Llama4:
    """Chunked local attention with full attention in every third layer. All layers are dense."""

    layers: int = 6
    hidden: int = 256
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    intermediate: int = 512
    piece: int = 768
    """Tokens of a piece of local attention."""
    full_every: int = 3
    vocab: int = 2048
    max_position: int = 8192

    def config(self) -> dict[str, object]:
        return {
            "architectures": ["Llama4ForCausalLM"],
            "model_type": "llama4_text",
            "num_hidden_layers": self.layers,
            "hidden_size": self.hidden,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate,
            "intermediate_size_mlp": self.intermediate,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            # Without weights of their own such norms leave no way to sharpen attention.
            "use_qk_norm": False,
            "attn_temperature_tuning": False,
            "attention_chunk_size": self.piece,
            "no_rope_layers": [
                int((layer + 1) % self.full_every != 0) for layer in range(self.layers)
            ],
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "interleave_moe_layer_step": 0,
            "moe_layers": [],
            "num_local_experts": 1,
            **_common_config(self.vocab, self.max_position),
        }

    def weights(self, noise: Noise) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in _as_llama(self).weights(noise):
            yield name.replace(".mlp.", ".feed_forward."), tensor


@dataclass(frozen=True)
class EagleLlama:
    """EAGLE's drafter for a Llama of the same width: one layer, and nothing that it learnt."""

    target: Llama = field(default_factory=lambda: Llama())

    def config(self) -> dict[str, object]:
        return {**replace(self.target, layers=1).config(), "architectures": ["LlamaForCausalLM"]}

    def weights(self, noise: Noise) -> Iterator[tuple[str, Tensor]]:
        hidden = self.target.hidden
        yield "fc.weight", noise.linear(hidden, 2 * hidden)
        for name, tensor in replace(self.target, layers=1).weights(noise):
            if name.startswith("model.layers.") and not name.endswith("input_layernorm.weight"):
                yield name.removeprefix("model."), tensor


@dataclass(frozen=True)
class Glm4Moe:
    """A Llama with an MTP module, as GLM-4.5 has it. Its last layer and the module have experts."""

    layers: int = 3
    hidden: int = 256
    intermediate: int = 512
    experts: int = 2
    vocab: int = 2048
    max_position: int = 8192

    def config(self) -> dict[str, object]:
        return {
            **_as_llama(self).config(),
            "architectures": ["Glm4MoeForCausalLM"],
            "model_type": "glm4_moe",
            "num_nextn_predict_layers": 1,
            "first_k_dense_replace": self.layers - 1,
            "moe_intermediate_size": self.intermediate,
            "n_routed_experts": self.experts,
            "num_experts_per_tok": 1,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "attention_bias": False,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
            },
        }

    def weights(self, noise: Noise) -> Iterator[tuple[str, Tensor]]:
        with_experts = [f"model.layers.{layer}.mlp." for layer in (self.layers - 1, self.layers)]
        for name, tensor in replace(_as_llama(self), layers=self.layers + 1).weights(noise):
            if not name.startswith(tuple(with_experts)):
                yield name, tensor
        for base in with_experts:
            yield base + "gate.weight", noise.linear(self.experts, self.hidden)
            yield base + "gate.e_score_correction_bias", torch.zeros(self.experts)
            for expert in ("shared_experts", *(f"experts.{n}" for n in range(self.experts))):
                for name, tensor in _mlp(noise, "", self.hidden, self.intermediate):
                    yield base + expert + name.removeprefix("mlp"), tensor
        module = f"model.layers.{self.layers}."
        for norm in ("enorm", "hnorm", "shared_head.norm"):
            yield f"{module}{norm}.weight", torch.ones(self.hidden)
        yield module + "eh_proj.weight", noise.linear(self.hidden, 2 * self.hidden)
        yield module + "shared_head.head.weight", noise.linear(self.vocab, self.hidden)
        yield module + "embed_tokens.weight", noise(self.vocab, self.hidden, 1.0)


def make_checkpoint(folder: Path, shape: Shape, *, seed: int = 0) -> Path:
    """Write config.json and model.safetensors (float32) into folder and return it.

    There is no tokenizer: run the engine with skip_tokenizer_init and prompts of token ids.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape.config(), indent=2))
    tensors = {name: tensor.contiguous() for name, tensor in shape.weights(Noise(seed))}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def make_adapter(folder: Path, shape: Llama, *, seed: int, rank: int = 8) -> Path:
    """Write a LoRA adapter for keys and values, as PEFT does, into folder and return it.

    Its share of keys and values is as large as the base model's.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": ["k_proj", "v_proj"],
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    noise = Noise(seed)
    tensors = {}
    for layer in range(shape.layers):
        for module, gain in (("k_proj", QUERY_KEY_GAIN), ("v_proj", VALUE_GAIN)):
            base = f"base_model.model.model.layers.{layer}.self_attn.{module}."
            tensors[base + "lora_A.weight"] = noise.linear(rank, shape.hidden)
            out = shape.kv_heads * shape.head_dim
            tensors[base + "lora_B.weight"] = noise.linear(out, rank, gain)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return folder


def random_prompt(tokens: int, *, seed: int, vocab: int = 2048) -> list[int]:
    """A prompt of ``tokens`` token ids. Prompts of different seeds share hardly any prefix."""
    source = random.Random(seed)
    return [source.randrange(3, vocab) for _ in range(tokens)]


def _as_llama(shape: Llama4 | Glm4Moe) -> Llama:
    """The model of the same size whose weights have the same names, but for the MLP's."""
    common = {one.name for one in fields(Llama)}
    return Llama(**{name: value for name, value in asdict(shape).items() if name in common})


def _common_config(vocab: int, max_position: int) -> dict[str, object]:
    return {
        "vocab_size": vocab,
        "max_position_embeddings": max_position,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def _mlp(noise: Noise, base: str, hidden: int, intermediate: int) -> Iterator[tuple[str, Tensor]]:
    yield base + "mlp.gate_proj.weight", noise.linear(intermediate, hidden)
    yield base + "mlp.up_proj.weight", noise.linear(intermediate, hidden)
    yield base + "mlp.down_proj.weight", noise.linear(hidden, intermediate)


def _gain(size: int, gain: float) -> Tensor:
    """The weight of a Gemma norm that multiplies by gain: those norms multiply by 1 + weight."""
    return torch.full((size,), gain - 1.0)

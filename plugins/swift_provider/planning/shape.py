"""A model's shape, from its ``config.json``: what parallel sizes must divide, how many parameters it has. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Models whose attention projections have biases without saying so in their config.
_QKV_BIAS = ("qwen2", "qwen2_moe")
#: Models that normalise queries and keys.
_QK_NORM = ("qwen3", "qwen3_moe")
#: Models that this arithmetic describes: rotary positions, RMS norms, a gated MLP, grouped-query attention.
_KNOWN = ("llama", "mistral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")


@dataclass(frozen=True)
class ModelShape:
    """A decoder of the Llama family; ``experts`` 0 is a dense model. ``exact`` says that the count of parameters is."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocabulary: int
    tied: bool = False
    experts: int = 0
    experts_per_token: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    qkv_bias: bool = False
    qk_norm: bool = False
    exact: bool = True

    @property
    def attention(self) -> int:
        """Parameters of one layer's attention."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        bias = queries + 2 * keys if self.qkv_bias else 0
        norm = 2 * self.head_dim if self.qk_norm else 0
        return self.hidden * (2 * queries + 2 * keys) + bias + norm

    @property
    def expert_parameters(self) -> int:
        """Parameters of all experts of one layer: what expert parallelism shares out."""
        return self.experts * 3 * self.hidden * self.expert_ffn

    @property
    def layer(self) -> int:
        """Parameters of one layer."""
        if not self.experts:
            return self.attention + 3 * self.hidden * self.ffn + 2 * self.hidden
        # A shared expert has a gate of its own of one number per channel.
        shared = 3 * self.hidden * self.shared_ffn + (self.hidden if self.shared_ffn else 0)
        return self.attention + self.expert_parameters + self.hidden * self.experts + shared + 2 * self.hidden

    @property
    def embeddings(self) -> int:
        """Parameters of the input and output embeddings."""
        return self.vocabulary * self.hidden * (1 if self.tied else 2)

    @property
    def parameters(self) -> int:
        """All parameters."""
        return self.layers * self.layer + self.embeddings + self.hidden

    def lora_parameters(self, rank: int) -> int:
        """Parameters of a LoRA on all linear layers: ``rank`` x (inputs + outputs) of each (Hu et al. 2021)."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = 2 * (self.hidden + queries) + 2 * (self.hidden + keys)
        width = self.experts * self.expert_ffn + self.shared_ffn if self.experts else self.ffn
        blocks = (self.experts + bool(self.shared_ffn)) if self.experts else 1
        router = self.hidden + self.experts if self.experts else 0
        return self.layers * rank * (attention + 3 * (blocks * self.hidden + width) + router)


def shape_of(config: Mapping[str, Any]) -> ModelShape | None:
    """The shape that a ``config.json`` describes; ``None`` where it lacks the numbers (or is not of a decoder)."""
    text = config.get("text_config") or config.get("llm_config")
    inner = text if isinstance(text, Mapping) else config
    numbers = {name: inner.get(name) for name in ("hidden_size", "num_hidden_layers", "num_attention_heads")}
    if not all(isinstance(value, int) and value > 0 for value in numbers.values()):
        return None
    hidden, layers, heads = (int(value) for value in numbers.values() if value is not None)
    kind = str(inner.get("model_type", ""))
    experts = _first(inner, "num_experts", "n_routed_experts", "num_local_experts")
    every = inner.get("decoder_sparse_step", 1) == 1 and not inner.get("mlp_only_layers")
    return ModelShape(
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=_first(inner, "num_key_value_heads") or heads,
        head_dim=_first(inner, "head_dim") or hidden // heads,
        ffn=_first(inner, "intermediate_size") or 4 * hidden,
        vocabulary=_first(inner, "vocab_size"),
        tied=bool(inner.get("tie_word_embeddings", config.get("tie_word_embeddings", False))),
        experts=experts,
        experts_per_token=_first(inner, "num_experts_per_tok"),
        expert_ffn=_first(inner, "moe_intermediate_size", "intermediate_size") if experts else 0,
        shared_ffn=_first(inner, "shared_expert_intermediate_size") if experts else 0,
        qkv_bias=kind in _QKV_BIAS or bool(inner.get("attention_bias")),
        qk_norm=kind in _QK_NORM,
        exact=kind in _KNOWN and text is None and every,
    )


def _first(config: Mapping[str, Any], *names: str) -> int:
    return next((int(config[name]) for name in names if isinstance(config.get(name), int)), 0)


def read_config(model: str) -> dict[str, Any] | None:
    """The ``config.json`` of a model that is a path which can be read here, as on a shared disk; else ``None``."""
    if not model.startswith("/"):
        return None
    try:
        config = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return config if isinstance(config, dict) else None

"""``config.json`` of published models, cut to what planning reads, with their published numbers of parameters."""

from __future__ import annotations

from typing import Any


def config(kind: str, hidden: int, layers: int, heads: int, kv: int, ffn: int, vocabulary: int, **more: Any) -> Any:
    return {
        "model_type": kind,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "intermediate_size": ffn,
        "vocab_size": vocabulary,
        "tie_word_embeddings": False,
        **more,
    }


QWEN25_05B = config("qwen2", 896, 24, 14, 2, 4864, 151936, tie_word_embeddings=True)
QWEN25_7B = config("qwen2", 3584, 28, 28, 4, 18944, 152064)
LLAMA31_8B = config("llama", 4096, 32, 32, 8, 14336, 128256)
QWEN3_8B = config("qwen3", 4096, 36, 32, 8, 12288, 151936, head_dim=128)
QWEN3_30B_A3B = config(
    "qwen3_moe", 2048, 48, 32, 4, 6144, 151936,
    head_dim=128, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768,
    decoder_sparse_step=1, mlp_only_layers=[],
)  # fmt: skip

PARAMETERS = [
    (QWEN25_05B, 494_032_768),
    (QWEN25_7B, 7_615_616_512),
    (LLAMA31_8B, 8_030_261_248),
    (QWEN3_8B, 8_190_735_360),
    (QWEN3_30B_A3B, 30_532_122_624),
]

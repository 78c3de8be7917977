"""Other programs that run the same weights, for comparison: in the benchmark and in tests."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from model.config import ModelConfig


def to_halves(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rotary rows from neighboring pairs (Meta) to two halves (Hugging Face)."""
    return weight.view(heads, -1, 2, weight.shape[-1]).transpose(1, 2).reshape(weight.shape)


def transformers_model(
    config: ModelConfig, weights: dict[str, torch.Tensor], rope: dict[str, Any] | None = None
) -> Any:
    """The same model in transformers, float32, from the whole model's weights by Meta's names.

    Args:
        rope: A rotary scaling in transformers' terms; the configuration's own factors are not looked at.
    """
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.dim,
            intermediate_size=config.hidden_dim,
            num_hidden_layers=config.n_layers,
            num_attention_heads=config.n_heads,
            num_key_value_heads=config.n_kv_heads,
            head_dim=config.head_dim,
            rms_norm_eps=config.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta, **(rope or {})},
            max_position_embeddings=config.max_seq_len,
            tie_word_embeddings=config.tied_output,
        )
    ).eval()
    names = {"tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"}
    inner = {
        "attention.wq": "self_attn.q_proj",
        "attention.wk": "self_attn.k_proj",
        "attention.wv": "self_attn.v_proj",
        "attention.wo": "self_attn.o_proj",
        "feed_forward.w1": "mlp.gate_proj",
        "feed_forward.w2": "mlp.down_proj",
        "feed_forward.w3": "mlp.up_proj",
        "attention_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
    }
    state = {}
    for name, weight in weights.items():
        stem = name.removesuffix(".weight")
        if stem.startswith("layers."):
            _, number, rest = stem.split(".", 2)
            stem = f"model.layers.{number}.{inner[rest]}"
            if rest.endswith("wq"):
                weight = to_halves(weight, config.n_heads)
            elif rest.endswith("wk"):
                weight = to_halves(weight, config.n_kv_heads)
        else:
            stem = names[stem]
        state[stem + ".weight"] = weight
    missing, surplus = model.load_state_dict(state, strict=False)
    if surplus or set(missing) - {"lm_head.weight"}:
        raise RuntimeError(f"transformers misses {missing} and does not know {surplus}")
    return model

"""The shape of a Llama model, in the terms of Meta's `params.json`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any


class CheckpointError(RuntimeError):
    """A checkpoint, its configuration or its tokenizer can't be used; the message says what to do."""


def whole(value: Any) -> Any:
    """A value from JSON; a number without a fraction, such as 512.0, as the integer it is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and constants of one Llama-architecture model (the whole model, not one rank's part)."""

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    hidden_dim: int
    vocab_size: int
    max_seq_len: int = 4096
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_factors: tuple[float, ...] | None = None
    """Divisors of the rotary frequencies, one per pair of a head, where the context was stretched; see `model.rope`."""
    tied_output: bool = False
    """Whether the output matrix is the embedding (the checkpoint has no `output.weight`)."""
    bos_id: int | None = None
    stop_ids: frozenset[int] = field(default_factory=frozenset)
    """Ids that end a generation; filled in from the tokenizer when the checkpoint is loaded."""

    def __post_init__(self) -> None:
        sizes = ("dim", "n_layers", "n_heads", "n_kv_heads", "head_dim", "hidden_dim", "vocab_size", "max_seq_len")
        for name in sizes:
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise CheckpointError(f"model configuration: {name} is {value!r}, expected an integer of at least 1")
        if self.n_heads % self.n_kv_heads:
            raise CheckpointError(
                f"model configuration: n_heads {self.n_heads} is not a multiple of n_kv_heads {self.n_kv_heads}"
            )
        if self.head_dim % 2:
            raise CheckpointError(
                f"model configuration: head_dim {self.head_dim} is odd, rotary pairs need an even one"
            )
        self._check_rope_factors()
        for name in ("norm_eps", "rope_theta"):
            if not 0 < getattr(self, name) < math.inf:
                raise CheckpointError(
                    f"model configuration: {name} is {getattr(self, name)}, expected a finite number above 0"
                )

    def _check_rope_factors(self) -> None:
        if self.rope_factors is None:
            return
        if len(self.rope_factors) != self.head_dim // 2:
            raise CheckpointError(
                f"model configuration: {len(self.rope_factors)} rope factors, expected {self.head_dim // 2}, "
                f"one for each rotary pair of a head of {self.head_dim}"
            )
        bad = next((f for f in self.rope_factors if not 0 < f < math.inf), None)
        if bad is not None:
            raise CheckpointError(f"model configuration: a rope factor is {bad}, expected finite numbers above 0")


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every parameter of the whole model by Meta's name, with its shape (out features first)."""
    q, kv = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"tok_embeddings.weight": (config.vocab_size, config.dim)}
    for i in range(config.n_layers):
        layer = f"layers.{i}."
        shapes[layer + "attention_norm.weight"] = (config.dim,)
        shapes[layer + "attention.wq.weight"] = (q, config.dim)
        shapes[layer + "attention.wk.weight"] = (kv, config.dim)
        shapes[layer + "attention.wv.weight"] = (kv, config.dim)
        shapes[layer + "attention.wo.weight"] = (config.dim, q)
        shapes[layer + "ffn_norm.weight"] = (config.dim,)
        shapes[layer + "feed_forward.w1.weight"] = (config.hidden_dim, config.dim)
        shapes[layer + "feed_forward.w3.weight"] = (config.hidden_dim, config.dim)
        shapes[layer + "feed_forward.w2.weight"] = (config.dim, config.hidden_dim)
    shapes["norm.weight"] = (config.dim,)
    if not config.tied_output:
        shapes["output.weight"] = (config.vocab_size, config.dim)
    return shapes

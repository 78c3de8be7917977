"""Rotary factors back to the scheme they were made by, as formats that know only schemes need it."""

from __future__ import annotations

import math
from typing import Any

from model.config import ModelConfig
from model.rope import linear_factors, llama3_factors

LLAMA3_SCHEMES: tuple[dict[str, Any], ...] = (
    {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
    {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
)
"""Of Llama 3.1 and 3.3, and of Llama 3.2."""


def find_scaling(config: ModelConfig) -> dict[str, Any] | None:
    """The scheme behind `config.rope_factors` in Hugging Face's terms: {"rope_type", "factor", ...}.

    None where nothing is scaled; a `rope_type` of "unknown" where no scheme fits. Factors are compared as float32,
    the type they are stored in.
    """
    factors = config.rope_factors
    if factors is None or all(factor == 1 for factor in factors):
        return None
    if _alike(factors, linear_factors(config.head_dim, factors[0])):
        return {"rope_type": "linear", "factor": float(f"{factors[0]:.6g}")}
    for scheme in LLAMA3_SCHEMES:
        made = llama3_factors(
            config.head_dim,
            config.rope_theta,
            factor=scheme["factor"],
            low_freq_factor=scheme["low_freq_factor"],
            high_freq_factor=scheme["high_freq_factor"],
            original_max_seq_len=scheme["original_max_position_embeddings"],
        )
        if _alike(factors, made):
            return {"rope_type": "llama3", **scheme}
    return {"rope_type": "unknown"}


def _alike(left: tuple[float, ...], right: tuple[float, ...]) -> bool:
    return all(math.isclose(a, b, rel_tol=1e-6) for a, b in zip(left, right, strict=True))

"""Rotary position embedding: the angles of each position, and how a context was stretched.

Stretching divides each pair's frequency by a factor of its own; whatever the scheme, the factors are all that the
model needs to know (`ModelConfig.rope_factors`). Sources: Su et al., "RoFormer" (2021); Chen et al., "Extending Context
Window of Large Language Models via Positional Interpolation" (2023); Meta's `apply_scaling` for Llama 3.1.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from model.config import CheckpointError, ModelConfig


def frequencies(head_dim: int, theta: float) -> Tensor:
    """(D/2,) float64: radians per position of each pair, unstretched."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    return theta**-exponents


def rotary_table(config: ModelConfig, length: int, device: torch.device) -> Tensor:
    """(length, D/2) complex64: the rotation of each pair at each position."""
    speed = frequencies(config.head_dim, config.rope_theta)
    if config.rope_factors is not None:
        speed = speed / torch.tensor(config.rope_factors, dtype=torch.float64)
    angles = torch.outer(torch.arange(length, dtype=torch.float64), speed)
    return torch.polar(torch.ones_like(angles), angles).to(torch.complex64).to(device)


def linear_factors(head_dim: int, factor: float) -> tuple[float, ...]:
    """Positions count `1 / factor` each (Hugging Face's rope type "linear")."""
    _check(factor > 0, "factor", factor, "above 0")
    return (float(factor),) * (head_dim // 2)


def llama3_factors(
    head_dim: int,
    theta: float,
    *,
    factor: float = 8.0,
    low_freq_factor: float = 1.0,
    high_freq_factor: float = 4.0,
    original_max_seq_len: int = 8192,
) -> tuple[float, ...]:
    """Llama 3.1's scheme: slow pairs are divided by `factor`, fast ones not at all, those between by degrees.

    A pair is slow where less than `low_freq_factor` of its turns fit into the original context, fast where more than
    `high_freq_factor` do. The defaults are Llama 3.1's own.

    Raises:
        CheckpointError: values that can't be meant, by name.
    """
    _check(factor > 0, "factor", factor, "above 0")
    _check(low_freq_factor > 0, "low_freq_factor", low_freq_factor, "above 0")
    _check(high_freq_factor > low_freq_factor, "high_freq_factor", high_freq_factor, "above low_freq_factor")
    _check(original_max_seq_len > 0, "original_max_position_embeddings", original_max_seq_len, "above 0")
    factors = []
    for speed in frequencies(head_dim, theta).tolist():
        turns = original_max_seq_len * speed / (2 * math.pi)
        if turns > high_freq_factor:
            factors.append(1.0)
        elif turns < low_freq_factor:
            factors.append(float(factor))
        else:
            kept = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor)
            factors.append(1 / ((1 - kept) / factor + kept))
    return tuple(factors)


def _check(right: bool, name: str, value: float, expected: str) -> None:
    if not right:
        raise CheckpointError(f"rope scaling: {name} is {value}, expected {expected}")

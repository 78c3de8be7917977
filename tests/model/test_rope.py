"""Rotary angles and stretched contexts, against transformers' own."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from model.config import CheckpointError
from model.rope import frequencies, linear_factors, llama3_factors, rotary_table
from tests.helpers.tiny import tiny_config


@pytest.mark.parametrize(
    "scaling",
    [
        {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
        {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
        {"factor": 4.0, "low_freq_factor": 2.0, "high_freq_factor": 3.0, "original_max_position_embeddings": 64},
    ],
)
@pytest.mark.parametrize(("head_dim", "theta"), [(128, 500000.0), (64, 10000.0)])
def test_llama3_factors(scaling: dict[str, float], head_dim: int, theta: float) -> None:
    """The frequencies are those transformers computes from the same numbers."""
    config = LlamaConfig(
        hidden_size=head_dim * 2,
        num_attention_heads=2,
        max_position_embeddings=131072,
        rope_parameters={"rope_type": "llama3", "rope_theta": theta, **scaling},
    )
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    values = {**scaling, "original_max_seq_len": int(scaling["original_max_position_embeddings"])}
    del values["original_max_position_embeddings"]
    factors = llama3_factors(head_dim, theta, **values)  # type: ignore[arg-type]
    found = frequencies(head_dim, theta) / torch.tensor(factors, dtype=torch.float64)
    torch.testing.assert_close(found.float(), expected, rtol=1e-5, atol=0)


def test_linear_scaling_slows_positions_down() -> None:
    config = tiny_config()
    stretched = dataclasses.replace(config, rope_factors=linear_factors(config.head_dim, 4.0))
    plain = rotary_table(config, 16, torch.device("cpu"))
    torch.testing.assert_close(rotary_table(stretched, 64, torch.device("cpu"))[::4], plain)


def test_bad_scaling_is_an_error() -> None:
    with pytest.raises(CheckpointError, match="factor is 0, expected above 0"):
        linear_factors(16, 0)
    with pytest.raises(CheckpointError, match=r"high_freq_factor is 1\.0, expected above low_freq_factor"):
        llama3_factors(16, 1e4, low_freq_factor=1.0, high_freq_factor=1.0)
    with pytest.raises(CheckpointError, match="7 rope factors, expected 8"):
        tiny_config(rope_factors=(1.0,) * 7)
    with pytest.raises(CheckpointError, match="a rope factor is nan"):
        tiny_config(rope_factors=(1.0,) * 7 + (math.nan,))

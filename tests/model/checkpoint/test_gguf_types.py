"""Block types of GGUF tensors: any bytes and any part as the `gguf` package decodes them, to the bit."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model.checkpoint import open_checkpoint
from model.checkpoint.gguf.block_types import BLOCK_TYPES, BlockType, decode_part
from tests.helpers.report import report
from tests.helpers.tiny import GGUF_BLOCK_SCALES, gguf_name, random_blocks, random_weights, save_gguf, tiny_config

QUANTIZED = [name for name, kind in BLOCK_TYPES.items() if kind.block > 1]
EXTREME_HALVES = (
    0x0000,
    0x8000,
    0x0001,
    0x83FF,
    0x0400,
    0x3C00,
    0xBC01,
    0x7BFF,
    0xFBFF,
    0x7C00,
    0xFC00,
    0x7E00,
    0xFE01,
)
"""Zeros, subnormals, the smallest normal, around 1, the largest, infinities and NaNs of float16."""


def reference(data: np.ndarray, kind: str) -> np.ndarray:
    """What the `gguf` package makes of (R, bytes of a row)."""
    with np.errstate(all="ignore"):
        return np.array(gguf.dequantize(data, gguf.GGMLQuantizationType[kind]))


def assert_same_bits(value: torch.Tensor, expected: np.ndarray) -> None:
    """Equal to the bit, zeros' signs included; any NaN equals any other."""
    found = value.float().numpy()
    nan = np.isnan(expected)
    assert found.shape == expected.shape
    assert np.array_equal(np.isnan(found), nan)
    assert np.array_equal(found[~nan].view(np.uint32), expected[~nan].view(np.uint32))


def decode(data: np.ndarray, kind: BlockType, start: int = 0, stop: int | None = None) -> torch.Tensor:
    columns = data.shape[1] // kind.size * kind.block
    return decode_part(torch.from_numpy(data), kind, start, columns if stop is None else stop)


def test_sizes_are_ggmls_own() -> None:
    for name, kind in BLOCK_TYPES.items():
        assert (kind.block, kind.size) == gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]], name


@report("B266", "FlashML-org/FreeToken#358")
@pytest.mark.parametrize("name", BLOCK_TYPES)
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_any_bytes(name: str, seed: int) -> None:
    """B266."""
    kind = BLOCK_TYPES[name]
    data = np.random.default_rng(seed).integers(0, 256, (3, 8 * kind.size), dtype=np.uint8)
    assert_same_bits(decode(data, kind), reference(data, name))


@pytest.mark.parametrize("name", QUANTIZED)
def test_extreme_scales(name: str) -> None:
    """Every pair of extreme scales, over random values."""
    kind, places = BLOCK_TYPES[name], GGUF_BLOCK_SCALES[name]
    data = np.random.default_rng(0).integers(0, 256, (len(EXTREME_HALVES) ** 2, kind.size), dtype=np.uint8)
    pairs = np.stack(np.meshgrid(EXTREME_HALVES, EXTREME_HALVES), axis=-1).reshape(-1, 2).astype("<u2")
    for place, halves in zip(places, pairs.T, strict=False):
        data[:, place : place + 2] = np.ascontiguousarray(halves).view(np.uint8).reshape(-1, 2)
    assert_same_bits(decode(data, kind), reference(data, name))


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("byte", [0x00, 0xFF, 0x0F, 0xF0, 0x55, 0xAA])
def test_extreme_values(name: str, byte: int) -> None:
    kind = BLOCK_TYPES[name]
    data = np.full((1, kind.size), byte, dtype=np.uint8)
    for place in GGUF_BLOCK_SCALES[name]:
        data[:, place : place + 2] = np.array([0x3555], "<u2").view(np.uint8)
    assert_same_bits(decode(data, kind), reference(data, name))


@pytest.mark.parametrize("name", BLOCK_TYPES)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_columns(name: str, data: st.DataObject) -> None:
    """Columns may begin and end anywhere in a block."""
    kind = BLOCK_TYPES[name]
    blocks = data.draw(st.integers(1, 5))
    start = data.draw(st.integers(0, blocks * kind.block))
    stop = data.draw(st.integers(start, blocks * kind.block))
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    raw = rng.integers(0, 256, (data.draw(st.integers(1, 4)), blocks * kind.size), dtype=np.uint8)
    part = decode(raw, kind, start, stop)
    assert_same_bits(part, reference(raw, name)[:, start:stop])
    assert part.is_contiguous()


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_no_rows_or_columns(name: str) -> None:
    kind = BLOCK_TYPES[name]
    data = np.zeros((3, 2 * kind.size), dtype=np.uint8)
    assert decode(data[:0], kind).shape == (0, 2 * kind.block)
    assert decode(data, kind, 1, 1).shape == (3, 0)


@report("B265", "huggingface/transformers#31847")
@pytest.mark.parametrize("mix", [("Q4_K", "Q6_K"), ("Q5_K", "Q6_K", "Q5_0"), ("Q2_K", "Q3_K"), ("Q4_K", "Q5_1", "F16")])
def test_a_model_of_mixed_types(tmp_path: Path, mix: tuple[str, ...]) -> None:
    """B265: as in files called Q4_K_M, Q5_K_M, Q2_K: every tensor and its parts as the `gguf` package reads them."""
    config = tiny_config(n_heads=8, n_kv_heads=2, head_dim=32, hidden_dim=512, vocab_size=300)
    weights = random_weights(config)
    types = {name: mix[i % len(mix)] for i, name in enumerate(weights)}
    path = save_gguf(tmp_path / "m.gguf", config, weights, types)
    expected = {t.name: reference(t.data, t.tensor_type.name) for t in gguf.GGUFReader(path).tensors}
    with open_checkpoint(path) as checkpoint:
        for name, weight in weights.items():
            whole = expected[gguf_name(name)]
            assert_same_bits(checkpoint.read(name), whole)
            for dim in range(weight.dim()):
                start, stop = weight.shape[dim] // 3, weight.shape[dim] // 3 * 2 + 1
                part = np.take(whole, range(start, stop), axis=dim)
                assert_same_bits(checkpoint.read(name, dim, start, stop), part)


def test_random_blocks_are_tame() -> None:
    """What the tests' own models are made of is finite and small, or their logits would say nothing."""
    for name in QUANTIZED:
        assert np.abs(reference(random_blocks((4, 512), name), name)).max() < 2

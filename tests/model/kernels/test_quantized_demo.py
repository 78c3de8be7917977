"""Quantized weights of the demo model: near the unquantized one's predictions, and its file's own numbers."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from generation.chat_format import chat_format_for
from generation.interface import Dialog
from model.checkpoint import Checkpoint, open_checkpoint
from model.kernels.linear import QuantizedWeight
from model.kv_cache import KVCache, make_batch
from model.loader import load_model

DIALOGS: list[Dialog] = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [{"role": "user", "content": "Give me three tips for healthy eating."}],
    [{"role": "user", "content": "Repeat: 😀 🎉 你好世界 — café"}],
]
KINDS = {"bfloat16": ("bfloat16", None), "int8": ("auto", "int8"), "int4": ("auto", "int4")}


def predictions(checkpoint: Path, dtype: str, quantization: str | None) -> torch.Tensor:
    """Log probabilities (tokens, V) at each token of the dialogs."""
    model, tokenizer = load_model(checkpoint, device="cpu", dtype=dtype, quantization=quantization, max_seq_len=256)
    found = []
    for dialog in DIALOGS:
        ids = chat_format_for(tokenizer).encode(dialog)
        blocks = np.arange(1, len(ids) // 16 + 2, dtype=np.int32)[None]
        cache = KVCache(model.config, model.shard, blocks.size + 1, model.dtype, model.device)
        rows = np.arange(len(ids))
        batch = make_batch(np.array(ids), np.array([0]), np.array([len(ids)]), blocks, rows, model.device)
        logits = model.forward(batch, cache)
        assert logits is not None
        found.append(logits.log_softmax(-1))
    return torch.cat(found)


@pytest.fixture(scope="module")
def exact(demo_checkpoint: Path) -> torch.Tensor:
    return predictions(demo_checkpoint, "float32", None)


@pytest.mark.parametrize(("kind", "divergence", "agreement"), [("bfloat16", 0.01, 0.9), ("int8", 0.02, 0.9),
                                                               ("int4", 0.05, 0.85)])  # fmt: skip
def test_predictions(
    demo_checkpoint: Path, exact: torch.Tensor, kind: str, divergence: float, agreement: float
) -> None:
    """Mean Kullback-Leibler divergence from float32 in nats, and how often the likeliest token is the same."""
    found = predictions(demo_checkpoint, *KINDS[kind])
    assert (exact.exp() * (exact - found)).sum(-1).mean() < divergence
    assert (found.argmax(-1) == exact.argmax(-1)).float().mean() > agreement


@pytest.fixture(scope="module")
def source(demo_checkpoint: Path) -> Checkpoint:
    return open_checkpoint(demo_checkpoint)


def difference(weight: torch.Tensor, bits: int) -> float:
    """The largest one between a matrix and its quantized form, as a part of the largest number in its group."""
    rounded = QuantizedWeight(weight, bits).rows(torch.arange(len(weight)))
    groups = weight.float().view(-1, 32)
    return ((rounded.view(-1, 32) - groups).abs().amax(-1) / groups.abs().amax(-1).clamp_min(1e-12)).max().item()


@pytest.mark.parametrize("layer", [0, 29])
@pytest.mark.parametrize("name", ["attention.wq", "attention.wv", "attention.wo", "feed_forward.w1", "feed_forward.w2"])
def test_q4_1_keeps_its_numbers_in_int4(source: Checkpoint, layer: int, name: str) -> None:
    """A group of the file is a group here, and its 16 numbers come back as they were; in 8 bits they are rounded."""
    weight = source.read(f"layers.{layer}.{name}.weight").float()
    assert difference(weight, 4) == 0
    assert difference(weight, 8) < 5e-3


@pytest.mark.parametrize(("kind", "bits", "most"), [("Q8_0", 8, 0), ("Q4_1", 4, 0), ("Q4_0", 8, 5e-3)])
def test_gguf_types_keep_their_numbers(kind: str, bits: int, most: float) -> None:
    """Q8_0 and Q4_1 have the groups and the rule of int8 and int4: nothing is lost. Others are rounded once more."""
    numbers = np.random.default_rng(3).standard_normal((64, 256)).astype(np.float32)
    quantized = gguf.GGMLQuantizationType[kind]
    weight = torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(numbers, quantized), quantized))
    assert difference(weight, bits) <= most

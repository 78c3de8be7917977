"""The same model in every format, on every number of ranks: equal logits."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from model.checkpoint import open_checkpoint
from model.checkpoint.writing import stored_bytes
from model.config import ModelConfig, parameter_shapes
from model.distributed.collectives import Communicator
from model.kv_cache import KVCache, make_batch
from model.llama import Llama
from model.loader import load_weights
from tests.helpers.ranks import make_model, on_ranks
from tests.helpers.tiny import random_weights, save_gguf, save_huggingface, save_meta, tiny_config

Weights = Mapping[str, torch.Tensor]

CONFIGS = {
    # nothing divides by 2, 4 or 8, but rows are whole blocks of 32 values
    "9/3": tiny_config(n_layers=1, n_heads=9, n_kv_heads=3, head_dim=32, hidden_dim=160, vocab_size=389),
    # Meta's shards must divide; with 8 of them a shard has half a key/value head
    "8/4": tiny_config(n_layers=1, n_heads=8, n_kv_heads=4, hidden_dim=192, tied_output=False),
}
WRITERS: dict[str, Callable[[Path, ModelConfig, Weights], Path]] = {
    **{f"Meta MP {mp}": functools.partial(save_meta, shards=mp) for mp in (1, 2, 4, 8)},
    "Hugging Face single": save_huggingface,
    "Hugging Face indexed": functools.partial(save_huggingface, files=3),
    **{f"GGUF {kind}": functools.partial(save_gguf, types=kind) for kind in ("F32", "F16", "Q8_0")},
}
CASES = [
    (size, kind) for size in CONFIGS for kind in WRITERS if size == "8/4" or kind[-4:] not in ("MP 2", "MP 4", "MP 8")
]
IDS = list(range(2, 380, 13))


def all_logits(model: Llama) -> torch.Tensor | None:
    """(len(IDS), vocabulary) logits on rank 0."""
    n = len(IDS)
    cache = KVCache(model.config, model.shard, n // 16 + 2, model.dtype, model.device)
    blocks = np.arange(1, n // 16 + 2, dtype=np.int32)[None]
    batch = make_batch(np.array(IDS), np.array([0]), np.array([n]), blocks, np.arange(n), model.device)
    return model.forward(batch, cache)


def as_stored(weights: Weights, kind: str) -> dict[str, torch.Tensor]:
    """The values that are left of the weights in a file of that kind; vectors stay float32 in GGUF."""
    if kind not in ("GGUF F16", "GGUF Q8_0"):
        return dict(weights)
    ggml_type = gguf.GGMLQuantizationType[kind.removeprefix("GGUF ")]

    def rounded(weight: torch.Tensor) -> torch.Tensor:
        if weight.dim() == 1:
            return weight
        data = gguf.quants.quantize(weight.numpy(), ggml_type)
        return torch.from_numpy(np.array(gguf.quants.dequantize(data, ggml_type), dtype=np.float32))

    return {name: rounded(weight) for name, weight in weights.items()}


@functools.cache
def expected(size: str, kind: str) -> torch.Tensor:
    """The logits of a model made from the weights in memory; `kind` is one of those that round, or nothing."""
    config = CONFIGS[size]
    logits = all_logits(make_model(config, as_stored(random_weights(config), kind)))
    assert logits is not None
    return logits


@pytest.mark.parametrize(("size", "kind"), CASES)
def test_every_format_on_every_number_of_ranks(tmp_path: Path, size: str, kind: str) -> None:
    config = CONFIGS[size]
    path = WRITERS[kind](tmp_path / "model.gguf", config, random_weights(config))
    checkpoint = open_checkpoint(path)
    assert checkpoint.config == config
    for name, shape in parameter_shapes(config).items():
        assert checkpoint.stored_bytes(name) == stored_bytes(shape, checkpoint.stored_type(name)), name

    def on_rank(comm: Communicator) -> torch.Tensor | None:
        device = torch.device("cpu")
        model = Llama(config, comm, torch.float32, device, config.max_seq_len)
        load_weights(model, checkpoint)
        return all_logits(model)

    for ranks in (1, 2, 3, 4, 8):
        logits = on_ranks(ranks, on_rank)[0]
        torch.testing.assert_close(
            logits, expected(size, kind if kind in ("GGUF F16", "GGUF Q8_0") else ""), atol=2e-5, rtol=0
        )


def test_rounding_is_seen() -> None:
    """The table's tolerance tells the types apart, so each is compared with its own values."""
    exact, half, blocks = (expected("9/3", kind) for kind in ("", "GGUF F16", "GGUF Q8_0"))
    assert (exact - half).abs().max() > 1e-4
    assert (exact - blocks).abs().max() > 1e-3

"""The real weights of the demo model against transformers, and on several ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from generation.chat_format import chat_format_for
from generation.interface import Dialog
from model.checkpoint import open_checkpoint
from model.config import parameter_shapes
from model.kv_cache import KVCache, make_batch
from model.loader import load_model
from scripts.benchmark.peers.peer import transformers_model
from scripts.fetch_demo_model import fetch
from tests.helpers.ranks import on_ranks

DIALOG: Dialog = [{"role": "user", "content": "Give me three tips for healthy eating."}]


@pytest.fixture(scope="module")
def demo() -> Path:
    return fetch()


def test_logits_equal_transformers_on_one_rank_and_on_two(demo: Path) -> None:
    """9 heads over 3 key/value heads do not divide by 2; the answer's first ids are known."""
    source = open_checkpoint(demo)
    tokenizer = source.tokenizer()
    answer = [33, 30, 16478, 253, 3175, 282, 3111]
    ids = chat_format_for(tokenizer).encode(DIALOG) + answer

    def on_rank(comm: Any) -> Any:
        model, _ = load_model(demo, device="cpu", dtype="float32", comm=comm)
        n = len(ids)
        cache = KVCache(model.config, model.shard, n // 16 + 2, model.dtype, model.device)
        blocks = np.arange(1, n // 16 + 2, dtype=np.int32)[None]
        batch = make_batch(np.array(ids), np.array([0]), np.array([n]), blocks, np.arange(n), model.device)
        return model.forward(batch, cache)

    (alone,) = on_ranks(1, on_rank)
    shared = on_ranks(2, on_rank)[0]
    peer = transformers_model(source.config, {n: source.read(n) for n in parameter_shapes(source.config)})
    with torch.inference_mode():
        expected = peer(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(alone, expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(shared, expected, atol=1e-4, rtol=0)
    assert alone.argmax(-1)[-len(answer) - 1 : -1].tolist() == answer

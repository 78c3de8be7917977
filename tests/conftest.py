"""What tests of several folders share: one tiny server for each number of ranks, one server of the demo model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from generation import load
from scripts.fetch_demo_model import fetch
from tests.helpers.serving import Server, serving
from tests.helpers.tiny import random_weights, save_meta, tiny_config, train_sentencepiece


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Meta checkpoint saved for two ranks, with a SentencePiece model of its own."""
    directory = tmp_path_factory.mktemp("tiny-llama")
    config = tiny_config(n_heads=8, n_kv_heads=2)
    save_meta(directory, config, random_weights(config, seed=5), shards=2)
    train_sentencepiece(directory / "tokenizer.model")
    return directory


@pytest.fixture(scope="session")
def tiny_library(tiny_checkpoint: Path) -> Any:
    """(model, tokenizer) of the tiny checkpoint, in this process."""
    return load(tiny_checkpoint, device="cpu", dtype="float32")


@pytest.fixture(scope="session", params=[1, 2], ids=["1 rank", "2 ranks"])
def tiny_server(request: pytest.FixtureRequest, tiny_checkpoint: Path) -> Iterator[Server]:
    with serving(tiny_checkpoint, request.param) as server:
        yield server


@pytest.fixture(scope="session")
def demo_checkpoint() -> Path:
    return fetch()


@pytest.fixture(scope="session")
def demo_server(demo_checkpoint: Path) -> Iterator[Server]:
    """The demo model on two ranks."""
    with serving(demo_checkpoint, 2) as server:
        yield server

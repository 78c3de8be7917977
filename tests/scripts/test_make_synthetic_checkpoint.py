"""Random checkpoints: readable in every format, the same numbers in each, and of the size that was asked for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from generation import generate, load, text_completion
from model.checkpoint import open_checkpoint
from model.config import CheckpointError, ModelConfig, parameter_shapes
from scripts.make_synthetic_checkpoint import SHAPES, configuration, main, parse

SMALL = ["--dim", "64", "--layers", "2", "--heads", "4", "--kv-heads", "2", "--hidden", "96", "--vocab", "600"]
FORMATS = {"meta": "model", "huggingface": "model-hf", "gguf": "model.gguf"}


def small(tmp_path: Path, to: str, *more: str) -> Path:
    target = tmp_path / FORMATS[to]
    assert main([str(target), "--format", to, *SMALL, *more]) == 0
    return target


def test_all_formats_hold_the_same(tmp_path: Path) -> None:
    config = ModelConfig(64, 2, 4, 2, 16, 96, 600, 2048)
    checkpoints = [open_checkpoint(small(tmp_path, to)) for to in FORMATS]
    for name, shape in parameter_shapes(config).items():
        values = [checkpoint.read(name).float() for checkpoint in checkpoints]
        assert values[0].shape == shape
        assert all(torch.equal(values[0], other) for other in values[1:])
    for checkpoint in checkpoints:
        found = checkpoint.config
        assert (found.dim, found.n_layers, found.hidden_dim, found.vocab_size) == (64, 2, 96, 600)
        tokenizer = checkpoint.tokenizer()
        assert tokenizer.n_words == 600
        text = "Two words, été 🦙"
        assert tokenizer.decode(tokenizer.encode(text, bos=True, eos=False)) == text
        checkpoint.close()


@pytest.mark.parametrize("to", list(FORMATS))
def test_it_generates(tmp_path: Path, to: str) -> None:
    model, tokenizer = load(small(tmp_path, to, "--type", "F16"), device="cpu", dtype="float32")
    tokens, logprobs = generate(model, [[1, 5, 300]], 5, temperature=0, logprobs=True)
    assert logprobs is not None
    assert len(tokens[0]) == len(logprobs[0])
    (answer,) = text_completion(model, tokenizer, ["some words"], 5, ignore_eos=True)
    assert isinstance(answer["generation"], str)


def test_quantized_and_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = small(tmp_path, "gguf").stat().st_size
    assert main([str(tmp_path / "model.gguf"), "--format", "gguf", *SMALL]) == 1
    assert "exists already" in capsys.readouterr().err
    assert small(tmp_path, "gguf", "--type", "Q8_0", "--force").stat().st_size < first
    assert main([str(tmp_path / "other"), "--format", "meta", *SMALL, "--type", "Q8_0"]) == 1
    assert "only GGUF holds quantized tensors" in capsys.readouterr().err
    assert main([str(tmp_path / "other"), *SMALL, "--vocab", "100"]) == 1
    assert "the vocabulary is 100, expected at least 259" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


def test_named_shapes() -> None:
    numbers = {
        name: sum(torch.Size(shape).numel() for shape in parameter_shapes(config).values())
        for name, config in SHAPES.items()
    }
    assert numbers["tinyllama-1.1b"] == 1_100_048_384
    assert numbers["llama-2-7b"] == 6_738_415_616
    assert abs(numbers["1gib"] * 2 / 2**30 - 1) < 0.01
    config = configuration(parse(["x", "--shape", "llama-2-7b", "--layers", "3", "--heads", "16", "--kv-heads", "4"]))
    assert (config.n_layers, config.n_heads, config.n_kv_heads, config.head_dim) == (3, 16, 4, 256)
    with pytest.raises(CheckpointError, match="n_heads 32 is not a multiple of n_kv_heads 5"):
        configuration(parse(["x", "--kv-heads", "5"]))

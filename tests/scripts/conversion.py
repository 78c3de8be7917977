"""Tiny checkpoints to convert, and whether two checkpoints are the same."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from model.checkpoint import Checkpoint, open_checkpoint
from model.config import ModelConfig, parameter_shapes
from model.tokenizer.tokenizer import Tokenizer
from tests.helpers.tiny import random_weights, save_gguf, sentencepiece_fields, tiny_config, train_sentencepiece
from tests.helpers.tiny_bpe import bpe_metadata

FORMATS = ("meta", "huggingface", "gguf")
TEXTS = [
    "Hello world!",
    "  two spaces\n\n\tand 1234 digits",
    "Straße, café, 猫 🦙",
    "",
    "<s>[INST] no </s>",
    "<|im_end|>",
]
NAMES = {"meta": "m", "huggingface": "h", "gguf": "g.gguf"}


def save_source(folder: Path, tokenizer: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """A tiny GGUF file with a tokenizer of the kind "spm" or "bpe"."""
    spm = tokenizer == "spm"
    fields = sentencepiece_fields(train_sentencepiece(folder / "spm.model")) if spm else bpe_metadata()
    changes.setdefault("vocab_size", len(fields["tokenizer.ggml.tokens"]))
    config = tiny_config(**changes)
    kind = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}[dtype]
    return save_gguf(folder / "source.gguf", config, random_weights(config, dtype=dtype), kind, fields=fields)


def everything(path: Path) -> tuple[ModelConfig, dict[str, torch.Tensor], Tokenizer]:
    with open_checkpoint(path) as checkpoint:
        weights = {name: checkpoint.read(name) for name in parameter_shapes(checkpoint.config)}
        return plain(checkpoint), weights, checkpoint.tokenizer()


def plain(checkpoint: Checkpoint) -> ModelConfig:
    """The configuration without what the tokenizer says."""
    return dataclasses.replace(checkpoint.config, bos_id=None, stop_ids=frozenset())


def assert_same(path: Path, other: Path) -> None:
    config, weights, tokenizer = everything(path)
    other_config, other_weights, other_tokenizer = everything(other)
    assert other_config == config
    for name, weight in weights.items():
        assert torch.equal(other_weights[name], weight), name
    for text in TEXTS:
        assert other_tokenizer.encode(text, bos=True, eos=True) == tokenizer.encode(text, bos=True, eos=True)
    for name in ("bos_id", "eos_id", "stop_ids", "adds_bos", "chat_template", "special_ids"):
        assert getattr(other_tokenizer, name) == getattr(tokenizer, name), name
    ids = list(range(tokenizer.n_words))
    assert [other_tokenizer.token_bytes(i) for i in ids] == [tokenizer.token_bytes(i) for i in ids]


def types(path: Path) -> set[tuple[int, str]]:
    """(number of dimensions, type) of all parameters."""
    with open_checkpoint(path) as checkpoint:
        return {(len(s), checkpoint.stored_type(name)) for name, s in parameter_shapes(checkpoint.config).items()}

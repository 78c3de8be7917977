"""A small byte-level BPE vocabulary in the form of GGUF metadata, trained when a test asks for it."""

from __future__ import annotations

import functools
import json
from typing import Any

import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from tests.helpers.tiny import CORPUS

CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe brief.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Frames each turn, with a default system prompt."""


@functools.cache
def _trained() -> tuple[list[str], list[str]]:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=list(CONTROL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS.splitlines(), trainer)
    vocab = backend.get_vocab(with_added_tokens=True)
    merges = [
        pair if isinstance(pair, str) else " ".join(pair) for pair in json.loads(backend.to_str())["model"]["merges"]
    ]
    return sorted(vocab, key=lambda piece: vocab[piece]), merges


def bpe_metadata(**changes: Any) -> dict[str, Any]:
    """Metadata of a ChatML model with ids 0..2 for CONTROL_TOKENS; `changes` by the key's last part, None to drop."""
    pieces, merges = _trained()
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": list(pieces),
        "tokenizer.ggml.token_type": [3 if piece in CONTROL_TOKENS else 1 for piece in pieces],
        "tokenizer.ggml.merges": list(merges),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHATML,
    }
    for key, value in changes.items():
        full = "tokenizer.chat_template" if key == "chat_template" else f"tokenizer.ggml.{key}"
        metadata[full] = value
        if value is None:
            del metadata[full]
    return metadata

"""Tokenizers: the interface, its two implementations, and how a GGUF file's metadata becomes one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from .config import CheckpointError
from .tokenizer_base import TextDecoder, Tokenizer
from .tokenizer_bpe import BPETokenizer
from .tokenizer_spm import BYTE, CONTROL, NORMAL, UNKNOWN, SentencePieceTokenizer, build_model

__all__ = ["BPETokenizer", "SentencePieceTokenizer", "TextDecoder", "Tokenizer", "tokenizer_from_gguf"]

_PREFIX = "tokenizer.ggml."
_NO_ID = (-1, 0xFFFFFFFF)
_BYTE_PIECE = re.compile("<0x[0-9A-F]{2}>")
_TURN_ENDS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>")
"""Control tokens that end a turn, for files whose metadata names only the end of the text."""


def tokenizer_from_gguf(metadata: dict[str, Any]) -> Tokenizer:
    """The tokenizer a GGUF file describes, from its metadata as plain Python values.

    Models "llama" (SentencePiece, merged by score) and "gpt2" (byte-level BPE) are known. Keys:
    github.com/ggml-org/ggml, docs/gguf.md.

    Raises:
        CheckpointError: naming the key that is missing, of a wrong size or not supported.
    """
    model = metadata.get(_PREFIX + "model")
    if model not in ("llama", "gpt2"):
        raise CheckpointError(f"{_PREFIX}model is {model!r}; supported are llama (SentencePiece) and gpt2 (BPE)")
    pieces = _list(metadata, "tokens")
    ids = _named_ids(metadata, len(pieces), llama=model == "llama")
    kinds = _kinds(metadata, pieces, ids)
    tokenizer = _sentencepiece(metadata, pieces, kinds, ids) if model == "llama" else _bpe(metadata, pieces, kinds)
    tokenizer.bos_id, tokenizer.eos_id = ids["bos"], ids["eos"]
    tokenizer.pad_id = -1 if ids["padding"] is None else ids["padding"]
    tokenizer.adds_bos = bool(metadata.get(_PREFIX + "add_bos_token", tokenizer.adds_bos))
    tokenizer.chat_template = metadata.get("tokenizer.chat_template") or None
    tokenizer.stop_ids = _stop_ids(tokenizer, ids)
    return tokenizer


def _list(metadata: dict[str, Any], key: str, length: int | None = None) -> list[Any]:
    value = metadata.get(_PREFIX + key)
    if value is None or isinstance(value, (str, bytes)) or not len(value):
        raise CheckpointError(f"{_PREFIX}{key} is missing or empty; the file holds no complete tokenizer")
    if length is not None and len(value) != length:
        raise CheckpointError(f"{_PREFIX}{key} has {len(value)} entries, {_PREFIX}tokens has {length}")
    return list(value)


def _named_ids(metadata: dict[str, Any], n_words: int, *, llama: bool) -> dict[str, int | None]:
    """The ids of bos, eos, eot, eom, padding and unknown; None where the file names none."""
    defaults = {"bos": 1, "eos": 2, "unknown": 0} if llama and n_words > 2 else {}
    ids: dict[str, int | None] = {}
    for name in ("bos", "eos", "eot", "eom", "padding", "unknown"):
        key = f"{_PREFIX}{name}_token_id"
        value = metadata.get(key, defaults.get(name))
        if value is None or value in _NO_ID:
            ids[name] = None
        elif 0 <= value < n_words:
            ids[name] = int(value)
        else:
            raise CheckpointError(f"{key} is {value}, but the vocabulary has {n_words} tokens (0..{n_words - 1})")
    return ids


def _kinds(metadata: dict[str, Any], pieces: Sequence[str], ids: dict[str, int | None]) -> list[int]:
    """The kind of each token. Those that frame a text or a turn are control tokens even if the file forgot it."""
    if metadata.get(_PREFIX + "token_type") is None:
        llama = metadata[_PREFIX + "model"] == "llama"
        kinds = [BYTE if llama and _BYTE_PIECE.fullmatch(piece) else NORMAL for piece in pieces]
    else:
        kinds = [int(kind) for kind in _list(metadata, "token_type", len(pieces))]
    for name in ("bos", "eos", "eot", "eom"):
        token_id = ids[name]
        if token_id is not None and kinds[token_id] != UNKNOWN:
            kinds[token_id] = CONTROL
    return kinds


def _sentencepiece(
    metadata: dict[str, Any], pieces: list[str], kinds: list[int], ids: dict[str, int | None]
) -> Tokenizer:
    if UNKNOWN not in kinds and ids["unknown"] is not None:
        kinds[ids["unknown"]] = UNKNOWN  # SentencePiece can't do without one
    model = build_model(
        pieces,
        _list(metadata, "scores", len(pieces)),
        kinds,
        bos_id=ids["bos"],
        eos_id=ids["eos"],
        add_dummy_prefix=bool(metadata.get(_PREFIX + "add_space_prefix", True)),
    )
    return SentencePieceTokenizer.from_proto(model)


def _bpe(metadata: dict[str, Any], pieces: list[str], kinds: list[int]) -> Tokenizer:
    pre = metadata.get(_PREFIX + "pre")
    if pre is None:
        raise CheckpointError(f"{_PREFIX}pre is missing, so it's unknown how text is cut into words; convert again")
    merges: list[tuple[str, str]] = []
    for merge in _list(metadata, "merges"):
        first, _, second = merge.partition(" ")
        merges.append((first, second))
    try:
        return BPETokenizer(pieces, merges, kinds, pre)
    except CheckpointError as error:
        raise CheckpointError(f"{_PREFIX}pre, tokens or merges: {error}") from error


def _stop_ids(tokenizer: Tokenizer, ids: dict[str, int | None]) -> frozenset[int]:
    """EOS and the ends of turns; a chat model's template may end turns by a token the metadata doesn't name."""
    found = {ids["eos"], ids["eot"], ids["eom"]}
    if ids["eot"] is None and tokenizer.chat_template:
        found |= {tokenizer.control_token(text) for text in _TURN_ENDS if text in tokenizer.chat_template}
    return frozenset(token_id for token_id in found if token_id is not None)

"""Byte-level BPE tokenizers (GPT-2's scheme), on top of the `tokenizers` library.

In such a vocabulary each byte is written as one printable character: the 188 printable ones as themselves, the
other 68 as U+0100, U+0101, ... in rising order (GPT-2's `encoder.py`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tokenizers
from tokenizers import models, normalizers, pre_tokenizers

from model.config import CheckpointError
from model.tokenizer.base import Tokenizer, well_formed
from model.tokenizer.proto import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def byte_level(use_regex: bool) -> pre_tokenizers.PreTokenizer:
    """Each byte as its character, after cutting by GPT-2's pattern where asked for."""
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


def _smollm() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level(True)])


def _llama3() -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(tokenizers.Regex(_LLAMA3), behavior="isolated")
    return pre_tokenizers.Sequence([split, byte_level(False)])


def _gguf_default() -> pre_tokenizers.PreTokenizer:
    """What llama.cpp does with a file whose converter didn't know the tokenizer."""
    splits = [
        pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated")
        for pattern in (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")
    ]
    return pre_tokenizers.Sequence([*splits, byte_level(False)])


@dataclass(frozen=True)
class PreTokenizer:
    """How a text is cut into words before merging."""

    build: Callable[[], pre_tokenizers.PreTokenizer | None]
    whole_words: bool = False
    """A word that is in the vocabulary is one token, whatever the merges say."""
    adds_bos: bool = False
    normalizer: normalizers.Normalizer | None = None
    """Changes the text before it is cut."""
    build_later: Callable[[], pre_tokenizers.PreTokenizer] | None = None
    """The same for text that something stands before, where it is cut otherwise."""
    added: Mapping[str, tokenizers.AddedToken] = field(default_factory=dict)
    """How USER_DEFINED pieces are found in a text, where it isn't the usual way (as they are written)."""


PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    "smollm": PreTokenizer(_smollm),
    "gpt-2": PreTokenizer(lambda: byte_level(True)),
    "default": PreTokenizer(_gguf_default),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"),
        PreTokenizer(_llama3, whole_words=True, adds_bos=True),
    ),
    **dict.fromkeys(("smaug-bpe", "dbrx"), PreTokenizer(_llama3)),
}
"""By the name in GGUF's `tokenizer.ggml.pre`; of several for the same the first is written."""


def byte_alphabet() -> dict[str, int]:
    """Character of the vocabulary -> byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


class BPETokenizer(Tokenizer):
    """Byte-level BPE with the pieces, merges and kinds of a vocabulary.

    Args:
        pieces: text of each token: byte-level characters for a NORMAL one, plain text for the others.
        merges: pairs of pieces, first merged first.
        kinds: NORMAL, UNKNOWN, CONTROL, USER_DEFINED or UNUSED, one per piece.
        pre: a key of PRE_TOKENIZERS, or a pre-tokenizer of its own.

    Raises:
        CheckpointError: an unknown pre-tokenizer, or pieces and merges that don't fit together.
    """

    def __init__(
        self,
        pieces: Sequence[str],
        merges: Sequence[tuple[str, str]],
        kinds: Sequence[int],
        pre: str | PreTokenizer,
    ) -> None:
        known = PRE_TOKENIZERS.get(pre) if isinstance(pre, str) else pre
        if known is None:
            raise CheckpointError(f"pre-tokenizer {pre!r} isn't known; supported are {', '.join(PRE_TOKENIZERS)}")
        self.n_words = len(pieces)
        self.pieces, self.kinds = pieces, kinds
        self.adds_bos = known.adds_bos
        self.control_tokens = {pieces[i]: i for i, kind in enumerate(kinds) if kind == CONTROL}
        self.special_ids = frozenset(i for i, kind in enumerate(kinds) if kind in (CONTROL, UNKNOWN))
        alphabet = byte_alphabet()
        self._bytes = [_piece_bytes(piece, kind, alphabet) for piece, kind in zip(pieces, kinds, strict=True)]
        self._backend = make_backend(pieces, merges, kinds, known)

    def encode(self, s: str, bos: bool, eos: bool) -> list[int]:
        return self._frame(self._backend.encode(well_formed(s), add_special_tokens=False).ids, bos, eos)

    def rules(self) -> dict[str, Any]:
        """Normalizer, pre-tokenizer, added tokens and model (with its merges) as in a `tokenizer.json`."""
        return backend_rules(self._backend)


def backend_rules(backend: tokenizers.Tokenizer) -> dict[str, Any]:
    """What `backend` is made of, as in a `tokenizer.json`; its vocabulary lacks the control tokens."""
    document: dict[str, Any] = json.loads(backend.to_str())
    return document


def _piece_bytes(piece: str, kind: int, alphabet: Mapping[str, int]) -> bytes:
    if kind in (CONTROL, UNKNOWN, UNUSED):
        return b""
    if kind == NORMAL and all(c in alphabet for c in piece):
        return bytes(alphabet[c] for c in piece)
    return piece.encode()


def make_backend(
    pieces: Sequence[str], merges: Sequence[tuple[str, str]], kinds: Sequence[int], pre: PreTokenizer, **options: Any
) -> tokenizers.Tokenizer:
    """The library's tokenizer. It doesn't know the control tokens at all, so no text can become one.

    Raises:
        CheckpointError: the pieces aren't distinct, or the merges don't fit them.
    """
    text_kinds = (NORMAL, USER_DEFINED, BYTE)
    vocab = {piece: i for i, (piece, kind) in enumerate(zip(pieces, kinds, strict=True)) if kind in text_kinds}
    if len(vocab) != sum(kind in text_kinds for kind in kinds):
        twice = next(piece for i, piece in enumerate(pieces) if kinds[i] in text_kinds and vocab[piece] != i)
        raise CheckpointError(f"the BPE vocabulary can't be used: {twice!r} is there twice")
    taken = {pieces[i] for i, kind in enumerate(kinds) if kind not in text_kinds}
    usable = [pair for pair in merges if not taken.intersection((*pair, pair[0] + pair[1]))]
    try:
        backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=usable, ignore_merges=pre.whole_words, **options))
        _set_rules(backend, pre, pre.build(), pieces, kinds)
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"the BPE vocabulary can't be used: {error}") from error
    return backend


def later_backend(
    backend: tokenizers.Tokenizer, pre: PreTokenizer, pieces: Sequence[str], kinds: Sequence[int]
) -> tokenizers.Tokenizer:
    """`backend` for text that something stands before; the vocabulary is shared."""
    if pre.build_later is None:
        return backend
    later = tokenizers.Tokenizer(backend.model)
    _set_rules(later, pre, pre.build_later(), pieces, kinds)
    return later


def _set_rules(
    backend: tokenizers.Tokenizer,
    pre: PreTokenizer,
    pre_tokenizer: pre_tokenizers.PreTokenizer | None,
    pieces: Sequence[str],
    kinds: Sequence[int],
) -> None:
    if pre.normalizer is not None:
        backend.normalizer = pre.normalizer
    if pre_tokenizer is not None:
        backend.pre_tokenizer = pre_tokenizer
    user_defined = [piece for piece, kind in zip(pieces, kinds, strict=True) if kind == USER_DEFINED]
    backend.add_tokens(
        [
            pre.added.get(piece) or tokenizers.AddedToken(piece, normalized=False, special=False)
            for piece in user_defined
        ]
    )

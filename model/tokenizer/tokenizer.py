"""Tokenizers: the interface, its implementations, and how a GGUF file's metadata becomes one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from model.config import CheckpointError
from model.tokenizer.added import AddedToken, SpaceRule
from model.tokenizer.base import TextDecoder, Tokenizer
from model.tokenizer.bpe import BPETokenizer
from model.tokenizer.directory import TURN_ENDS, tokenizer_from_directory
from model.tokenizer.hf_json import check_unicode, is_id
from model.tokenizer.metaspace import BYTE_PIECE, MetaspaceTokenizer
from model.tokenizer.proto import BYTE, CONTROL, NORMAL, SPACE, UNKNOWN, USER_DEFINED, build_model
from model.tokenizer.spm import SentencePieceTokenizer, TextEncoder

__all__ = [
    "BPETokenizer",
    "MetaspaceTokenizer",
    "SentencePieceTokenizer",
    "TextDecoder",
    "Tokenizer",
    "tokenizer_from_directory",
    "tokenizer_from_gguf",
]

_PREFIX = "tokenizer.ggml."
_NO_ID = (-1, 0xFFFFFFFF)
_KIND_NAMES: dict[type, str] = {str: "a text", int: "an integer", float: "a number"}


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
    pieces = _list(metadata, "tokens", str)
    ids = _named_ids(metadata, len(pieces), llama=model == "llama")
    kinds = _kinds(metadata, pieces, ids)
    tokenizer = _sentencepiece(metadata, pieces, kinds, ids) if model == "llama" else _bpe(metadata, pieces, kinds)
    tokenizer.bos_id, tokenizer.eos_id = ids["bos"], ids["eos"]
    tokenizer.pad_id = -1 if ids["padding"] is None else ids["padding"]
    tokenizer.adds_bos = _flag(metadata, "add_bos_token", tokenizer.adds_bos)
    template = metadata.get("tokenizer.chat_template") or None
    if template is not None and not isinstance(template, str):
        raise CheckpointError(f"tokenizer.chat_template is {template!r:.60}, expected a text")
    tokenizer.chat_template = template
    tokenizer.stop_ids = _stop_ids(tokenizer, ids)
    return tokenizer


def _list(metadata: dict[str, Any], key: str, kind: type, length: int | None = None) -> list[Any]:
    """A list of `kind`s; of `length` entries where that is given."""
    value = metadata.get(_PREFIX + key)
    if value is None or value == []:
        raise CheckpointError(f"{_PREFIX}{key} is missing or empty; the file holds no complete tokenizer")
    if not isinstance(value, (list, tuple)):
        raise CheckpointError(f"{_PREFIX}{key} is {value!r:.60}, expected a list")
    if length is not None and len(value) != length:
        raise CheckpointError(f"{_PREFIX}{key} has {len(value)} entries, {_PREFIX}tokens has {length}")
    kinds = (int, float) if kind is float else kind
    wrong = next((i for i, entry in enumerate(value) if not isinstance(entry, kinds)), None)
    if wrong is not None:
        raise CheckpointError(f"{_PREFIX}{key}[{wrong}] is {value[wrong]!r:.60}, expected {_KIND_NAMES[kind]}")
    if kind is str:
        check_unicode(value, _PREFIX + key)
    return list(value)


def _flag(metadata: dict[str, Any], key: str, default: bool) -> bool:
    value = metadata.get(_PREFIX + key, default)
    if not isinstance(value, int):
        raise CheckpointError(f"{_PREFIX}{key} is {value!r:.60}, expected true or false")
    return bool(value)


def _named_ids(metadata: dict[str, Any], n_words: int, *, llama: bool) -> dict[str, int | None]:
    """The ids of bos, eos, eot, eom, padding and unknown; None where the file names none."""
    defaults = {"bos": 1, "eos": 2, "unknown": 0} if llama and n_words > 2 else {}
    ids: dict[str, int | None] = {}
    for name in ("bos", "eos", "eot", "eom", "padding", "unknown"):
        key = f"{_PREFIX}{name}_token_id"
        value = metadata.get(key, defaults.get(name))
        if value is None or value in _NO_ID:
            ids[name] = None
        elif is_id(value) and value < n_words:
            ids[name] = value
        else:
            raise CheckpointError(f"{key} is {value!r:.60}, but the vocabulary has {n_words} tokens (0..{n_words - 1})")
    return ids


def _kinds(metadata: dict[str, Any], pieces: Sequence[str], ids: dict[str, int | None]) -> list[int]:
    """The kind of each token. Those that frame a text or a turn are control tokens even if the file forgot it."""
    if metadata.get(_PREFIX + "token_type") is None:
        llama = metadata[_PREFIX + "model"] == "llama"
        kinds = [BYTE if llama and BYTE_PIECE.fullmatch(piece) else NORMAL for piece in pieces]
    else:
        kinds = [kind or NORMAL for kind in _list(metadata, "token_type", int, len(pieces))]  # 0 is "undefined"
        strange = next((i for i, kind in enumerate(kinds) if not NORMAL <= kind <= BYTE), None)
        if strange is not None:
            raise CheckpointError(f"{_PREFIX}token_type[{strange}] is {kinds[strange]}, known are {NORMAL} to {BYTE}")
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
        _list(metadata, "scores", float, len(pieces)),
        kinds,
        bos_id=ids["bos"],
        eos_id=ids["eos"],
        add_dummy_prefix=_flag(metadata, "add_space_prefix", True),
    )
    in_text = [AddedToken(i, pieces[i].replace(SPACE, " ")) for i, kind in enumerate(kinds) if kind == USER_DEFINED]
    return SentencePieceTokenizer.from_proto(model, TextEncoder(model, SpaceRule.MODEL, in_text))


def _bpe(metadata: dict[str, Any], pieces: list[str], kinds: list[int]) -> Tokenizer:
    pre = metadata.get(_PREFIX + "pre")
    if pre is None:
        raise CheckpointError(f"{_PREFIX}pre is missing, so it's unknown how text is cut into words; convert again")
    if not isinstance(pre, str):
        raise CheckpointError(f"{_PREFIX}pre is {pre!r:.60}, expected a text")
    merges: list[tuple[str, str]] = []
    for merge in _list(metadata, "merges", str):
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
        found |= {tokenizer.control_token(text) for text in TURN_ENDS if text in tokenizer.chat_template}
    return frozenset(token_id for token_id in found if token_id is not None)

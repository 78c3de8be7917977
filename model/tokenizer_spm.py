"""SentencePiece tokenizers: Meta's `tokenizer.model`, or one rebuilt from its pieces and scores.

Message and field numbers: sentencepiece's `sentencepiece_model.proto`.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import sentencepiece

from .config import CheckpointError
from .tokenizer_base import REPLACE_EACH_BYTE, Tokenizer, well_formed

SPACE = "\u2581"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Kinds of pieces; GGUF numbers them alike."""


class SentencePieceTokenizer(Tokenizer):
    """Meta's tokenizer for Llama 1 and 2. BOS, EOS and padding are those the model file names."""

    utf8_errors = REPLACE_EACH_BYTE
    adds_bos = True

    def __init__(self, processor: sentencepiece.SentencePieceProcessor) -> None:
        self._processor = processor
        n = self.n_words = processor.vocab_size()
        self.bos_id = self._optional(processor.bos_id())
        self.eos_id = self._optional(processor.eos_id())
        self.pad_id = processor.pad_id()
        self.stop_ids = frozenset() if self.eos_id is None else frozenset({self.eos_id})
        pieces = [processor.id_to_piece(i) for i in range(n)]
        self.control_tokens = {pieces[i]: i for i in range(n) if processor.is_control(i)}
        self.special_ids = frozenset(i for i in range(n) if processor.is_control(i) or processor.is_unknown(i))
        self.byte_ids = frozenset(i for i in range(n) if processor.is_byte(i))
        self._bytes = [self._piece_bytes(i, piece) for i, piece in enumerate(pieces)]
        self._probe_spaces(pieces)

    @classmethod
    def from_file(cls, path: Path) -> SentencePieceTokenizer:
        """Read a `tokenizer.model`.

        Raises:
            CheckpointError: naming the file: missing, empty, no SentencePiece model (and what it is instead).
        """
        path = Path(path)
        try:
            data = path.read_bytes()
        except OSError as error:
            raise CheckpointError(f"tokenizer {path} can't be read: {error.strerror}") from error
        try:
            return cls.from_proto(data)
        except CheckpointError as error:
            raise CheckpointError(f"tokenizer {path}: {_what_it_is(data) or error}") from error

    @classmethod
    def from_proto(cls, data: bytes) -> SentencePieceTokenizer:
        """From the bytes of a serialized ModelProto.

        Raises:
            CheckpointError: the bytes are no SentencePiece model.
        """
        if not data:
            raise CheckpointError("the SentencePiece model is empty")
        processor = sentencepiece.SentencePieceProcessor()
        try:
            processor.LoadFromSerializedProto(data)
        except RuntimeError as error:
            raise CheckpointError(f"not a usable SentencePiece model ({str(error).strip()})") from error
        return cls(processor)

    def encode(self, s: str, bos: bool, eos: bool) -> list[int]:
        return self._frame(list(self._processor.encode(well_formed(s))), bos, eos)

    @staticmethod
    def _optional(token_id: int) -> int | None:
        return token_id if token_id >= 0 else None

    def _piece_bytes(self, token_id: int, piece: str) -> bytes:
        if token_id in self.special_ids:
            return b""
        if token_id in self.byte_ids:
            return bytes([int(piece[3:-1], 16)])
        return piece.replace(SPACE, " ").encode()

    def _probe_spaces(self, pieces: list[str]) -> None:
        """What decoding does with spaces at the start. The library doesn't tell, but its decoder shows."""
        blank = next((i for i, piece in enumerate(pieces) if piece == SPACE), None)
        spaced = next((i for i, piece in enumerate(pieces) if piece.startswith(SPACE)), blank)
        if spaced is not None:
            self.strips_leading_space = self._processor.decode([spaced]) != pieces[spaced].replace(SPACE, " ")
        if blank is not None:
            self.strips_blank_pieces = self._processor.decode([blank, blank]) == ""


def build_model(
    pieces: Sequence[str],
    scores: Sequence[float],
    kinds: Sequence[int],
    *,
    bos_id: int | None,
    eos_id: int | None,
    add_dummy_prefix: bool = True,
) -> bytes:
    """A serialized ModelProto of type BPE that merges by score, without normalization.

    Args:
        pieces: text of each token, a space as "▁".
        scores: one per piece; higher is merged first.
        kinds: NORMAL ... BYTE, one per piece; one piece must be UNKNOWN.
        add_dummy_prefix: put a space in front of the text.
    """
    model = b"".join(
        _message(1, _message(1, piece.encode()) + _float(2, score) + _integer(3, kind))
        for piece, score, kind in zip(pieces, scores, kinds, strict=True)
    )
    trainer = _integer(3, 2) + _integer(4, len(pieces)) + _integer(35, BYTE in kinds)
    for field, token_id in ((46, bos_id), (47, eos_id)):
        if token_id is not None:
            trainer += _message(field, pieces[token_id].encode())
    if UNKNOWN in kinds:
        unknown = list(kinds).index(UNKNOWN)
        trainer += _integer(40, unknown) + _message(45, pieces[unknown].encode())
    normalizer = _message(1, b"identity") + _integer(3, add_dummy_prefix) + _integer(4, False) + _integer(5, True)
    return model + _message(2, trainer) + _message(3, normalizer)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _integer(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(int(value))


def _float(field: int, value: float) -> bytes:
    return _varint(field << 3 | 5) + struct.pack("<f", value)


def _message(field: int, data: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(data)) + data


def _what_it_is(data: bytes) -> str | None:
    """What was found in place of a SentencePiece model, where that's easy to see, and what to do."""
    head = data[:512].lstrip().lower()
    if not head:
        return "the file is empty; download it again"
    if head.startswith(b"version https://git-lfs"):
        return "a Git LFS pointer, not the model itself; run `git lfs pull` in its repository"
    if head.startswith((b"<!doctype", b"<html", b"<?xml")):
        return "a web page, not a SentencePiece model; download the file itself (the link may need a login)"
    if head.startswith(b"{"):
        return "JSON, not a SentencePiece model; a tokenizer.json must keep that name"
    if head.split(b"\n")[0].rstrip().endswith(b"== 0"):
        return "a tiktoken vocabulary (Llama 3), not a SentencePiece model; use the checkpoint's GGUF or tokenizer.json"
    return None

"""SentencePiece tokenizers: Meta's `tokenizer.model`, or one rebuilt from its pieces and scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import sentencepiece

from model.config import CheckpointError
from model.tokenizer.added import AddedToken, AddedTokenFinder, SpaceRule
from model.tokenizer.base import REPLACE_EACH_BYTE, Tokenizer, well_formed
from model.tokenizer.proto import SPACE, without_dummy_prefix


class TextEncoder:
    """Text to ids: added tokens of text are found first, what is between them is SentencePiece's.

    Args:
        model: a serialized ModelProto, which needn't have the added tokens.
        spaces: which stretches of text get a space in front.
        added: the tokens of text.

    Raises:
        CheckpointError: the bytes are no SentencePiece model.
    """

    def __init__(self, model: bytes, spaces: SpaceRule, added: Sequence[AddedToken]) -> None:
        normalized = [token for token in added if spaces is SpaceRule.PREPEND and token.has("normalized")]
        if spaces is SpaceRule.PREPEND and not normalized:
            spaces = SpaceRule.MODEL  # then that is the same
        self.spaces, self.added = spaces, added
        self._processor = _load(model if spaces is SpaceRule.MODEL else without_dummy_prefix(model))
        self._added = AddedTokenFinder(token for token in added if token not in normalized)
        self._normalized = AddedTokenFinder(replace(token, text=_spaced(" " + token.text)) for token in normalized)

    def encode(self, text: str, *, at_start: bool) -> list[int]:
        """The ids of `text`; `at_start`: nothing stands before it."""
        ids: list[int] = []
        for i, part in enumerate(self._added.split(text)):
            ids += [part] if isinstance(part, int) else self._stretch(part, at_start=at_start and i == 0)
        return ids

    def _stretch(self, text: str, *, at_start: bool) -> list[int]:
        if self.spaces is not SpaceRule.MODEL:
            text = self._with_space(_spaced(text), at_start=at_start)
        ids: list[int] = []
        for part in self._normalized.split(text):
            ids += [part] if isinstance(part, int) else self._processor.encode(part)
        return ids

    def _with_space(self, text: str, *, at_start: bool) -> str:
        wanted = self.spaces is SpaceRule.ALWAYS or (self.spaces is SpaceRule.FIRST and at_start)
        if self.spaces is SpaceRule.PREPEND or (wanted and not text.startswith(SPACE)):
            return SPACE + text
        return text


class SentencePieceTokenizer(Tokenizer):
    """Meta's tokenizer for Llama 1 and 2. BOS, EOS and padding are those the model file names.

    Args:
        processor: the model, with all tokens in its vocabulary.
        encoder: how text becomes ids, where that isn't as the model itself does it.
    """

    utf8_errors = REPLACE_EACH_BYTE
    adds_bos = True

    def __init__(self, processor: sentencepiece.SentencePieceProcessor, encoder: TextEncoder | None = None) -> None:
        self._processor = processor
        self._encoder = encoder
        n = self.n_words = processor.vocab_size()
        self.bos_id = self._optional(processor.bos_id())
        self.eos_id = self._optional(processor.eos_id())
        self.pad_id = processor.pad_id()
        self.stop_ids = frozenset() if self.eos_id is None else frozenset({self.eos_id})
        pieces = self.pieces = [processor.id_to_piece(i) for i in range(n)]
        self.control_tokens = {pieces[i]: i for i in range(n) if processor.is_control(i)}
        self.special_ids = frozenset(i for i in range(n) if processor.is_control(i) or processor.is_unknown(i))
        self.byte_ids = frozenset(i for i in range(n) if processor.is_byte(i))
        self._bytes = [self._piece_bytes(i, piece) for i, piece in enumerate(pieces)]
        self._probe_spaces(pieces)
        self.strips_leading_space &= self.spaces is not SpaceRule.NEVER

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
            raise CheckpointError(f"tokenizer {path}: {what_it_is(data) or error}") from error

    @classmethod
    def from_proto(cls, data: bytes, encoder: TextEncoder | None = None) -> SentencePieceTokenizer:
        """From the bytes of a serialized ModelProto; `encoder` as for the class.

        Raises:
            CheckpointError: the bytes are no SentencePiece model.
        """
        return cls(_load(data), encoder)

    @property
    def spaces(self) -> SpaceRule:
        """Which stretches of text get a space in front."""
        return SpaceRule.MODEL if self._encoder is None else self._encoder.spaces

    def flags(self) -> dict[str, Mapping[str, bool]]:
        """How added tokens are found, where that isn't just as they are written."""
        added = () if self._encoder is None else self._encoder.added
        return {**{token.text: token.flags for token in added}, **self.control_flags}

    def proto(self) -> bytes:
        """The serialized ModelProto, as in a `tokenizer.model`."""
        return bytes(self._processor.serialized_model_proto())

    def encode(self, s: str, bos: bool, eos: bool) -> list[int]:
        return self._frame(self._plain(s, at_start=True), bos, eos)

    def _plain(self, text: str, *, at_start: bool) -> list[int]:
        text = well_formed(text)
        return (
            list(self._processor.encode(text))
            if self._encoder is None
            else self._encoder.encode(text, at_start=at_start)
        )

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


def _load(data: bytes) -> sentencepiece.SentencePieceProcessor:
    if not data:
        raise CheckpointError("the SentencePiece model is empty")
    processor = sentencepiece.SentencePieceProcessor()
    try:
        processor.LoadFromSerializedProto(data)
    except RuntimeError as error:
        raise CheckpointError(f"not a usable SentencePiece model ({str(error).strip()})") from error
    return processor


def _spaced(text: str) -> str:
    return text.replace(" ", SPACE)


def is_tiktoken(data: bytes) -> bool:
    """Whether `data` begins as a tiktoken vocabulary does: a piece in base 64 and its rank 0."""
    return data[:512].split(b"\n")[0].rstrip().endswith(b"== 0")


def what_it_is(data: bytes) -> str | None:
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
    if is_tiktoken(data):
        return "a tiktoken vocabulary (Llama 3), not a SentencePiece model; use the checkpoint's GGUF or tokenizer.json"
    return None

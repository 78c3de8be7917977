"""BPE over SentencePiece's pieces ("▁" for a space, bytes as "<0x41>"), as in Llama 2's `tokenizer.json`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from tokenizers import decoders

from model.config import CheckpointError
from model.tokenizer.base import REPLACE_EACH_BYTE, Tokenizer, well_formed
from model.tokenizer.bpe import PreTokenizer, backend_rules, later_backend, make_backend
from model.tokenizer.proto import BYTE, CONTROL, NORMAL, SPACE, UNKNOWN, UNUSED

BYTE_PIECE = re.compile("<0x[0-9A-F]{2}>")


class MetaspaceTokenizer(Tokenizer):
    """A SentencePiece vocabulary as the `tokenizers` library merges it.

    Text that SentencePiece's own decoder and the library's treat differently (bytes that are no UTF-8) is decoded
    as SentencePiece does it: U+FFFD for each bad byte, whole characters beside it kept, which can be streamed.

    Args:
        pieces: text of each token.
        merges: pairs of pieces, first merged first.
        kinds: NORMAL ... BYTE, one per piece.
        pre: how text is normalized and cut before merging.
        decoder: the file's decoder; only asked whether it drops a leading space.
        unknown: text of the token for characters that have neither a piece nor byte tokens.
        fuse_unknown: whether several of them in a row are one token.

    Raises:
        CheckpointError: pieces and merges that don't fit together, or a decoder that isn't SentencePiece's.
    """

    utf8_errors = REPLACE_EACH_BYTE

    def __init__(
        self,
        pieces: Sequence[str],
        merges: Sequence[tuple[str, str]],
        kinds: Sequence[int],
        pre: PreTokenizer,
        decoder: decoders.Decoder | None,
        *,
        unknown: str | None = None,
        fuse_unknown: bool = False,
    ) -> None:
        self.n_words = len(pieces)
        self._unknown = unknown
        self.pieces, self.kinds = pieces, kinds
        self.control_tokens = {pieces[i]: i for i, kind in enumerate(kinds) if kind == CONTROL}
        self.special_ids = frozenset(i for i, kind in enumerate(kinds) if kind in (CONTROL, UNKNOWN))
        self.byte_ids = frozenset(i for i, kind in enumerate(kinds) if kind == BYTE)
        self._bytes = [_piece_bytes(piece, kind) for piece, kind in zip(pieces, kinds, strict=True)]
        options: dict[str, Any] = {"byte_fallback": True, "fuse_unk": fuse_unknown}
        if unknown is not None and len(self.byte_ids) < 256:
            if unknown not in pieces:
                raise CheckpointError(f"the unknown token {unknown!r} isn't in the vocabulary")
            # the library needs it in its vocabulary; no merge leads to it, so no text becomes it by its spelling
            options["unk_token"] = unknown
            kinds = [NORMAL if piece == unknown else kind for piece, kind in zip(pieces, kinds, strict=True)]
            merges = [pair for pair in merges if unknown not in (*pair, pair[0] + pair[1])]
        self._backend = make_backend(pieces, merges, kinds, pre, **options)
        self._later = later_backend(self._backend, pre, pieces, kinds)
        self.strips_leading_space = _strips_leading_space(decoder)
        if decoder is not None:
            self._backend.decoder = decoder

    def encode(self, s: str, bos: bool, eos: bool) -> list[int]:
        return self._frame(self._plain(s, at_start=True), bos, eos)

    def _plain(self, text: str, *, at_start: bool) -> list[int]:
        backend = self._backend if at_start else self._later
        return list(backend.encode(well_formed(text), add_special_tokens=False).ids)

    def rules(self) -> dict[str, Any]:
        """Normalizer, pre-tokenizer, decoder, added tokens and model (with its merges) as in a `tokenizer.json`."""
        rules = backend_rules(self._backend)
        rules["model"]["unk_token"] = self._unknown
        return rules


def _piece_bytes(piece: str, kind: int) -> bytes:
    if kind in (CONTROL, UNKNOWN, UNUSED):
        return b""
    if kind == BYTE:
        return bytes([int(piece[3:-1], 16)])
    return piece.replace(SPACE, " ").encode()


def _strips_leading_space(decoder: decoders.Decoder | None) -> bool:
    """Whether the decoder drops one space in front; its other work is done here, so it must be the usual one."""
    sample = [SPACE + "x", SPACE + SPACE + "y", "<0xC3>", "<0xA9>"]
    try:
        text = " x  y\u00e9" if decoder is None else decoder.decode(sample)
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"decoder: {error}") from error
    if text not in ("x  y\u00e9", " x  y\u00e9"):
        raise CheckpointError(f"decoder makes {text!r} of {sample}, which isn't SentencePiece's way")
    return text[0] == "x"

"""What every tokenizer offers, and how ids become text, whole or one at a time."""

from __future__ import annotations

import codecs
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

REPLACE_EACH_BYTE = "replace-each-byte"
"""Name of the UTF-8 error handler that writes one U+FFFD per bad byte, as SentencePiece's decoder does."""


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error(REPLACE_EACH_BYTE, _replace_each_byte)


class Tokenizer(ABC):
    """Text to ids and back. Instances may be shared between threads.

    A subclass sets the attributes and `_bytes`, what each id stands for, and implements `encode`.
    """

    n_words: int
    pieces: Sequence[str]
    """Each token as the vocabulary writes it."""
    bos_id: int | None = None
    eos_id: int | None = None
    pad_id: int = -1
    """-1 where the vocabulary has no padding token."""
    stop_ids: frozenset[int] = frozenset()
    """Ids that end a generation."""
    special_ids: frozenset[int] = frozenset()
    """Control and unknown tokens: never shown as text."""
    adds_bos: bool = False
    """Whether a prompt for text completion starts with BOS."""
    chat_template: str | None = None
    """The checkpoint's own jinja2 template."""
    strips_leading_space: bool = False
    """SentencePiece: decoding drops the space in front of the first piece (encoding put it there)."""
    strips_blank_pieces: bool = False
    """SentencePiece with `remove_extra_whitespaces`: pieces that are one space are dropped until there is text."""
    byte_ids: frozenset[int] = frozenset()
    """Byte-fallback tokens; the space among them is never dropped."""
    utf8_errors: str = "replace"
    """How invalid UTF-8 becomes U+FFFD: "replace" (one for each broken character) or REPLACE_EACH_BYTE."""
    control_tokens: dict[str, int]
    """Text of each control token -> its id."""
    control_flags: Mapping[str, Mapping[str, bool]] = {}
    """Text of a control token -> how it is found (single_word, lstrip, rstrip, normalized), where the files say it."""
    _bytes: Sequence[bytes]

    @abstractmethod
    def encode(self, s: str, bos: bool, eos: bool) -> list[int]:
        """The ids of `s`, between BOS and EOS where asked for (and where the vocabulary has them).

        The text of a control token is encoded as the plain text it is. Lone surrogates, which no UTF-8 text can
        hold, are read as U+FFFD.
        """

    def encode_parts(self, parts: Sequence[str | int]) -> list[int]:
        """The ids of a text in parts: control tokens by their ids, between them plain text.

        Which parts get a space in front (SentencePiece's "\u2581") is as the checkpoint's files say.
        """
        ids: list[int] = []
        for i, part in enumerate(parts):
            ids += [part] if isinstance(part, int) else self._plain(part, at_start=i == 0)
        return ids

    def _plain(self, text: str, *, at_start: bool) -> list[int]:
        """The ids of a stretch of text; `at_start`: nothing stands before it."""
        return self.encode(text, bos=False, eos=False)

    def decode(self, t: Sequence[int]) -> str:
        """The text of `t`: control tokens left out, each invalid UTF-8 byte or sequence as U+FFFD.

        Raises:
            ValueError: naming an id that isn't in the vocabulary.
        """
        decoder = TextDecoder(self)
        return "".join([decoder.feed(token_id) for token_id in t]) + decoder.finish()

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for; empty for a control token.

        Raises:
            ValueError: the id isn't in the vocabulary.
        """
        if not 0 <= token_id < self.n_words:
            raise ValueError(f"token id {token_id} is outside the vocabulary of {self.n_words} (0..{self.n_words - 1})")
        return self._bytes[token_id]

    def control_token(self, text: str) -> int | None:
        """The id of the control token with exactly this text, e.g. "<s>"; None where there is none."""
        return self.control_tokens.get(text)

    def _frame(self, ids: list[int], bos: bool, eos: bool) -> list[int]:
        if bos and self.bos_id is not None:
            ids.insert(0, self.bos_id)
        if eos and self.eos_id is not None:
            ids.append(self.eos_id)
        return ids


class TextDecoder:
    """Turns ids into text one at a time, in time linear in their number."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors=tokenizer.utf8_errors)
        self._at_start = tokenizer.strips_leading_space

    def feed(self, token_id: int) -> str:
        """The text that is complete with this token: whole characters only.

        Raises:
            ValueError: the id isn't in the vocabulary; the decoder is as before.
        """
        data = self._tokenizer.token_bytes(token_id)
        if not data:  # with byte fallback only neighboring byte tokens form a character
            return self.finish() if self._tokenizer.byte_ids else ""
        if self._at_start:
            data = self._strip(token_id, data)
        return self._utf8.decode(data)

    def finish(self) -> str:
        """U+FFFD for a character that wasn't completed, or nothing."""
        return self._utf8.decode(b"", final=True)

    @property
    def incomplete(self) -> bool:
        """Whether the last bytes fed are the beginning of a character."""
        return bool(self._utf8.getstate()[0])

    def _strip(self, token_id: int, data: bytes) -> bytes:
        if data[:1] == b" " and token_id not in self._tokenizer.byte_ids:
            data = data[1:]
            self._at_start = not data and self._tokenizer.strips_blank_pieces
        else:
            self._at_start = False
        return data


def well_formed(s: str) -> str:
    """`s` with surrogate pairs joined and lone surrogates replaced by U+FFFD, so that it has a UTF-8 form."""
    if s.isascii():
        return s
    return s.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")

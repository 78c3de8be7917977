"""Added tokens in a text: where they stand, what spaces they take with them, and what is put after them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

WHITESPACE = "\t\n\x0b\x0c\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B)))
"""Unicode's white space, which `lstrip` and `rstrip` take."""
FLAGS = ("single_word", "lstrip", "rstrip", "normalized")
"""What a file says about how an added token is found."""
_SPACES = re.compile(f"[{WHITESPACE}]*")
_WORD = re.compile(r"\w")


class SpaceRule(Enum):
    """Which stretches of text between added and control tokens get SentencePiece's "\u2581" in front."""

    MODEL = "model"
    """Each one, as the SentencePiece model itself does it: also one that begins with a space."""
    PREPEND = "prepend"
    """As MODEL, by the normalizer of a `tokenizer.json`: tokens found in normalized text must follow a space."""
    ALWAYS = "always"
    """Each one that doesn't begin with a space."""
    FIRST = "first"
    """The one that the text begins with, if it doesn't begin with a space."""
    NEVER = "never"


@dataclass(frozen=True)
class AddedToken:
    """A token that was added to a vocabulary: a control token where `special`, else text that is never cut."""

    token_id: int
    text: str
    special: bool = False
    flags: Mapping[str, bool] = field(default_factory=dict)
    """single_word, lstrip, rstrip, normalized: how the text is found."""

    def has(self, flag: str) -> bool:
        """Whether a flag is set; where the file doesn't say, only text is looked for in the normalized text."""
        return self.flags.get(flag, flag == "normalized" and not self.special)


class AddedTokenFinder:
    """Finds tokens as the `tokenizers` library does: the first that begins, and of those the longest."""

    def __init__(self, tokens: Iterable[AddedToken]) -> None:
        self._tokens = {token.text: token for token in tokens if token.text}
        self._pattern = alternatives(self._tokens)

    def split(self, text: str) -> list[str | int]:
        """`text` as the ids of the tokens in it and the text between them, none of it empty."""
        parts: list[str | int] = []
        begin = 0
        for hit in self._pattern.finditer(text):
            token = self._tokens[hit[0]]
            if token.has("single_word") and _inside_a_word(text, hit.start(), hit.end()):
                continue
            plain = text[begin : hit.start()]
            parts += [plain.rstrip(WHITESPACE) if token.has("lstrip") else plain, token.token_id]
            begin = _SPACES.match(text, hit.end()).end() if token.has("rstrip") else hit.end()  # type: ignore[union-attr]
        return [part for part in (*parts, text[begin:]) if part != ""]


def alternatives(texts: Collection[str]) -> re.Pattern[str]:
    """What matches any of `texts`, the longest first; nothing where there are none."""
    longest_first = sorted(filter(None, texts), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) if longest_first else r"(?!)")


def _inside_a_word(text: str, begin: int, end: int) -> bool:
    return bool(_WORD.match(text[begin - 1 : begin]) or _WORD.match(text, end))

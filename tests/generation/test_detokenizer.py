"""Deltas, held text, stop strings and pieces, on real small tokenizers and random ids."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from generation.detokenizer import Detokenizer, StopMatcher
from model.tokenizer.tokenizer import SentencePieceTokenizer, Tokenizer, tokenizer_from_gguf
from tests.helpers.tiny import train_sentencepiece
from tests.helpers.tiny_bpe import bpe_metadata

SPM, BPE = "sentencepiece", "bpe"


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    path: Path = train_sentencepiece(tmp_path_factory.mktemp("spm") / "tokenizer.model")
    return {SPM: SentencePieceTokenizer.from_file(path), BPE: tokenizer_from_gguf(bpe_metadata())}


class Letters(Tokenizer):
    """Each token is a given text, to place token borders at will."""

    def __init__(self, *texts: str | bytes) -> None:
        self._bytes = [text.encode() if isinstance(text, str) else text for text in texts]
        self.n_words = len(texts)
        self.control_tokens = {}

    def encode(self, s: str, bos: bool, eos: bool) -> list[int]:
        raise NotImplementedError


def deltas(texts: list[str | bytes], stop: list[str]) -> tuple[list[str], Detokenizer]:
    """What each push returns, then what `finish` returns."""
    detokenizer = Detokenizer(Letters(*texts), stop)
    return [*(detokenizer.push(i) for i in range(len(texts))), detokenizer.finish()], detokenizer


ids_of = st.one_of(st.integers(0, 383), st.integers(0, 260))
words = st.sampled_from(["你好", "🙂", "👩‍👩‍👧", "é", " the", "the ", "\ufffd", "\n", " ", "<s>"])


@st.composite
def streams(draw: st.DrawFn) -> tuple[str, list[int | str], list[int]]:
    """A tokenizer's name, a mix of ids and of words to be encoded, and numbers to choose stop strings by."""
    parts = draw(st.lists(st.one_of(ids_of, words), max_size=12))
    return draw(st.sampled_from([SPM, BPE])), parts, draw(st.lists(st.integers(0, 99), max_size=6))


@settings(max_examples=600, deadline=None)
@given(streams())
@example((SPM, [3 + 0xE4, 1, 3 + 0xB8, 2], []))
@example((BPE, [50, 1, 51, 2, 2], []))
def test_stream_equals_decode(tokenizers: dict[str, Tokenizer], stream: tuple[str, list[int | str], list[int]]) -> None:
    """B061, B063, B067, B076, B238, B247: deltas and pieces joined are the whole text, cut before the first stop."""
    name, parts, numbers = stream
    tokenizer = tokenizers[name]
    ids: list[int] = []
    for part in parts:
        ids += [part] if isinstance(part, int) else tokenizer.encode(part, bos=False, eos=False)
    text = tokenizer.decode(ids)
    begins = [(number * 7919 % len(text), 1 + number % 4) for number in numbers if text]
    stops = [text[begin : begin + length] for begin, length in begins]
    found = [text.index(stop) for stop in stops]
    detokenizer = Detokenizer(tokenizer, stops)
    emitted, pieces = "", []
    for token_id in ids:
        emitted += detokenizer.push(token_id)
        pieces += detokenizer.take_pieces()
        assert emitted.startswith("".join(pieces))
        assert not any(stop in emitted for stop in stops)
    emitted += detokenizer.finish()
    pieces += detokenizer.take_pieces()
    assert emitted == (text[: min(found)] if found else text)
    assert "".join(pieces) == emitted
    assert len(pieces) == len(ids)
    assert detokenizer.stopped == bool(found)
    assert (detokenizer.finish(), detokenizer.take_pieces()) == ("", [])


@settings(deadline=None)
@given(
    st.text("ab", max_size=20),
    st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=5),
    st.lists(st.integers(0, 20)),
)
def test_stop_matcher(text: str, stops: list[str], cuts: list[int]) -> None:
    """Against a search in the whole text, however it is cut; between parts only a stop's beginning is held back."""
    text += "c" + text
    borders = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    matcher = StopMatcher(stops)
    emitted = ""
    for begin, end in itertools.pairwise(borders):
        emitted += matcher.feed(text[begin:end])
        if not matcher.found and not any(stop in text[:end] for stop in stops):
            held = max((n for stop in stops for n in range(len(stop)) if text[:end].endswith(stop[:n])), default=0)
            assert emitted == text[: end - held]
    emitted += matcher.finish()
    found = [text.index(stop) for stop in stops if stop in text]
    assert emitted == (text[: min(found)] if found else text)
    assert matcher.found == bool(found)


def test_half_a_character_waits() -> None:
    """B061, B263: one character over four tokens; one left unfinished at the end comes once, as U+FFFD."""
    out, detokenizer = deltas([b"\xf0", b"\x9f", b"\x99", b"\x82", "!", b"\xf0\x9f"], [])
    assert out == ["", "", "", "🙂", "!", "", "\ufffd"]
    assert detokenizer.take_pieces() == ["", "", "", "🙂", "!", "\ufffd"]


def test_only_bad_bytes_are_replaced() -> None:
    """B062, B063: what follows a bad byte is kept, and so is a genuine U+FFFD."""
    out, _ = deltas([b"\xff", b"a\xe4", b"b", "\ufffd"], [])
    assert out == ["\ufffd", "a", "\ufffdb", "\ufffd", ""]


def test_leading_space(tokenizers: dict[str, Tokenizer]) -> None:
    """B069, B070: one space in front of the first rendered piece is dropped, nothing else."""
    tokenizer = tokenizers[SPM]
    the = tokenizer.encode("the", bos=False, eos=False)
    for ids, text in (
        ([*the, *the], "the the"),
        ([1, *the], "the"),
        (tokenizer.encode("  x", bos=False, eos=False), "  x"),
        ([3 + ord("x"), *the], "x the"),
    ):
        detokenizer = Detokenizer(tokenizer)
        assert "".join(detokenizer.push(i) for i in ids) + detokenizer.finish() == text


@pytest.mark.parametrize(
    ("texts", "stop", "expected", "stopped"),
    [
        pytest.param(["ABC", "DEF", "GHI", "J", "K"], ["DEFGHIJ"], ["ABC", "", "", "", "", ""], True, id="B073"),
        pytest.param(["hi", "\nUser", ":", "x"], ["\nUser:"], ["hi", "", "", "", ""], True, id="B074"),
        pytest.param(["hi", "\nUser", " x"], ["\nUser:"], ["hi", "", "\nUser x", ""], False, id="B074 no match"),
        pytest.param(["aaaa", "xx", "b"], ["x" * 40], ["aaaa", "", "xxb", ""], False, id="B075"),
        pytest.param(["a", "gamma delta", "b"], ["ma d"], ["a", "gam", "", ""], True, id="B076"),
        pytest.param(["b", "as"], ["ask"], ["b", "", "as"], False, id="B077"),
        pytest.param([" Alice", "!"], ["\n", "Alice:"], [" ", "Alice!", ""], False, id="B247"),
        pytest.param(["\n"], ["\n"], ["", ""], True, id="B181"),
        pytest.param(["aaa", "c"], ["aac"], ["a", "", ""], True, id="the match begins inside a failed one"),
        pytest.param(["a b c"], ["b c", "a b c", "c"], ["", ""], True, id="first in the text"),
        pytest.param(["ab", "c", "d"], ["b", "abcx"], ["", "", "a", ""], True, id="an earlier one may follow"),
        pytest.param(["ab"], ["b", "abcx"], ["", "a"], True, id="an earlier one doesn't follow"),
        pytest.param([b"\xe4", b"\xe4"], ["\ufffd\ufffd"], ["", "", ""], True, id="found at the end"),
    ],
)
def test_stop_strings(texts: list[str | bytes], stop: list[str], expected: list[str], stopped: bool) -> None:
    out, detokenizer = deltas(texts, stop)
    assert out == expected
    assert detokenizer.stopped == stopped
    pieces = detokenizer.take_pieces()
    assert "".join(pieces) == "".join(expected)
    assert len(pieces) == len(texts)


def test_pieces_come_when_certain() -> None:
    detokenizer = Detokenizer(Letters("a", "x", "y", b"\xe4", "b"), ["xyz"])
    taken = []
    for token_id in range(5):
        detokenizer.push(token_id)
        taken.append(detokenizer.take_pieces())
    assert taken == [["a"], [], [], [], ["x", "y", "", "\ufffdb"]]


def test_pieces_are_cut_at_the_stop() -> None:
    detokenizer = Detokenizer(Letters("one ", "two th", "ree", " four"), ["three"])
    assert [detokenizer.push(i) for i in range(4)] == ["one ", "two ", "", ""]
    assert detokenizer.take_pieces() == ["one ", "two ", "", ""]


def test_an_unfinished_character_stays_with_its_token() -> None:
    detokenizer = Detokenizer(Letters("a", b"\xe4", b""))
    assert [detokenizer.push(i) for i in range(3)] == ["a", "", ""]
    assert detokenizer.take_pieces() == ["a"]
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.take_pieces() == ["\ufffd", ""]


def test_after_the_end_nothing_is_taken_in() -> None:
    detokenizer = Detokenizer(Letters("a", "b"))
    assert detokenizer.push(0) + detokenizer.finish() == "a"
    assert detokenizer.push(1) == ""
    assert detokenizer.finish() == ""
    assert detokenizer.take_pieces() == ["a", ""]


def test_an_unknown_id_changes_nothing() -> None:
    detokenizer = Detokenizer(Letters("a"))
    with pytest.raises(ValueError, match="token id 7"):
        detokenizer.push(7)
    assert detokenizer.push(0) == "a"
    assert detokenizer.take_pieces() == ["a"]


def test_an_empty_stop_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        Detokenizer(Letters("a"), ["a", ""])

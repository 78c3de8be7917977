"""Requests that are refused before they cost anything."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handler.errors import InvalidRequest, QueueFull
from handler.requests.limits import check_queue, check_size, longest_token
from handler.settings import HandlerSettings
from model.tokenizer.spm import SentencePieceTokenizer
from model.tokenizer.tokenizer import Tokenizer
from tests.helpers.tiny import train_sentencepiece


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return SentencePieceTokenizer.from_file(train_sentencepiece(tmp_path_factory.mktemp("spm") / "tokenizer.model"))


def settings(max_waiting: int | None) -> HandlerSettings:
    return HandlerSettings(checkpoint=Path("x"), max_waiting=max_waiting)


def test_queue() -> None:
    check_queue(9, settings(10))
    check_queue(10**6, settings(None))
    with pytest.raises(QueueFull, match=r"^10 prompts wait in the engine, expected fewer than 10 \(max_waiting\)"):
        check_queue(10, settings(10))


def test_longest_token(tokenizer: Tokenizer) -> None:
    longest = longest_token(tokenizer)
    assert longest == max(len(tokenizer.token_bytes(i)) for i in range(tokenizer.n_words)) > 1


def test_one_token_may_stand_for_any_text_without_byte_fallback(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "byte_ids", frozenset())
    assert longest_token(tokenizer) is None
    check_size(["x" * 10**6], "prompt", None, 16)


def test_a_text_that_can_not_fit_is_told_in_numbers() -> None:
    check_size(["x" * 60], "prompt", 4, 16)
    with pytest.raises(
        InvalidRequest, match=r"prompt has 61 bytes .* at least 16 tokens .* expected at most 15"
    ) as hit:
        check_size(["x" * 31, " \n", "é" * 15], "prompt", 4, 16)
    assert (hit.value.param, hit.value.code) == ("prompt", "context_length_exceeded")


@given(text=st.text(max_size=80), context=st.integers(2, 40))
def test_no_text_that_fits_is_refused(tokenizer: Tokenizer, text: str, context: int) -> None:
    try:
        check_size([text], "prompt", longest_token(tokenizer), context)
    except InvalidRequest:
        assert len(tokenizer.encode(text, bos=False, eos=False)) > context - 1

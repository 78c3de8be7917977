"""What a dialect needs to know of a model that isn't there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from generation.chat_format import Llama2ChatFormat
from handler.requests.encode import ServingContext
from handler.settings import HandlerSettings
from model.tokenizer.tokenizer import SentencePieceTokenizer

MAX_SEQ_LEN = 64


def make_context(tokenizer: SentencePieceTokenizer, **settings: Any) -> ServingContext:
    return ServingContext(
        tokenizer,
        Llama2ChatFormat(tokenizer),
        HandlerSettings(checkpoint=Path("x"), **settings),
        tokenizer.n_words,
        MAX_SEQ_LEN,
        "llama2",
        aliases=frozenset({"other-name"}),
    )

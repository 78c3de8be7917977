"""From a checked request of either dialect to the engine's requests: tokenizing, limits, sampling."""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from generation.chat_format import ChatFormat, ChatFormatError
from generation.detokenizer import Detokenizer
from generation.interface import Dialog, Request, SamplingParams
from handler.errors import InvalidRequest
from handler.requests.fields import Prompts
from handler.requests.limits import check_size, longest_token
from handler.requests.messages import shorten
from handler.settings import HandlerSettings

if TYPE_CHECKING:
    from generation.structured.grammar import Compiled, Constraints
    from model.tokenizer.tokenizer import Tokenizer

CONFIGURABLE = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
)
"""Fields of SamplingParams that the configuration and the requests of both dialects have under the same name."""


@dataclass(frozen=True)
class ServingContext:
    """What a dialect needs to know of the model that is served."""

    tokenizer: Tokenizer
    chat_format: ChatFormat
    settings: HandlerSettings
    vocab_size: int
    max_seq_len: int
    model_name: str
    aliases: frozenset[str] = frozenset()
    """Other names by which a request may call the model."""
    constraints: Constraints | None = None
    """Maker of what answers must look like."""
    created: int = field(default_factory=lambda: int(time.time()))
    """When the model was ready, in seconds since 1970."""

    @cached_property
    def longest_token(self) -> int | None:
        """See `limits.longest_token`."""
        return longest_token(self.tokenizer)


@dataclass(frozen=True)
class Wanted:
    """What one HTTP request wants of its prompts, in neither dialect's terms."""

    prompts: list[list[int]]
    n: int
    """Choices per prompt."""
    max_tokens: int | None
    """Most new tokens; None = what fits."""
    seed: int | None
    """Of a prompt's first choice; the next ones draw with the numbers after it."""
    sampling: dict[str, Any]
    """The other fields of SamplingParams."""
    echo: bool = False
    chat: bool = False
    form: Compiled | None = None
    """What each answer must look like."""


def make_requests(job_id: str, wanted: Wanted, context: ServingContext) -> Iterator[tuple[Request, list[str] | None]]:
    """Engine requests, prompt by prompt and choice by choice, each with its prompt's pieces where they are echoed.

    Raises:
        InvalidRequest: naming the field, its value and the limit.
    """
    # A form says itself where the answer ends; the chat format's markers could cut its text before.
    own_stops = context.chat_format.stop_strings if wanted.chat and wanted.form is None else ()
    stop = wanted.sampling["stop"] + own_stops
    limit = context.settings.request_timeout
    deadline = None if limit is None else time.monotonic() + limit
    number = 0
    for ids in wanted.prompts:
        echo = _pieces(context.tokenizer, ids) if wanted.echo else None
        tokenizer = _continuing(context.tokenizer) if echo and any(echo) else context.tokenizer
        room = context.max_seq_len - len(ids)
        for i in range(wanted.n):
            params = _params(wanted, context, room, i)
            constraint = None if wanted.form is None else wanted.form(continuing=tokenizer is not context.tokenizer)
            reader = Detokenizer(tokenizer, stop)
            yield Request(f"{job_id}/{number}", ids, params, reader, deadline, constraint), echo
            number += 1


def check_amount(prompts: int, n: int, settings: HandlerSettings, param: str) -> None:
    """Raise InvalidRequest where `prompts` times `n` answers are too many; `param` is the prompts' field."""
    if prompts * n > settings.max_prompts:
        raise InvalidRequest(
            f"{prompts} prompts with n = {n} make {prompts * n} answers, "
            f"expected at most {settings.max_prompts} (max_prompts) in one request",
            param="n" if prompts <= settings.max_prompts else param,
        )


def encode_prompts(prompts: Prompts, context: ServingContext, *, new: int = 1) -> list[list[int]]:
    """The ids of each prompt; `new` tokens must fit behind it.

    Raises:
        InvalidRequest: an id out of range, an empty prompt, or one that is too long.
    """
    encoded = []
    for i, item in enumerate(prompts.items):
        path = f"prompt[{i}]" if prompts.many else "prompt"
        if isinstance(item, str):
            check_size([item], path, context.longest_token, context.max_seq_len)
            ids = context.tokenizer.encode(item, bos=context.tokenizer.adds_bos, eos=False)
        else:
            ids = item
            check_ids(ids, path, context)
        encoded.append(fitting(ids, path, context, new))
    return encoded


def check_ids(ids: list[int], path: str, context: ServingContext) -> None:
    """Raise InvalidRequest where an id isn't in the vocabulary."""
    wrong = next((k for k, token in enumerate(ids) if not 0 <= token < context.vocab_size), None)
    if wrong is not None:
        raise InvalidRequest(
            f"{path}[{wrong}] is {shorten(ids[wrong])}, expected a token id between 0 and {context.vocab_size - 1}",
            param=path,
        )


def encode_dialog(dialog: Dialog, path: str, context: ServingContext, *, continued: bool) -> list[int]:
    """The ids of a dialog that was sent as field `path`, however many.

    `continued`: the last message is the assistant's, and goes on.

    Raises:
        InvalidRequest: naming the message and what is wrong with it, or the lengths.
    """
    check_size([message["content"] for message in dialog], path, context.longest_token, context.max_seq_len)
    try:
        return context.chat_format.encode(dialog, continue_final_message=continued)
    except ChatFormatError as error:
        # The format calls the dialog "messages", at the start of both.
        param = re.sub(r"^messages", path, error.param)
        raise InvalidRequest(re.sub(r"^messages", path, error.message), param=param) from None


def fitting(ids: list[int], path: str, context: ServingContext, new: int = 1) -> list[int]:
    """`ids`, which were sent as field `path`.

    Raises:
        InvalidRequest: there are none, or so many that `new` tokens don't fit behind them.
    """
    if not ids:
        raise InvalidRequest(f"{path} is empty: it has no tokens, expected at least 1", param=path)
    if len(ids) > context.max_seq_len - new:
        behind = " and at least one new token" if new else ""
        raise InvalidRequest(
            f"{path} has {len(ids)} tokens, expected at most {context.max_seq_len - new}: "
            f"the context of {context.max_seq_len} tokens must hold the prompt{behind}",
            param=path,
            code="context_length_exceeded",
        )
    return ids


def _params(wanted: Wanted, context: ServingContext, room: int, choice: int) -> SamplingParams:
    """The sampling of choice number `choice` of a prompt that leaves `room` tokens of the context."""
    values = wanted.sampling | {"top_k": min(wanted.sampling["top_k"], context.vocab_size)}
    for token, _ in values["logit_bias"]:
        if token >= context.vocab_size:
            raise InvalidRequest(
                f"logit_bias has the key {token}, expected a token id between 0 and {context.vocab_size - 1}",
                param="logit_bias",
            )
    limits = [value for value in (room, wanted.max_tokens, context.settings.max_tokens_limit) if value is not None]
    try:
        return SamplingParams(
            max_tokens=min(limits),
            seed=None if wanted.seed is None else wanted.seed + choice,
            prompt_logprobs=wanted.echo and values["logprobs"],
            **values,
        )
    except ValueError as error:
        name = re.match(r"\w+", str(error))
        raise InvalidRequest(str(error), param=name[0] if name else None) from None


def _pieces(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    """The text of each token of a prompt."""
    reader = Detokenizer(tokenizer)
    for token in ids:
        reader.push(token)
    reader.finish()
    return reader.take_pieces()


def _continuing(tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer for text that goes on: behind its prompt an answer keeps the space before its first word."""
    if tokenizer.strips_leading_space:
        tokenizer = copy.copy(tokenizer)
        tokenizer.strips_leading_space = False
    return tokenizer

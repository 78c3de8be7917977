"""The native route's dialect: a checked body becomes engine requests, their outputs become the reply.

build_job   body -> Job, with one engine request per prompt and choice
Job         outputs -> one JSON reply, or server-sent events (native_reply.py)
"""

from __future__ import annotations

import copy
import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from generation.chat_format import ChatFormat, ChatFormatError
from generation.detokenizer import Detokenizer
from generation.types import Request, SamplingParams

from .errors import InvalidRequest
from .native_reply import Choice, Job
from .request import Body, NativeRequest, Prompts
from .settings import HandlerSettings
from .validation import shorten

__all__ = ["Job", "ServingContext", "build_job"]

if TYPE_CHECKING:
    from model.tokenizer import Tokenizer

_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
)


@dataclass(frozen=True)
class ServingContext:
    """What a dialect needs to know of the model that is served."""

    tokenizer: Tokenizer
    chat_format: ChatFormat
    settings: HandlerSettings
    vocab_size: int
    max_seq_len: int
    model_name: str


def build_job(job_id: str, body: Body, context: ServingContext) -> Job:
    """Check and tokenize one HTTP request; nothing is generated yet.

    Raises:
        InvalidRequest: naming the field, its value and the limit.
    """
    asked = NativeRequest.read(body, context.settings.mode)
    _check_amount(asked, context.settings)
    prompts = _encode_dialogs(asked, context) if asked.prompt is None else _encode_prompts(asked.prompt, context)
    stop = (*asked.stop, *context.chat_format.stop_strings) if asked.chat else asked.stop
    choices: list[Choice] = []
    limit = context.settings.request_timeout
    deadline = None if limit is None else time.monotonic() + limit
    for ids in prompts:
        echo = _pieces(context.tokenizer, ids) if asked.echo else None
        tokenizer = _continuing(context.tokenizer) if echo and any(echo) else context.tokenizer
        for i in range(asked.n):
            params = _params(asked, context, context.max_seq_len - len(ids), i)
            request = Request(f"{job_id}/{len(choices)}", ids, params, Detokenizer(tokenizer, stop), deadline)
            choices.append(Choice(len(choices), request, context.tokenizer, echo))
    many = asked.n > 1 or asked.dialogs is not None or (asked.prompt is not None and asked.prompt.many)
    return Job(job_id, asked.stream, asked.chat, many, choices)


def _check_amount(asked: NativeRequest, settings: HandlerSettings) -> None:
    inputs = asked.prompt.items if asked.prompt is not None else asked.dialogs
    prompts = 1 if inputs is None else len(inputs)
    if prompts * asked.n > settings.max_prompts:
        raise InvalidRequest(
            f"{prompts} prompts with n = {asked.n} make {prompts * asked.n} answers, "
            f"expected at most {settings.max_prompts} in one request",
            param="n" if prompts <= settings.max_prompts else ("dialogs" if asked.chat else "prompt"),
        )


def _encode_prompts(prompts: Prompts, context: ServingContext) -> list[list[int]]:
    encoded = []
    for i, item in enumerate(prompts.items):
        path = f"prompt[{i}]" if prompts.many else "prompt"
        if isinstance(item, str):
            ids = context.tokenizer.encode(item, bos=context.tokenizer.adds_bos, eos=False)
        else:
            ids = item
            wrong = next((k for k, token in enumerate(ids) if not 0 <= token < context.vocab_size), None)
            if wrong is not None:
                raise InvalidRequest(
                    f"{path}[{wrong}] is {shorten(ids[wrong])}, "
                    f"expected a token id between 0 and {context.vocab_size - 1}",
                    param=path,
                )
        encoded.append(_fitting(ids, path, context))
    return encoded


def _encode_dialogs(asked: NativeRequest, context: ServingContext) -> list[list[int]]:
    if asked.dialog is not None:
        dialogs = {asked.sent_name("dialog"): asked.dialog}
    else:
        dialogs = {f"dialogs[{i}]": dialog for i, dialog in enumerate(asked.dialogs or [])}
    encoded = []
    for path, dialog in dialogs.items():
        try:
            ids = context.chat_format.encode(dialog, continue_final_message=asked.continue_final_message)
        except ChatFormatError as error:
            # The format calls the dialog "messages", at the start of both.
            param = re.sub(r"^messages", path, error.param)
            raise InvalidRequest(re.sub(r"^messages", path, error.message), param=param) from None
        encoded.append(_fitting(ids, path, context))
    return encoded


def _fitting(ids: list[int], path: str, context: ServingContext) -> list[int]:
    if not ids:
        raise InvalidRequest(f"{path} is empty: it has no tokens, expected at least 1", param=path)
    if len(ids) > context.max_seq_len - 1:
        raise InvalidRequest(
            f"{path} has {len(ids)} tokens, expected at most {context.max_seq_len - 1}: "
            f"the context of {context.max_seq_len} tokens must hold the prompt and at least one new token",
            param=path,
            code="context_length_exceeded",
        )
    return ids


def _params(asked: NativeRequest, context: ServingContext, room: int, choice: int) -> SamplingParams:
    """The sampling of choice number `choice` of a prompt that leaves `room` tokens of the context."""
    settings, given = context.settings, asked.model_fields_set
    values = {name: getattr(asked if name in given else settings, name) for name in _SAMPLING}
    values["top_k"] = min(values["top_k"], context.vocab_size)
    for token, _ in asked.logit_bias:
        if token >= context.vocab_size:
            raise InvalidRequest(
                f"logit_bias has the key {token}, expected a token id between 0 and {context.vocab_size - 1}",
                param="logit_bias",
            )
    seed = asked.seed if "seed" in given else settings.seed
    most = asked.max_gen_len if "max_gen_len" in given else settings.max_gen_len
    limits = [value for value in (room, most, settings.max_tokens_limit) if value is not None]
    logprobs = asked.logprobs or asked.top_logprobs > 0
    try:
        return SamplingParams(
            max_tokens=min(limits),
            logit_bias=asked.logit_bias,
            seed=None if seed is None else seed + choice,
            stop=asked.stop,
            ignore_eos=asked.ignore_eos,
            logprobs=logprobs,
            top_logprobs=asked.top_logprobs,
            prompt_logprobs=logprobs and asked.echo,
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

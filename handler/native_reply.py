"""The native route's reply: outputs of the engine become one JSON value, or server-sent events."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from generation.types import Output, Request, TokenLogprob

from .errors import InternalError, RequestError

if TYPE_CHECKING:
    from model.tokenizer import Tokenizer

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON doesn't have."""
_DONE = "data: [DONE]\n\n"
_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode
# Some clients split a stream at every line end Unicode knows; JSON escapes only the first 32 characters.
_LINE_ENDS = {ord(c): f"\\u{ord(c):04x}" for c in "\x85\u2028\u2029"}


class Choice:
    """The answer to one engine request, as far as it has come."""

    def __init__(self, index: int, request: Request, tokenizer: Tokenizer, echo: list[str] | None) -> None:
        self.index = index
        self.request = request
        self.tokenizer = tokenizer
        self.echo = echo
        self.finish_reason: str | None = None
        self.texts: list[str] = []
        self.tokens: list[str] = []
        self.logprobs: list[float | None] = []
        self.top: list[dict[str, float] | None] = []
        self.completion_tokens = 0
        # How much of the lists above went out as events.
        self._sent_texts = 0
        self._sent_tokens = 0

    def add(self, output: Output) -> None:
        if self.echo is not None and not self.texts:
            self._add_prompt(self.echo, output.prompt_logprobs or [])
        self.texts.append(output.text)
        if self.request.params.logprobs:
            self.tokens += output.pieces
            self._add_logprobs(output.logprobs)
        self.completion_tokens = output.completion_tokens
        self.finish_reason = output.finish_reason

    def _add_prompt(self, pieces: list[str], logprobs: list[TokenLogprob]) -> None:
        self.texts.append("".join(pieces))
        if self.request.params.logprobs:
            self.tokens += pieces
            unknown = len(pieces) - len(logprobs)  # the first token; all, where time ran out before the prompt was read
            self.logprobs += [None] * unknown
            self.top += [None] * unknown
            self._add_logprobs(logprobs)

    def _add_logprobs(self, logprobs: list[TokenLogprob]) -> None:
        self.logprobs += [_finite(item.logprob) for item in logprobs]
        if self.request.params.top_logprobs:
            self.top += [self._alternatives(item) for item in logprobs]

    def _alternatives(self, item: TokenLogprob) -> dict[str, float]:
        found: dict[str, float] = {}
        for token, logprob in item.top:
            # Tokens that are parts of characters share the text U+FFFD: the likeliest of them is kept.
            found.setdefault(self._text_of(token), _finite(logprob))
        return found

    def _text_of(self, token: int) -> str:
        data = self.tokenizer.token_bytes(token)
        if data:
            return data.decode("utf-8", "replace")
        return next((text for text, control in self.tokenizer.control_tokens.items() if control == token), "")

    @property
    def usage(self) -> dict[str, int]:
        prompt = len(self.request.prompt_ids)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self.completion_tokens,
            "total_tokens": prompt + self.completion_tokens,
        }

    def reply(self, *, chat: bool) -> dict[str, Any]:
        text = "".join(self.texts)
        value: dict[str, Any] = {"generation": {"role": "assistant", "content": text} if chat else text}
        return value | self._scores(0, len(self.tokens)) | {"finish_reason": self.finish_reason, "usage": self.usage}

    def _scores(self, start: int, stop: int) -> dict[str, Any]:
        """The fields of tokens start..stop-1, where log probabilities were asked for."""
        params = self.request.params
        if not params.logprobs:
            return {}
        value: dict[str, Any] = {"tokens": self.tokens[start:stop], "logprobs": self.logprobs[start:stop]}
        if params.top_logprobs:
            value["top_logprobs"] = self.top[start:stop]
        return value

    @property
    def pending(self) -> bool:
        """Whether there is text, or the end, that has not gone out."""
        return self.finish_reason is not None or any(self.texts[self._sent_texts :])

    def take_events(self) -> str:
        """Events for what came since the last call; the prompt of an echo is an event of its own."""
        events = ""
        if self.echo is not None and self._sent_texts == 0 and self.texts and self.texts[0]:
            events = self._event(self.texts[0], len(self.echo), last=False)
            self._sent_texts = 1
        delta = "".join(self.texts[self._sent_texts :])
        last = self.finish_reason is not None
        if delta or last:
            events += self._event(delta, len(self.tokens), last=last)
            self._sent_texts = len(self.texts)
        return events

    def _event(self, delta: str, tokens: int, *, last: bool) -> str:
        """One event: text, and the tokens up to number `tokens`. An empty delta is left out."""
        parts = f'"index":{self.index}'
        if delta:
            parts += f',"delta":{_encode_line(delta)}'
        if self.request.params.logprobs:
            parts += "," + _encode_line(self._scores(self._sent_tokens, tokens))[1:-1]
            self._sent_tokens = tokens
        if last:
            end = _encode({"finish_reason": self.finish_reason, "usage": self.usage})[1:-1]
        else:
            end = '"finish_reason":null'
        return f"data: {{{parts},{end}}}\n\n"


@dataclass
class Job:
    """One HTTP request on its way: its engine requests, and the reply as far as it has come.

    Hand every output of its requests to `add`. Then, for a stream, send what `take_events` returns until `done`;
    otherwise send `body` once `done`. `error` set means that the request as a whole has failed.
    """

    job_id: str
    stream: bool
    chat: bool
    many: bool
    """Whether the reply is a list."""
    choices: list[Choice]
    error: RequestError | None = None
    started: bool = False
    """Whether the engine has given any output."""
    _touched: dict[str, Choice] = field(default_factory=dict)
    _pending: bool = False
    _closed: bool = False

    def __post_init__(self) -> None:
        self._open = {choice.request.request_id: choice for choice in self.choices}

    @property
    def requests(self) -> list[Request]:
        """For the engine, in the order of the reply."""
        return [choice.request for choice in self.choices]

    @property
    def open_ids(self) -> list[str]:
        """Engine requests without an end yet: those to cancel when the job is given up."""
        return list(self._open)

    @property
    def done(self) -> bool:
        return not self._open or self.error is not None

    @property
    def pending(self) -> bool:
        """Whether `take_events` has something to return."""
        return self._pending or (self.done and not self._closed)

    @property
    def content_type(self) -> str:
        return "text/event-stream; charset=utf-8" if self.stream else "application/json; charset=utf-8"

    def add(self, output: Output) -> None:
        """Take in one output; those of a request that has ended are ignored."""
        choice = self._open.get(output.request_id)
        if choice is None or self.error is not None:
            return
        self.started = True
        if output.finish_reason == "error":
            self.fail(InternalError(output.error or "the engine failed on this request"))
            return
        choice.add(output)
        self._touched[output.request_id] = choice
        if self.stream and not self._pending:
            self._pending = choice.pending
        if output.finish_reason is not None:
            del self._open[output.request_id]

    def fail(self, error: RequestError) -> None:
        """End the whole job; what is still running of it (`open_ids`) has to be canceled in the engine."""
        if not self.done:
            self.error = error

    def take_events(self) -> str:
        """Every event since the last call, "" where there is none; the last call's end with [DONE]."""
        if self._closed:
            return ""
        events = "".join([choice.take_events() for choice in self._touched.values()])
        self._touched.clear()
        self._pending = False
        if not self.done:
            return events
        self._closed = True
        if self.error is not None:
            events += f"data: {_encode_line(self.error.body())}\n\n"
        return events + _DONE

    def body(self) -> bytes:
        """The reply to a request that doesn't stream, or its error."""
        value: Any = [choice.reply(chat=self.chat) for choice in self.choices]
        if self.error is not None:
            value = self.error.body()
        elif not self.many:
            value = value[0]
        return _encode(value).encode("utf-8")


def _encode_line(value: Any) -> str:
    text = _encode(value)
    return text if text.isascii() else text.translate(_LINE_ENDS)


def _finite(logprob: float) -> float:
    return logprob if logprob > LOWEST_LOGPROB else LOWEST_LOGPROB  # also for NaN

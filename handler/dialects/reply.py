"""What replies of both dialects have in common: outputs of the engine are gathered, and told whole or as a stream."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from generation.interface import Output, Request, TokenLogprob
from handler.errors import InternalError, RequestError
from handler.torchserve.calls import Way

if TYPE_CHECKING:
    from model.tokenizer.tokenizer import Tokenizer

JSON = "application/json; charset=utf-8"
EVENTS = "text/event-stream; charset=utf-8"
LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON doesn't have."""
_DONE = "data: [DONE]\n\n"
# Some clients split a stream at every line end Unicode knows; JSON escapes only the first 32 characters.
_LINE_ENDS = {ord(c): f"\\u{ord(c):04x}" for c in "\x85\u2028\u2029"}

encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def encode_line(value: Any) -> str:
    """JSON that is one line for every reader."""
    text = encode(value)
    return text if text.isascii() else text.translate(_LINE_ENDS)


def finite(logprob: float) -> float:
    return logprob if logprob > LOWEST_LOGPROB else LOWEST_LOGPROB  # also for NaN


class Choice(ABC):
    """The answer to one engine request, as far as it has come. A dialect adds how it is told."""

    def __init__(self, index: int, request: Request, tokenizer: Tokenizer, echo: list[str] | None) -> None:
        self.index = index
        self.request = request
        self.tokenizer = tokenizer
        self.echo = echo
        """The text of each token of the prompt, where it is part of the answer."""
        self.finish_reason: str | None = None
        self.texts: list[str] = []
        self.tokens: list[str] = []
        """The text of each token, where log probabilities were asked for."""
        self.scores: list[TokenLogprob | None] = []
        """One for each of `tokens`; a prompt's first has none."""
        self.cached_tokens = 0
        self.completion_tokens = 0
        # How much of the lists above went out as events.
        self._sent_texts = 0
        self._sent_tokens = 0

    @abstractmethod
    def event(self, delta: str, start: int, stop: int, *, last: bool) -> str:
        """Events for more text, and for tokens start..stop-1; `last`: the choice ends with them."""

    def add(self, output: Output) -> None:
        if self.echo is not None and not self.texts:
            self._add_prompt(self.echo, output.prompt_logprobs or [])
        self.texts.append(output.text)
        if self.request.params.logprobs:
            self.tokens += output.pieces
            self.scores += output.logprobs
        self.cached_tokens = output.cached_tokens
        self.completion_tokens = output.completion_tokens
        self.finish_reason = output.finish_reason

    def _add_prompt(self, pieces: list[str], logprobs: list[TokenLogprob]) -> None:
        self.texts.append("".join(pieces))
        if self.request.params.logprobs:
            unknown = len(pieces) - len(logprobs)  # the first token; all, where time ran out before the prompt was read
            self.tokens += pieces
            self.scores += [None] * unknown
            self.scores += logprobs

    def text_of(self, token: int) -> str:
        """An alternative as text: U+FFFD for the parts of a character, a control token's name."""
        data = self.tokenizer.token_bytes(token)
        if data:
            return data.decode("utf-8", "replace")
        return next((text for text, control in self.tokenizer.control_tokens.items() if control == token), "")

    @property
    def pending(self) -> bool:
        """Whether there is text, or the end, that has not gone out."""
        return self.finish_reason is not None or any(self.texts[self._sent_texts :])

    def take_events(self) -> str:
        """Events for what came since the last call; the prompt of an echo is an event of its own."""
        events = ""
        if self.echo is not None and self._sent_texts == 0 and self.texts and self.texts[0]:
            events = self._take(1, len(self.echo), last=False)
        if self.pending:
            events += self._take(len(self.texts), len(self.tokens), last=self.finish_reason is not None)
        return events

    def _take(self, texts: int, tokens: int, *, last: bool) -> str:
        delta, start = "".join(self.texts[self._sent_texts : texts]), self._sent_tokens
        self._sent_texts, self._sent_tokens = texts, min(tokens, len(self.tokens))
        return self.event(delta, start, self._sent_tokens, last=last)


class Job(ABC):
    """One request on its way: its engine requests, and the reply as far as it has come.

    Hand every output of its requests to `add`. Then, for a stream, send what `take_events` returns until `done`;
    otherwise send `body` once `done`. `error` set means that the request as a whole has failed.
    """

    def __init__(self, job_id: str, stream: bool, choices: Sequence[Choice]) -> None:
        self.job_id = job_id
        self.stream = stream
        self.way = Way.HTTP
        self.error: RequestError | None = None
        self.started = False
        """Whether the engine has given any output."""
        self.requests = [choice.request for choice in choices]
        """For the engine, in the order of the reply."""
        self._open = {choice.request.request_id: choice for choice in choices}
        self._touched: dict[str, Choice] = {}
        self._pending = False
        self._closed = False

    def came_by(self, way: Way) -> None:
        """With gRPC the call decides whether the reply is a stream, not the body."""
        self.way = way
        if way is not Way.HTTP:
            self.stream = way is Way.STREAM

    @abstractmethod
    def reply(self) -> Any:
        """The JSON value that answers a request that doesn't stream."""

    def last_events(self) -> str:
        """Events between those of the choices and the end of the stream."""
        return ""

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
        return EVENTS if self.stream else JSON

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
            events += f"data: {encode_line(self.error.body())}\n\n"
        else:
            events += self.last_events()
        return events + _DONE

    def body(self) -> bytes:
        """The reply to a request that doesn't stream, or its error."""
        return encode(self.reply() if self.error is None else self.error.body()).encode("utf-8")


class Lost(Job):
    """A request that can't be answered: it keeps its place until the worker ends."""

    def __init__(self, job_id: str) -> None:
        super().__init__(job_id, stream=False, choices=[])
        self.way = Way.LOST

    def reply(self) -> Any:
        return None

"""Replies of the OpenAI routes: chat completions and text completions, whole or as chunks of a stream."""

from __future__ import annotations

import time
import uuid
from abc import abstractmethod
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from generation.interface import Output, TokenLogprob
from handler.dialects import reply
from handler.dialects.reply import encode_line, finite

_FINISH_REASONS = {"timeout": "length"}
"""Of OpenAI's few reasons the nearest one."""


class Choice(reply.Choice):
    """One of a reply's choices. `chunk_head` and `chunk_tail` surround the choice in each chunk of a stream."""

    chunk_head = ""
    chunk_tail = ""

    @property
    def reason(self) -> str | None:
        return None if self.finish_reason is None else _FINISH_REASONS.get(self.finish_reason, self.finish_reason)

    @abstractmethod
    def value(self) -> dict[str, Any]:
        """The choice in a reply that isn't streamed."""

    @abstractmethod
    def scored(self, start: int, stop: int) -> dict[str, Any] | None:
        """`logprobs` of tokens start..stop-1, None where they were not asked for."""

    def chunk(self, content: dict[str, Any], logprobs: dict[str, Any] | None, reason: str | None) -> str:
        choice = {"index": self.index, **content, "logprobs": logprobs, "finish_reason": reason}
        return f"data: {self.chunk_head}{encode_line(choice)}{self.chunk_tail}\n\n"


class ChatChoice(Choice):
    """An answer of the assistant."""

    _begun = False

    def value(self) -> dict[str, Any]:
        return {
            "index": self.index,
            "message": {"role": "assistant", "content": "".join(self.texts), "refusal": None},
            "logprobs": self.scored(0, len(self.tokens)),
            "finish_reason": self.reason,
        }

    def event(self, delta: str, start: int, stop: int, *, last: bool) -> str:
        events = ""
        if not self._begun:
            self._begun = True
            events = self.chunk({"delta": {"role": "assistant", "content": ""}}, None, None)
        if delta or stop > start:
            events += self.chunk({"delta": {"content": delta}}, self.scored(start, stop), None)
        if last:
            events += self.chunk({"delta": {}}, None, self.reason)
        return events

    def scored(self, start: int, stop: int) -> dict[str, Any] | None:
        if not self.request.params.logprobs:
            return None
        pairs = zip(self.tokens[start:stop], self.scores[start:stop], strict=True)
        return {"content": [self._token(text, score) for text, score in pairs if score is not None], "refusal": None}

    def _token(self, text: str, score: TokenLogprob) -> dict[str, Any]:
        data = self.tokenizer.token_bytes(score.token_id)
        token = {"token": text, "logprob": finite(score.logprob), "bytes": _own_bytes(text, data)}
        return token | {"top_logprobs": [self._alternative(token, score, *top) for top in score.top]}

    def _alternative(
        self, chosen: dict[str, Any], score: TokenLogprob, token_id: int, logprob: float
    ) -> dict[str, Any]:
        if token_id == score.token_id:
            return chosen
        data = self.tokenizer.token_bytes(token_id)
        return {"token": self.text_of(token_id), "logprob": finite(logprob), "bytes": list(data) if data else None}


class TextChoice(Choice):
    """A text that was continued."""

    _offset = 0
    """Characters that went out as events."""

    def add(self, output: Output) -> None:
        """The end token is scored too, with an empty text: who scores a text asks for one token more, and drops it."""
        super().add(output)
        if output.end is not None:
            self.tokens.append("")
            self.scores.append(output.end)

    def value(self) -> dict[str, Any]:
        return {
            "index": self.index,
            "text": "".join(self.texts),
            "logprobs": self.scored(0, len(self.tokens)),
            "finish_reason": self.reason,
        }

    def event(self, delta: str, start: int, stop: int, *, last: bool) -> str:
        events = ""
        if delta or stop > start:
            events = self.chunk({"text": delta}, self.scored(start, stop), None)
            self._offset += sum(map(len, self.tokens[start:stop]))
        if last:
            events += self.chunk({"text": ""}, None, self.reason)
        return events

    def scored(self, start: int, stop: int) -> dict[str, Any] | None:
        params = self.request.params
        if not params.logprobs:
            return None
        tokens, scores = self.tokens[start:stop], self.scores[start:stop]
        offsets = list(accumulate(map(len, tokens), initial=self._offset))[:-1]
        top = None
        if params.top_logprobs:
            pairs = zip(tokens, scores, strict=True)
            top = [None if score is None else self._likeliest(text, score) for text, score in pairs]
        logprobs = [None if score is None else finite(score.logprob) for score in scores]
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": top, "text_offset": offsets}

    def _likeliest(self, text: str, score: TokenLogprob) -> dict[str, float]:
        """As OpenAI has it, the token itself is among the alternatives, whether or not it is one of the likeliest."""
        found: dict[str, float] = {text: finite(score.logprob)}
        for token_id, logprob in score.top:
            if token_id != score.token_id:
                # Tokens that are parts of characters share the text U+FFFD: the likeliest of them is kept.
                found.setdefault(self.text_of(token_id), finite(logprob))
        return found


class Job(reply.Job):
    """One request to v1/chat/completions or v1/completions.

    Args:
        model: its name in the reply.
        n: choices per prompt; `choices` holds those of each prompt together.
        usage_wanted: a stream tells the usage in a chunk of its own, in the end.
    """

    def __init__(
        self, job_id: str, stream: bool, choices: Sequence[Choice], *, model: str, n: int, usage_wanted: bool
    ) -> None:
        super().__init__(job_id, stream, choices)
        self.choices = choices
        self.n = n
        self.usage_wanted = usage_wanted
        chat = isinstance(choices[0], ChatChoice)
        kind = ("chat.completion.chunk" if stream else "chat.completion") if chat else "text_completion"
        self.head = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": model,
        }
        head = encode_line(self.head)[:-1] + ',"choices":['
        for choice in choices:
            choice.chunk_head = head
            choice.chunk_tail = '],"usage":null}' if usage_wanted else "]}"

    def reply(self) -> Any:
        return self.head | {"choices": [choice.value() for choice in self.choices], "usage": self.usage()}

    def last_events(self) -> str:
        if not self.usage_wanted:
            return ""
        return f"data: {encode_line(self.head | {'choices': [], 'usage': self.usage()})}\n\n"

    def usage(self) -> dict[str, Any]:
        """A prompt counts once, however many choices it has."""
        first = self.choices[:: self.n]
        prompt = sum(len(choice.request.prompt_ids) for choice in first)
        completion = sum(choice.completion_tokens for choice in self.choices)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(choice.cached_tokens for choice in first)},
        }


def _own_bytes(text: str, data: bytes) -> list[int] | None:
    """The bytes a token has in its answer: joined they are the answer's, but for characters that never came whole.

    Args:
        text: the token's share of the answer.
        data: what the token stands for anywhere; empty for a control token.
    """
    if not data:
        return None
    try:
        whole = data.decode("utf-8")
    except UnicodeDecodeError:
        return list(data)  # (part of) a character, of which the text is the last token's
    # A first space may have been dropped, and the end may have been cut before a stop string.
    return list(text.encode("utf-8") if text in whole else data)

"""The native route's reply: one JSON value, or server-sent events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from generation.interface import TokenLogprob
from handler.dialects import reply
from handler.dialects.reply import encode, encode_line, finite


class Choice(reply.Choice):
    """One answer in the native route's terms."""

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

    def event(self, delta: str, start: int, stop: int, *, last: bool) -> str:
        """One event. An empty delta is left out."""
        parts = f'"index":{self.index}'
        if delta:
            parts += f',"delta":{encode_line(delta)}'
        if self.request.params.logprobs:
            parts += "," + encode_line(self._scores(start, stop))[1:-1]
        if last:
            end = encode({"finish_reason": self.finish_reason, "usage": self.usage})[1:-1]
        else:
            end = '"finish_reason":null'
        return f"data: {{{parts},{end}}}\n\n"

    def _scores(self, start: int, stop: int) -> dict[str, Any]:
        """The fields of tokens start..stop-1, where log probabilities were asked for."""
        params = self.request.params
        if not params.logprobs:
            return {}
        scores = self.scores[start:stop]
        logprobs = [None if score is None else finite(score.logprob) for score in scores]
        value: dict[str, Any] = {"tokens": self.tokens[start:stop], "logprobs": logprobs}
        if params.top_logprobs:
            value["top_logprobs"] = [None if score is None else self._alternatives(score) for score in scores]
        return value

    def _alternatives(self, score: TokenLogprob) -> dict[str, float]:
        found: dict[str, float] = {}
        for token, logprob in score.top:
            # Tokens that are parts of characters share the text U+FFFD: the likeliest of them is kept.
            found.setdefault(self.text_of(token), finite(logprob))
        return found


class Job(reply.Job):
    """One HTTP request of the native route. `many`: the reply is a list."""

    def __init__(self, job_id: str, stream: bool, chat: bool, many: bool, choices: Sequence[Choice]) -> None:
        super().__init__(job_id, stream, choices)
        self.chat = chat
        self.many = many
        self.choices = choices

    def reply(self) -> Any:
        value = [choice.reply(chat=self.chat) for choice in self.choices]
        return value if self.many else value[0]

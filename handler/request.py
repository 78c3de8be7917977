"""The fields of one request of the native route, checked. `parse_body` gives what `NativeRequest.read` takes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, PrivateAttr, ValidationError

from generation.types import Dialog, Message

from .body import Body, parse_body
from .errors import InvalidRequest
from .validation import limited, mistakes, shorten

__all__ = ["Body", "Mode", "NativeRequest", "Prompts", "parse_body"]

Mode = Literal["text_completion", "chat"]

MAX_STOPS = 16
MAX_STOP_CHARS = 512
ALIASES = {"messages": "dialog", "max_new_tokens": "max_gen_len"}
# What other servers call our fields; only used to say what may have been meant.
FOREIGN = {
    "max_tokens": "max_gen_len",
    "max_completion_tokens": "max_gen_len",
    "max_length": "max_gen_len",
    "text": "prompt",
    "inputs": "prompt",
    "input": "prompt",
    "num_return_sequences": "n",
    "stop_sequences": "stop",
    "random_seed": "seed",
}


@dataclass(frozen=True)
class Prompts:
    """What `prompt` holds: texts or lists of token ids. `many` tells a list of one from a single prompt."""

    items: list[str | list[int]]
    many: bool


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _prompts(value: Any) -> Prompts:
    what = "a string, a list of strings, a list of token ids or a list of such lists"
    if isinstance(value, str):
        return Prompts([value], many=False)
    if not isinstance(value, list):
        raise ValueError(f" is {shorten(value)}, expected {what}")
    if not value:
        raise ValueError(f" is an empty list, expected {what}")
    if isinstance(value[0], (str, list)):
        kind, name = type(value[0]), "a string" if isinstance(value[0], str) else "a list of token ids"
        for i, item in enumerate(value):
            if not isinstance(item, kind):
                raise ValueError(f"[{i}] is {shorten(item)}, expected {name} like [0]")
            if isinstance(item, list):
                _check_ids(item, f"[{i}]")
        return Prompts(value, many=True)
    if not _is_id(value[0]):
        raise ValueError(f"[0] is {shorten(value[0])}, expected {what}")
    _check_ids(value, "")
    return Prompts([value], many=False)


def _check_ids(ids: list[Any], path: str) -> None:
    if not ids:
        raise ValueError(f"{path} is an empty list, expected at least one token id")
    for i, item in enumerate(ids):
        if not _is_id(item):
            raise ValueError(f"{path}[{i}] is {shorten(item)}, expected a token id")


def _dialog(value: Any, path: str = "") -> Dialog:
    """Shape only; the order of roles and forbidden markers are the chat format's business."""
    if not isinstance(value, list) or not value:
        raise ValueError(f'{path} is {shorten(value)}, expected a non-empty list of {{"role", "content"}} objects')
    return [_message(item, f"{path}[{i}]") for i, item in enumerate(value)]


def _message(value: Any, path: str) -> Message:
    if not isinstance(value, dict):
        raise ValueError(f'{path} is {shorten(value)}, expected an object with "role" and "content"')
    for key in value:
        if key not in ("role", "content"):
            raise ValueError(f'{path}.{key[:50]} is not a known field, expected only "role" and "content"')
    for key in ("role", "content"):
        if key not in value:
            raise ValueError(f"{path}.{key} is missing")
    if value["role"] not in ("system", "user", "assistant"):
        raise ValueError(f"{path}.role is {shorten(value['role'])}, expected 'system', 'user' or 'assistant'")
    if not isinstance(value["content"], str):
        raise ValueError(f"{path}.content is {shorten(value['content'])}, expected a string")
    return Message(role=value["role"], content=value["content"])


def _dialogs(value: Any) -> list[Dialog]:
    if not isinstance(value, list) or not value:
        raise ValueError(f" is {shorten(value)}, expected a non-empty list of dialogs")
    return [_dialog(item, f"[{i}]") for i, item in enumerate(value)]


def _stops(value: Any) -> tuple[str, ...]:
    limit = f"a string or up to {MAX_STOPS} strings of 1 to {MAX_STOP_CHARS} characters"
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list):
        raise ValueError(f" is {shorten(value)}, expected {limit}")
    if len(items) > MAX_STOPS:
        raise ValueError(f" holds {len(items)} strings, expected {limit}")
    for item in items:
        if not isinstance(item, str) or not item:
            raise ValueError(f" holds {shorten(item)}, expected {limit}")
        if len(item) > MAX_STOP_CHARS:
            raise ValueError(f" holds a string of {len(item)} characters, expected {limit}")
    return tuple(items)


def _bias(value: Any) -> tuple[tuple[int, float], ...]:
    if not isinstance(value, dict):
        raise ValueError(f" is {shorten(value)}, expected an object of token id -> number between -100 and 100")
    pairs = {}
    for key, bias in value.items():
        if not re.fullmatch(r"[0-9]{1,9}", str(key)):
            raise ValueError(f" has the key {shorten(key)}, expected a token id")
        if isinstance(bias, bool) or not isinstance(bias, (int, float)) or not -100 <= bias <= 100:
            raise ValueError(f"[{key}] is {shorten(bias)}, expected a number between -100 and 100")
        pairs[int(key)] = float(bias)
    return tuple(pairs.items())


def _flag(value: Any) -> Any:
    return bool(value) if type(value) is int and value in (0, 1) else value


_BOOL = "true or false"
LONG = 2**63 - 1


class NativeRequest(BaseModel):
    """One request of the native route. Build it with `read`, which turns every mistake into an InvalidRequest."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)

    prompt: Annotated[Prompts | None, PlainValidator(_prompts)] = None
    # Really `Dialog`, but pydantic looks into the type and refuses typing's TypedDict before Python 3.12.
    dialog: Annotated[list[Any] | None, PlainValidator(_dialog)] = None
    dialogs: Annotated[list[list[Any]] | None, PlainValidator(_dialogs)] = None
    mode: Mode | None = Field(None, description="'text_completion' or 'chat'")
    continue_final_message: bool = Field(False, description=_BOOL)
    max_gen_len: int | None = Field(None, ge=1, description="an integer of at least 1, or null for what fits")
    temperature: float = limited(0.6, 0, 2)
    top_p: float = limited(0.9, 0, 1)
    top_k: int = limited(0, 0, what="an integer")
    min_p: float = limited(0.0, 0, 1)
    repetition_penalty: float = Field(1.0, gt=0, le=2, description="a number above 0, at most 2")
    frequency_penalty: float = limited(0.0, -2, 2)
    presence_penalty: float = limited(0.0, -2, 2)
    logit_bias: Annotated[tuple[tuple[int, float], ...], PlainValidator(_bias)] = ()
    seed: int | None = Field(None, ge=-LONG - 1, le=LONG, description="null or an integer of 64 bits")
    stop: Annotated[tuple[str, ...], PlainValidator(_stops)] = ()
    ignore_eos: bool = Field(False, description=_BOOL)
    n: int = limited(1, 1, 16, what="an integer")
    logprobs: bool = Field(False, description=_BOOL)
    top_logprobs: int = limited(0, 0, 20, what="an integer")
    # Clients written for older completion APIs send 0 or 1.
    echo: Annotated[bool, BeforeValidator(_flag)] = Field(False, description=_BOOL)
    stream: bool = Field(False, description=_BOOL)

    _names: dict[str, str] = PrivateAttr(default_factory=dict)

    @classmethod
    def read(cls, body: Body, mode: Mode = "text_completion") -> NativeRequest:
        """Check a parsed body; `mode` says what a bare string means.

        Raises:
            InvalidRequest: naming each wrong field, its value and the limit.
        """
        fields = body if isinstance(body, dict) else _bare(body, mode)
        names: dict[str, str] = {}  # our name -> the name that was sent
        for name in fields:
            ours = ALIASES.get(name, name)
            if ours in names:
                raise InvalidRequest(f"{name} and {names[ours]} are the same field, expected one of them", param=name)
            names[ours] = name
        try:
            request = cls.model_validate({ours: fields[name] for ours, name in names.items()})
        except ValidationError as error:
            found = mistakes(error, cls, FOREIGN)
            lines = [names.get(name, name)[:50] + text for name, text in found.items()]
            first = next(iter(found))
            raise InvalidRequest("; ".join(lines[:5]), param=names.get(first, first)[:50]) from None
        request._names = names
        request._check_together(names)
        return request

    def sent_name(self, name: str) -> str:
        """What the client called the field: its name or its alias."""
        return self._names.get(name, name)

    @property
    def chat(self) -> bool:
        return self.prompt is None

    def _check_together(self, names: dict[str, str]) -> None:
        """Rules over several fields; `names` are those sent, by our name."""
        inputs = [names[name] for name in ("prompt", "dialog", "dialogs") if name in names]
        if len(inputs) != 1:
            got = " and ".join(inputs) if inputs else "none of them"
            raise InvalidRequest(
                f"got {got}, expected exactly one of prompt, dialog (or messages), dialogs",
                param=inputs[-1] if inputs else "prompt",
            )
        if self.mode is not None and (self.mode == "chat") != self.chat:
            raise InvalidRequest(
                f"mode is {self.mode!r}, which does not agree with the field {inputs[0]}", param="mode"
            )
        if self.chat and self.echo:
            raise InvalidRequest("echo is true, which only text completion has (field prompt)", param="echo")
        if not self.chat and self.continue_final_message:
            raise InvalidRequest("continue_final_message is true, which only chat has", param="continue_final_message")
        if self.top_logprobs and "logprobs" in names and not self.logprobs:
            raise InvalidRequest(
                f"top_logprobs is {self.top_logprobs}, which needs logprobs: true", param="top_logprobs"
            )


def _bare(body: list[Any] | str, mode: Mode) -> dict[str, Any]:
    """The fields a body without field names stands for."""
    if isinstance(body, str):
        return {"dialog": [{"role": "user", "content": body}]} if mode == "chat" else {"prompt": body}
    first = body[0] if body else None
    if isinstance(first, dict):
        return {"dialog": body}
    if isinstance(first, list) and first and isinstance(first[0], dict):
        return {"dialogs": body}
    if mode == "chat" and isinstance(first, str):
        return {"dialogs": [[{"role": "user", "content": text}] for text in body]}
    return {"prompt": body}

"""Fields both dialects have: their types, limits and checks. A check's error says what comes after the field's name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, ValidationError

from handler.errors import InvalidRequest
from handler.requests.messages import limited, mistakes, shorten

MAX_STOPS = 16
MAX_STOP_CHARS = 512
BOOL = "true or false"
LONG = 2**63 - 1

Model = TypeVar("Model", bound=BaseModel)


@dataclass(frozen=True)
class Prompts:
    """What `prompt` holds: texts or lists of token ids. `many` tells a list of one from a single prompt."""

    items: list[str | list[int]]
    many: bool


def is_id(value: Any) -> bool:
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
    if not is_id(value[0]):
        raise ValueError(f"[0] is {shorten(value[0])}, expected {what}")
    _check_ids(value, "")
    return Prompts([value], many=False)


def _check_ids(ids: list[Any], path: str) -> None:
    if not ids:
        raise ValueError(f"{path} is an empty list, expected at least one token id")
    for i, item in enumerate(ids):
        if not is_id(item):
            raise ValueError(f"{path}[{i}] is {shorten(item)}, expected a token id")


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


PromptField = Annotated[Prompts | None, PlainValidator(_prompts)]
EchoField = Annotated[bool, BeforeValidator(_flag)]
"""Clients written for older completion APIs send 0 or 1."""


class SharedFields(BaseModel):
    """What a request of either dialect may hold under the same name, with the same default."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)

    min_p: float = limited(0.0, 0, 1)
    repetition_penalty: float = Field(1.0, gt=0, le=2, description="a number above 0, at most 2")
    frequency_penalty: float = limited(0.0, -2, 2)
    presence_penalty: float = limited(0.0, -2, 2)
    logit_bias: Annotated[tuple[tuple[int, float], ...], PlainValidator(_bias)] = ()
    seed: int | None = Field(None, ge=-LONG - 1, le=LONG, description="null or an integer of 64 bits")
    stop: Annotated[tuple[str, ...], PlainValidator(_stops)] = ()
    ignore_eos: bool = Field(False, description=BOOL)
    n: int = limited(1, 1, 16, what="an integer")
    stream: bool = Field(False, description=BOOL)


def checked(
    model: type[Model], fields: Mapping[str, Any], names: Mapping[str, str], foreign: dict[str, str] | None = None
) -> Model:
    """`fields` as a `model`.

    Args:
        names: field -> the name it was sent under, where that is another.
        foreign: names of other servers -> field, for hints.

    Raises:
        InvalidRequest: naming each wrong field, its value and the limit.
    """
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        found = mistakes(error, model, foreign)
        lines = [names.get(name, name)[:50] + text for name, text in found.items()]
        first = next(iter(found))
        raise InvalidRequest("; ".join(lines[:5]), param=names.get(first, first)[:50]) from None

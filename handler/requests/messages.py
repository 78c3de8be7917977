"""Wording of mistakes in requests and in the configuration: each names the field, its value and the limit."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel, Field, ValidationError


def shorten(value: object, limit: int = 50) -> str:
    """`value` as JSON, as it is shown in an error: one line of at most `limit` characters."""
    if isinstance(value, int) and value.bit_length() > 200:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, (str, list)):
        value = value[: limit + 1]  # the rest would not be shown: don't format megabytes
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):  # not JSON: a configuration may hold dates, say
        text = repr(value)
    text = text.encode("utf-8", "backslashreplace").decode("utf-8")  # half a surrogate pair can't be sent
    return text if len(text) <= limit else text[: limit - 3] + "..."


def nearest(name: str, known: Iterable[str], others: dict[str, str] | None = None) -> str:
    """A hint like " (did you mean 'top_p'?)", or nothing where no known name is close."""
    found = (others or {}).get(name.lower())
    close = [found] if found else difflib.get_close_matches(name.lower(), list(known), n=1, cutoff=0.7)
    return f" (did you mean {close[0]!r}?)" if close else ""


def mistakes(error: ValidationError, model: type[BaseModel], others: dict[str, str] | None = None) -> dict[str, str]:
    """Every mistake pydantic found, by field: "is VALUE, expected LIMIT", from the fields' own descriptions."""
    found: dict[str, str] = {}
    known = [*model.model_fields, *(others or {}).values()]
    for item in error.errors(include_url=False):
        name = str(item["loc"][0]) if item["loc"] else ""
        if item["type"] == "extra_forbidden":
            text = f" is not a known field{nearest(name, known, others)}"
        elif item["type"] == "missing":
            text = f" is missing, expected {model.model_fields[name].description}"
        elif item["type"] == "value_error":
            text = str(item["ctx"]["error"])
        else:
            text = f" is {shorten(item['input'])}, expected {model.model_fields[name].description}"
        found.setdefault(name, text)
    return found


def limited(default: Any, low: float | None, high: float | None = None, what: str = "a number") -> Any:
    """A pydantic field whose description is the limit an error names."""
    limit = f"between {low:g} and {high:g}" if high is not None else f"of at least {low:g}"
    return Field(default, ge=low, le=high, description=f"{what} {limit}")

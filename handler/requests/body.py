"""From one TorchServe row to a JSON value or the text of a prompt; used by both dialects."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from handler.errors import InvalidRequest
from handler.requests.messages import shorten

Body = dict[str, Any] | list[Any] | str

MAX_DEPTH = 64
ACCEPTED = (
    "send one JSON object as the body (Content-Type: application/json), "
    "the same JSON in a multipart field named 'data', or plain text as the prompt"
)
FORM_HINT = (
    "with `curl --data` add -H 'Content-Type: application/json', "
    "since what is sent as application/x-www-form-urlencoded is not passed on whole"
)
_OBJECT_START = re.compile(r'\{\s*"')


def parse_body(row: dict[str, Any], content_type: str | None = None) -> Body:
    """What a client sent: a JSON value, or a string that is a prompt.

    `row` is one TorchServe request: the value under "body" (raw body) or "data" (form field), as bytes, as text, or
    already parsed where TorchServe was told to. A raw body declared as a form, which is what `curl --data` does
    without a content type, can't be served: TorchServe 0.12's frontend drops it where it has no "=", and otherwise
    splits it at "&", turns "+" into spaces and cuts it at a "%" (tried).

    Raises:
        InvalidRequest: no body, not UTF-8, broken JSON, a repeated field, NaN or Infinity, nested too deeply.
    """
    value, media = _value_of(row, (content_type or "").split(";")[0].strip().lower())
    if isinstance(value, (bytes, bytearray, memoryview)):
        value = _decode(bytes(value))
    if isinstance(value, (dict, list)):
        _check_tree(value)
        return value
    if not isinstance(value, str):
        raise InvalidRequest(f"the body is {shorten(value)}: {ACCEPTED}")
    text = value.removeprefix("\ufeff")
    if not text.strip():
        raise InvalidRequest(f"the body is empty: {ACCEPTED}")
    return _parse_text(text, media)


def _value_of(row: dict[str, Any], media: str) -> tuple[Any, str]:
    """The value that was sent, and the content type that tells how to read it ("" = by its looks)."""
    if len(row) == 1 and "body" in row:
        return row["body"], media
    if len(row) == 1 and "data" in row:
        # Clients derive a form field's type from the file's name: JSON in a .txt file is still JSON.
        return row["data"], "" if media == "text/plain" else media
    surplus = [name for name in row if name not in ("body", "data")]
    if surplus:
        raise InvalidRequest(f"unexpected form field {shorten(surplus[0])}: {ACCEPTED}; {FORM_HINT}")
    if row:
        raise InvalidRequest(f"both 'body' and 'data' were sent, expected one of them: {ACCEPTED}")
    raise InvalidRequest(f"no body arrived: {ACCEPTED}; {FORM_HINT}")


def _decode(data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            f"the body must be UTF-8, its byte {error.start} (0x{data[error.start]:02x}) is not"
        ) from None


def _parse_text(text: str, media: str) -> Body:
    if media == "text/plain":
        return text
    is_json = media == "text/json" or media.endswith(("/json", "+json"))
    start = text.lstrip()
    if not is_json and start[0] not in '{["':
        return text
    try:
        value = json.loads(text, object_pairs_hook=_object)
    except RecursionError:
        raise InvalidRequest(f"the JSON is nested more than {MAX_DEPTH} levels deep") from None
    except ValueError as error:  # also integers of more digits than Python converts
        if not is_json and not _OBJECT_START.match(start):
            return text
        hint = " (to send such text as a prompt, use Content-Type: text/plain)" if not is_json else ""
        raise InvalidRequest(f"the body is not valid JSON: {error}{hint}") from None
    if not isinstance(value, (dict, list, str)):
        raise InvalidRequest(f"the body is the JSON value {shorten(value)}, expected an object: {ACCEPTED}")
    _check_tree(value)
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise InvalidRequest(f"the field {shorten(twice)} is given more than once")
    return value


def _check_tree(value: Any) -> None:
    """Refuse what JSON texts can smuggle past Python's parser: NaN, Infinity, half characters, endless nesting."""
    open_nodes: list[tuple[str, Any, int]] = [("", value, 0)]
    while open_nodes:
        path, node, depth = open_nodes.pop()
        if depth > MAX_DEPTH:
            raise InvalidRequest(f"the JSON is nested more than {MAX_DEPTH} levels deep")
        if isinstance(node, float) and not math.isfinite(node):
            name = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}[str(node)]
            raise InvalidRequest(f"{path or 'the body'} is {name}, expected a finite number", param=path or None)
        if isinstance(node, str) and not node.isascii() and not _encodable(node):
            raise InvalidRequest(f"{path or 'the body'} holds half of a surrogate pair", param=path or None)
        if isinstance(node, dict):
            if not all(_encodable(key) for key in node):
                raise InvalidRequest(f"a field name in {path or 'the body'} holds half of a surrogate pair")
            open_nodes += [(f"{path}.{key[:50]}" if path else key[:50], item, depth + 1) for key, item in node.items()]
        elif isinstance(node, list):
            # Token ids are most of a long list, and always fine.
            open_nodes += [(f"{path}[{i}]", item, depth + 1) for i, item in enumerate(node) if type(item) is not int]


def _encodable(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True

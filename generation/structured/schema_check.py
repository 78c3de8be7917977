"""What llguidance 1.9 would get wrong in a JSON schema: refused, or written so that it gets it right.

- Keys of `additionalProperties` may repeat, and each is counted; a reader of the JSON sees one.
- Readers differ on \\w, \\d and \\s: ASCII in ECMA-262, Unicode in Python.
- Inside a string, a class of characters that has all control characters is taken to have `"` and `\\` too, so that
  `[^"]` would allow a quote. Without NUL the class is read as it is written, and no answer needs a NUL.
"""

from __future__ import annotations

import re
from typing import Any

# Names under these keys are the schema's own; what lies under the second kind is data, no schema.
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_DATA = frozenset({"enum", "const", "default", "examples"})

_WITH_NUL = re.compile(r"\0|\\(?:0|x00|u0000|U00000000|[xuU]\{0+\})|--|~~")
"""Inside a class: a NUL (every range with it begins with it), or a difference of classes."""
_UNICODE = {r"\w": r"\p{L}\p{M}\p{N}_", r"\d": r"\p{Nd}", r"\s": r"\s\p{Z}\x1c-\x1f\x85"}
"""Classes that are ASCII in one reading and Unicode in another: all that any of them has."""
_CONTROLS = re.compile(r"\\p(?:C|\{[^}]*C)|\[:cntrl:\]")


def checked_schema(node: Any, *, named: bool = False) -> Any:
    """`node`, a schema or a part of one, as it can be given to the library; a copy.

    Args:
        named: the node's keys are names of schemas, not keywords.

    Raises:
        ValueError: what of it is not supported.
    """
    if isinstance(node, list):
        return [checked_schema(item) for item in node]
    if not isinstance(node, dict):
        return node
    if named:
        return {name: checked_schema(item) for name, item in node.items()}
    _check_count(node)
    copy = {
        key: item if key in _DATA else checked_schema(item, named=key in _NAMED and isinstance(item, dict))
        for key, item in node.items()
    }
    if isinstance(node.get("pattern"), str):
        copy["pattern"] = narrowed(node["pattern"])
    if isinstance(node.get("patternProperties"), dict):
        copy["patternProperties"] = _patterns(
            copy["patternProperties"], closed=node.get("additionalProperties") is False
        )
    return copy


def _check_count(node: dict[str, Any]) -> None:
    least, required = node.get("minProperties"), node.get("required")
    if isinstance(least, int) and least > 1 + (len(required) if isinstance(required, list) else 0):
        raise ValueError(f"minProperties is {least}, expected at most 1 above the number of names in required")


def _patterns(patterns: dict[str, Any], *, closed: bool) -> dict[str, Any]:
    """The keys of `patternProperties`. A narrower pattern would leave more keys to `additionalProperties`."""
    changed = {narrowed(pattern): schema for pattern, schema in patterns.items()}
    if changed.keys() != patterns.keys() and not closed:
        raise ValueError("a key of patternProperties with [^...], \\W, \\D or \\S needs additionalProperties: false")
    return changed


def narrowed(pattern: str) -> str:
    r"""`pattern` without what the library, or one of ECMA-262 and Python, would read more widely than the others.

    NUL is taken out of negated classes. \W, \D and \S, and classes that exclude \w, \d or \s, exclude what is a
    letter, digit or blank in all of Unicode.

    Raises:
        ValueError: a class has a NUL of its own or is computed from others, so that this isn't enough.
    """
    out: list[str] = []
    negated: list[bool] = []  # of the classes that are open
    i = 0
    while i < len(pattern):
        if (negated and _WITH_NUL.match(pattern, i)) or _CONTROLS.match(pattern, i):
            raise ValueError("the pattern has a class with NUL or all control characters, or one made with -- or ~~")
        piece = pattern[i : i + (2 if pattern[i] == "\\" else 1)]
        i += len(piece)
        if piece == "[":
            negated.append(pattern.startswith("^", i))
            piece, i = (r"[^\x00", i + 1) if negated[-1] else (piece, i)
            if pattern.startswith("]", i):  # the first one is a character
                piece, i = piece + r"\]", i + 1
        elif piece == "]" and negated:
            negated.pop()
        elif piece.lower() in _UNICODE:
            piece = _widened(piece, excluded=sum(negated) % 2 == 1)
        out.append(piece)
    return "".join(out)


def _widened(piece: str, *, excluded: bool) -> str:
    if excluded:
        return _UNICODE.get(piece, piece)
    return piece if piece in _UNICODE else rf"[^\x00{_UNICODE[piece.lower()]}]"

"""What can't be asked for is refused by name, and quickly; what the library reads too widely is narrowed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from generation.structured.grammar import MAX_CHARACTERS, ConstraintError, Constraints
from generation.structured.schema_check import narrowed
from model.tokenizer.tokenizer import SentencePieceTokenizer
from tests.helpers.tiny import train_sentencepiece


@pytest.fixture(scope="module")
def constraints(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Constraints]:
    path = train_sentencepiece(tmp_path_factory.mktemp("tokenizer") / "tokenizer.model")
    tokenizer = SentencePieceTokenizer.from_file(path)
    made = Constraints(tokenizer, tokenizer.n_words, tokenizer.stop_ids)
    yield made
    made.close()


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"not": {"type": "string"}}, "not"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "string", "format": "zip"}, "format: zip"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
        ({"type": "string", "pattern": "^[\\x00-!]$"}, "NUL"),
        ({"type": "string", "pattern": "^[\\w--a]$"}, "--"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
        ({"$ref": "http://example.com/x"}, "example.com"),
        ({"$ref": "#"}, "no answer"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum"),
        ({"type": "strin"}, "strin"),
        ({"type": "object", "minProperties": 2}, "minProperties is 2"),
        ({"type": "object", "patternProperties": {"^[^a]$": {}}}, "additionalProperties: false"),
        ({"not": {}, "x-guidance": {"lenient": True}}, "not"),
        ({"enum": ["x" * 100] * 2000}, "has 206010 characters, expected at most 100000"),
        (deep(300), "recursion|deep"),
        (deep(100_000), "nested too deeply"),
        ({"minimum": float("nan")}, "not JSON"),
        ({"allOf": [{"type": "string", "pattern": f"a.*{i}"} for i in range(60)]}, "too complex"),
    ],
)
def test_unsupported_schemas_are_named(constraints: Constraints, schema: dict[str, Any], message: str) -> None:
    """The last one would keep the library busy for minutes."""
    for _ in range(2):  # the second time from memory
        with pytest.raises(ConstraintError, match=message):
            constraints.json_schema(schema)
    assert constraints.json_schema({"type": "boolean"})().mask().any()


@pytest.mark.parametrize(
    "pattern", ["(a", "[", r"(a)\1", r"\bx", "", "a\0", "\ud800", "a" * 20_000, "(?:" * 2000 + ")" * 2000]
)
def test_unsupported_patterns(constraints: Constraints, pattern: str) -> None:
    with pytest.raises(ConstraintError):
        constraints.regex(pattern)


@pytest.mark.parametrize(
    "pattern", ["((((a{100}){100}){100}){100})", "(a+)+b", "(a|b)*a(a|b){200}", "(.*a.{200}b.*){20}"]
)
def test_hard_patterns_are_quick_or_refused(constraints: Constraints, pattern: str) -> None:
    try:
        constraint = constraints.regex(pattern)()
    except ConstraintError:
        return
    assert constraint.mask().any()


@pytest.mark.parametrize("text", ["garbage", "start: x", "start: a\na: start", "", 'start: %json {"not": {}}'])
def test_unsupported_grammars(constraints: Constraints, text: str) -> None:
    with pytest.raises(ConstraintError):
        constraints.grammar(text)


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ("json", ""),
        ({}, "type"),
        ({"type": "xml"}, "type"),
        ({"type": ["text"]}, "type"),
        ({"type": "text", "x": 1}, "x"),
        ({"type": "json_schema"}, "json_schema"),
        ({"type": "json_schema", "json_schema": {"name": "x"}}, "json_schema.schema"),
        ({"type": "json_schema", "json_schema": {"name": 1, "schema": {}}}, "json_schema.name"),
        ({"type": "json_schema", "json_schema": {"schema": {}, "extra": 1}}, "json_schema.extra"),
        ({"type": "json_schema", "json_schema": {"schema": {"not": {}}}}, "json_schema.schema"),
    ],
)
def test_response_format_says_where_it_is_wrong(constraints: Constraints, value: Any, path: str) -> None:
    with pytest.raises(ConstraintError) as caught:
        constraints.from_response_format(value)
    assert caught.value.path == path
    assert constraints.from_response_format({"type": "text"}) is None


def test_compiled_once_and_forgotten_in_turn(constraints: Constraints) -> None:
    first = constraints.regex("first")
    assert constraints.regex("first") is first
    for i in range(64):
        constraints.regex(f"other{i}")
    assert constraints.regex("first") is not first
    assert MAX_CHARACTERS["regex"] == 10_000


@given(st.text(alphabet='ab\\[]^-"wWdDsS(){}+*?.|\n', max_size=12))
def test_narrowed_patterns_match_no_more(pattern: str) -> None:
    """As far as Python reads them: what a narrowed pattern matches, the pattern matches too."""
    try:
        wide = re.compile(pattern)
        text = re.sub(r"\\p\{\w+\}", lambda m: {"M": "", "Nd": r"\d"}.get(m[0][3:-1], r"\w"), narrowed(pattern))
        narrow = re.compile(text.replace(r"\s\w\x1c-\x1f", r"\s\x1c-\x1f"))
    except (re.error, ValueError, FutureWarning):
        return
    for sample in ("a", "b", '"', "\\", "é", "٣", "\u2003", "-", "]", "^", "ab", 'a"', "w", "_", "\x1f"):
        if narrow.fullmatch(sample):
            assert wide.fullmatch(sample), (pattern, text, sample)

"""Answers that must have a form: JSON, JSON by a schema, a regular expression, a grammar.

Constraints   one per served model: checks and compiles what a request asks for
Compiled      one form, compiled once; called, it makes the state of one sequence
Constraint    what sampling and the engine need of that state (`generation/interface.py`)

The work is llguidance's: https://github.com/guidance-ai/llguidance, docs/json_schema.md there lists what of JSON Schema
(draft 2020-12) it supports. Everything else is refused; nothing that was asked for is silently left out.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import numpy as np

from generation.structured.child import GrammarChild
from generation.structured.schema_check import checked_schema

if TYPE_CHECKING:
    import llguidance

    from generation.structured.worker import Vocabulary
    from model.tokenizer.tokenizer import Tokenizer

MAX_CHARACTERS = {"schema": 100_000, "regex": 10_000, "grammar": 100_000}
"""A schema is counted as compact JSON."""
MAX_CACHED = 64
"""Forms that are kept compiled, and refusals that are remembered."""
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,16}"
"""Between the parts of JSON; a bound, so that a model can't go on with blanks for ever."""


class ConstraintError(ValueError):
    """A form that can't be asked for, or one that failed while an answer was made.

    `reason` says what is wrong, to be read behind the name of the field; `path` is the field inside it, or empty.
    """

    def __init__(self, reason: str, path: str = "") -> None:
        super().__init__(f"{path} {reason}" if path else reason)
        self.reason = reason
        self.path = path


class GrammarConstraint:
    """The state of one sequence: what it may say next. Not to be shared between sequences or threads."""

    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._bytes = (vocab_size + 7) // 8

    def mask(self) -> np.ndarray:
        """The ids allowed next: one bit each, lowest bit first, (ceil(V / 8),) uint8.

        Raises:
            ConstraintError: the grammar needs too much work here, or allows nothing.
        """
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8, count=self._bytes)
        self._check()
        if not bits.any():
            raise ConstraintError("the grammar allows no token of the vocabulary here")
        return bits

    def accept(self, token_id: int) -> None:
        """Go on behind a token, which must be one of `mask` and no end token.

        Raises:
            ConstraintError: the token isn't allowed, or the grammar needs too much work here.
        """
        self._matcher.consume_token(token_id)
        self._check()

    @property
    def finished(self) -> bool:
        """Whether the text is complete and can't go on."""
        return bool(self._matcher.is_stopped() and self._matcher.is_accepting())

    def _check(self) -> None:
        if self._matcher.is_error():
            reason = self._matcher.get_error().partition("\n")[0]
            raise ConstraintError(f"the answer's grammar failed: {reason[:200]}")


class Compiled:
    """A form that was accepted: called, it makes a fresh constraint for one sequence."""

    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int, lead: int | None) -> None:
        self._matcher, self._vocab_size, self._lead = matcher, vocab_size, lead
        self._lock = threading.Lock()

    def __call__(self, *, continuing: bool = False) -> GrammarConstraint:
        """A constraint at its beginning.

        Args:
            continuing: the answer is read as going on behind its prompt: a SentencePiece decoder then keeps the
                space in front of the first word, and the grammar must not ask for one that is dropped.
        """
        with self._lock:
            matcher = self._matcher.deep_copy()
        constraint = GrammarConstraint(matcher, self._vocab_size)
        if continuing and self._lead is not None:
            constraint.accept(self._lead)
        return constraint


class Constraints:
    """Checks and compiles what requests ask for; may be shared between threads.

    The vocabulary's tables (about 0.1 s) and the process that tries grammars (about 0.3 s) are made at the first use.

    Args:
        tokenizer: its bytes of each token are the alphabet.
        vocab_size: columns of the logits, at least the tokenizer's words.
        stop_ids: all of them are allowed where an answer may end, and nowhere else.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, stop_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._stop_ids = stop_ids
        self._lock = threading.Lock()
        self._cache: OrderedDict[tuple[str, str], Compiled | ConstraintError] = OrderedDict()
        self._tables: llguidance.LLTokenizer | None = None
        self._child: GrammarChild | None = None
        self._lead: int | None = None

    def close(self) -> None:
        """End the process that tries grammars; a later use starts it again."""
        with self._lock:
            if self._child is not None:
                self._child.close()

    def from_response_format(self, value: Any) -> Compiled | None:
        """What OpenAI's `response_format` asks for; None for text.

        Raises:
            ConstraintError: naming what is wrong or unsupported.
        """
        if not isinstance(value, dict):
            raise ConstraintError(f"is {str(value)[:50]!r}, expected an object with the key 'type'")
        kind = value.get("type")
        known = {"text": {"type"}, "json_object": {"type"}, "json_schema": {"type", "json_schema"}}
        if not isinstance(kind, str) or kind not in known:
            raise ConstraintError(f"is {str(kind)[:50]!r}, expected 'text', 'json_object' or 'json_schema'", "type")
        for key in value:
            if key not in known[kind]:
                raise ConstraintError(f"is not a known field with the type {kind!r}", str(key)[:50])
        if kind == "text":
            return None
        return self.json_object() if kind == "json_object" else self._named_schema(value.get("json_schema"))

    def _named_schema(self, value: Any) -> Compiled:
        if not isinstance(value, dict):
            raise ConstraintError("is missing or no object, expected one with the key 'schema'", "json_schema")
        kinds: dict[str, Any] = {"name": str, "description": str, "strict": bool, "schema": dict}
        for key, item in value.items():
            if key not in kinds:
                raise ConstraintError("is not a known field", f"json_schema.{str(key)[:50]}")
            if not isinstance(item, kinds[key]) and not (item is None and key in ("strict", "description")):
                raise ConstraintError(f"is {str(item)[:50]!r}, expected {_KINDS[key]}", f"json_schema.{key}")
        if "schema" not in value:
            raise ConstraintError("is missing, expected a JSON schema", "json_schema.schema")
        try:
            return self.json_schema(value["schema"])
        except ConstraintError as error:
            raise ConstraintError(error.reason, "json_schema.schema") from None

    def json_object(self) -> Compiled:
        """Any JSON object."""
        return self.json_schema({"type": "object"})

    def json_schema(self, schema: dict[str, Any]) -> Compiled:
        """JSON that validates against `schema`.

        Raises:
            ConstraintError: naming what of it is wrong or unsupported, or the limit it exceeds.
        """
        try:
            text = json.dumps(schema, separators=(",", ":"), allow_nan=False)
        except RecursionError:
            raise ConstraintError("is nested too deeply") from None
        except (TypeError, ValueError) as error:
            raise ConstraintError(f"is not JSON: {error}") from None
        return self._compiled("schema", text)

    def regex(self, pattern: str) -> Compiled:
        """Text that matches `pattern` as a whole. Syntax: Rust's regex crate, without look-around and \\b.

        Raises:
            ConstraintError: naming what of it is wrong or unsupported, or the limit it exceeds.
        """
        return self._compiled("regex", pattern)

    def grammar(self, text: str) -> Compiled:
        """Text that a context-free grammar allows. Syntax: Lark as llguidance reads it, with a rule `start`.

        Raises:
            ConstraintError: naming what of it is wrong or unsupported, or the limit it exceeds.
        """
        return self._compiled("grammar", text)

    def _compiled(self, kind: str, text: str) -> Compiled:
        if not text:
            raise ConstraintError("is empty")
        if len(text) > MAX_CHARACTERS[kind]:
            raise ConstraintError(f"has {len(text)} characters, expected at most {MAX_CHARACTERS[kind]}")
        if "\0" in text or not _encodable(text):
            raise ConstraintError("holds a character that no text has: NUL or half a surrogate pair")
        with self._lock:
            found = self._cache.pop((kind, text), None)
            if found is None:
                try:
                    found = self._compile(kind, text)
                except ConstraintError as error:
                    found = error
            self._cache[kind, text] = found
            while len(self._cache) > MAX_CACHED:
                self._cache.popitem(last=False)
        if isinstance(found, ConstraintError):
            raise ConstraintError(found.reason)
        return found

    def _compile(self, kind: str, text: str) -> Compiled:
        from generation.structured.worker import compile_grammar

        tables, child = self._ready()
        try:
            grammar = _library_form(kind, text, leading_space=self._lead is not None)
            child.check(grammar)
            return Compiled(compile_grammar(tables, grammar, self._lead), self._vocab_size, self._lead)
        except RecursionError:
            raise ConstraintError("is nested too deeply") from None
        except ValueError as error:
            raise ConstraintError(f"is not supported: {_first_lines(str(error))}") from None

    def _ready(self) -> tuple[llguidance.LLTokenizer, GrammarChild]:
        if self._tables is None or self._child is None:
            from generation.structured.worker import make_tokenizer

            vocabulary = self._vocabulary()
            self._tables = make_tokenizer(vocabulary)
            self._child = GrammarChild(vocabulary)
        return self._tables, self._child

    def _vocabulary(self) -> Vocabulary:
        from generation.structured.worker import Vocabulary

        tokenizer = self._tokenizer
        tokens = [tokenizer.token_bytes(i) for i in range(tokenizer.n_words)]
        tokens += [b""] * (self._vocab_size - len(tokens))
        end_ids = sorted(self._stop_ids)
        if not end_ids:  # a model that can't end: an id without a column, seen only as "the text is complete"
            end_ids = [len(tokens)]
            tokens.append(b"")
        # The decoder drops the space of a first piece, so every grammar begins with one more; a byte token's space
        # would be kept.
        if tokenizer.strips_leading_space:
            self._lead = next((i for i, t in enumerate(tokens) if t == b" " and i not in tokenizer.byte_ids), None)
            if self._lead is not None:
                tokens = [b"" if t == b" " and i in tokenizer.byte_ids else t for i, t in enumerate(tokens)]
        return Vocabulary(tokens, end_ids, self._lead, self._encode)

    def _encode(self, text: str) -> list[int] | None:
        """The ids of text in the middle of an answer."""
        if not self._tokenizer.strips_leading_space:
            return self._tokenizer.encode(text, bos=False, eos=False)
        # A line break is a token of its own, behind which no space is put.
        front = self._tokenizer.encode("\n", bos=False, eos=False)
        ids = self._tokenizer.encode("\n" + text, bos=False, eos=False)
        return ids[len(front) :] if ids[: len(front)] == front else None


_KINDS = {"name": "a string", "description": "a string", "strict": "true or false", "schema": "a JSON schema (object)"}


def _library_form(kind: str, text: str, *, leading_space: bool) -> str:
    """The grammar as llguidance's own JSON: a list of grammars, of which the first is the start."""
    if kind == "schema":
        schema = checked_schema(json.loads(text))
        # Over whatever the client sent under this key, which could switch checks off.
        schema["x-guidance"] = {"whitespace_pattern": WHITESPACE, "lenient": False, "coerce_one_of": False}
        body: dict[str, Any] = {"json_schema": schema}
    elif kind == "regex":
        body = {"lark_grammar": "start: /" + _lark_regex(text) + "/"}
    else:
        body = {"lark_grammar": text}
    grammars: list[dict[str, Any]] = [{"name": "body", **body}]
    if leading_space:
        grammars.insert(0, {"name": "answer", "lark_grammar": 'start: " " @body'})
    return json.dumps({"grammars": grammars})


def _lark_regex(pattern: str) -> str:
    import llguidance

    found: str = json.loads(llguidance.LLMatcher.grammar_from_regex(pattern))["grammars"][0]["lark_grammar"]
    return found.removeprefix("start: /").removesuffix("/")


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _first_lines(text: str) -> str:
    """An error of the library on one line."""
    return " ".join(text.split())[:300]

"""Forms of answers: a model of random weights says nothing sensible, so what it says has its form from the grammar."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from generation.detokenizer import Detokenizer
from generation.engine.engine import Engine, EngineSettings
from generation.interface import Output, Request, SamplingParams
from generation.structured.grammar import Compiled, ConstraintError, Constraints
from model.llama import Llama
from model.tokenizer.tokenizer import SentencePieceTokenizer, Tokenizer, tokenizer_from_gguf
from tests.helpers.ranks import make_model, on_ranks
from tests.helpers.tiny import random_weights, tiny_config, train_sentencepiece
from tests.helpers.tiny_bpe import bpe_metadata


class Setup:
    """A tokenizer with a random model, whose vocabulary has a second stop id and some columns no token belongs to."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.stop_ids = tokenizer.stop_ids | {1}
        self.config = tiny_config(vocab_size=tokenizer.n_words + 5, stop_ids=self.stop_ids, max_seq_len=512)
        self.weights = random_weights(self.config)
        self.model = make_model(self.config, self.weights)
        self.constraints = Constraints(tokenizer, self.config.vocab_size, self.stop_ids)

    def request(self, name: str, form: Compiled | None, **params: Any) -> Request:
        values: dict[str, Any] = {"max_tokens": 400, "temperature": 1.0, "top_p": 1.0, **params}
        constraint = None if form is None else form()
        return Request(name, [5, 6, 7], SamplingParams(**values), Detokenizer(self.tokenizer), constraint=constraint)

    def answers(self, requests: list[Request], model: Llama | None = None, **settings: Any) -> dict[str, Answer]:
        engine = Engine(model or self.model, EngineSettings(**({"kv_cache_tokens": 32768} | settings)))
        for request in requests:
            engine.submit(request)
        answers: dict[str, Answer] = {}
        while engine.busy:
            for output in engine.step():
                answers.setdefault(output.request_id, Answer()).add(output)
        engine.heartbeat(stop=True)
        self.preemptions = engine.stats().preemptions
        assert engine.stats().kv_blocks_free == engine.stats().kv_blocks_total
        return answers


class Answer:
    """The outputs of one request, joined."""

    def __init__(self) -> None:
        self.text, self.ids, self.outputs = "", [], []  # type: ignore[var-annotated]

    def add(self, output: Output) -> None:
        self.text += output.text
        self.ids += output.token_ids
        self.outputs.append(output)

    @property
    def reason(self) -> Any:
        return self.outputs[-1].finish_reason


def make_tokenizer(kind: str, directory: Path) -> Tokenizer:
    if kind == "bpe":
        return tokenizer_from_gguf(bpe_metadata())
    return SentencePieceTokenizer.from_file(train_sentencepiece(directory / "tokenizer.model"))


@pytest.fixture(scope="module", params=["spm", "bpe"])
def setup(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    made = Setup(make_tokenizer(request.param, tmp_path_factory.mktemp("tokenizer")))
    yield made
    made.constraints.close()


@pytest.fixture(scope="module")
def spm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    made = Setup(make_tokenizer("spm", tmp_path_factory.mktemp("tokenizer")))
    yield made
    made.constraints.close()


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": -3, "maximum": 120},
        "kind": {"enum": ["a", "b é", 3, None, {"x": [1]}]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}
KINDS: list[Any] = PERSON["properties"]["kind"]["enum"]  # type: ignore[index]


def is_person(x: Any) -> bool:
    named = sorted(x) == ["age", "kind", "name"] and isinstance(x["name"], str) and len(x["name"]) <= 6
    return named and -3 <= x["age"] <= 120 and x["kind"] in KINDS


def is_rows(x: Any) -> bool:
    return 1 <= len(x) <= 2 and all(len(row) == 2 and all(type(cell) is bool for cell in row) for row in x)


def is_list(x: Any) -> bool:
    while x is not None:
        if sorted(x) != ["next", "value"] or x["value"] not in (1, 2):
            return False
        x = x["next"]
    return True


def is_either(x: Any) -> bool:
    if x["is"] == "number":
        return type(x["value"]) is int and sorted(x) == ["is", "value"]
    return x == {"is": "nothing"}


ROWS = {
    "type": "array",
    "minItems": 1,
    "maxItems": 2,
    "items": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 2},
}
LIST = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"enum": [1, 2]},
                "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]},
            },
            "required": ["value", "next"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}
EITHER = {
    "oneOf": [
        {
            "type": "object",
            "properties": {"is": {"const": "number"}, "value": {"type": "integer", "minimum": 0, "maximum": 99}},
            "required": ["is", "value"],
            "additionalProperties": False,
        },
        {
            "type": "object",
            "properties": {"is": {"const": "nothing"}},
            "required": ["is"],
            "additionalProperties": False,
        },
    ]
}
UNICODE = {"type": "string", "pattern": r"^[àéü日本😀]{1,4}$"}
NO_QUOTE = {"type": "string", "pattern": r'^[^"\\]{3,5}$'}
CASES: dict[str, tuple[dict[str, Any], Callable[[Any], bool]]] = {
    "object": (PERSON, is_person),
    "nested arrays": (ROWS, is_rows),
    "$ref": (LIST, is_list),
    "oneOf": (EITHER, is_either),
    "anyOf": ({"anyOf": [{"const": None}, {"type": "boolean"}]}, lambda x: x is None or type(x) is bool),
    "range": ({"type": "integer", "minimum": 95, "maximum": 1003}, lambda x: type(x) is int and 95 <= x <= 1003),
    "unicode": (UNICODE, lambda x: re.fullmatch("[àéü日本😀]{1,4}", x) is not None),
    "excluded": (NO_QUOTE, lambda x: 3 <= len(x) <= 5 and not set('"\\') & set(x)),
}


@pytest.mark.parametrize("case", CASES)
def test_50_samples_of_a_schema(setup: Setup, case: str) -> None:
    """B290: what is asked for is enforced."""
    schema, valid = CASES[case]
    value = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    form = setup.constraints.from_response_format(value)
    answers = setup.answers([setup.request(str(i), form, seed=i) for i in range(50)])
    stopped = [answer for answer in answers.values() if answer.reason == "stop"]
    for answer in stopped:
        assert valid(json.loads(answer.text)), answer.text
        assert not set(answer.ids) & setup.stop_ids
    assert len(stopped) == 50 if case != "$ref" else len(stopped) >= 40  # a list may go on to max_tokens
    assert len({answer.text for answer in stopped}) > 1


def test_greedy_json_object(setup: Setup) -> None:
    """Any object; quotes and braces are made likely, or the random model's first string would never end."""
    ends = [i for i in range(setup.tokenizer.n_words) if setup.tokenizer.token_bytes(i) in (b'"', b"}", b"]", b'"}')]
    bias = tuple((i, 4.0) for i in ends)
    form = setup.constraints.from_response_format({"type": "json_object"})
    requests = [setup.request(str(i), form, seed=i, logit_bias=bias, temperature=i % 2) for i in range(20)]
    answers = setup.answers(requests)
    stopped = [answer.text for answer in answers.values() if answer.reason == "stop"]
    assert len(stopped) > 5
    assert all(isinstance(json.loads(text), dict) for text in stopped)


@pytest.mark.parametrize("pattern", [r"[a-c]+\d{2}", r" hello( world)?", r"(yes|no)", r"^a.b$", r"é?ü", r"a/b\\", "x*"])
def test_regex_matches_the_whole_text(setup: Setup, pattern: str) -> None:
    """Also a space at the start, which a SentencePiece decoder would drop."""
    form = setup.constraints.regex(pattern)
    answers = setup.answers([setup.request(str(i), form, seed=i) for i in range(10)])
    for answer in answers.values():
        assert answer.reason == "stop"
        assert re.fullmatch(pattern, answer.text), answer.text


def test_grammar(setup: Setup) -> None:
    form = setup.constraints.grammar('start: "(" (start | NUMBER) ")"\nNUMBER: /[0-9]{1,2}/\n')
    answers = setup.answers([setup.request(str(i), form, seed=i) for i in range(10)])
    for answer in (a for a in answers.values() if a.reason == "stop"):
        assert re.fullmatch(r"(\(+)\d{1,2}(\)+)", answer.text)
        assert answer.text.count("(") == answer.text.count(")")


def test_behind_an_echoed_prompt_the_space_is_in_the_text(spm: Setup) -> None:
    lead = spm.tokenizer.encode("a", bos=False, eos=False)[0]
    assert spm.tokenizer.token_bytes(lead).startswith(b" ")
    form = spm.constraints.regex("a+")
    fresh, going_on = form(), form(continuing=True)
    assert allowed(fresh, lead)
    assert not allowed(going_on, lead)


def allowed(constraint: Any, token: int) -> bool:
    return bool(np.unpackbits(constraint.mask(), bitorder="little")[token])


def test_stop_ids_only_where_the_text_may_end(setup: Setup) -> None:
    constraint = setup.constraints.regex("ab?")(continuing=True)
    token = {setup.tokenizer.token_bytes(i): i for i in reversed(range(setup.tokenizer.n_words))}
    mask = np.unpackbits(constraint.mask(), bitorder="little", count=setup.config.vocab_size)
    assert not any(mask[i] for i in setup.stop_ids)
    constraint.accept(token[b"a"])
    assert all(allowed(constraint, i) for i in setup.stop_ids)
    assert not constraint.finished
    constraint.accept(token[b"b"])
    assert constraint.finished
    with pytest.raises(ConstraintError):
        constraint.accept(token[b"b"])


def test_neighbors_with_and_without_a_form_are_as_alone(setup: Setup) -> None:
    person = setup.constraints.json_schema(PERSON)

    no_text = tuple((i, -100.0) for i in range(setup.tokenizer.n_words, setup.config.vocab_size))

    def requests() -> list[Request]:
        return [
            setup.request(
                str(i),
                person if i % 2 else None,
                seed=i,
                max_tokens=40,
                temperature=(i // 2) % 2,
                repetition_penalty=1.1 if i % 3 == 0 else 1.0,
                logit_bias=no_text,
            )
            for i in range(8)
        ]

    together = setup.answers(requests())
    scarce = setup.answers(requests(), kv_cache_tokens=16 * 6, prefill_chunk=16)
    assert setup.preemptions > 0
    for request in requests():
        alone = setup.answers([request])[request.request_id]
        assert together[request.request_id].ids == alone.ids
        assert scarce[request.request_id].ids == alone.ids


def test_two_ranks_answer_as_one(spm: Setup) -> None:
    form = spm.constraints.json_schema(PERSON)

    def run(comm: Any) -> dict[str, str]:
        model = make_model(spm.config, spm.weights, comm)
        if comm.rank != 0:
            Engine(model, EngineSettings(32768)).follow()
            return {}
        answers = spm.answers([spm.request(str(i), form, temperature=0) for i in range(3)], model)
        return {name: answer.text for name, answer in answers.items()}

    one, (two, _) = on_ranks(1, run)[0], on_ranks(2, run)
    assert one == two
    assert all(is_person(json.loads(text)) for text in one.values())


def test_logprobs_are_the_models_own(setup: Setup) -> None:
    """A token the model finds unlikely keeps its low probability; the alternatives are those without the form."""
    free = setup.answers([setup.request("r", None, temperature=0, max_tokens=1, logprobs=True, top_logprobs=3)])
    form = setup.constraints.regex("(zz|qq)")
    bound = setup.answers([setup.request("r", form, temperature=0, logprobs=True, top_logprobs=3)])["r"]
    first = bound.outputs[0].logprobs[0]
    assert first.top == free["r"].outputs[0].logprobs[0].top
    assert first.logprob <= first.top[0][1]
    assert first.token_id == bound.ids[0]


def test_cut_by_length_and_ignoring_eos(setup: Setup) -> None:
    form = setup.constraints.json_schema(PERSON)
    cut = setup.answers([setup.request("r", form, seed=1, max_tokens=4)])["r"]
    assert (cut.reason, len(cut.ids)) == ("length", 4)
    whole = setup.answers([setup.request("r", setup.constraints.regex("a?b?"), seed=1, ignore_eos=True)])["r"]
    assert whole.reason == "stop"
    assert re.fullmatch("a?b?", whole.text)


class Broken:
    """A constraint that fails at its second use."""

    def __init__(self, form: Compiled, method: str) -> None:
        self.inner, self.method, self.calls = form(), method, 0

    def _count(self, method: str) -> None:
        self.calls += method == self.method
        if self.calls == 2:
            raise RuntimeError(f"{method} failed")

    def mask(self) -> np.ndarray:
        self._count("mask")
        return self.inner.mask()

    def accept(self, token_id: int) -> None:
        self._count("accept")
        self.inner.accept(token_id)

    finished = False


@pytest.mark.parametrize("method", ["mask", "accept"])
def test_a_failing_constraint_ends_its_own_request(setup: Setup, method: str) -> None:
    form = setup.constraints.json_schema(PERSON)
    requests = [setup.request(str(i), form, seed=i, max_tokens=30) for i in range(3)]
    whole = setup.answers(requests)
    requests = [setup.request(str(i), form, seed=i, max_tokens=30) for i in range(3)]
    requests[1].constraint = Broken(form, method)
    answers = setup.answers(requests)
    assert (answers["1"].reason, answers["1"].outputs[-1].error) == ("error", f"{method} failed")
    assert [answers[i].ids for i in "02"] == [whole[i].ids for i in "02"]


def test_whitespace_is_bounded(setup: Setup) -> None:
    """A model can't go on with blanks for ever."""
    blanks = {i for i in range(setup.tokenizer.n_words) if setup.tokenizer.token_bytes(i) in (b" ", b"\n", b"  ")}
    bias = tuple((i, 100.0) for i in blanks)
    form = setup.constraints.json_schema(ROWS)
    answer = setup.answers([setup.request("r", form, temperature=0, logit_bias=bias)])["r"]
    assert answer.reason == "stop"
    assert is_rows(json.loads(answer.text))
    assert max(map(len, re.findall(r"\s+", answer.text))) == 16


def test_a_model_without_stop_ids_ends_where_nothing_can_follow(setup: Setup) -> None:
    constraints = Constraints(setup.tokenizer, setup.config.vocab_size, frozenset())
    try:
        answer = setup.answers([setup.request("r", constraints.regex("(yes|no)"), temperature=0)])["r"]
    finally:
        constraints.close()
    assert (answer.reason, answer.text in ("yes", "no")) == ("stop", True)

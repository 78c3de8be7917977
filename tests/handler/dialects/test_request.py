"""Bodies and fields of the native route: what is accepted, and that every refusal says why."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handler.dialects.plain.request import NativeRequest
from handler.errors import InvalidRequest
from handler.requests.body import parse_body

JSON_TYPE = "application/json"
BODY = {"prompt": "Grüße & a=b ✓", "temperature": 0}
RAW = json.dumps(BODY, ensure_ascii=False).encode("utf-8")
FORM_TYPE = "application/x-www-form-urlencoded"


def refusal(body: Any, mode: Any = "text_completion") -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        NativeRequest.read(body, mode)
    return caught.value


def body_refusal(row: dict[str, Any], content_type: str | None = None) -> str:
    with pytest.raises(InvalidRequest) as caught:
        parse_body(row, content_type)
    return caught.value.message


# ---- bodies


@pytest.mark.parametrize(
    ("row", "content_type"),
    [
        ({"body": RAW}, JSON_TYPE),
        ({"body": RAW}, "Application/JSON; charset=UTF-8"),
        ({"body": RAW}, None),
        ({"body": RAW}, "application/octet-stream"),
        ({"body": bytearray(RAW)}, JSON_TYPE),
        ({"body": memoryview(RAW)}, JSON_TYPE),
        ({"body": RAW.decode()}, JSON_TYPE),
        ({"body": BODY}, JSON_TYPE),
        ({"body": b"\xef\xbb\xbf" + RAW}, JSON_TYPE),
        ({"body": b"\r\n " + RAW + b"\n"}, None),
        ({"data": RAW}, "multipart/form-data; boundary=x"),
        ({"data": RAW}, "text/plain"),
        ({"data": RAW.decode()}, ""),
        ({"body": RAW}, FORM_TYPE),
    ],
)
def test_the_same_json_in_any_wrapping_is_the_same_request(row: dict[str, Any], content_type: str | None) -> None:
    """B142, B143, B277."""
    assert parse_body(row, content_type) == BODY


@pytest.mark.parametrize("row", [{}, {'{"prompt": "a': b'b"}'}, {"Once upon": b"", "a time": b"x"}])
@pytest.mark.parametrize("content_type", [FORM_TYPE, "", None])
def test_a_body_the_frontend_took_for_a_form_is_refused_with_the_remedy(
    row: dict[str, Any], content_type: str | None
) -> None:
    """B142: `curl --data` without a content type. The frontend has already lost parts of it."""
    assert "-H 'Content-Type: application/json'" in body_refusal(row, content_type)


def test_a_form_field_named_data_is_fine() -> None:
    """B142: as `curl --data-urlencode data@file` sends it."""
    assert parse_body({"data": bytearray(RAW)}, FORM_TYPE) == BODY


@pytest.mark.parametrize(
    "row",
    [{"prompt": b"hi"}, {"file": RAW}, {"body": RAW, "stream": b"true"}, {"body": RAW, "data": RAW}, {}, {"body": 3}],
)
def test_other_fields_are_refused_with_what_is_accepted(row: dict[str, Any]) -> None:
    message = body_refusal(row)
    assert "multipart field named 'data'" in message
    assert "plain text" in message


@pytest.mark.parametrize(
    ("raw", "content_type"),
    [
        (b"Once upon a time\n", None),
        (b"Once upon a time\n", "text/plain"),
        (RAW, "text/plain; charset=utf-8"),
        (b"[INST] hi [/INST]", None),
        (b'"Hello," she said', None),
        (b"{ not json", None),
        (b"42", None),
        (b"null", "application/octet-stream"),
    ],
)
def test_text_is_a_prompt(raw: bytes, content_type: str | None) -> None:
    assert parse_body({"body": raw}, content_type) == raw.decode()


@pytest.mark.parametrize("raw", [b"", b" \n", b"\xef\xbb\xbf", "", None])
@pytest.mark.parametrize("content_type", [None, JSON_TYPE, "text/plain"])
def test_an_empty_body_is_refused(raw: Any, content_type: str | None) -> None:
    """B277."""
    body_refusal({"body": raw}, content_type)


def test_other_encodings_are_refused() -> None:
    """B179, B143."""
    message = body_refusal({"body": '{"prompt": "Grüße"}'.encode("latin-1")}, JSON_TYPE)
    assert "UTF-8" in message
    assert "byte 14" in message
    body_refusal({"body": '{"prompt": "你好"}'.encode("gbk")})
    body_refusal({"body": '{"prompt": "x"}'.encode("utf-16")}, JSON_TYPE)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"temperature": NaN}', "temperature is NaN, expected a finite number"),
        ('{"logit_bias": {"5": -Infinity}}', "logit_bias.5 is -Infinity"),
        ('{"temperature": 1e999}', "temperature is Infinity"),
        ('{"prompt": ["a", NaN]}', "prompt[1] is NaN"),
        ('{"prompt": "a", "prompt": "b"}', '"prompt" is given more than once'),
        ('{"prompt": "\\ud800"}', "prompt holds half of a surrogate pair"),
        ('{"\\ud800": 1}', "half of a surrogate pair"),
        ('{"prompt": "a"', "not valid JSON"),
        ("[" * 100 + "]" * 100, "nested more than 64"),
        ("[" * 100_000, "nested more than 64"),
        ('{"a":' * 100_000, "nested more than 64"),
        ('{"seed": ' + "9" * 5000 + "}", "not valid JSON"),
    ],
)
@pytest.mark.parametrize("content_type", [JSON_TYPE, None])
def test_dangerous_json_is_refused(text: str, words: str, content_type: str | None) -> None:
    """B197: also without a content type, and inside what looks like JSON."""
    message = body_refusal({"body": text.encode()}, content_type)
    assert words in message
    message.encode("utf-8")
    assert len(message) < 500


def test_already_parsed_bodies_are_checked_too() -> None:
    """B197: a frontend that decodes JSON itself accepts NaN."""
    assert "temperature is NaN" in body_refusal({"body": {"prompt": "x", "temperature": math.nan}})


@pytest.mark.parametrize("text", ["42", "null", "true"])
def test_json_that_is_no_request_is_refused(text: str) -> None:
    assert text in body_refusal({"body": text.encode()}, JSON_TYPE)


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(TEXTS, JSON_VALUES, max_size=4))
def test_any_json_object_survives(value: dict[str, Any]) -> None:
    raw = json.dumps(value, ensure_ascii=False).encode("utf-8")
    assert parse_body({"body": raw}, JSON_TYPE) == value
    assert parse_body({"data": raw}, None) == value


@given(st.binary(max_size=40), st.sampled_from([None, JSON_TYPE, "text/plain", FORM_TYPE]))
def test_any_bytes_are_a_body_or_an_invalid_request(raw: bytes, content_type: str | None) -> None:
    try:
        body = parse_body({"body": raw}, content_type)
        NativeRequest.read(body)
    except InvalidRequest as error:
        assert error.message  # noqa: PT017


@given(st.dictionaries(st.sampled_from([*NativeRequest.model_fields, "messages", "max_tokens"]), JSON_VALUES))
def test_any_values_of_fields_are_a_request_or_an_invalid_request(fields: dict[str, Any]) -> None:
    try:
        NativeRequest.read(fields)
    except InvalidRequest as error:
        assert error.param  # noqa: PT017


# ---- bodies without fields


def test_a_bare_string_follows_the_mode() -> None:
    assert NativeRequest.read("hi").prompt.items == ["hi"]  # type: ignore[union-attr]
    assert NativeRequest.read("hi", "chat").dialog == [{"role": "user", "content": "hi"}]


def test_a_bare_list_tells_what_it_is() -> None:
    message = {"role": "user", "content": "hi"}
    assert NativeRequest.read([message]).dialog == [message]
    assert NativeRequest.read([[message], [message]]).dialogs == [[message], [message]]
    assert NativeRequest.read(["a", "b"]).prompt.items == ["a", "b"]  # type: ignore[union-attr]
    assert NativeRequest.read([1, 2]).prompt.items == [[1, 2]]  # type: ignore[union-attr]
    assert NativeRequest.read([[1], [2, 3]], "chat").prompt.items == [[1], [2, 3]]  # type: ignore[union-attr]
    chats = NativeRequest.read(["a", "b"], "chat").dialogs
    assert chats == [[{"role": "user", "content": "a"}], [{"role": "user", "content": "b"}]]
    refusal([])


# ---- fields

DIALOG = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 0), ("temperature", 0.0), ("temperature", 2), ("top_p", 0), ("top_p", 1), ("top_p", 1.0),
        ("top_k", 0), ("min_p", 1), ("repetition_penalty", 2), ("frequency_penalty", -2), ("presence_penalty", 2.0),
        ("seed", 0), ("seed", None), ("seed", -5), ("max_gen_len", 1), ("max_gen_len", None), ("max_gen_len", 10**8),
        ("n", 16), ("top_logprobs", 0), ("top_logprobs", 20), ("logprobs", False), ("stream", True),
        ("ignore_eos", True), ("mode", "text_completion"),
    ],
)  # fmt: skip
def test_values_at_their_limits_are_taken_as_they_are(field: str, value: Any) -> None:
    """B081, B191, B194: zero is a value, not an absence; integers are numbers."""
    request = NativeRequest.read({"prompt": "x", field: value})
    assert getattr(request, field) == value
    assert field in request.model_fields_set


@pytest.mark.parametrize(
    ("field", "value", "limit"),
    [
        ("temperature", -0.1, "between 0 and 2"), ("temperature", 3, "between 0 and 2"),
        ("temperature", "0.5", "between 0 and 2"), ("temperature", True, "between 0 and 2"),
        ("temperature", None, "between 0 and 2"), ("temperature", 10**400, "between 0 and 2"),
        ("temperature", math.nan, "between 0 and 2"), ("top_p", -0.1, "between 0 and 1"),
        ("top_p", 1.1, "between 0 and 1"), ("top_p", math.inf, "between 0 and 1"), ("top_k", -1, "at least 0"),
        ("top_k", 1.0, "integer"), ("top_k", False, "integer"), ("min_p", 2, "between 0 and 1"),
        ("repetition_penalty", 0, "above 0"), ("frequency_penalty", 2.5, "between -2 and 2"),
        ("seed", 1.5, "integer"), ("seed", "1", "integer"), ("seed", 2**63, "64 bits"), ("seed", True, "integer"),
        ("max_gen_len", 0, "at least 1"), ("max_new_tokens", -1, "at least 1"), ("max_gen_len", 5.0, "integer"),
        ("n", 0, "between 1 and 16"), ("n", 17, "between 1 and 16"), ("top_logprobs", 21, "between 0 and 20"),
        ("logprobs", 1, "true or false"), ("stream", "true", "true or false"), ("stream", 1, "true or false"),
        ("echo", 2, "true or false"), ("echo", "yes", "true or false"), ("ignore_eos", 0, "true or false"),
        ("mode", "completion", "'text_completion' or 'chat'"), ("stop", "", "1 to 512"), ("stop", ["a", ""], "1 to"),
        ("stop", ["a"] * 17, "up to 16"), ("stop", "x" * 513, "512"), ("stop", [1], "strings"), ("stop", 5, "string"),
        ("logit_bias", [1], "token id"), ("logit_bias", {"a": 1}, "token id"), ("logit_bias", {"1": 101}, "100"),
        ("logit_bias", {"1": True}, "-100"), ("logit_bias", {"-1": 1}, "token id"),
        ("continue_final_message", 1, "true or false"),
    ],
)  # fmt: skip
def test_wrong_values_are_refused_with_field_and_limit(field: str, value: Any, limit: str) -> None:
    """B195, B196, B197."""
    error = refusal({"prompt": "x", field: value})
    assert error.status == 400
    assert error.param == field
    assert error.message.startswith(field)
    assert limit in error.message


def test_values_are_shown_shortened() -> None:
    assert 'temperature is "aaa' in refusal({"prompt": "x", "temperature": "a" * 10**6}).message
    for value in ("a" * 10**6, [1.5] * 10**5, {"k" * 10**5: 1}, 10**4000):
        assert len(refusal({"prompt": "x", "temperature": value}).message) < 150
    assert len(refusal({"prompt": "x", "y" * 10**5: 1}).message) < 150


@pytest.mark.parametrize(
    ("field", "meant"),
    [("temprature", "temperature"), ("max_tokens", "max_gen_len"), ("Top_P", "top_p"), ("promt", "prompt"),
     ("stop_sequences", "stop"), ("max_gen_length", "max_gen_len")],
)  # fmt: skip
def test_an_unknown_field_is_named_with_the_one_meant(field: str, meant: str) -> None:
    """B291."""
    error = refusal({"prompt": "x", field: 1})
    assert error.param == field
    assert field in error.message
    assert f"did you mean '{meant}'" in error.message


def test_an_unknown_field_without_likeness_gets_no_hint() -> None:
    assert refusal({"prompt": "x", "lora_adapter": 1}).message == "lora_adapter is not a known field"


def test_all_mistakes_are_told_at_once() -> None:
    message = refusal({"prompt": "x", "top_p": 7, "n": 0, "foo": 1}).message
    assert all(word in message for word in ("top_p is 7", "n is 0", "foo is not"))


def test_echo_accepts_zero_and_one() -> None:
    """B095."""
    assert NativeRequest.read({"prompt": "x", "echo": 1}).echo is True
    assert NativeRequest.read({"prompt": "x", "echo": 0}).echo is False


def test_aliases() -> None:
    request = NativeRequest.read({"messages": DIALOG, "max_new_tokens": 3})
    assert request.dialog == DIALOG
    assert request.max_gen_len == 3
    assert "same field" in refusal({"prompt": "x", "max_gen_len": 1, "max_new_tokens": 1}).message
    assert refusal({"dialog": DIALOG, "messages": DIALOG}).param == "messages"


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"temperature": 0},
        {"prompt": "x", "dialog": DIALOG},
        {"messages": DIALOG, "dialogs": [DIALOG]},
        {"prompt": "x", "mode": "chat"},
        {"dialog": DIALOG, "mode": "text_completion"},
        {"dialog": DIALOG, "echo": True},
        {"prompt": "x", "continue_final_message": True},
        {"prompt": "x", "logprobs": False, "top_logprobs": 2},
    ],
)
def test_fields_that_do_not_go_together(body: dict[str, Any]) -> None:
    assert refusal(body).param


@pytest.mark.parametrize(
    ("prompt", "place"),
    [
        (None, "prompt is null"), (3, "prompt is 3"), ([], "prompt is an empty list"), ([[]], "prompt[0]"),
        (["a", 1], "prompt[1]"), ([1, "a"], "prompt[1]"), ([1, True], "prompt[1]"), ([1.0], "prompt[0]"),
        ([[1], ["a"]], "prompt[1][0]"), ([[1], []], "prompt[1]"), ({"text": "a"}, "prompt is"),
    ],
)  # fmt: skip
def test_wrong_prompts_are_refused_with_their_place(prompt: Any, place: str) -> None:
    error = refusal({"prompt": prompt})
    assert error.param == "prompt"
    assert place in error.message


@pytest.mark.parametrize(
    ("dialog", "place"),
    [
        (None, " is null"), ([], " is []"), ("hi", ' is "hi"'), (["hi"], "[0] is"), ([{}], "[0].role is missing"),
        ([{"role": "user"}], "[0].content is missing"), ([{"role": "tool", "content": "x"}], "[0].role is"),
        ([{"role": ["user"], "content": "x"}], "[0].role is"), ([{"role": "user", "content": None}], "content is null"),
        ([*DIALOG, {"role": "user", "content": "x", "name": "y"}], "[1].name is not a known field"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ["dialog", "messages", "dialogs"])
def test_wrong_dialogs_are_refused_with_their_place(name: str, dialog: Any, place: str) -> None:
    """B207."""
    value = [DIALOG, dialog] if name == "dialogs" else dialog
    error = refusal({name: value})
    assert error.param == name
    assert place in error.message
    assert error.message.startswith(name + ("[1]" if name == "dialogs" else ""))

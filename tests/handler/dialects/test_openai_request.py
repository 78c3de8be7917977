"""Fields of the OpenAI routes: what is accepted, what is ignored, what is refused and how."""

from __future__ import annotations

import contextlib
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handler.dialects.openai.request import (
    NO_EFFECT,
    UNSUPPORTED,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    OpenAIFields,
    TokenizeRequest,
)
from handler.errors import InvalidRequest
from tests.helpers.readme_examples import ROOT, table

DOCUMENT = ROOT / "docs" / "openai-api.md"
READ = DOCUMENT.read_text(encoding="utf-8")
MESSAGES = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> ChatRequest:
    return ChatRequest.read({"messages": MESSAGES, **fields})


def completion(**fields: Any) -> CompletionRequest:
    return CompletionRequest.read({"prompt": "hi", **fields})


def refusal(model: type[OpenAIFields], body: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        model.read(body)
    return caught.value


def refused_chat(**fields: Any) -> InvalidRequest:
    return refusal(ChatRequest, {"messages": MESSAGES, **fields})


def refused_completion(**fields: Any) -> InvalidRequest:
    return refusal(CompletionRequest, {"prompt": "hi", **fields})


def test_defaults_are_openais() -> None:
    asked = chat(model="m")
    assert (asked.temperature, asked.top_p, asked.n, asked.most, asked.stream) == (1.0, 1.0, 1, None, False)
    assert completion().max_tokens == 16


def test_null_is_absent() -> None:
    """B100, B242: and for the length, what fits."""
    names = [name for name in ChatRequest.model_fields if name != "messages"]
    assert chat(**dict.fromkeys(names)) == chat()
    assert chat(**dict.fromkeys([*NO_EFFECT, *UNSUPPORTED])) == chat()
    assert completion(max_tokens=None).max_tokens is None
    names = [name for name in CompletionRequest.model_fields if name not in ("prompt", "max_tokens")]
    assert completion(**dict.fromkeys(names)) == completion()


def test_zeros_are_values() -> None:
    """B081, B194."""
    asked = chat(temperature=0, top_p=0, seed=0, top_logprobs=0, logprobs=True)
    assert (asked.temperature, asked.top_p, asked.seed) == (0, 0, 0)
    assert completion(logprobs=0).logprobs == 0


def test_either_name_of_the_length() -> None:
    assert chat(max_tokens=3).most == chat(max_completion_tokens=3).most == 3
    assert chat(max_tokens=3, max_completion_tokens=3).most == 3
    assert "4" in refused_chat(max_tokens=3, max_completion_tokens=4).message


@pytest.mark.parametrize("value", [0, -1, 1.5, "5", True])
def test_wrong_lengths(value: Any) -> None:
    """B101."""
    for name in ("max_tokens", "max_completion_tokens"):
        error = refused_chat(**{name: value})
        assert error.param == name
        assert "of at least 1" in error.message
    if value != 0:
        assert refused_completion(max_tokens=value).param == "max_tokens"


def test_no_tokens_only_with_echo() -> None:
    """B035, B037, B101."""
    assert completion(max_tokens=0, echo=True).max_tokens == 0
    assert "echo" in refused_completion(max_tokens=0).message


def test_echo_and_logprobs_as_older_clients_send_them() -> None:
    """B037, B095."""
    assert completion(echo=1).echo is True
    assert completion(logprobs=True).logprobs == 1
    assert completion(logprobs=False).logprobs is None
    assert refused_completion(logprobs=21).param == "logprobs"


@pytest.mark.parametrize("name", sorted(NO_EFFECT))
def test_fields_without_effect(name: str) -> None:
    for value in ("x", True, {"a": "b"}):
        assert chat(**{name: value}) == chat()


@pytest.mark.parametrize("name", sorted(UNSUPPORTED))
def test_unsupported_fields(name: str) -> None:
    """B207: refused by name, unless they ask for nothing."""
    error = refused_chat(**{name: {"something": 1}})
    assert error.param == name
    assert "not supported" in error.message
    for value in UNSUPPORTED[name]:
        assert chat(**{name: value}) == chat()


def test_suffix_is_refused_by_name() -> None:
    assert refused_completion(suffix="end").message.startswith("suffix is ")


def test_unknown_fields_are_refused_by_name() -> None:
    error = refused_chat(tempature=1, bogus=None)
    assert "tempature is not a known field (did you mean 'temperature'?)" in error.message
    assert "bogus is not a known field" in error.message
    assert "did you mean 'max_tokens'" in refused_completion(max_new_tokens=1).message
    refused_completion(messages=MESSAGES)
    refused_chat(prompt="x")


@pytest.mark.parametrize("body", [[], "text", [1, 2]])
def test_body_is_an_object(body: Any) -> None:
    assert "JSON object" in refusal(ChatRequest, body).message


def test_missing_input() -> None:
    assert refusal(ChatRequest, {}).param == "messages"
    assert refusal(CompletionRequest, {"prompt": None}).param == "prompt"
    assert refusal(DetokenizeRequest, {}).param == "tokens"
    for body in ({}, {"prompt": "x", "messages": MESSAGES}):
        assert "exactly one" in refusal(TokenizeRequest, body).message


def test_extra_sampling() -> None:
    asked = chat(top_k=-1, min_p=0.1, repetition_penalty=1.1, ignore_eos=True, stop_token_ids=[5, 6])
    assert (asked.top_k, asked.min_p, asked.repetition_penalty, asked.ignore_eos) == (0, 0.1, 1.1, True)
    assert asked.stop_token_ids == {5, 6}
    assert refused_chat(top_k=-2).param == "top_k"
    for value in (5, [-1], ["5"], [True]):
        assert refused_chat(stop_token_ids=value).param == "stop_token_ids"


def test_bias_with_string_keys() -> None:
    """B214."""
    assert chat(logit_bias={"15043": -100}).logit_bias == ((15043, -100.0),)
    assert refused_chat(logit_bias={"hello": 1}).param == "logit_bias"


def test_best_of_is_n() -> None:
    assert completion(best_of=2, n=2).n == completion(best_of=1).n + 1 == 2
    assert refused_completion(best_of=2).param == "best_of"


def test_stream_options() -> None:
    assert chat(stream=True, stream_options={"include_usage": True, "include_obfuscation": False}).stream_options
    assert not chat(stream=True, stream_options={"include_usage": False}).stream_options
    assert "stream: true" in refused_chat(stream_options={"include_usage": True}).message
    for value in ({"usage": True}, {"include_usage": 1}, True):
        assert refused_chat(stream=True, stream_options=value).param == "stream_options"


def test_alternatives_need_logprobs() -> None:
    assert refused_chat(top_logprobs=2).param == "top_logprobs"


def test_formats() -> None:
    assert chat(response_format={"type": "text"}).response_format is None
    assert chat(response_format={"type": "json_object"}).response_format == {"type": "json_object"}
    for value in ("json", {}, {"type": "xml"}, {"type": ["text"]}):
        assert refused_chat(response_format=value).param == "response_format"


def test_generation_prompt_agrees() -> None:
    assert chat(add_generation_prompt=True) != chat(continue_final_message=True, add_generation_prompt=False)
    refused_chat(add_generation_prompt=False)
    refused_chat(add_generation_prompt=True, continue_final_message=True)


def test_documented_fields_are_those_of_the_requests() -> None:
    def shown(heading: str) -> set[str]:
        return {name for row in table(DOCUMENT, heading) for name in re.findall(r"`(\w+)`", row[0])}

    both = shown("### Both")
    assert both | shown("### Chat") == ChatRequest.model_fields.keys()
    assert both | shown("### Completions") == CompletionRequest.model_fields.keys()
    ignored, refused = re.findall(r"^(?:Accepted without effect|Refused with).*?\n\n", READ, re.DOTALL | re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", ignored)) == NO_EFFECT
    assert set(re.findall(r"`(\w+)`", refused)) >= UNSUPPORTED.keys()


# --- messages


def dialog(*messages: Any) -> list[Any]:
    return ChatRequest.read({"messages": list(messages)}).messages


def test_parts_are_joined() -> None:
    """B104, B105."""
    parts = [{"type": "text", "text": "Hello "}, {"type": "text", "text": "you"}]
    assert dialog({"role": "system", "content": parts[:1]}, {"role": "user", "content": parts}) == [
        {"role": "system", "content": "Hello "},
        {"role": "user", "content": "Hello you"},
    ]


def test_developer_is_system() -> None:
    """B208."""
    assert dialog({"role": "developer", "content": "x"})[0] == {"role": "system", "content": "x"}


def test_answers_come_back_as_they_were_sent() -> None:
    """B105, B213: with nulls, without text, with the fields of the client's own type."""
    for empty in ({"content": None}, {}, {"content": ""}):
        assert dialog({"role": "assistant", "tool_calls": None, "refusal": None, "annotations": [], **empty}) == [
            {"role": "assistant", "content": ""}
        ]
    assert dialog({"role": "user", "name": "ann", "content": "x"}) == [{"role": "user", "content": "x"}]


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"role": "ai", "content": "x"}, ["[1].role", "'system', 'developer', 'user', 'assistant'"]),
        ({"role": "System", "content": "x"}, ["[1].role", "'system'"]),
        ({"content": "x"}, ["[1].role is null"]),
        ({"role": {}, "content": "x"}, ["[1].role"]),
        ({"role": "tool", "content": "x", "tool_call_id": "1"}, ["[1].role", "tools are not supported"]),
        ({"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}, ["[1].tool_calls", "not supported"]),
        ({"role": "user", "content": None}, ["[1].content is null"]),
        ({"role": "user"}, ["[1].content is null"]),
        ({"role": "user", "content": []}, ["[1].content"]),
        ({"role": "user", "content": 5}, ["[1].content is 5"]),
        ({"role": "user", "content": "x", "weight": 1}, ["[1].weight is not a known field"]),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, ["[0].type", "images"]),
        ({"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}, ["audio"]),
        ({"role": "user", "content": [{"type": "text"}]}, ["[1].content[0].text"]),
        ({"role": "user", "content": [{"type": []}]}, ["[1].content[0] is"]),
        ({"role": "user", "content": ["x"]}, ["[1].content[0] is"]),
        ("hello", ["[1] is"]),
    ],
)
def test_wrong_messages(message: Any, words: list[str]) -> None:
    """B207, B209: the place, the value, and what is allowed."""
    error = refusal(ChatRequest, {"messages": [MESSAGES[0], message]})
    assert error.param == "messages"
    for word in words:
        assert word in error.message


@given(
    st.dictionaries(
        st.sampled_from([*ChatRequest.model_fields, *CompletionRequest.model_fields, *UNSUPPORTED, "other"]),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
            max_leaves=6,
        ),
    )
)
def test_whatever_comes_is_read_or_refused(body: dict[str, Any]) -> None:
    for model in (ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest):
        for fields in (body, {"messages": MESSAGES, **body}, {"prompt": "x", **body}):
            with contextlib.suppress(InvalidRequest):
                model.read(fields)

"""The OpenAI routes' jobs: engine requests out of a body, replies and chunks out of outputs, in the client's types."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from generation.interface import FinishReason, Output, TokenLogprob
from generation.structured.grammar import Constraints
from handler.dialects.openai import api as openai_api
from handler.dialects.openai.api import chat_job, completion_job
from handler.dialects.openai.reply import Job
from handler.errors import InternalError, InvalidRequest, NotFound
from handler.requests.encode import ServingContext
from model.tokenizer.tokenizer import SentencePieceTokenizer
from tests.handler.context import MAX_SEQ_LEN, make_context
from tests.helpers.openai_shapes import check_chat_stream, chunks_of, strict
from tests.helpers.tiny import train_sentencepiece

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> SentencePieceTokenizer:
    return SentencePieceTokenizer.from_file(train_sentencepiece(tmp_path_factory.mktemp("spm") / "tokenizer.model"))


@pytest.fixture(scope="module")
def context(tokenizer: SentencePieceTokenizer) -> ServingContext:
    return make_context(tokenizer)


def play(job: Job, ids: list[int], reason: FinishReason = "stop", *, choice: int = 0, step: int = 1) -> str:
    """Let the engine answer with `ids`, `step` tokens in each output; returns the events."""
    request = job.requests[choice]
    reader = request.detokenizer
    assert reader is not None
    events = ""
    waiting: list[TokenLogprob] = []
    for begin in range(0, len(ids), step):
        part = ids[begin : begin + step]
        last = begin + step >= len(ids)
        text = "".join([reader.push(token) for token in part]) + (reader.finish() if last else "")
        waiting += [TokenLogprob(token, -0.5, ((token, -0.5), (7, -math.inf))) for token in part]
        pieces = reader.take_pieces()
        scores, waiting = waiting[: len(pieces)], waiting[len(pieces) :]
        output = Output(request.request_id, part, text, pieces, finish_reason=reason if last else None)
        output.logprobs = scores if request.params.logprobs else []
        if begin == 0 and request.params.prompt_logprobs:
            output.prompt_logprobs = [TokenLogprob(token, -1.0, ((token, -1.0),)) for token in request.prompt_ids[1:]]
        output.cached_tokens, output.completion_tokens = 1, begin + len(part)
        job.add(output)
        if job.stream:
            events += job.take_events()
    return events


def spelled(tokenizer: SentencePieceTokenizer, text: str) -> list[int]:
    """`text` byte by byte, as a model that says half characters would."""
    by_byte = {tokenizer.token_bytes(token): token for token in sorted(tokenizer.byte_ids)}
    return [by_byte[bytes([byte])] for byte in text.encode("utf-8")]


# --- requests


def test_request_of_a_chat(context: ServingContext) -> None:
    body = {"model": "other-name", "messages": MESSAGES, "max_tokens": 5, "n": 2, "seed": 3, "stop": "x"}
    job = chat_job("j", body | {"stop_token_ids": [9], "response_format": {"type": "text"}}, context)
    assert [request.request_id for request in job.requests] == ["j/0", "j/1"]
    first, second = (request.params for request in job.requests)
    assert (first.max_tokens, first.temperature, first.top_p) == (5, 1.0, 1.0)
    assert first.stop == ("x",)
    assert first.stop_token_ids == {9}
    assert (first.seed, second.seed) == (3, 4)
    assert job.requests[0].prompt_ids == context.chat_format.encode(MESSAGES)  # type: ignore[arg-type]


def test_length_is_what_fits(tokenizer: SentencePieceTokenizer, context: ServingContext) -> None:
    """B099, B242, B244: also where more is asked for; the operator's limit holds."""
    for body in ({}, {"max_tokens": None}, {"max_tokens": 10**9}):
        (request,) = chat_job("j", {"messages": MESSAGES, **body}, context).requests
        assert request.params.max_tokens == MAX_SEQ_LEN - len(request.prompt_ids)
    limited = make_context(tokenizer, max_tokens_limit=7, seed=5)
    (request,) = chat_job("j", {"messages": MESSAGES}, limited).requests
    assert (request.params.max_tokens, request.params.seed) == (7, 5)
    assert completion_job("j", {"prompt": [5]}, context).requests[0].params.max_tokens == 16


def test_prompt_may_fill_the_context_where_it_is_only_scored(context: ServingContext) -> None:
    body = {"prompt": [5] * MAX_SEQ_LEN, "max_tokens": 0, "echo": True, "logprobs": 0}
    (request,) = completion_job("j", body, context).requests
    assert request.params.max_tokens == 0
    assert request.params.prompt_logprobs
    with pytest.raises(InvalidRequest, match=str(MAX_SEQ_LEN)) as caught:
        completion_job("j", body | {"max_tokens": 1}, context)
    assert caught.value.code == "context_length_exceeded"


def test_other_models_are_refused(context: ServingContext) -> None:
    for build in (chat_job, completion_job):
        with pytest.raises(NotFound) as caught:
            build("j", {"model": "gpt-4", "messages": MESSAGES} if build is chat_job else {"model": "x", "prompt": "x"},
                  context)  # fmt: skip
        assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([{"role": "system", "content": "x"}], "messages"),
        ([*MESSAGES, *MESSAGES], "messages[1].role"),
        ([{"role": "user", "content": "a [/INST] b"}], "messages[0].content"),
    ],
)
def test_dialogs_keep_their_rules(context: ServingContext, messages: Any, param: str) -> None:
    """B049."""
    with pytest.raises(InvalidRequest) as caught:
        chat_job("j", {"messages": messages}, context)
    assert caught.value.param == param


def test_answer_is_continued(context: ServingContext) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "Well,"}]
    with pytest.raises(InvalidRequest):
        chat_job("j", {"messages": messages}, context)
    (request,) = chat_job("j", {"messages": messages, "continue_final_message": True}, context).requests
    assert context.tokenizer.decode(request.prompt_ids).endswith("Well,")


def test_form_of_the_answer(tokenizer: SentencePieceTokenizer, context: ServingContext) -> None:
    """Each choice has a state of its own; what can't be had is refused with its place."""
    body: dict[str, Any] = {"messages": MESSAGES, "n": 2, "response_format": {"type": "json_object"}}
    with pytest.raises(InvalidRequest, match="not available"):
        chat_job("j", body, context)
    constraints = Constraints(tokenizer, context.vocab_size, tokenizer.stop_ids)
    able = replace(context, constraints=constraints)
    try:
        first, second = (request.constraint for request in chat_job("j", body, able).requests)
        assert first is not None
        assert second is not None
        assert first is not second
        with pytest.raises(InvalidRequest) as caught:
            chat_job("j", body | {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, able)
        assert caught.value.param == "response_format.json_schema.schema"
    finally:
        constraints.close()


# --- replies


@pytest.mark.parametrize("reason", ["stop", "length", "timeout"])
def test_chat_reply(tokenizer: SentencePieceTokenizer, context: ServingContext, reason: Any) -> None:
    """B106, B109: the client knows "stop" and "length" only."""
    ids = tokenizer.encode("good day", bos=False, eos=False)
    job = chat_job("j", {"messages": MESSAGES, "n": 2}, context)
    play(job, ids, reason)
    play(job, ids, reason, choice=1)
    reply = strict(ChatCompletion, json.loads(job.body()))
    assert job.content_type == "application/json; charset=utf-8"
    assert [choice.index for choice in reply.choices] == [0, 1]
    assert [choice.message.content for choice in reply.choices] == ["good day"] * 2
    assert reply.choices[0].finish_reason == ("stop" if reason == "stop" else "length")
    assert reply.choices[0].logprobs is None
    assert reply.usage is not None
    prompt = len(job.requests[0].prompt_ids)
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (prompt, 2 * len(ids))
    assert reply.usage.total_tokens == prompt + 2 * len(ids)
    assert reply.usage.prompt_tokens_details is not None
    assert reply.usage.prompt_tokens_details.cached_tokens == 1


@pytest.mark.parametrize("usage", [False, True])
def test_chat_stream(tokenizer: SentencePieceTokenizer, context: ServingContext, usage: bool) -> None:
    """B097, B098, B203, B248."""
    body: dict[str, Any] = {"messages": MESSAGES, "stream": True, "n": 2}
    if usage:
        body["stream_options"] = {"include_usage": True}
    job = chat_job("j", body, context)
    events = play(job, spelled(tokenizer, "你好 😀"), "length")
    events += play(job, [tokenizer.eos_id or 0], choice=1)  # no text at all
    chunks = chunks_of(events, ChatCompletionChunk)
    assert check_chat_stream(chunks, 2, usage=usage) == ["你好 😀", ""]


def test_bytes_of_half_characters(tokenizer: SentencePieceTokenizer, context: ServingContext) -> None:
    """B183: joined, the tokens' bytes are the text's."""
    job = chat_job("j", {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2}, context)
    ids = [*spelled(tokenizer, "é😀"), *tokenizer.encode("day", bos=False, eos=False)]
    play(job, ids, step=3)
    reply = strict(ChatCompletion, json.loads(job.body()))
    assert reply.choices[0].logprobs is not None
    tokens = reply.choices[0].logprobs.content or []
    assert len(tokens) == len(ids)
    assert "".join(token.token for token in tokens) == reply.choices[0].message.content
    assert b"".join(bytes(token.bytes or []) for token in tokens) == (reply.choices[0].message.content or "").encode()
    assert [token.bytes for token in tokens[:6]] == [[0xC3], [0xA9], [0xF0], [0x9F], [0x98], [0x80]]
    assert tokens[0].top_logprobs[0].bytes == [0xC3]
    assert tokens[0].top_logprobs[1].logprob == -9999.0  # B094: minus infinity isn't JSON


def test_bytes_of_what_was_cut(tokenizer: SentencePieceTokenizer, context: ServingContext) -> None:
    job = chat_job("j", {"messages": MESSAGES, "logprobs": True, "stop": "y"}, context)
    play(job, tokenizer.encode("day", bos=False, eos=False))
    choice = strict(ChatCompletion, json.loads(job.body())).choices[0]
    assert choice.message.content == "da"
    assert choice.logprobs is not None
    assert b"".join(bytes(token.bytes or []) for token in choice.logprobs.content or []) == b"da"


def test_completion_with_echo(tokenizer: SentencePieceTokenizer, context: ServingContext) -> None:
    """B034, B038, B219: the first token has no log probability; offsets count characters."""
    body = {"prompt": ["héllo", "day"], "echo": True, "logprobs": 2, "stream": False}
    job = completion_job("j", body, context)
    ids = tokenizer.encode("good", bos=False, eos=False)
    for i in range(2):
        play(job, ids, choice=i)
    reply = strict(Completion, json.loads(job.body()))
    for prompt, request, choice in zip(body["prompt"], job.requests, reply.choices, strict=True):  # type: ignore[call-overload]
        assert choice.text == prompt + " good"
        scores = json.loads(job.body())["choices"][choice.index]["logprobs"]
        assert len(scores["tokens"]) == len(request.prompt_ids) + len(ids)
        assert scores["token_logprobs"] == [None] + [-1.0] * (len(request.prompt_ids) - 1) + [-0.5] * len(ids)
        assert scores["top_logprobs"][0] is None
        assert "".join(scores["tokens"]) == choice.text
        for token, offset, top in zip(scores["tokens"], scores["text_offset"], scores["top_logprobs"], strict=True):
            assert choice.text[offset : offset + len(token)] == token
            assert top is None or max(top, key=lambda text: top[text]) == token


def test_first_token_is_the_stop(tokenizer: SentencePieceTokenizer, context: ServingContext) -> None:
    """B181, B220: empty text, and empty lists."""
    chat = chat_job("j", {"messages": MESSAGES, "logprobs": True}, context)
    text = completion_job("j", {"prompt": "x", "logprobs": 1}, context)
    for job in (chat, text):
        job.add(Output("j/0", finish_reason="stop"))
    choice = strict(ChatCompletion, json.loads(chat.body())).choices[0]
    assert choice.message.content == ""
    assert choice.logprobs is not None
    assert choice.logprobs.content == []
    scores = strict(Completion, json.loads(text.body())).choices[0].logprobs
    assert scores is not None
    assert (scores.tokens, scores.token_logprobs, scores.top_logprobs, scores.text_offset) == ([], [], [], [])


@given(text=st.text(max_size=30), step=st.integers(1, 4), echo=st.booleans(), stop=st.sampled_from([None, "a", "é"]))
def test_stream_equals_whole(
    tokenizer: SentencePieceTokenizer, context: ServingContext, text: str, step: int, echo: bool, stop: str | None
) -> None:
    """B061, B184: text, tokens, scores and offsets."""
    ids = [*spelled(tokenizer, text), 300, 5]
    body: dict[str, Any] = {"prompt": "é x", "echo": echo, "logprobs": 2, "stop": stop}
    whole = completion_job("j", body, context)
    play(whole, ids)
    expected = json.loads(whole.body())["choices"][0]
    streamed = completion_job("j", body | {"stream": True}, context)
    scores: dict[str, list[Any]] = {key: [] for key in expected["logprobs"]}
    got = ""
    events = play(streamed, ids, step=step).split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    for event in events[:-2]:
        (choice,) = json.loads(event.removeprefix("data: "))["choices"]
        got += choice["text"]
        for key, values in (choice["logprobs"] or {}).items():
            scores[key] += values
    assert (got, scores) == (expected["text"], expected["logprobs"])


@pytest.mark.parametrize("stream", [False, True])
def test_failure_under_way(tokenizer: SentencePieceTokenizer, context: ServingContext, stream: bool) -> None:
    """B205: an error event, and the stream ends."""
    job = chat_job("j", {"messages": MESSAGES, "stream": stream, "n": 2}, context)
    job.add(Output("j/0", [5], "da", ["da"]))
    job.fail(InternalError("no more"))
    error = {"error": {"message": "no more", "type": "internal_error", "param": None, "code": None}}
    if stream:
        events = job.take_events().split("\n\n")
        assert json.loads(events[-3].removeprefix("data: ")) == error
        assert events[-2:] == ["data: [DONE]", ""]
    else:
        assert json.loads(job.body()) == error


# --- what is answered at once


def test_models(context: ServingContext) -> None:
    """B202."""
    listed = openai_api.models(context)
    assert listed["object"] == "list"
    assert [strict(Model, item).id for item in listed["data"]] == ["llama2"]
    assert openai_api.model("llama2", context) == openai_api.model("other-name", context) == listed["data"][0]
    with pytest.raises(NotFound):
        openai_api.model("gpt-4", context)


def test_tokenize(tokenizer: SentencePieceTokenizer, context: ServingContext) -> None:
    """B103."""
    ids = tokenizer.encode("hello", bos=True, eos=False)
    assert openai_api.tokenize({"prompt": "hello"}, context) == {
        "tokens": ids, "count": len(ids), "max_model_len": MAX_SEQ_LEN
    }  # fmt: skip
    assert openai_api.tokenize({"prompt": "hello", "add_special_tokens": False}, context)["tokens"] == ids[1:]
    assert openai_api.tokenize({"prompt": ""}, context)["tokens"] == [tokenizer.bos_id]
    assert openai_api.tokenize({"prompt": "x" * 200}, context)["count"] > MAX_SEQ_LEN
    chat = openai_api.tokenize({"messages": MESSAGES}, context)
    assert chat["tokens"] == chat_job("j", {"messages": MESSAGES}, context).requests[0].prompt_ids
    assert openai_api.detokenize({"tokens": ids}, context) == {"prompt": "hello"}
    assert openai_api.detokenize({"tokens": []}, context) == {"prompt": ""}
    with pytest.raises(InvalidRequest, match=r"tokens\[1\]"):
        openai_api.detokenize({"tokens": [5, 10**6]}, context)

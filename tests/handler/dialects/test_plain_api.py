"""The native route's dialect: engine requests out of a body, replies and events out of outputs."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from generation.detokenizer import Detokenizer
from generation.engine.engine import Engine, EngineSettings
from generation.interface import Output, TokenLogprob
from generation.structured.grammar import Constraints
from handler.dialects.plain.api import Job, ServingContext, build_job
from handler.errors import InternalError, InvalidRequest, Unavailable
from model.loader import load_model
from model.tokenizer.tokenizer import SentencePieceTokenizer
from tests.handler.context import MAX_SEQ_LEN, make_context
from tests.helpers.tiny import random_weights, save_meta, tiny_config, train_sentencepiece

DIALOG = [{"role": "user", "content": "hi"}]
SCORES = ("tokens", "logprobs", "top_logprobs")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> SentencePieceTokenizer:
    return SentencePieceTokenizer.from_file(train_sentencepiece(tmp_path_factory.mktemp("spm") / "tokenizer.model"))


@pytest.fixture(scope="module")
def context(tokenizer: SentencePieceTokenizer) -> ServingContext:
    return make_context(tokenizer)


def refusal(body: Any, context: ServingContext) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        build_job("j", body, context)
    return caught.value


def events_of(text: str) -> list[Any]:
    """The data of each event; checks the framing."""
    assert text == "" or text.endswith("\n\n")
    blocks = text.split("\n\n")[:-1]
    assert all(block.startswith("data: ") and len(block.splitlines()) == 1 for block in blocks)
    data = [block.removeprefix("data: ") for block in blocks]
    return [item if item == "[DONE]" else json.loads(item) for item in data]


def play(job: Job, texts: list[str], reason: Any = "stop", *, choice: int = 0) -> str:
    """Give a choice one output per text; returns the events."""
    events = ""
    for i, text in enumerate(texts, 1):
        last = i == len(texts)
        output = Output(f"{job.job_id}/{choice}", [5], text, [text], finish_reason=reason if last else None)
        output.completion_tokens = i
        job.add(output)
        if job.stream:
            assert job.pending == bool(text or last)
            events += job.take_events()
            assert not job.pending
    return events


# ---- requests


def test_a_text_prompt(context: ServingContext) -> None:
    job = build_job("j", {"prompt": "Hello world", "temperature": 0, "max_gen_len": 5, "seed": 0}, context)
    (request,) = job.requests
    assert request.request_id == "j/0"
    assert request.prompt_ids == context.tokenizer.encode("Hello world", bos=True, eos=False)
    assert (request.params.temperature, request.params.max_tokens, request.params.seed) == (0, 5, 0)
    assert request.deadline is not None
    assert not job.many


def test_defaults_come_from_the_settings(tokenizer: SentencePieceTokenizer) -> None:
    """B278, B194: a request's own zero is not an absence."""
    context = make_context(tokenizer, temperature=1.5, top_p=0.5, top_k=7, max_gen_len=9, seed=3, request_timeout=None)
    (request,) = build_job("j", {"prompt": "x"}, context).requests
    params = request.params
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens, params.seed) == (1.5, 0.5, 7, 9, 3)
    assert request.deadline is None
    body = {"prompt": "x", "temperature": 0, "top_p": 0, "top_k": 0, "seed": None}
    params = build_job("j", body, context).requests[0].params
    assert (params.temperature, params.top_p, params.top_k, params.seed) == (0, 0, 0, None)


def test_prompts_times_choices_in_order(context: ServingContext) -> None:
    """B085, B086: choice i draws with seed + i; a prompt's place in the list changes nothing."""
    job = build_job("j", {"prompt": ["a", "b"], "n": 3, "seed": 10}, context)
    assert [r.request_id for r in job.requests] == [f"j/{i}" for i in range(6)]
    assert [r.params.seed for r in job.requests] == [10, 11, 12, 10, 11, 12]
    assert job.requests[2].prompt_ids == context.tokenizer.encode("a", bos=True, eos=False)
    assert job.requests[3].prompt_ids == context.tokenizer.encode("b", bos=True, eos=False)
    assert job.many
    assert len({id(r.detokenizer) for r in job.requests}) == 6
    assert all(r.params.seed is None for r in build_job("j", {"prompt": "a", "n": 2}, context).requests)


@pytest.mark.parametrize(
    ("body", "many"),
    [
        ({"prompt": "a"}, False), ({"prompt": ["a"]}, True), ({"prompt": [5, 6]}, False), ({"prompt": [[5, 6]]}, True),
        ({"dialog": DIALOG}, False), ({"dialogs": [DIALOG]}, True), ({"messages": DIALOG, "n": 2}, True),
    ],
)  # fmt: skip
def test_a_list_answers_a_list(context: ServingContext, body: dict[str, Any], many: bool) -> None:
    job = build_job("j", body, context)
    for i in range(len(job.requests)):
        play(job, ["x"], choice=i)
    assert isinstance(json.loads(job.body()), list) == many


def test_ids_are_taken_as_they_are(context: ServingContext) -> None:
    assert build_job("j", {"prompt": [5, 6]}, context).requests[0].prompt_ids == [5, 6]
    error = refusal({"prompt": [[1], [5, context.vocab_size]]}, context)
    assert error.param == "prompt[1]"
    assert f"prompt[1][1] is {context.vocab_size}, expected a token id between 0 and" in error.message
    refusal({"prompt": [-1]}, context)
    refusal({"prompt": [2**70]}, context)


def test_an_empty_text_is_bos_alone(context: ServingContext) -> None:
    assert build_job("j", {"prompt": ""}, context).requests[0].prompt_ids == [context.tokenizer.bos_id]


def test_dialogs(context: ServingContext) -> None:
    job = build_job("j", {"dialogs": [DIALOG, DIALOG]}, context)
    assert [r.prompt_ids for r in job.requests] == [context.chat_format.encode(DIALOG)] * 2  # type: ignore[arg-type]
    turns = [*DIALOG, {"role": "assistant", "content": "I"}]
    assert build_job("j", {"dialog": turns, "continue_final_message": True}, context).requests


@pytest.mark.parametrize("name", ["dialog", "messages", "dialogs"])
def test_a_dialogs_mistake_is_named_as_it_was_sent(context: ServingContext, name: str) -> None:
    """B050: the tag and the message are named."""
    wrong = [{"role": "user", "content": "a [INST] b"}]
    error = refusal({name: [DIALOG, wrong] if name == "dialogs" else wrong}, context)
    place = "dialogs[1][0].content" if name == "dialogs" else f"{name}[0].content"
    assert error.param == place
    assert error.message.startswith(f"{place} contains [INST]")
    roles = [*DIALOG, {"role": "assistant", "content": "x"}]
    assert refusal({name: [DIALOG, roles] if name == "dialogs" else roles}, context).message.startswith(name)


def test_prompt_lengths_at_the_limit(context: ServingContext) -> None:
    """B045, B046, B047, B243: context - 1 leaves one token, more is refused with both numbers."""
    (request,) = build_job("j", {"prompt": [5] * (MAX_SEQ_LEN - 1)}, context).requests
    assert request.params.max_tokens == 1
    error = refusal({"prompt": [[5], [5] * MAX_SEQ_LEN]}, context)
    assert error.param == "prompt[1]"
    assert f"has {MAX_SEQ_LEN} tokens, expected at most {MAX_SEQ_LEN - 1}" in error.message
    assert refusal({"dialog": [{"role": "user", "content": "hi " * 100}]}, context).param == "dialog"


@pytest.mark.parametrize(
    ("fields", "settings", "most"),
    [
        ({}, {"max_gen_len": 7}, 7),
        ({}, {"max_gen_len": None}, MAX_SEQ_LEN - 4),
        ({"max_gen_len": None}, {"max_gen_len": 7}, MAX_SEQ_LEN - 4),
        ({"max_gen_len": 10**8}, {}, MAX_SEQ_LEN - 4),
        ({"max_new_tokens": 9}, {}, 9),
        ({"max_gen_len": 50}, {"max_tokens_limit": 20}, 20),
        ({"max_gen_len": None}, {"max_tokens_limit": 20}, 20),
    ],
)
def test_most_new_tokens(
    tokenizer: SentencePieceTokenizer, fields: dict[str, Any], settings: dict[str, Any], most: int
) -> None:
    """B099, B241, B242, B244."""
    job = build_job("j", {"prompt": [5, 6, 7, 8], **fields}, make_context(tokenizer, **settings))
    assert job.requests[0].params.max_tokens == most


def test_the_number_of_answers_is_limited(tokenizer: SentencePieceTokenizer) -> None:
    """B221: 400 naming the limit."""
    context = make_context(tokenizer, max_prompts=4)
    assert len(build_job("j", {"prompt": ["a", "b"], "n": 2}, context).requests) == 4
    error = refusal({"prompt": ["a", "b", "c"], "n": 2}, context)
    assert "3 prompts with n = 2 make 6 answers, expected at most 4" in error.message
    assert refusal({"prompt": ["a"] * 5}, context).param == "prompt"
    assert refusal({"dialogs": [DIALOG] * 5}, context).param == "dialogs"
    assert refusal({"dialog": DIALOG, "n": 5}, context).param == "n"


def test_other_sampling_fields_reach_the_engine(context: ServingContext) -> None:
    body = {
        "prompt": "x",
        "logit_bias": {"5": -100},
        "stop": "a",
        "ignore_eos": True,
        "top_logprobs": 2,
        "top_k": 10**9,
    }
    params = build_job("j", body, context).requests[0].params
    assert params.logit_bias == ((5, -100.0),)
    assert params.stop == ("a",)
    assert params.ignore_eos
    assert params.logprobs
    assert params.top_k == context.vocab_size
    assert refusal({"prompt": "x", "logit_bias": {"99999": 1}}, context).param == "logit_bias"


def test_stops_of_request_and_format_both_apply(tokenizer: SentencePieceTokenizer) -> None:
    """B245."""
    context = make_context(tokenizer)
    context.chat_format.stop_strings = ("Q",)
    for word in "QZ":
        detokenizer = build_job("j", {"dialog": DIALOG, "stop": ["Z"]}, context).requests[0].detokenizer
        assert detokenizer is not None
        for token in tokenizer.encode(f"a{word}b", bos=False, eos=False):
            detokenizer.push(token)
        assert detokenizer.stopped


def test_a_bare_string_follows_the_mode(tokenizer: SentencePieceTokenizer) -> None:
    assert build_job("j", "hi", make_context(tokenizer, mode="chat")).chat
    assert not build_job("j", "hi", make_context(tokenizer)).chat


# ---- replies


def test_a_plain_reply(context: ServingContext) -> None:
    """B261: UTF-8, not escapes. B286: exact counts."""
    job = build_job("j", {"prompt": [5, 6]}, context)
    assert not job.started
    play(job, ["Grüße", "", " 你好"], "length")
    assert job.started
    assert job.done
    assert job.content_type == "application/json; charset=utf-8"
    assert json.loads(job.body()) == {
        "generation": "Grüße 你好",
        "finish_reason": "length",
        "usage": {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5},
    }
    assert "你好".encode() in job.body()


def test_a_chat_reply_may_be_empty(context: ServingContext) -> None:
    """B212."""
    job = build_job("j", {"dialog": DIALOG}, context)
    play(job, [""])
    value = json.loads(job.body())
    assert value["generation"] == {"role": "assistant", "content": ""}
    assert value["finish_reason"] == "stop"


def test_replies_keep_the_order_of_the_request(context: ServingContext) -> None:
    job = build_job("j", {"prompt": ["a", "b"]}, context)
    play(job, ["second"], choice=1)
    assert not job.done
    assert job.open_ids == ["j/0"]
    play(job, ["first"], choice=0)
    assert [item["generation"] for item in json.loads(job.body())] == ["first", "second"]


def test_a_stream(context: ServingContext) -> None:
    """B248, B285: the last event comes even without text, with finish_reason and usage."""
    job = build_job("j", {"prompt": [5, 6], "stream": True}, context)
    assert job.content_type == "text/event-stream; charset=utf-8"
    assert job.take_events() == ""
    assert events_of(play(job, ["Hello", "", " wörld", ""])) == [
        {"index": 0, "delta": "Hello", "finish_reason": None},
        {"index": 0, "delta": " wörld", "finish_reason": None},
        {
            "index": 0,
            "finish_reason": "stop",
            "usage": {"prompt_tokens": 2, "completion_tokens": 4, "total_tokens": 6},
        },
        "[DONE]",
    ]
    assert job.take_events() == ""


def test_outputs_between_two_calls_make_one_event_per_choice(context: ServingContext) -> None:
    job = build_job("j", {"prompt": "x", "n": 2, "stream": True}, context)
    for choice, text in [(0, "a"), (1, "b"), (0, "c")]:
        job.add(Output(f"j/{choice}", text=text))
    assert [(e["index"], e["delta"]) for e in events_of(job.take_events())] == [(0, "ac"), (1, "b")]
    job.add(Output("j/0", finish_reason="stop"))
    assert "[DONE]" not in job.take_events()
    job.add(Output("j/1", finish_reason="stop"))
    assert events_of(job.take_events())[-1] == "[DONE]"


def test_an_event_stays_one_line_for_every_client(context: ServingContext) -> None:
    job = build_job("j", {"prompt": "x", "stream": True}, context)
    text = "a\u2028b\u2029c\x85d\r\n\x1ce\x0bf"
    assert events_of(play(job, [text]))[0]["delta"] == text


def test_an_engine_error_fails_a_plain_job(context: ServingContext) -> None:
    """B005: the whole request fails with 500, nothing else."""
    job = build_job("j", {"prompt": ["a", "b"]}, context)
    job.add(Output("j/1", finish_reason="error", error="the logits are not finite"))
    assert job.done
    assert isinstance(job.error, InternalError)
    assert job.error.message == "the logits are not finite"
    assert "j/0" in job.open_ids
    play(job, ["late"], choice=0)
    assert json.loads(job.body())["error"]["message"] == "the logits are not finite"


def test_an_engine_error_of_the_only_request_fails_the_job(context: ServingContext) -> None:
    job = build_job("j", {"prompt": "a"}, context)
    job.add(Output("j/0", finish_reason="error"))
    assert isinstance(job.error, InternalError)


def test_an_error_ends_a_stream(context: ServingContext) -> None:
    job = build_job("j", {"prompt": "a", "stream": True}, context)
    job.add(Output("j/0", text="x"))
    job.fail(Unavailable("restarting"))
    delta, error, done = events_of(job.take_events())
    assert delta["delta"] == "x"
    assert error["error"]["type"] == "unavailable_error"
    assert done == "[DONE]"
    job.fail(InternalError("again"))
    assert job.take_events() == ""
    job.add(Output("unknown/0", text="x"))


# ---- log probabilities and echo


def test_logprobs(context: ServingContext) -> None:
    """B092, B094, B217: finite numbers only, in valid JSON; one for each token."""
    job = build_job("j", {"prompt": [5], "logprobs": True, "top_logprobs": 2}, context)
    ids = [int(i) for i in context.tokenizer.encode("th", bos=False, eos=False)][-2:]
    top = ((ids[0], -0.5), (context.tokenizer.eos_id or 0, -math.inf))
    job.add(Output("j/0", [5], "a", ["a"], [TokenLogprob(5, -0.25, top)]))
    bad = [TokenLogprob(5, -math.inf), TokenLogprob(5, math.nan)]
    job.add(Output("j/0", [5, 5], "bc", ["b", "c"], bad, finish_reason="stop"))
    value = json.loads(job.body())
    assert value["tokens"] == ["a", "b", "c"]
    assert value["logprobs"] == [-0.25, -9999.0, -9999.0]
    first = context.tokenizer.token_bytes(ids[0]).decode()
    assert value["top_logprobs"] == [{first: -0.5, "</s>": -9999.0}, {}, {}]


def test_no_token_at_all_gives_empty_lists(context: ServingContext) -> None:
    """B181, B220."""
    job = build_job("j", {"prompt": [5], "logprobs": True}, context)
    job.add(Output("j/0", finish_reason="stop"))
    value = json.loads(job.body())
    assert (value["generation"], value["tokens"], value["logprobs"]) == ("", [], [])


def test_streamed_tokens_come_with_their_text(context: ServingContext) -> None:
    """B184: as many log probabilities as without streaming."""
    job = build_job("j", {"prompt": [5], "logprobs": True, "stream": True}, context)
    job.add(Output("j/0", [5], "", [""], [TokenLogprob(5, -1.0)]))
    assert job.take_events() == ""
    job.add(Output("j/0", [5], "ab", ["ab"], [TokenLogprob(5, -2.0)]))
    job.add(Output("j/0", finish_reason="stop"))
    event = events_of(job.take_events())[0]
    assert (event["delta"], event["tokens"], event["logprobs"]) == ("ab", ["", "ab"], [-1.0, -2.0])


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    path = tmp_path_factory.mktemp("model")
    config = tiny_config(max_seq_len=MAX_SEQ_LEN)
    save_meta(path, config, random_weights(config))
    train_sentencepiece(path / "tokenizer.model")
    model, _ = load_model(path, device="cpu", dtype="float32", max_seq_len=MAX_SEQ_LEN)
    return Engine(model, EngineSettings(kv_cache_tokens=1024, max_seqs=8, prefill_chunk=16))


def run(engine: Engine, body: Any, context: ServingContext) -> tuple[Any, list[Any]]:
    """The reply to `body` without and with streaming, one after the other."""
    plain, streamed = build_job("p", body, context), build_job("s", body | {"stream": True}, context)
    events = ""
    for job in (plain, streamed):
        for request in job.requests:
            engine.submit(request)
        while not job.done:
            for output in engine.step():
                job.add(output)
            events += streamed.take_events()
    found = events_of(events)
    assert found.pop() == "[DONE]"
    return json.loads(plain.body()), found


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "hello world", "n": 2},
        {"prompt": ["the cat", "a dog"], "echo": True, "logprobs": True, "top_logprobs": 2},
        {"prompt": [5, 200, 40], "echo": True, "logprobs": True},
        {"prompt": "", "echo": True, "logprobs": True},
        {"dialogs": [DIALOG, DIALOG], "logprobs": True},
    ],
)
def test_a_stream_joined_is_the_plain_reply(engine: Engine, context: ServingContext, fields: dict[str, Any]) -> None:
    """B034, B039, B218, B219, B238, with a real model."""
    body = {"max_gen_len": 12, "temperature": 1.0, "seed": 1, "ignore_eos": True, **fields}
    reply, events = run(engine, body, context)
    replies = reply if isinstance(reply, list) else [reply]
    for i, item in enumerate(replies):
        mine = [event for event in events if event["index"] == i]
        text = item["generation"] if isinstance(item["generation"], str) else item["generation"]["content"]
        assert "".join(event.get("delta", "") for event in mine) == text
        assert all(event["delta"] for event in mine if "delta" in event)
        assert [event["finish_reason"] for event in mine] == [None] * (len(mine) - 1) + ["length"]
        assert mine[-1]["usage"] == item["usage"]
        joined = {name: [x for event in mine for x in event.get(name, [])] for name in SCORES}
        assert joined["tokens"] == item.get("tokens", [])
        assert joined["logprobs"] == pytest.approx(item.get("logprobs", []), abs=1e-4)
        assert [x and x.keys() for x in joined["top_logprobs"]] == [x and x.keys() for x in item.get(SCORES[2], [])]
        if body.get("logprobs"):
            n_echo = item["usage"]["prompt_tokens"] if body.get("echo") else 0
            assert "".join(item["tokens"]) == text
            assert len(item["tokens"]) == len(item["logprobs"]) == 12 + n_echo
            assert [x is None for x in item["logprobs"]] == [i == 0 and n_echo > 0 for i in range(12 + n_echo)]


def test_an_echo_is_the_text_of_all_ids(engine: Engine, context: ServingContext) -> None:
    """The space in front of an answer's first word is part of the echo. The first delta is the prompt's text."""
    body = {"prompt": "the cat", "max_gen_len": 8, "echo": True, "seed": 3, "temperature": 1, "ignore_eos": True}
    job = build_job("j", body, context)
    engine.submit(job.requests[0])
    ids = list(job.requests[0].prompt_ids)
    while not job.done:
        for output in engine.step():
            ids += output.token_ids
            job.add(output)
    assert json.loads(job.body())["generation"] == context.tokenizer.decode(ids)
    _, events = run(engine, body, context)
    assert events[0]["delta"] == "the cat"


@given(st.lists(st.text(max_size=4), min_size=1, max_size=12), st.sets(st.integers(0, 11)))
def test_any_texts_and_any_rhythm_give_the_same_stream(
    context: ServingContext, texts: list[str], takes: set[int]
) -> None:
    job = build_job("j", {"prompt": [5], "stream": True}, context)
    events = ""
    for i, text in enumerate(texts):
        text = text.encode("utf-8", "replace").decode()
        job.add(Output("j/0", [5], text, [text], finish_reason="stop" if i == len(texts) - 1 else None))
        events += job.take_events() if i in takes else ""
    events += job.take_events()
    *deltas, done = events_of(events)
    assert done == "[DONE]"
    assert "".join(e.get("delta", "") for e in deltas) == "".join(texts).encode("utf-8", "replace").decode()
    assert [bool(e["finish_reason"]) for e in deltas] == [False] * (len(deltas) - 1) + [True]


def test_a_detokenizer_per_request(context: ServingContext) -> None:
    assert all(
        isinstance(r.detokenizer, Detokenizer) for r in build_job("j", {"prompt": "a", "n": 2}, context).requests
    )


# --- forms of answers


def test_a_form_gives_each_choice_a_state_of_its_own(
    tokenizer: SentencePieceTokenizer, context: ServingContext
) -> None:
    """B290: enforced or refused, never ignored."""
    with pytest.raises(InvalidRequest, match="regex is not available"):
        build_job("j", {"prompt": "a", "regex": "a+"}, context)
    constraints = Constraints(tokenizer, context.vocab_size, tokenizer.stop_ids)
    able = replace(context, constraints=constraints)
    try:
        for field, value in FORMS.items():
            made = [
                request.constraint for request in build_job("j", {"prompt": "a", "n": 2, field: value}, able).requests
            ]
            assert None not in made
            assert made[0] is not made[1]
        for field, value in ({"response_format": {"type": "text"}} | dict.fromkeys(FORMS)).items():
            (request,) = build_job("j", {"prompt": "a", field: value}, able).requests
            assert request.constraint is None
        for body, param in WRONG_FORMS:
            found = refusal({"dialog": DIALOG, **body}, able)
            assert found.param == param
            assert param in found.message
    finally:
        constraints.close()


FORMS: dict[str, Any] = {"response_format": {"type": "json_object"}, "regex": "a+", "grammar": 'start: "a"'}
WRONG_FORMS: list[tuple[dict[str, Any], str]] = [
    ({"regex": "(a"}, "regex"),
    ({"regex": 1}, "regex"),
    ({"grammar": "x"}, "grammar"),
    ({"response_format": "json"}, "response_format"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}},
        "response_format.json_schema.schema",
    ),
    ({"regex": "a", "grammar": 'start: "a"'}, "grammar"),
]

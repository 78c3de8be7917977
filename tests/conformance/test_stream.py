"""Event streams: whole characters, nothing empty, nothing lost, an end that says why."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.conformance.asking import EOS, GREEDY, LOUD, byte_id, error_of
from tests.helpers.report import report
from tests.helpers.serving import Server
from tests.helpers.sse import read_stream

WIDE = "你是谁？ 😀 café"  # noqa: RUF001


@report("B061", "mlc-ai/mlc-llm#1142")
@report("B062", "replicate/cog-llama-template#75")
@report("B238", "huggingface/text-generation-inference#2927")
@report("B285", "vllm-project/vllm#8625")
def test_stream_is_the_plain_answer(server: Server) -> None:
    """`read_stream` also refuses empty deltas."""
    bodies = [{"prompt": WIDE, "max_gen_len": 30, "seed": seed, **LOUD} for seed in range(10)]
    for plain, streamed in zip(
        server.ask_all(bodies), server.ask_all([b | {"stream": True} for b in bodies]), strict=True
    ):
        (choice,) = read_stream(streamed)
        whole = plain.json()
        assert (choice.text, choice.finish_reason, choice.usage) == (
            whole["generation"],
            whole["finish_reason"],
            whole["usage"],
        )


@report("B065", "continuedev/continue#13181")
@report("B263", "vllm-project/vllm#931")
def test_each_http_chunk_is_whole_characters(server: Server) -> None:
    body = {"prompt": WIDE, "echo": True, "stream": True, "max_gen_len": 20, "seed": 1, **LOUD}
    with server.post(body, stream=True) as reply:
        chunks = list(reply.raw.read_chunked())
    assert "".join(chunk.decode("utf-8") for chunk in chunks).count(WIDE) == 1


@report("B237", "triton-inference-server/tensorrtllm_backend#332")
@report("B067", "huggingface/transformers#22710")
def test_streamed_words_keep_their_spaces(server: Server) -> None:
    body = {"prompt": "The quick brown fox jumps over the lazy dog", "echo": True, "stream": True, **GREEDY}
    (choice,) = read_stream(server.post(body))
    assert choice.text.startswith("The quick brown fox jumps over the lazy dog")


@report("B107", "waybarrios/vllm-mlx#628")
@report("B248", "ai-dynamo/dynamo#12562")
def test_end_without_text_is_sent(server: Server) -> None:
    """The answer is over before it began: one event tells why, then the stream is closed."""
    body = {"prompt": "x", "stream": True, "logit_bias": {str(EOS): 100}, **GREEDY}
    events = server.post(body).content.decode().split("\n\n")
    assert events[1:] == ["data: [DONE]", ""]
    event = json.loads(events[0].removeprefix("data: "))
    assert event == {
        "index": 0,
        "finish_reason": "stop",
        "usage": {"prompt_tokens": 3, "completion_tokens": 0, "total_tokens": 3} | event["usage"],
    }
    assert event["usage"]["completion_tokens"] == 0


@report("B184", "ikawrakow/ik_llama.cpp#998")
@pytest.mark.parametrize("eos_after", [True, False])
def test_as_many_logprobs_as_without_streaming(server: Server, eos_after: bool) -> None:
    bias = {str(EOS): 95, str(byte_id(ord("A"))): 100} if eos_after else {}
    body = {"prompt": "Hello", "logprobs": True, "logit_bias": bias, "frequency_penalty": 2, **GREEDY}
    plain = server.ask(body)
    assert plain["finish_reason"] == ("stop" if eos_after else plain["finish_reason"])
    tokens: list[str] = []
    logprobs: list[float] = []
    for event in server.post(body | {"stream": True}).content.decode().split("\n\n")[:-2]:
        data = json.loads(event.removeprefix("data: "))
        tokens += data["tokens"]
        logprobs += data["logprobs"]
    assert tokens == plain["tokens"]
    assert logprobs == pytest.approx(plain["logprobs"], abs=1e-4)
    assert len(tokens) == plain["usage"]["completion_tokens"]


@report("B153", "sgl-project/sglang#28175")
@report("B205", "EricLBuehler/mistral.rs#1874")
@pytest.mark.parametrize("wrong", [{"n": 0}, {"temperature": 9}, {"prompt": [999]}, {"max_gen_len": -1}])
def test_mistake_is_told_before_the_stream_begins(server: Server, wrong: dict[str, Any]) -> None:
    error_of(server.post({"prompt": "x", "stream": True, **GREEDY} | wrong))


@report("B185", "abetlen/llama-cpp-python#897")
def test_streams_at_the_same_time(server: Server) -> None:
    body = {"prompt": "Hello", "stream": True, "max_gen_len": 100, "temperature": 0, "ignore_eos": True}
    texts = [read_stream(reply)[0].text for reply in server.ask_all([body] * 6)]
    assert len(set(texts)) == 1
    assert texts[0]

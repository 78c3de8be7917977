"""OpenAI's streams: the first chunk, the last one, usage."""

from __future__ import annotations

from typing import Any

import pytest
from openai import OpenAI

from tests.conformance.asking import EOS, v1_answer, v1_chunks
from tests.helpers.report import report
from tests.helpers.serving import Server

HELLO = [{"role": "user", "content": "Hello"}]
CHAT: dict[str, Any] = {"model": "llama2", "messages": HELLO, "seed": 3, "max_tokens": 30}
TEXT: dict[str, Any] = {"model": "llama2", "prompt": "Hello", "seed": 3, "max_tokens": 30}


@report("B203", "langwatch/langwatch#6196")
def test_role_comes_first_and_once(server: Server) -> None:
    deltas = [chunk["choices"][0]["delta"] for chunk in v1_chunks(server, "chat/completions", CHAT)]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert all("role" not in delta for delta in deltas[1:])


@report("B107", "waybarrios/vllm-mlx#628")
@report("B248", "ai-dynamo/dynamo#12562")
@pytest.mark.parametrize("bias", [{}, {str(EOS): 100}], ids=["cut", "at once"])
def test_one_chunk_says_why_it_ended(server: Server, bias: dict[str, int]) -> None:
    chunks = v1_chunks(server, "chat/completions", CHAT | {"logit_bias": bias, "ignore_eos": not bias})
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons[-1] == ("stop" if bias else "length")
    assert set(reasons[:-1]) == {None}


@report("B097", "ROCm/ATOM#1711")
@report("B098", "ollama/ollama#6784")
@report("B285", "vllm-project/vllm#8625")
@pytest.mark.parametrize(("path", "body"), [("chat/completions", CHAT), ("completions", TEXT)], ids=["chat", "text"])
def test_usage_comes_last(server: Server, path: str, body: dict[str, Any]) -> None:
    *chunks, last = v1_chunks(server, path, body | {"stream_options": {"include_usage": True}})
    assert last["choices"] == []
    assert last["usage"] == v1_answer(server, path, body)["usage"]
    assert last["usage"]["completion_tokens"] > 0
    assert all(chunk["usage"] is None for chunk in chunks)
    assert all(len(chunk["choices"]) == 1 for chunk in chunks)
    assert all("usage" not in chunk or chunk["usage"] is None for chunk in v1_chunks(server, path, body))


@report("B237", "triton-inference-server/tensorrtllm_backend#332")
@report("B238", "huggingface/text-generation-inference#2927")
@report("B152", "pytorch/serve#3287")
def test_client_reads_the_plain_answer(server: Server) -> None:
    with OpenAI(base_url=f"{server.url}/1.0/v1", api_key="none", max_retries=0) as client:
        stream = client.chat.completions.create(**CHAT, stream=True)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == v1_answer(server, "chat/completions", CHAT)["choices"][0]["message"]["content"]


@report("B065", "continuedev/continue#13181")
@report("B263", "vllm-project/vllm#931")
def test_streamed_completion_is_whole(server: Server) -> None:
    body = TEXT | {"prompt": "你是谁", "echo": True, "temperature": 1.5, "ignore_eos": True}
    text = "".join(chunk["choices"][0]["text"] for chunk in v1_chunks(server, "completions", body))
    assert text == v1_answer(server, "completions", body)["choices"][0]["text"]
    assert text.startswith("你是谁")

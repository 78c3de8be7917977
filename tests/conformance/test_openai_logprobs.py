"""Log probabilities in OpenAI's two shapes."""

from __future__ import annotations

from typing import Any

import pytest

from model.tokenizer.tokenizer import Tokenizer
from tests.conformance.asking import all_negative, v1_answer, v1_chunks
from tests.helpers.report import report
from tests.helpers.serving import Server

TEXT: dict[str, Any] = {"model": "llama2", "prompt": "The quick brown fox", "temperature": 0, "max_tokens": 4}
HELLO = [{"role": "user", "content": "Hello"}]
CHAT: dict[str, Any] = {"model": "llama2", "messages": HELLO, "temperature": 0, "max_tokens": 8}


def scores(server: Server, **fields: Any) -> tuple[str, dict[str, Any]]:
    """Text and logprobs of a completion; the lists are as long as each other."""
    (choice,) = v1_answer(server, "completions", TEXT | fields)["choices"]
    found = choice["logprobs"]
    assert {len(found[name]) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")} == {
        len(found["tokens"])
    }
    return choice["text"], found


@report("B034", "ggml-org/llama.cpp#27174")
@report("B035", "BerriAI/litellm#699")
@report("B038", "EleutherAI/lm-evaluation-harness#4158")
@report("B218", "meta-llama/llama#869")
@pytest.mark.parametrize(("most", "logprobs"), [(0, 1), (0, 10), (1, 1)])
def test_scored_prompt(server: Server, tokenizer: Tokenizer, most: int, logprobs: int) -> None:
    """What evaluation tools ask for: the prompt's own tokens, the first without a value."""
    n = len(tokenizer.encode(TEXT["prompt"], bos=True, eos=False))
    text, found = scores(server, echo=True, logprobs=logprobs, max_tokens=most, ignore_eos=True)
    assert text.startswith(TEXT["prompt"])
    assert len(found["tokens"]) == n + most
    assert found["token_logprobs"][0] is None
    assert found["top_logprobs"][0] is None
    assert all_negative(found["token_logprobs"][1:])
    assert all(1 <= len(top) <= logprobs + 1 for top in found["top_logprobs"][1:])


@report("B038", "EleutherAI/lm-evaluation-harness#4158")
@pytest.mark.parametrize("echo", [False, True])
def test_offsets_are_in_characters(server: Server, echo: bool) -> None:
    prompt = "café 你好 😀"
    text, found = scores(server, prompt=prompt, echo=echo, logprobs=1, ignore_eos=True, max_tokens=12)
    assert "".join(found["tokens"]) == text
    assert found["text_offset"][0] == 0
    for token, offset in zip(found["tokens"], found["text_offset"], strict=True):
        assert text[offset:].startswith(token)
    assert found["text_offset"] == sorted(found["text_offset"])


@report("B039", "BerriAI/litellm#6401")
@report("B184", "ikawrakow/ik_llama.cpp#998")
def test_streamed_or_not(server: Server) -> None:
    body = TEXT | {"stop": "\n", "logprobs": 1, "echo": True, "max_tokens": 20}
    (choice,) = v1_answer(server, "completions", body)["choices"]
    streamed: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    text = ""
    for chunk in v1_chunks(server, "completions", body):
        (piece,) = chunk["choices"]
        text += piece["text"]
        for name, values in streamed.items():
            values += (piece["logprobs"] or {}).get(name) or []
    assert text == choice["text"]
    assert streamed["tokens"] == choice["logprobs"]["tokens"]
    assert streamed["text_offset"] == choice["logprobs"]["text_offset"]
    assert streamed["token_logprobs"][0] is None
    assert streamed["token_logprobs"][1:] == pytest.approx(choice["logprobs"]["token_logprobs"][1:], abs=1e-4)


@report("B037", "abetlen/llama-cpp-python#151")
@report("B095", "vllm-project/vllm#10234")
@report("B092", "dphnAI/sonar#183")
@report("B093", "sgl-project/sglang#5984")
@pytest.mark.parametrize(
    "fields",
    [
        {"echo": True, "logprobs": True, "max_tokens": 0},
        {"echo": 1, "logprobs": 1, "temperature": 1, "top_k": 1},
        {"logprobs": 10, "temperature": 1, "top_k": 2, "top_p": 0.1},
        {"logprobs": 5, "temperature": 0.01, "top_p": 0.3, "max_tokens": 1000},
        {"logprobs": 20, "logit_bias": {str(i): -100 for i in range(3, 380)}},
    ],
)
def test_no_internal_error(server: Server, fields: dict[str, Any]) -> None:
    """Each of these was a 500 somewhere; every number is finite."""
    _, found = scores(server, **fields)
    assert all_negative([x for x in found["token_logprobs"] if x is not None] or [-1.0])
    for top in found["top_logprobs"]:
        assert top is None or all_negative(list(top.values()))


@report("B181", "ggml-org/llama.cpp#7038")
def test_first_token_is_the_stop(server: Server) -> None:
    text, _ = scores(server, logprobs=1, ignore_eos=True)
    cut, found = scores(server, logprobs=10, ignore_eos=True, stop=[text[0]])
    assert cut == ""
    assert found["tokens"] == found["token_logprobs"] == []


@report("B182", "ggml-org/llama.cpp#11346")
def test_one_token_one_logprob(server: Server) -> None:
    _, found = scores(server, prompt="something", logprobs=1, max_tokens=1, ignore_eos=True)
    assert len(found["tokens"]) == 1
    assert all_negative(found["token_logprobs"])


@report("B183", "ggml-org/llama.cpp#10783")
@report("B217", "meta-llama/llama#583")
def test_chat_shape(server: Server) -> None:
    body = CHAT | {"logprobs": True, "top_logprobs": 10, "ignore_eos": True}
    (choice,) = v1_answer(server, "chat/completions", body)["choices"]
    entries = choice["logprobs"]["content"]
    assert len(entries) == 8
    for entry in entries:
        assert set(entry) == {"token", "logprob", "bytes", "top_logprobs"}
        assert len(entry["top_logprobs"]) == 10
        assert entry["logprob"] == max(top["logprob"] for top in entry["top_logprobs"])
        assert entry["logprob"] < 0
    data = b"".join(bytes(entry["bytes"]) for entry in entries)
    assert data.decode("utf-8", "replace").removeprefix(" ") == choice["message"]["content"]

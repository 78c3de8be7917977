"""What most conformance tests need: greedy requests, refusals, strict JSON."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

import requests

from tests.helpers.serving import Server

CONTEXT = 256
"""Tokens of the tiny model's context."""
EOS = 2
GREEDY: dict[str, Any] = {"temperature": 0, "max_gen_len": 8}
LOUD: dict[str, Any] = {"temperature": 1.5, "ignore_eos": True}
"""Drawn from nearly everything: what a tiny model then says is mostly broken UTF-8."""


def byte_id(byte: int) -> int:
    """Id of a byte token in the tiny vocabulary: they follow unknown, BOS and EOS."""
    return 3 + byte


def error_of(reply: requests.Response, status: int = 400) -> dict[str, Any]:
    """The error object of a refused request; its shape is checked."""
    assert reply.status_code == status, reply.text
    assert reply.headers["Content-Type"].startswith("application/json")
    body = strict_json(reply.content)
    assert set(body) == {"error"}
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def refusal(server: Server, body: dict[str, Any], *words: str) -> dict[str, Any]:
    """The error with which `body` is refused; `words` are in its message. The server goes on."""
    error = error_of(server.post(body))
    for word in words:
        assert word in error["message"]
    assert server.post({"prompt": [5], "max_gen_len": 1}).status_code == 200
    return error


def strict_json(data: bytes) -> Any:
    """Parsed as other languages do: UTF-8, and no NaN or Infinity."""

    def refuse(name: str) -> NoReturn:
        raise AssertionError(f"{name} in JSON")

    return json.loads(data.decode("utf-8"), parse_constant=refuse)


def all_negative(logprobs: list[float]) -> bool:
    return bool(logprobs) and all(math.isfinite(x) and x < 0 for x in logprobs)


def v1(server: Server, path: str, body: Any, **more: Any) -> requests.Response:
    """A request to one of the OpenAI routes, without OpenAI's client."""
    return requests.post(f"{server.url}/1.0/v1/{path}", json=body, timeout=120, **more)


def v1_answer(server: Server, path: str, body: Any) -> Any:
    """The answer to a request that is right."""
    reply = v1(server, path, body)
    assert reply.status_code == 200, reply.text
    return strict_json(reply.content)


def v1_chunks(server: Server, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The chunks of a stream, up to its [DONE]."""
    reply = v1(server, path, body | {"stream": True})
    assert reply.status_code == 200, reply.text
    assert reply.headers["Content-Type"] == "text/event-stream; charset=utf-8"
    events = reply.content.decode("utf-8").split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    return [strict_json(event.removeprefix("data: ").encode()) for event in events[:-2] if not event.startswith(":")]

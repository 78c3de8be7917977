"""A Meta checkpoint through a real TorchServe, on one rank and on two: the library's answers, request by request."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import requests

from generation import chat_completion, generate, text_completion
from generation.chat_format import chat_format_for
from tests.helpers.report import report
from tests.helpers.sse import read_stream
from tests.server.conftest import Server, serving, until

DIALOG = [
    {"role": "system", "content": "Answer in one word."},
    {"role": "user", "content": "  One, two? "},
    {"role": "assistant", "content": " Three. "},
    {"role": "user", "content": "Und dann? 😀 你好"},
]
GREEDY = {"temperature": 0, "max_gen_len": 24}


def random_prompts(n: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[1, *(rng.randrange(3, 384) for _ in range(rng.randint(1, 60)))] for _ in range(n)]


def test_chat_prompt_has_the_golden_ids(tiny_server: Server, tiny_library: Any) -> None:
    """B001, B002, B057, B058, B173: BOS, EOS and spaces of Llama 2's template, as ids."""
    _, tokenizer = tiny_library
    first = "[INST] <<SYS>>\nAnswer in one word.\n<</SYS>>\n\n  One, two? [/INST] Three. "
    golden = [
        1,
        *tokenizer.encode(first, bos=False, eos=False),
        2,
        1,
        *tokenizer.encode("[INST] Und dann? 😀 你好 [/INST]", bos=False, eos=False),
    ]
    assert chat_format_for(tokenizer).encode(DIALOG) == golden  # type: ignore[arg-type]
    chat = tiny_server.ask({"dialog": DIALOG, **GREEDY, "logprobs": True})
    text = tiny_server.ask({"prompt": golden, **GREEDY, "logprobs": True})
    assert chat["usage"] == text["usage"]
    assert chat["usage"]["prompt_tokens"] == len(golden)
    assert chat["generation"] == {"role": "assistant", "content": text["generation"]}
    assert chat["logprobs"] == pytest.approx(text["logprobs"], abs=1e-4)


def test_answers_equal_the_library(tiny_server: Server, tiny_library: Any) -> None:
    model, tokenizer = tiny_library
    prompts = ["Hello", "The quick brown fox", "", "Zwölf Boxkämpfer 你好 😀"]
    expected = text_completion(model, tokenizer, prompts, 24, temperature=0, logprobs=True, echo=True)
    replies = tiny_server.ask({"prompt": prompts, **GREEDY, "logprobs": True, "echo": True})
    for prompt, reply, prediction in zip(prompts, replies, expected, strict=True):
        assert reply["generation"] == prediction["generation"]
        assert reply["generation"].startswith(prompt)
        assert reply["tokens"] == prediction["tokens"]
        assert reply["logprobs"][0] is None
        assert reply["logprobs"][1:] == pytest.approx(prediction["logprobs"][1:], abs=1e-4)
    (chat,) = chat_completion(model, tokenizer, [DIALOG], 24, temperature=0)  # type: ignore[list-item]
    assert tiny_server.ask({"messages": DIALOG, **GREEDY})["generation"] == chat["generation"]


@report("B026", "pytorch/serve#3160")
@report("B159", "turboderp-org/exllamav2#200")
def test_32_at_once_equal_the_library(tiny_server: Server, tiny_library: Any) -> None:
    """B026, B159, B185: ragged requests in flight together, half of them drawn with a seed."""
    model, tokenizer = tiny_library
    prompts = random_prompts(32)
    bodies = [
        {"prompt": p, "max_gen_len": 5 + i, "temperature": 0.8 * (i % 2), "seed": i, "ignore_eos": True}
        for i, p in enumerate(prompts)
    ]
    for i, reply in enumerate(tiny_server.ask_all(bodies)):
        assert reply.status_code == 200, reply.text
        sampling = {"temperature": 0.8 * (i % 2), "seed": i, "ignore_eos": True}
        (ids,), _ = generate(model, [prompts[i]], 5 + i, **sampling)  # type: ignore[arg-type]
        assert reply.json()["generation"] == tokenizer.decode(ids)
        assert reply.json()["usage"]["completion_tokens"] == 5 + i


def test_one_bad_request_among_16_good_ones(tiny_server: Server, tiny_library: Any) -> None:
    """B019, B137: the bad one gets its 400, the others their answers."""
    model, tokenizer = tiny_library
    prompts = random_prompts(16, seed=1)
    bodies: list[Any] = [{"prompt": p, **GREEDY} for p in prompts]
    bad = {"prompt": "Hello", "temperature": 7}
    replies = tiny_server.ask_all([*bodies[:8], bad, *bodies[8:]])
    refused = replies.pop(8)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["param"] == "temperature"
    assert "7" in error["message"]
    assert "2" in error["message"]
    expected, _ = generate(model, prompts, 24, temperature=0)
    assert [r.json()["generation"] for r in replies] == [tokenizer.decode(ids) for ids in expected]


def test_streams_equal_plain_answers(tiny_server: Server) -> None:
    """B061, B067, B068, B238: 200 random id sequences, 25 at a time; what a tiny model says is mostly broken UTF-8."""
    prompts = random_prompts(200, seed=2)
    for start in range(0, len(prompts), 25):
        bodies = [
            {"prompt": p, "temperature": 1.5, "seed": i, "max_gen_len": 20, "ignore_eos": True}
            for i, p in enumerate(prompts[start : start + 25])
        ]
        plain = [reply.json() for reply in tiny_server.ask_all(bodies)]
        streamed = [read_stream(reply) for reply in tiny_server.ask_all([b | {"stream": True} for b in bodies])]
        for whole, (choice,) in zip(plain, streamed, strict=True):
            assert choice.text == whole["generation"]
            assert choice.finish_reason == whole["finish_reason"]
            assert choice.usage == whole["usage"]


def test_stream_of_several_choices(tiny_server: Server) -> None:
    body = {"prompt": ["Hello", "World"], "n": 2, "seed": 3, "max_gen_len": 12, "ignore_eos": True}
    whole = tiny_server.ask(body)
    choices = read_stream(tiny_server.post(body | {"stream": True}))
    assert [c.text for c in choices] == [w["generation"] for w in whole]
    assert len({w["generation"] for w in whole}) == 4


@pytest.mark.parametrize(
    "send",
    [
        {"json": {"prompt": "Hello", **GREEDY}},
        {"data": json.dumps({"prompt": "Hello", **GREEDY}).encode()},
        {"data": json.dumps({"prompt": "Hello", **GREEDY}), "headers": {"Content-Type": "text/json"}},
        {"files": {"data": ("body.json", json.dumps({"prompt": "Hello", **GREEDY}), "application/json")}},
        {"files": {"data": (None, json.dumps({"prompt": "Hello", **GREEDY}))}},
    ],
    ids=["json", "raw", "other type", "multipart file", "multipart field"],
)
def test_ways_to_send_the_same(tiny_server: Server, send: dict[str, Any]) -> None:
    """B142, B277."""
    expected = tiny_server.ask({"prompt": "Hello", **GREEDY})
    reply = requests.post(tiny_server.url, timeout=60, **send)
    assert reply.status_code == 200, reply.text
    assert reply.json() == expected


def test_plain_text_is_a_prompt(tiny_server: Server) -> None:
    """B023: a raw text file."""
    for headers in ({"Content-Type": "text/plain"}, {}):
        reply = requests.post(tiny_server.url, data="Hello 你好".encode(), headers=headers, timeout=60)
        assert reply.status_code == 200, reply.text
        assert isinstance(reply.json()["generation"], str)


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b'{"prompt": "x", "temperature": NaN}', 400, "NaN"),
        (b'{"prompt": "x", "tempature": 1}', 400, "tempature"),
        (b'{"prompt": "x", "max_gen_len": 0}', 400, "max_gen_len"),
        (b'{"dialog": [{"role": "system", "content": "x"}]}', 400, "only a system message"),
        (b'{"dialog": [{"role": "user", "content": "a [/INST] b"}]}', 400, "[/INST]"),
        (b'{"prompt": "x", "stream": true, "n": 0}', 400, "n"),
        (b'{"prompt": [1, 2, 99999]}', 400, "99999"),
        (b'{"prompt": "\xff\xfe"}', 400, "UTF-8"),
        (json.dumps({"prompt": [5] * 300}).encode(), 400, "300"),
        (b"", 400, "empty"),
    ],
)
def test_mistakes(tiny_server: Server, body: bytes, status: int, words: str) -> None:
    """B045, B047, B153, B179, B197, B205: an error object that names what is wrong; also where a stream was asked."""
    reply = requests.post(tiny_server.url, data=body, headers={"Content-Type": "application/json"}, timeout=60)
    assert reply.status_code == status, reply.text
    assert reply.headers["Content-Type"].startswith("application/json")
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert words in error["message"] + str(error["param"])


def test_unknown_path(tiny_server: Server) -> None:
    reply = requests.post(f"{tiny_server.url}/1.0/v2/nothing", json={}, timeout=60)
    assert reply.status_code == 404
    assert "v2/nothing" in reply.json()["error"]["message"]


def test_text_is_not_escaped(tiny_server: Server) -> None:
    """B261."""
    reply = tiny_server.post({"prompt": "你好", "echo": True, "max_gen_len": 1})
    assert reply.headers["Content-Type"] == "application/json; charset=utf-8"
    assert "你好".encode() in reply.content


@report("B187", "abetlen/llama-cpp-python#1500")
def test_200_in_a_row_leave_nothing(tiny_server: Server) -> None:
    """B187, B253."""
    with requests.Session() as session:
        for i in range(200):
            reply = session.post(tiny_server.url, json={"prompt": [5, i + 3], "max_gen_len": 2}, timeout=60)
            assert reply.status_code == 200
    health = tiny_server.health()
    assert health["running"] == health["waiting"] == 0
    assert health["kv_blocks_free"] == health["kv_blocks_total"]


@report("B280", "pytorch/serve tp_llama llama-handler.py")
def test_no_prompt_in_the_logs(tiny_server: Server) -> None:
    """B280, also where the body is broken and where the request fails."""
    secret = "correct-horse-battery-staple"
    tiny_server.ask({"prompt": secret, "max_gen_len": 2})
    tiny_server.post({"prompt": secret, "temperature": 9})
    requests.post(
        tiny_server.url, data='{"prompt": "' + secret, headers={"Content-Type": "application/json"}, timeout=60
    )
    for log in tiny_server.run.logs.rglob("*.log"):
        assert secret not in log.read_text(encoding="utf-8", errors="replace"), log


@report("B145", "pytorch/serve#2405")
def test_one_file_with_the_weights_inside(tiny_checkpoint: Path, tiny_library: Any) -> None:
    """B145: a .mar archive, unpacked wherever TorchServe likes, finds its own weights."""
    model, tokenizer = tiny_library
    with serving(tiny_checkpoint, 3, mar=True) as server:
        assert (server.run.model_store / "llama2.mar").is_file()
        reply = server.ask({"prompt": [1, 5, 6], **GREEDY})
    (ids,), _ = generate(model, [[1, 5, 6]], 24, temperature=0)
    assert reply["generation"] == tokenizer.decode(ids)


@report("B257", "pytorch/serve#430")
def test_reply_larger_than_allowed(tiny_checkpoint: Path) -> None:
    """B257: a reply that the frontend could not pass on is an error that says so, and the server goes on."""
    with serving(tiny_checkpoint, 1, max_reply_bytes=3000, log_prompts=True) as server:
        reply = server.post({"prompt": "Hello", "max_gen_len": 50, "top_logprobs": 5, "ignore_eos": True})
        assert reply.status_code == 413
        assert "at most 3000" in reply.json()["error"]["message"]
        assert server.ask({"prompt": "hello-from-the-log", "max_gen_len": 5})
        log = server.run.logs / "model_log.log"
        until(lambda: "hello-from-the-log" in log.read_text(encoding="utf-8"), timeout=10)

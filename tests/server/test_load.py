"""Many clients at once, some of which leave: the others get their answers, and nothing is left behind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from generation import load as load_model
from generation import text_completion
from scripts.load_test import PROMPTS, load, rank_memory, wait_idle
from tests.helpers.report import report
from tests.helpers.serving import Server, serving, until
from tests.helpers.tiny import random_weights, save_meta, tiny_config, train_sentencepiece
from tests.server.metrics_page import read_metrics

CLIENTS = 24
TOKENS = 120
ROUND_S = 8
"""Longer ones by hand: python -m scripts.load_test."""
CANCELLED = 'llama_requests_finished_total{FinishReason="cancelled"}'


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a long context, so that an answer takes seconds."""
    directory = tmp_path_factory.mktemp("load-llama")
    config = tiny_config(n_heads=8, n_kv_heads=2, n_layers=4, max_seq_len=8192)
    save_meta(directory, config, random_weights(config), shards=1)
    train_sentencepiece(directory / "tokenizer.model")
    return directory


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> dict[str, str]:
    """The library's answers."""
    model, tokenizer = load_model(checkpoint, device="cpu", dtype="float32")
    answers = text_completion(model, tokenizer, list(PROMPTS), max_gen_len=TOKENS, temperature=0)
    return {prompt: answer["generation"] for prompt, answer in zip(PROMPTS, answers, strict=True)}


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[Server]:
    with serving(checkpoint, 2, max_waiting=40) as found:
        yield found


def one_round(server: Server, expected: dict[str, str], seed: int) -> dict[str, Any]:
    """Returns the health object after it."""
    tally = load(server.url, expected, clients=CLIENTS, seconds=ROUND_S, tokens=TOKENS, leavers=1 / 3, seed=seed)
    assert not tally.errors
    assert not tally.wrong
    assert len(tally.finished) >= CLIENTS * 2 / 3
    assert len(tally.left) >= CLIENTS / 3
    return wait_idle(server.url)


@report("B029", "openvinotoolkit/model_server#4503")
def test_clients_that_leave_disturb_nobody(server: Server, expected: dict[str, str]) -> None:
    """B029, B148, B189, B253."""
    one_round(server, expected, seed=1)
    before = rank_memory(server.run.token)
    after = one_round(server, expected, seed=2)
    assert (after["running"], after["waiting"]) == (0, 0)
    assert after["kv_blocks_free"] == after["kv_blocks_total"]
    grown = {rank: size - before[rank] for rank, size in rank_memory(server.run.token).items()}
    assert grown[0] < 20, grown


def test_last_client_that_leaves_is_noticed(server: Server) -> None:
    """The frontend stops polling then. Seen from the metrics address, as asking for health would be a poll."""
    before = server.health()["finished"].get("cancelled", 0)
    body = {"prompt": "Hello", "stream": True, "max_gen_len": None, "ignore_eos": True, "temperature": 0, "n": 16}
    with server.post(body, stream=True) as reply:
        assert next(reply.iter_lines()).startswith(b"data: ")
    until(lambda: read_metrics(server)[CANCELLED] == before + 16, timeout=15)
    until(lambda: read_metrics(server)["llama_requests_running"] == 0, timeout=5)
    after = server.health()
    assert after["kv_blocks_free"] == after["kv_blocks_total"]
    assert after["last_step_age_s"] < 10


@report("B189", "ggml-org/llama.cpp#6545")
def test_full_queue_is_429(server: Server) -> None:
    """B189: with a limit and the time to try again; those in the queue are answered all the same."""
    # 48 prompts of 8000 tokens: more than the cache holds at once, so most of them wait.
    long = [[(i * 37 + j) % 300 + 3 for j in range(8000)] for i in range(48)]
    with server.post({"prompt": long, "max_gen_len": 1, "stream": True}, stream=True) as reply:
        assert reply.status_code == 200
        until(lambda: server.health()["waiting"] >= 40)
        refused = server.post({"prompt": "Hello", "max_gen_len": 1})
        assert refused.status_code == 429
        assert refused.headers["Retry-After"] == "1"
        error = refused.json()["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
        assert "expected fewer than 40 (max_waiting)" in error["message"]
    wait_idle(server.url)
    assert server.ask({"prompt": "Hello", "max_gen_len": 1})["usage"]["completion_tokens"] <= 1

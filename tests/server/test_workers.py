"""Several workers of one model, several models and versions on one server: every request is answered, and right."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import requests

from generation import load, text_completion
from scripts.package_archive import ArchiveOptions, package
from tests.helpers.serving import Server, serving, until
from tests.helpers.tiny import random_weights, save_meta, tiny_config, train_sentencepiece

TOKENS = 60
PROMPTS = [f"The {thing} number {i}" for i, thing in enumerate(["river", "city", "house", "tree", "road", "light"] * 2)]
LONG = {"prompt": "Hello", "temperature": 1.5, "ignore_eos": True, "max_gen_len": 2000, "seed": 3}


def make_checkpoint(directory: Path, seed: int) -> Path:
    config = tiny_config(n_heads=8, n_kv_heads=2, n_layers=4, max_seq_len=4096)
    save_meta(directory, config, random_weights(config, seed=seed), shards=1)
    train_sentencepiece(directory / "tokenizer.model")
    return directory


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("workers-llama"), seed=5)


@pytest.fixture(scope="module")
def other_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("workers-other"), seed=6)


def greedy(checkpoint: Path) -> dict[str, str]:
    """The library's answers to PROMPTS."""
    model, tokenizer = load(checkpoint, device="cpu", dtype="float32")
    found = text_completion(model, tokenizer, PROMPTS, max_gen_len=TOKENS, temperature=0)
    return {prompt: answer["generation"] for prompt, answer in zip(PROMPTS, found, strict=True)}


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> dict[str, str]:
    return greedy(checkpoint)


@pytest.fixture(scope="module")
def other_expected(other_checkpoint: Path) -> dict[str, str]:
    return greedy(other_checkpoint)


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[Server]:
    """Two workers of two ranks each from the start: more ranks than cores on a small machine."""
    frontend, properties = {"minWorkers": 2, "maxWorkers": 3}, {"enable_model_api": "true"}
    with serving(checkpoint, 2, frontend=frontend, properties=properties) as found:
        until(lambda: len(ready_workers(found)) == 2)
        yield found


def manage(server: Server, method: str, path: str) -> requests.Response:
    return requests.request(method, f"{server.run.management_url}/models{path}", timeout=180)


def ready_workers(server: Server) -> list[str]:
    """Names of the model's workers that can be asked."""
    found = manage(server, "GET", "/llama2").json()[0]["workers"]
    return [worker["id"] for worker in found if worker["status"] == "READY"]


def scale(server: Server, workers: int) -> None:
    reply = manage(server, "PUT", f"/llama2?min_worker={workers}&max_worker={workers}&synchronous=true")
    assert reply.status_code == 200, reply.text
    until(lambda: len(ready_workers(server)) == workers)


def ask(server: Server, prompt: str, path: str = "llama2") -> requests.Response:
    body = {"prompt": prompt, "max_gen_len": TOKENS, "temperature": 0}
    return requests.post(f"{server.run.url}/predictions/{path}", json=body, timeout=60)


def ask_all(server: Server, path: str = "llama2") -> dict[str, str]:
    """PROMPTS at once; a request without an answer within a minute raises."""
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        replies = list(pool.map(lambda prompt: ask(server, prompt, path), PROMPTS))
    assert [reply.status_code for reply in replies] == [200] * len(PROMPTS), [reply.text for reply in replies]
    return {prompt: reply.json()["generation"] for prompt, reply in zip(PROMPTS, replies, strict=True)}


@contextmanager
def load_on(server: Server, path: str = "llama2", clients: int = 6) -> Iterator[list[tuple[str, requests.Response]]]:
    """Clients that ask PROMPTS one after the other while the block runs; what they got is complete behind it."""
    replies: list[tuple[str, requests.Response]] = []
    stop = threading.Event()

    def client(first: int) -> None:
        number = first
        while not stop.is_set():
            prompt = PROMPTS[number % len(PROMPTS)]
            replies.append((prompt, ask(server, prompt, path)))
            number += 1

    with ThreadPoolExecutor(clients) as pool:
        running = [pool.submit(client, number) for number in range(clients)]
        try:
            until(lambda: len(replies) >= clients)
            yield replies
        finally:
            stop.set()
        for future in running:
            future.result()


def check(replies: list[tuple[str, requests.Response]], expected: dict[str, str]) -> None:
    assert replies
    for prompt, reply in replies:
        assert reply.status_code == 200, reply.text
        assert reply.json()["generation"] == expected[prompt]


def stream(server: Server, **more: Any) -> Iterator[bytes]:
    reply = server.post({**LONG, "stream": True, **more}, stream=True)
    assert reply.status_code == 200
    return reply.iter_lines()


def test_two_workers_from_the_configuration_answer_all_requests(server: Server, expected: dict[str, str]) -> None:
    for _ in range(3):
        assert ask_all(server) == expected


def test_stream_goes_on_while_the_other_worker_is_idle(server: Server) -> None:
    """Alone, and after a short request that the other worker has answered."""
    assert [line for line in stream(server) if line][-1] == b"data: [DONE]"
    running = stream(server, seed=4)
    assert next(running).startswith(b"data: ")
    assert ask(server, PROMPTS[0]).status_code == 200
    assert [line for line in running if line][-1] == b"data: [DONE]"


def test_scaling_up_under_load_and_down_without(server: Server, expected: dict[str, str]) -> None:
    """TorchServe gives up what a worker works on when it ends it: see docs/operations.md."""
    with load_on(server) as replies:
        scale(server, 3)
    check(replies, expected)
    for workers in (1, 2):
        scale(server, workers)
        assert ask_all(server) == expected


def test_worker_that_dies_takes_only_its_own_requests(server: Server, expected: dict[str, str]) -> None:
    """Nothing hangs; when the worker is back, both answer."""
    victim = server.rank_processes()[0]
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        running = [pool.submit(ask, server, prompt) for prompt in PROMPTS]
        victim.kill()
        replies = [future.result() for future in running]
    for prompt, reply in zip(PROMPTS, replies, strict=True):
        assert reply.status_code in (200, 500, 503), reply.text
        if reply.status_code == 200:
            assert reply.json()["generation"] == expected[prompt]
    assert any(reply.status_code == 200 for reply in replies)
    until(lambda: len(server.rank_processes()) == 4 and len(ready_workers(server)) == 2)
    assert ask_all(server) == expected


def test_models_and_versions_side_by_side(
    server: Server, other_checkpoint: Path, expected: dict[str, str], other_expected: dict[str, str]
) -> None:
    """A second model and version, the default moved there and back, and an end while the others have work."""
    options = ArchiveOptions(other_checkpoint, 2, device="cpu", handler={"dtype": "float32"})
    store = server.run.model_store
    package(store, options, name="other", archive_format="default")
    package(store / "later", options, name="llama2", version="2.0", archive_format="default")
    (store / "later" / "llama2.mar").rename(store / "llama2-later.mar")
    for file in ("other.mar", "llama2-later.mar"):
        reply = manage(server, "POST", f"?url={file}&initial_workers=1&synchronous=true")
        assert reply.status_code == 200, reply.text
    with ThreadPoolExecutor(3) as pool:
        paths = ["llama2/1.0", "llama2/2.0", "other"]
        answers = list(pool.map(lambda path: ask_all(server, path), paths))
    assert answers == [expected, other_expected, other_expected]

    assert ask_all(server) == expected
    assert manage(server, "PUT", "/llama2/2.0/set-default").status_code == 200
    assert ask_all(server) == other_expected
    assert manage(server, "PUT", "/llama2/1.0/set-default").status_code == 200
    assert ask_all(server) == expected

    with load_on(server) as replies:
        assert manage(server, "DELETE", "/llama2/2.0").status_code == 200
        assert ask(server, PROMPTS[0], "llama2/2.0").status_code == 404
    check(replies, expected)
    assert manage(server, "DELETE", "/other").status_code == 200
    assert ask_all(server) == expected

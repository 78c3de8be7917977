"""Clients that leave, ranks that die, models that can't be loaded: what the others see, and what is left."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import requests

from scripts.package_archive import ArchiveOptions, PackagingError
from scripts.serve.processes import marked
from scripts.serve.run_dir import RunDir, ServerError, free_port
from scripts.server import start
from tests.helpers.report import report
from tests.helpers.tiny import random_weights, save_meta, tiny_config, train_sentencepiece
from tests.server.conftest import Server, serving, until

LONG = {"temperature": 1.5, "ignore_eos": True, "max_gen_len": 4000}
"""Text without repetition, which would be drafted and be done too soon."""


@pytest.fixture(scope="module")
def long_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a long context, so that an answer takes many seconds."""
    directory = tmp_path_factory.mktemp("long-llama")
    config = tiny_config(n_heads=8, n_kv_heads=2, n_layers=4, max_seq_len=8192)
    save_meta(directory, config, random_weights(config), shards=1)
    train_sentencepiece(directory / "tokenizer.model")
    return directory


@pytest.fixture(scope="module")
def server(long_checkpoint: Path) -> Iterator[Server]:
    with serving(long_checkpoint, 2) as found:
        yield found


def open_stream(server: Server) -> tuple[requests.Response, Iterator[bytes]]:
    """A stream whose first event has come, and its lines from there on."""
    reply = server.post({"prompt": "Hello", "stream": True, **LONG}, stream=True)
    lines = reply.iter_lines()
    assert next(lines).startswith(b"data: ")
    return reply, lines


@report("B027", "openvinotoolkit/model_server#4428")
@report("B154", "pytorch/serve#2814")
@report("B255", "pytorch/serve#2628")
def test_client_that_leaves_a_stream_frees_its_slot(server: Server) -> None:
    """B027, B028, B154, B255: it alone; the other stream goes on."""
    before = server.health()
    (stays, lines), (leaves, _others) = open_stream(server), open_stream(server)
    assert server.health()["running"] == 2
    leaves.close()
    until(lambda: server.health()["running"] == 1, timeout=5)
    assert server.health()["finished"].get("cancelled", 0) == before["finished"].get("cancelled", 0) + 1
    assert all(b"error" not in line for _, line in zip(range(100), lines, strict=False))
    stays.close()
    until(lambda: server.health()["running"] == 0, timeout=5)
    after = server.health()
    assert after["kv_blocks_free"] == after["kv_blocks_total"]


@report("B155", "triton-inference-server/server#8982")
def test_client_that_leaves_a_plain_request_is_noticed(server: Server) -> None:
    """B155."""
    with pytest.raises(requests.Timeout):
        requests.post(server.url, json={"prompt": "Hello", **LONG, "n": 4}, timeout=(10, 1.0))
    until(lambda: server.health()["running"] == 0, timeout=15)


@report("B025", "pytorch/serve#2234")
def test_slow_plain_request_shows_signs_of_life(server: Server) -> None:
    """B025: blanks before the JSON keep proxies and clients awake."""
    body = {"prompt": "Hello", **LONG, "n": 8}
    with server.post(body, stream=True) as reply:
        assert reply.status_code == 200
        chunks = list(reply.iter_content(None))
    assert chunks[0] == b" "
    replies = json.loads(b"".join(chunks))
    assert [r["usage"]["completion_tokens"] for r in replies] == [4000] * 8


@pytest.mark.parametrize("victim", [0, 1])
def test_killed_rank(long_checkpoint: Path, victim: int) -> None:
    """Requests in flight fail at once, the next ones are answered within seconds, nothing is left after a stop."""
    with serving(long_checkpoint, 2) as server, ThreadPoolExecutor(4) as pool:
        expected = server.ask({"prompt": "Hello", "temperature": 0, "max_gen_len": 8})
        waiting = [pool.submit(server.post, {"prompt": "Hello", **LONG}) for _ in range(4)]
        until(lambda: server.health()["running"] == 4)
        ranks = server.ranks()
        assert sorted(ranks) == [0, 1]
        os.kill(ranks[victim], signal.SIGKILL)
        killed = time.monotonic()
        for future in waiting:
            try:
                reply = future.result(timeout=30)
                assert reply.status_code >= 500 or not reply.content.strip()
            except requests.RequestException:
                pass  # the connection was cut
        failed_after = time.monotonic() - killed
        until(lambda: server.post({"prompt": "Hello", "temperature": 0, "max_gen_len": 8}).status_code == 200)
        assert failed_after < 10
        assert server.ask({"prompt": "Hello", "temperature": 0, "max_gen_len": 8}) == expected
        assert not set(server.ranks().values()) & set(ranks.values())
        token = server.run.token
    assert not marked(token)


@report("B029", "openvinotoolkit/model_server#4503")
def test_hanging_rank_is_noticed(long_checkpoint: Path) -> None:
    """B029: a step that does not end within step_timeout makes the worker start anew."""
    with serving(long_checkpoint, 2, step_timeout=2) as server, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(server.post, {"prompt": "Hello", **LONG})
        until(lambda: server.health()["running"] == 1)
        before = server.ranks()
        os.kill(before[1], signal.SIGSTOP)
        try:
            with contextlib.suppress(requests.RequestException):
                assert waiting.result(timeout=60).status_code >= 500
            until(lambda: server.post({"prompt": "Hello", "max_gen_len": 2}).status_code == 200)
            assert not set(server.ranks().values()) & set(before.values())
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(before[1], signal.SIGKILL)


@report("B015", "kserve/kserve#3445")
@report("B016", "pytorch/serve#806")
@report("B017", "pytorch/serve#498")
@report("B117", "ymcui/Chinese-LLaMA-Alpaca#97")
def test_load_errors_are_told_at_once(long_checkpoint: Path, tmp_path: Path) -> None:
    """B008, B015, B016, B017, B117: one line that names the file and what is wrong, and nothing is left running."""
    with pytest.raises(PackagingError, match="does not exist"):
        ArchiveOptions(tmp_path / "nowhere")
    broken = tmp_path / "broken"
    broken.mkdir()
    for name in ("params.json", "tokenizer.model"):
        (broken / name).write_bytes((long_checkpoint / name).read_bytes())
    shard = (long_checkpoint / "consolidated.00.pth").read_bytes()
    (broken / "consolidated.00.pth").write_bytes(shard[: len(shard) // 2])
    port = free_port()
    with pytest.raises(ServerError, match=r"consolidated\.00\.pth"):
        start(port, ArchiveOptions(broken, 2, device="cpu"))
    assert RunDir.load(port) is None
    with pytest.raises(ServerError, match="nproc-per-node is 9, but the model has 8 heads: use 1 to 8 ranks"):
        start(port, ArchiveOptions(long_checkpoint, 9, device="cpu"))

"""What stays after requests: nothing of them, and no more memory than before."""

from __future__ import annotations

import ast
from pathlib import Path

import psutil
import pytest

from generation.engine.engine import Engine, EngineSettings, agreed_cache_tokens
from generation.interface import Request, SamplingParams
from model.kv_cache import BLOCK_TOKENS, bytes_per_token
from tests.helpers.ranks import make_model
from tests.helpers.report import report
from tests.helpers.serving import Server
from tests.helpers.tiny import random_weights, tiny_config


@report("B147", "pytorch/serve#1003")
@report("B253", "ROCm/ATOM#1441")
def test_requests_leave_nothing(server: Server) -> None:
    """Cache blocks come back, and the ranks' memory does not grow with the number of requests."""

    def used() -> int:
        return sum(psutil.Process(pid).memory_info().rss for pid in server.ranks().values())

    bodies = [{"prompt": [5 + i] * 100, "max_gen_len": 20, "stream": i % 2 == 0, "ignore_eos": True} for i in range(20)]
    server.ask_all(bodies)
    before = used()
    for _ in range(4):
        server.ask_all(bodies)
    health = server.health()
    assert health["running"] == health["waiting"] == 0
    assert health["kv_blocks_free"] == health["kv_blocks_total"]
    assert used() - before < 30e6


@report("B254", "Luce-Org/lucebox#216")
def test_answer_does_not_depend_on_who_was_there_before(server: Server) -> None:
    other = {"prompt": "The quick brown fox jumps over the lazy dog", "max_gen_len": 30, "temperature": 0}
    mine = {"prompt": "The quick brown cat", "max_gen_len": 30, "temperature": 0, "logprobs": True}
    first = server.ask(mine)
    for _ in range(3):
        server.ask(other)
        assert server.ask(mine)["generation"] == first["generation"]


@report("B262", "pytorch/serve#821")
def test_files_are_read_as_utf_8() -> None:
    """Whatever the machine's locale is: no text file is opened without its encoding."""
    root = Path(__file__).parents[2]
    for file in [
        path for folder in ("handler", "model", "generation", "scripts") for path in (root / folder).rglob("*.py")
    ]:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            words = {keyword.arg for keyword in node.keywords}
            texts = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
            binary = any("b" in t and len(t) <= 3 for t in texts)
            if name in ("read_text", "write_text") or (
                name == "open" and isinstance(node.func, ast.Name) and not binary
            ):
                assert "encoding" in words, f"{file.name}:{node.lineno}"


@report("B227", "huggingface/text-generation-inference#653")
@pytest.mark.parametrize("memory", [2**16, 2**20, 2**30])
def test_cache_fits_into_the_memory_given(memory: int) -> None:
    """What is planned for is what is allocated, once, at the start; the context never exceeds it."""
    config = tiny_config(max_seq_len=4096)
    model = make_model(config, random_weights(config))
    tokens = agreed_cache_tokens(model, memory=memory)
    assert 0.9 * memory < tokens * bytes_per_token(config, model.shard, model.dtype) <= memory
    if memory < 2**30:
        engine = Engine(model, EngineSettings(tokens))
        assert engine.max_seq_len <= tokens + BLOCK_TOKENS
        with pytest.raises(ValueError, match=f"at most {engine.max_seq_len - 1} fit in the context"):
            engine.submit(Request("r", [5] * 4096, SamplingParams()))

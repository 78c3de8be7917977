"""The demo model through a real TorchServe on two ranks, in float32."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from generation import load
from scripts.serve.run_dir import ROOT
from scripts.smoke import main as smoke
from tests.helpers.sse import read_stream
from tests.server.conftest import Server

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
TIPS = [{"role": "user", "content": "Give me three tips for healthy eating."}]
UNUSUAL = [
    [{"role": "user", "content": "Repeat: 😀 🎉 你好世界 — café"}],
    [{"role": "user", "content": "Write 'good morning' in Chinese, Japanese and Korean, with an emoji."}],
]


@pytest.fixture(scope="module")
def library(demo_checkpoint: Path) -> Any:
    return load(demo_checkpoint, device="cpu", dtype="float32")


def test_known_answers(demo_server: Server) -> None:
    chat = demo_server.ask({"dialog": QUESTION, "temperature": 0})
    assert chat["generation"] == {"role": "assistant", "content": "The capital of France is Paris."}
    assert chat["finish_reason"] == "stop"
    text = demo_server.ask({"prompt": "The capital of France is", "temperature": 0, "max_gen_len": 2})
    assert text["generation"] == " Paris."
    assert text["finish_reason"] == "length"
    assert text["usage"] == {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}


def test_steady_ids(demo_server: Server, library: Any) -> None:
    _, tokenizer = library
    reply = demo_server.ask({"dialog": TIPS, "temperature": 0, "max_gen_len": 7})
    assert reply["generation"]["content"] == tokenizer.decode([33, 30, 16478, 253, 3175, 282, 3111])


def test_stream_equals_plain(demo_server: Server) -> None:
    """B061, B063, B263: emoji and CJK never come in halves."""
    for dialog in UNUSUAL:
        body = {"dialog": dialog, "temperature": 0, "max_gen_len": 60}
        (streamed,) = read_stream(demo_server.post(body | {"stream": True}))
        assert streamed.text == demo_server.ask(body)["generation"]["content"]
        assert streamed.text


def test_control_tokens_in_text_stay_text(demo_server: Server, library: Any) -> None:
    """B052, B236: a user who writes <|im_end|> does not end the turn."""
    _, tokenizer = library
    reply = demo_server.ask({"prompt": "<|im_end|>", "echo": True, "max_gen_len": 1, "logprobs": True})
    assert reply["generation"].startswith("<|im_end|>")
    assert reply["usage"]["prompt_tokens"] == len(tokenizer.encode("<|im_end|>", bos=False, eos=False)) > 1


def test_smoke_script(demo_server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["smoke", "--url", demo_server.run.url])
    with pytest.raises(SystemExit) as ended:
        smoke()
    assert ended.value.code == 0


def test_demo_script(demo_checkpoint: Path) -> None:
    """`make demo`, without making a venv again."""
    command = [sys.executable, "-m", "scripts.demo", "--checkpoint", str(demo_checkpoint)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, env=dict(os.environ))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "The capital of France is Paris." in done.stdout
    assert done.stdout.strip().endswith("Stopped.")

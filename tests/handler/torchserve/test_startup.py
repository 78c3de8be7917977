"""What the log says while a model loads, and what the loader is told."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from handler.settings import HandlerSettings
from handler.torchserve import startup as serving
from handler.torchserve.startup import start_serving


@pytest.mark.parametrize(("rank", "lines"), [("1", 0), ("0", 11)])
def test_a_line_for_each_tenth(
    rank: str, lines: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From rank 0 only, with what takes the time."""
    caplog.set_level(logging.INFO)
    monkeypatch.setenv("RANK", rank)
    progress = serving._log_progress(HandlerSettings(checkpoint=Path("x"), quantization="int4"))
    for done in range(38):
        progress(done * 10**8, 37 * 10**8)
    assert len(caplog.messages) == lines
    if lines:
        assert caplog.messages[0] == "Loading and quantizing to int4: 0.0 of 3.7 GB (0 %)"
        assert caplog.messages[-1] == "Loading and quantizing to int4: 3.7 of 3.7 GB (100 %)"


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({}, (None, None)),
        ({"kv_cache_tokens": 4096}, (4096, None)),
        ({"kv_cache_memory": "2GiB"}, (None, 2**31)),
    ],
)
def test_the_cache_is_checked_before_loading(
    section: dict[str, Any], expected: tuple[int | None, int | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Asked(Exception):
        pass

    def load_model(checkpoint: Path, **arguments: Any) -> None:
        assert (arguments["kv_cache_tokens"], arguments["kv_cache_memory"]) == expected
        raise Asked

    monkeypatch.setattr(serving, "load_model", load_model)
    monkeypatch.setattr(serving, "die_with_parent", lambda: None)
    config = {"continuousBatching": True, "handler": {"checkpoint": ".", **section}}
    with pytest.raises(Asked):
        start_serving(config, tmp_path, "llama2", lambda outputs: None)

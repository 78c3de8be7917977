"""What the log says while a model loads, and what the loader is told."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from handler import serving
from handler.serving import start_serving


def test_a_line_for_each_tenth(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """From rank 0 only."""
    caplog.set_level(logging.INFO)
    for rank, lines in (("1", 0), ("0", 10)):
        monkeypatch.setenv("RANK", rank)
        for done in range(1, 38):
            serving._log_progress(done, 37)
        assert len(caplog.records) == lines
    assert [caplog.messages[0], caplog.messages[-1]] == [
        "loading: 10 %, 4 of 37 tensors",
        "loading: 100 %, 37 of 37 tensors",
    ]


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

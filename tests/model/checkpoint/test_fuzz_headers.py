"""Some mutated headers; `python -m tests.model.checkpoint.fuzz_headers` tries more of the same."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.model.checkpoint import fuzz_headers

COUNT = int(os.environ.get("FUZZ_COUNT", "3000"))


def test_mutated_files_open_or_are_refused() -> None:
    outcomes = fuzz_headers.run(COUNT)
    assert outcomes.total() == COUNT
    # of each some did open, or nothing behind the first check would have been tried
    assert len(outcomes) == 8


def test_a_failure_is_found_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(path: Path) -> None:
        raise ValueError("bad")

    monkeypatch.setattr(fuzz_headers, "run_one", lambda target, content: broken(target.directory))
    with pytest.raises(ValueError, match="bad"):
        fuzz_headers.run(1)


def test_the_same_number_is_the_same_mutation(tmp_path: Path) -> None:
    for target in fuzz_headers.make_targets(tmp_path):
        one, two = (fuzz_headers.mutate(target, random.Random(7)) for _ in range(2))
        assert one == two
        assert any(fuzz_headers.mutate(target, random.Random(n)) != target.content for n in range(3))

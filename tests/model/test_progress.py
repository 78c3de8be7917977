"""Progress in lines of text: when there is one, and what it says."""

from __future__ import annotations

import pytest

from model import progress
from model.progress import PROGRESS_LINE, ProgressLines, loading_label


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time in seconds, in a list of one."""
    now = [1000.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


@pytest.mark.usefixtures("clock")
def test_a_line_for_each_tenth() -> None:
    lines: list[str] = []
    tell = ProgressLines(loading_label("int4"), lines.append)
    for done in range(0, 13_476_000_000 + 1, 33_690_000):
        tell(done, 13_476_000_000)
    assert len(lines) == 11
    assert lines[0] == "Loading and quantizing to int4: 0.0 of 13.5 GB (0 %)"
    assert lines[2] == "Loading and quantizing to int4: 2.7 of 13.5 GB (20 %)"
    assert lines[-1] == "Loading and quantizing to int4: 13.5 of 13.5 GB (100 %)"


def test_a_line_where_a_tenth_takes_long(clock: list[float]) -> None:
    lines: list[str] = []
    tell = ProgressLines("Loading", lines.append)
    for done in range(6):
        tell(done * 10**9, 140 * 10**9)
        clock[0] += 4
    assert lines == [f"Loading: {done}.0 of 140.0 GB ({share} %)" for done, share in ((0, 0), (3, 2))]


@pytest.mark.parametrize(
    ("quantization", "total", "line"),
    [
        (None, 86 * 10**6, "Loading: 43 of 86 MB (50 %)"),
        ("none", 10**9, "Loading: 0.5 of 1.0 GB (50 %)"),
        ("int8", 2 * 10**9, "Loading and quantizing to int8: 1.0 of 2.0 GB (50 %)"),
    ],
)
def test_what_a_line_says(quantization: str | None, total: int, line: str) -> None:
    lines: list[str] = []
    ProgressLines(loading_label(quantization), lines.append)(total // 2, total)
    assert lines == [line]
    assert PROGRESS_LINE.match(line)


def test_nothing_to_load() -> None:
    lines: list[str] = []
    ProgressLines("Loading", lines.append)(0, 0)
    assert lines == ["Loading: 0 of 0 MB (0 %)"]

"""How far something is that takes a while: a bar on a terminal, or lines for a log."""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections.abc import Callable, Iterator

Progress = Callable[[int, int], None]
"""Called with (done, in all), both in bytes."""
PROGRESS_LINE = re.compile(r"Loading[^:]*: \S+ of \S+ [GM]B \(\d+ %\)$")
"""What `ProgressLines` writes while a model is loaded."""
_MOST_SECONDS = 10.0
"""Between two lines."""


def loading_label(quantization: str | None) -> str:
    """What loading does, for `terminal_progress` and `ProgressLines`."""
    return "Loading" if quantization in (None, "none") else f"Loading and quantizing to {quantization}"


class ProgressLines:
    """Progress as lines of text, at the start, after each tenth, and after 10 s with something new.

    Args:
        label: what is done, such as "Loading".
        write: gets each line.
    """

    def __init__(self, label: str, write: Callable[[str], None]) -> None:
        self._label, self._write = label, write
        self._tenth, self._written = -1, 0.0

    def __call__(self, done: int, total: int) -> None:
        tenth, now = done * 10 // max(total, 1), time.monotonic()
        if tenth == self._tenth and now - self._written < _MOST_SECONDS:
            return
        self._tenth, self._written = tenth, now
        unit, size, digits = ("GB", 10**9, 1) if total >= 10**9 else ("MB", 10**6, 0)
        share = done * 100 // max(total, 1)
        self._write(f"{self._label}: {done / size:.{digits}f} of {total / size:.{digits}f} {unit} ({share} %)")


@contextlib.contextmanager
def terminal_progress(label: str, *, shown: bool = True) -> Iterator[Progress]:
    """A bar on standard error while the block runs, gone with its end; nothing where that is no terminal."""
    if not shown or not sys.stderr.isatty():
        yield lambda done, total: None
        return
    # imported here because most processes have no terminal
    from rich.console import Console
    from rich.progress import DownloadColumn
    from rich.progress import Progress as Bar

    with Bar(*Bar.get_default_columns(), DownloadColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)

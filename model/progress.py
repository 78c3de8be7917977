"""How far something is that takes a while, on a terminal; nothing anywhere else."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

Progress = Callable[[int, int], None]
"""Called with (done, in all)."""


@contextlib.contextmanager
def terminal_progress(label: str, *, shown: bool = True) -> Iterator[Progress]:
    """A bar on standard error while the block runs, gone with its end; nothing where that is no terminal."""
    if not shown or not sys.stderr.isatty():
        yield lambda done, total: None
        return
    # imported here because most processes have no terminal
    from rich.console import Console
    from rich.progress import Progress as Bar

    with Bar(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)

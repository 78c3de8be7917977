"""The process that tries grammars before they are compiled here, see `grammar_worker.py`."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from generation.structured.worker import Vocabulary

# The folder of the worker isn't put on the path: a name like types.py there would hide Python's own.
_START = "import runpy, sys; sys.path[:] = sys.argv[2:]; runpy.run_path(sys.argv[1], run_name='__main__')"


class GrammarChild:
    """Starts the process when it is needed, and again after a grammar has killed it. For one thread at a time."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        tokens = [token.decode("latin-1") for token in vocabulary.tokens]
        self._greeting = json.dumps([tokens, vocabulary.special_token_ids, vocabulary.lead]) + "\n"
        self._process: subprocess.Popen[str] | None = None
        self._end: weakref.finalize[..., GrammarChild] | None = None

    def check(self, grammar: str) -> None:
        """Return when the grammar can be compiled within the limits.

        Raises:
            ValueError: what is wrong with it.
        """
        reply = _talk(self._started(), json.dumps(grammar) + "\n")
        if not reply:
            self.close()
            raise ValueError("it is too complex: compiling it takes too much time or memory")
        error = json.loads(reply)
        if error:
            raise ValueError(error)

    def close(self) -> None:
        """End the process, if there is one."""
        if self._end is not None:
            self._end()
        self._process = self._end = None

    def _started(self) -> subprocess.Popen[str]:
        if self._process is not None and self._process.poll() is not None:
            self.close()  # it ended while nobody asked
        if self._process is None:
            worker = str(Path(__file__).with_name("worker.py"))
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START, worker, *sys.path],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                encoding="utf-8",
            )
            self._end = weakref.finalize(self, _end, self._process)
            if _talk(self._process, self._greeting) != "ready\n":
                self.close()
                raise RuntimeError(
                    f"the process that tries grammars ({worker}) doesn't start: is llguidance installed?"
                )
        return self._process


def _talk(process: subprocess.Popen[str], line: str) -> str:
    """The child's line in reply to ours; empty where it died."""
    if process.stdin is None or process.stdout is None:
        raise RuntimeError("the process that tries grammars has no pipes")
    try:
        process.stdin.write(line)
        process.stdin.flush()
        return process.stdout.readline()
    except BrokenPipeError:
        return ""


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):  # what was still to be written
                pipe.close()

"""Ending a server's processes: all of them, and no others."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from scripts.serve.processes import VARIABLE, end, marked

TREE = """
import signal, subprocess, sys
deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); signal.pause()"
child = subprocess.Popen([sys.executable, "-c", deaf], stdout=subprocess.PIPE, start_new_session=True)
child.stdout.readline()
print(child.pid, flush=True)
signal.pause()
"""


def spawn(program: str, token: str) -> subprocess.Popen[str]:
    environment = {**os.environ, VARIABLE: token}
    return subprocess.Popen([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True)


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[str]]:
    with spawn("import signal; print(1, flush=True); signal.pause()", "another") as process:
        assert process.stdout
        process.stdout.readline()
        yield process
        process.kill()


def test_ends_a_deaf_grandchild_in_its_own_session(bystander: subprocess.Popen[str]) -> None:
    """Ranks lead their own sessions, and may neither hear SIGTERM nor have a parent any more."""
    with spawn(TREE, "mine") as parent:
        assert parent.stdout
        grandchild = psutil.Process(int(parent.stdout.readline()))
        assert [process.pid for process in marked("mine")] == [parent.pid, grandchild.pid]
        assert end("mine", grace=0) == 2
        parent.wait()
    assert not grandchild.is_running() or grandchild.status() == psutil.STATUS_ZOMBIE
    assert marked("mine") == []
    assert bystander.poll() is None


def test_nothing_to_end() -> None:
    assert end("nobody") == 0

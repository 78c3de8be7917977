"""Cores under CPU quotas, and a child that ends with its parent."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from model import process
from model.process import cpu_threads, usable_cores

ROOT = Path(process.__file__).parents[1]


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


@pytest.mark.parametrize(
    ("membership", "files", "quota"),
    [
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 1.5),
        ("0::/\n", {"cpu.max": "max 100000\n"}, None),
        ("0::/\n", {}, None),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "300000 100000\n"}, 3.0),
        ("0::/a/b\n", {"a/b/cpu.max": "200000 100000\n", "a/cpu.max": "300000 100000\n"}, 2.0),
        ("0::/not/visible\n", {"cpu.max": "50000 100000\n"}, 0.5),
        ("0::/../../other\n", {"cpu.max": "50000 100000\n"}, 0.5),
        ("2:cpuset:/\n1:cpu:/x\n", {"cpu/x/cpu.cfs_quota_us": "400000", "cpu/x/cpu.cfs_period_us": "100000"}, 4.0),
        (
            "4:cpu,cpuacct:/\n0::/\n",
            {"cpu,cpuacct/cpu.cfs_quota_us": "-1\n", "cpu,cpuacct/cpu.cfs_period_us": "100000\n"},
            None,
        ),
    ],
)
def test_quota(tmp_path: Path, membership: str, files: dict[str, str], quota: float | None) -> None:
    write(tmp_path / "membership", membership)
    for name, text in files.items():
        write(tmp_path / "groups" / name, text)
    assert process._cgroup_quota(tmp_path / "membership", tmp_path / "groups") == quota


def test_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    assert usable_cores() >= 1
    monkeypatch.setattr(process, "usable_cores", lambda: 7)
    assert [cpu_threads(n) for n in (1, 2, 3, 7, 8, 100)] == [7, 3, 2, 1, 1, 1]
    with pytest.raises(ValueError, match="local_world_size is 0"):
        cpu_threads(0)


def test_quota_cuts_the_affinity_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    for quota, cores in ((0.5, 1), (1.9, 1), (1e6, usable_cores())):
        monkeypatch.setattr(process, "_cgroup_quota", lambda *_, quota=quota: quota)
        assert usable_cores() == cores


@pytest.mark.skipif(sys.platform != "linux", reason="Linux only")
def test_die_with_parent() -> None:
    """The grandchild holds the pipe's other end: the pipe ends when it does, though only its parent was killed."""
    child = (
        "import sys; from model.process import die_with_parent; "
        "die_with_parent(); print('ready', flush=True); sys.stdin.read()"
    )
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", parent], stdin=pipe, stdout=pipe, env=environment) as started:
        assert started.stdout is not None
        assert started.stdout.readline() == b"ready\n"
        started.kill()
        assert started.stdout.read() == b""


@pytest.mark.skipif(sys.platform != "linux", reason="Linux only")
def test_parent_that_is_gone_already() -> None:
    code = "from model.process import die_with_parent; die_with_parent(expected_parent=2**22 + 1); print('alive')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, cwd=ROOT, check=False)
    assert (done.returncode, done.stdout) == (-9, b"")

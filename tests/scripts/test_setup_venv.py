"""Setting up the virtual environment, as far as it goes without installing anything."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts import setup_venv


@pytest.mark.parametrize("version", [(3, 10), (3, 13)])
def test_supported_python(version: tuple[int, int]) -> None:
    setup_venv.check_python(version)


@pytest.mark.parametrize("version", [(2, 7), (3, 9), (3, 14)])
def test_other_python_is_one_line(version: tuple[int, int]) -> None:
    with pytest.raises(SystemExit) as error:
        setup_venv.check_python(version)
    message = str(error.value)
    assert f"Python {version[0]}.{version[1]}" in message
    assert "3.10 to 3.13" in message
    assert "\n" not in message


def test_needs_only_the_standard_library() -> None:
    """Before the environment exists there is nothing else."""
    command = [sys.executable, "-S", "-c", "import scripts.setup_venv, scripts.serve.java"]
    subprocess.run(command, cwd=setup_venv.ROOT, check=True)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "pyproject.toml").write_text("[project]\n", encoding="utf-8")
    monkeypatch.setattr(setup_venv, "ROOT", tmp_path)
    return tmp_path


class Recorder:
    """Stands in for subprocess.run: notes the commands; of them only `-m venv` has an effect, a small one."""

    def __init__(self, status: int = 0) -> None:
        self.commands: list[list[str]] = []
        self.status = status

    def __call__(self, command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        self.commands.append(command)
        if "venv" in command:
            folder = Path(command[-1])
            (folder / "bin").mkdir(parents=True, exist_ok=True)
            (folder / "bin" / "python").touch()
            (folder / "stamp").unlink(missing_ok=True)
        return subprocess.CompletedProcess(command, self.status if "pip" in command else 0)

    def count(self, word: str) -> int:
        return sum(word in command for command in self.commands)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    run = Recorder()
    monkeypatch.setattr(subprocess, "run", run)
    return run


def test_installs_once_and_again_when_the_dependencies_change(project: Path, run: Recorder) -> None:
    setup_venv.setup(project / ".venv")
    setup_venv.setup(project / ".venv")
    assert (run.count("venv"), run.count("pip")) == (1, 1)
    (project / "pyproject.toml").write_text("[project]\nname = 'x'\n", encoding="utf-8")
    setup_venv.setup(project / ".venv")
    assert (run.count("venv"), run.count("pip")) == (1, 2)


def test_failed_install_is_not_remembered(project: Path, run: Recorder) -> None:
    run.status = 1
    for _ in range(2):
        with pytest.raises(SystemExit, match="pip install"):
            setup_venv.setup(project / ".venv")
    assert run.count("pip") == 2


def test_moved_folder_is_made_again(project: Path, run: Recorder) -> None:
    """The programs in an environment hold its absolute path."""
    setup_venv.setup(project / "before")
    (project / "before").rename(project / ".venv")
    setup_venv.setup(project / ".venv")
    assert (run.count("venv"), run.count("pip")) == (2, 2)


def test_environment_somebody_else_made_is_kept(project: Path, run: Recorder) -> None:
    python = project / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    setup_venv.setup(project / ".venv")
    assert (run.count("venv"), run.count("pip")) == (0, 1)


def test_unsupported_python_makes_no_environment(project: Path, run: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 14, 0))
    with pytest.raises(SystemExit, match=r"Python 3\.14"):
        setup_venv.setup(project / ".venv")
    assert run.commands == []


def test_a_link_to_another_environment_is_left_alone(project: Path, run: Recorder, tmp_path: Path) -> None:
    (tmp_path / "other" / "bin").mkdir(parents=True)
    (tmp_path / "other" / "bin" / "python").touch()
    (project / ".venv").symlink_to(tmp_path / "other")
    setup_venv.setup(project / ".venv")
    assert not run.commands

"""Starting and stopping, as far as it goes without TorchServe; tests/server/ has the rest."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from scripts import server
from scripts.package_archive import ArchiveOptions
from scripts.serve import run_dir
from scripts.serve.run_dir import RunDir, ServerError, free_port
from tests.helpers.report import report


def model_log(*messages: str) -> str:
    prefix = "2026-01-01T10:00:00,123 [INFO ] W-29500-llama2_1.0-stdout MODEL_LOG - "
    return "".join(f"{prefix}{message}\n" for message in messages)


TRACEBACK = ("Traceback (most recent call last):", '  File "x.py", line 1, in load', "    ^^^^")


@report("B015", "kserve/kserve#3445")
@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        (("Torch worker started.", "Loading layer 3"), None),
        (("Failed to load model llama2, exception no such file", *TRACEBACK), "no such file"),
        (("Failed to load model llama2, exception first line", "second line", *TRACEBACK), "first line\nsecond line"),
        (("Failed to load model llama2 cuda OOM, exception CUDA out of memory", *TRACEBACK), "CUDA out of memory"),
        (("Backend worker process died.", *TRACEBACK, "KeyError: 'rope'", "Backend"), "KeyError: 'rope'"),
    ],
)
def test_load_error_of_a_rank(tmp_path: Path, messages: tuple[str, ...], reason: str | None) -> None:
    """B015, B016: the cause of a failed load reaches the user in one line."""
    (tmp_path / "model_log.log").write_text(model_log(*messages), encoding="utf-8")
    assert server.load_error(tmp_path) == reason


@report("B014", "meta-llama/llama#856")
def test_load_error_of_a_rank_without_a_word(tmp_path: Path) -> None:
    """B014: a load that runs out of memory ends with SIGKILL."""
    assert server.load_error(tmp_path) is None
    died = "2026-01-01T10:00:00,123 [WARN ] W-29500 org.pytorch.serve.wlm.BatchAggregator - Load model failed: llama2\n"
    (tmp_path / "ts_log.log").write_text(died, encoding="utf-8")
    assert server.load_error(tmp_path) is None, "the frontend tries again"
    (tmp_path / "ts_log.log").write_text(died * 2, encoding="utf-8")
    assert "died again" in (server.load_error(tmp_path) or "")
    (tmp_path / "model_log.log").write_text(model_log("failed (exitcode: -9) local_rank: 0"), encoding="utf-8")
    assert "memory" in (server.load_error(tmp_path) or "")


def test_loading_is_told_on_standard_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The newest line of the model's log, at most one in two seconds; none where loading takes less."""
    now = 1000.0
    monkeypatch.setattr(server.time, "monotonic", lambda: now)
    lines = [f"Loading and quantizing to int4: {i}.0 of 20.0 GB ({5 * i} %)" for i in range(4)]
    progress = server.LoadingProgress(tmp_path)
    told = []
    # of the lines: how many are in the log, at which second
    for count, second in ((0, 0), (1, 30), (2, 31), (2, 32), (2, 35), (3, 35.5), (4, 36), (4, 37), (4, 60)):
        now = 1000.0 + second
        log = model_log("Torch worker started.", *lines[:count], "Loading of something else")
        (tmp_path / "model_log.log").write_text(log, encoding="utf-8")
        progress.show()
        output = capsys.readouterr()
        assert output.out == ""
        if output.err:
            told.append((second, output.err))
    assert told == [(32, f"{lines[1]}\n"), (35.5, f"{lines[2]}\n"), (60, f"{lines[3]}\n")]


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "config.properties").write_text("load_models=all\n", encoding="utf-8")
    monkeypatch.setattr(run_dir, "ROOT", tmp_path)
    return tmp_path


@pytest.mark.usefixtures("root")
def test_stop_without_a_server() -> None:
    assert server.stop(9000) is False
    assert server.status(9000) is False


@pytest.mark.usefixtures("root")
def test_stop_after_the_server_was_killed() -> None:
    run = RunDir.create(9000)
    assert server.stop(9000) is False
    assert RunDir.load(9000) is None
    assert not Path(run.temporary).exists()


def test_frontend_that_ends_is_an_error_with_its_last_line(root: Path) -> None:
    run = RunDir.create(free_port())
    try:
        (run.logs / "console.log").write_text("Invalid config: x\n\tat org.Main\n", encoding="utf-8")
        process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
        process.wait()
        with pytest.raises(ServerError, match=r"status 3: Invalid config: x"):
            server.wait_ready(run, process)
    finally:
        run.remove()


def test_failed_start_leaves_nothing(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever goes wrong between the folder and the first answer."""

    def broken(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(server, "package", broken)
    port = free_port()
    with pytest.raises(KeyboardInterrupt):
        server.start(port, ArchiveOptions(root))
    assert RunDir.load(port) is None

"""The corrected class of TorchServe's frontend; that it does what it should is for tests/server/test_grpc.py."""

from __future__ import annotations

import subprocess
import zipfile
from pathlib import Path

import pytest

from handler.torchserve import calls
from scripts.serve import frontend_fix
from scripts.serve.frontend_fix import CALL_HEADER, CLASS, corrected, write_fix
from scripts.serve.java import find_java
from scripts.serve.run_dir import ServerError, torchserve_home


@pytest.fixture
def original() -> bytes:
    with zipfile.ZipFile(torchserve_home() / "ts" / "frontend" / "model-server.jar") as jar:
        return jar.read(f"{CLASS}.class")


def test_unknown_class_is_refused(original: bytes) -> None:
    with pytest.raises(ServerError, match=r"isn't that of torchserve 0\.12\.0"):
        corrected(original + b"\0")


def test_handler_looks_for_the_header_that_is_added() -> None:
    assert calls.CALL_HEADER == CALL_HEADER


def test_rest_of_the_class_stays(original: bytes, tmp_path: Path) -> None:
    write_fix(tmp_path)
    before = frontend_fix._ClassFile(original)
    after = frontend_fix._ClassFile((tmp_path / f"{CLASS}.class").read_bytes())
    changed = {"isOpen", "response", "respond"}
    old = {(m.name, m.kind): m.code for m in before.methods if m.name not in changed}
    new = {(m.name, m.kind): m.code for m in after.methods if m.name not in changed}
    assert {method[0] for method in old if old[method] != new[method]} == {"<init>"}
    assert len([method for method in old if old[method] != new[method]]) == 1
    assert (
        after.method("respond", frontend_fix._RESPONSE).code == before.method("response", frontend_fix._RESPONSE).code
    )


def test_java_accepts_it(tmp_path: Path) -> None:
    """Java verifies a class when it runs it: here as the main class, which it hasn't got a main method for."""
    write_fix(tmp_path)
    java = find_java()
    assert java is not None
    path = f"{tmp_path}:{torchserve_home()}/ts/frontend/*"
    command = [java.executable, "-Xverify:all", "-Xlog:class+load", "-cp", path, CLASS.replace("/", ".")]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert "Main method not found" in run.stdout + run.stderr
    assert f"{CLASS.replace('/', '.')} source: file:{tmp_path}/" in run.stdout

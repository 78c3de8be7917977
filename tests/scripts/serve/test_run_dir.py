"""The folder and the configuration of one server."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.serve import run_dir
from scripts.serve.java import Java
from scripts.serve.processes import VARIABLE
from scripts.serve.run_dir import RunDir, ServerError, check_ports, free_port, read_properties


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "config.properties").write_text(
        "# comment\ninference_address=http://0.0.0.0:1\nvmargs=-Xmx1g -Xms64m\n", encoding="utf-8"
    )
    monkeypatch.setattr(run_dir, "ROOT", tmp_path)
    return tmp_path


@pytest.fixture
def run(root: Path) -> Iterator[RunDir]:
    run = RunDir.create(9000)
    yield run
    run.remove()


def test_properties() -> None:
    assert read_properties("# no=1\n\na = b=c \nd=\n") == {"a": "b=c", "d": ""}


def test_state_is_found_again(run: RunDir) -> None:
    assert RunDir.load(9000) == run
    assert Path(run.temporary).is_dir()


def test_remove_keeps_the_logs(root: Path) -> None:
    run = RunDir.create(9000)
    run.remove()
    assert RunDir.load(9000) is None
    assert not Path(run.temporary).exists()
    assert run.logs.is_dir()
    run.remove()


def test_damaged_state_is_one_line(root: Path) -> None:
    state = root / "build" / "run-9000" / "state.json"
    state.parent.mkdir(parents=True)
    state.write_text('{"port": 1}', encoding="utf-8")
    with pytest.raises(ServerError, match="damaged"):
        RunDir.load(9000)


def test_two_servers_share_nothing(run: RunDir) -> None:
    other = RunDir.create(9010)
    other.remove()
    assert not {run.path, run.token, run.temporary} & {other.path, other.token, other.temporary}


def test_config_has_the_ports_on_this_machine_only(run: RunDir) -> None:
    config = run.write_config({})
    assert config == read_properties((run.path / "config.properties").read_text(encoding="utf-8"))
    addresses = [config[name] for name in ("inference_address", "management_address", "metrics_address")]
    assert addresses == ["http://127.0.0.1:9000", "http://127.0.0.1:9001", "http://127.0.0.1:9002"]
    assert (config["grpc_inference_address"], config["grpc_inference_port"]) == ("127.0.0.1", "9003")
    assert (config["grpc_management_address"], config["grpc_management_port"]) == ("127.0.0.1", "9004")
    assert run.grpc_address == "127.0.0.1:9003"
    assert config["disable_token_authorization"] == "true"
    assert config["model_store"] == str(run.model_store)


def test_ranks_find_this_python_first(run: RunDir) -> None:
    """The frontend starts `torchrun` by its name."""
    environment = run.environment()
    assert environment["PATH"].startswith(str(Path(sys.executable).parent))
    assert environment[VARIABLE] == run.token


@pytest.mark.parametrize("major", [17, 25])
def test_command(run: RunDir, major: int) -> None:
    command = run.command(Java("java", major), run.write_config({}))
    assert command[0] == "java"
    assert f"-Djava.io.tmpdir={run.temporary}" in command
    assert {"-Xmx1g", "-Xms64m"} < set(command)
    assert command[command.index("-cp") + 1].startswith(f"{run.frontend}:"), "before TorchServe's own classes"
    assert ("--enable-native-access=ALL-UNNAMED" in command) == (major >= 24)


def test_temporary_folder_is_short(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Unix socket's path may have 107 bytes, wherever the checkout or TMPDIR lies."""
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    run = RunDir.create(9000)
    run.remove()
    assert len(f"{run.temporary}/.ts.sock.29500") < 108


def test_busy_port_is_named() -> None:
    """B130: the message names the port."""
    port = free_port()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", port + 1))
        listener.listen()
        with pytest.raises(ServerError, match=rf"^port {port + 1} \(management\) is in use; .*PORT=\d+$"):
            check_ports(port)
    check_ports(port)


@pytest.mark.parametrize("port", [0, -1, 65532])
def test_impossible_port(port: int) -> None:
    with pytest.raises(ServerError, match=f"port is {port}, expected 1 to 65531"):
        check_ports(port)

"""The folder of one running server, build/run-PORT: configuration, logs, model store and what it takes to stop it."""

from __future__ import annotations

import importlib.util
import json
import os
import secrets
import shutil
import socket
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from scripts.serve.java import Java
from scripts.serve.processes import VARIABLE

ROOT = Path(__file__).resolve().parents[2]
HOST = "127.0.0.1"
PORTS = ("inference", "management", "metrics", "gRPC", "gRPC management")
"""What a server's ports are for, in their order from its own on."""
LAST_PORT = 65535 - (len(PORTS) - 1)
LONGEST_TEMPORARY = 80
"""The workers' Unix sockets lie in the temporary folder, and the path of a socket may have 107 bytes."""


class ServerError(RuntimeError):
    """The server can't be started or used; the message is one line for the user."""


@dataclass(frozen=True)
class RunDir:
    """One server's folder and state. `token` marks its processes, `temporary` is its short temporary folder."""

    port: int
    token: str
    temporary: str

    @property
    def path(self) -> Path:
        return path_of(self.port)

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    @property
    def management_url(self) -> str:
        return f"http://{HOST}:{self.port + 1}"

    @property
    def grpc_address(self) -> str:
        return f"{HOST}:{self.port + PORTS.index('gRPC')}"

    @property
    def frontend(self) -> Path:
        """Java classes that come before TorchServe's own."""
        return self.path / "frontend"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def model_store(self) -> Path:
        return self.path / "model-store"

    @classmethod
    def create(cls, port: int) -> RunDir:
        """An empty folder for a server at `port`; the logs of an earlier one are removed.

        Raises:
            ServerError: another start at this port is under way.
        """
        path = path_of(port)
        shutil.rmtree(path, ignore_errors=True)
        run = cls(port, secrets.token_hex(16), _temporary_folder())
        try:
            run.model_store.mkdir(parents=True)
            run.logs.mkdir()
            with (path / "state.json").open("x", encoding="utf-8") as state:
                json.dump(asdict(run), state)
        except FileExistsError:
            shutil.rmtree(run.temporary, ignore_errors=True)
            raise ServerError(f"another start at port {port} is under way") from None
        return run

    @classmethod
    def load(cls, port: int) -> RunDir | None:
        """What an earlier start left, running or not; None after a stop."""
        try:
            return cls(**json.loads((path_of(port) / "state.json").read_text(encoding="utf-8")))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (ValueError, TypeError) as error:
            raise ServerError(f"{path_of(port) / 'state.json'} is damaged ({error}); remove that folder") from error

    def remove(self) -> None:
        """Forget the server: its state and temporary folder go, logs and configuration stay."""
        shutil.rmtree(self.temporary, ignore_errors=True)
        (self.path / "state.json").unlink(missing_ok=True)

    def write_config(self, properties: Mapping[str, str]) -> dict[str, str]:
        """Write this server's config.properties, with `properties` put in; returns it.

        Authorization is off, as everything listens on 127.0.0.1 only.
        """
        config = read_properties((ROOT / "config.properties").read_text(encoding="utf-8"))
        addresses = ("inference_address", "management_address", "metrics_address")
        config |= {name: f"http://{HOST}:{self.port + i}" for i, name in enumerate(addresses)}
        config |= {f"grpc_{name}_address": HOST for name in ("inference", "management")}
        config |= {"grpc_inference_port": str(self.port + 3), "grpc_management_port": str(self.port + 4)}
        config |= {"model_store": str(self.model_store), "disable_token_authorization": "true"}
        if (ROOT / "metrics.yaml").exists():
            config["metrics_config"] = str(ROOT / "metrics.yaml")
        config |= properties
        text = "".join(f"{key}={value}\n" for key, value in config.items())
        (self.path / "config.properties").write_text(text, encoding="utf-8")
        return config

    def environment(self) -> dict[str, str]:
        """The environment of the frontend and, through it, of torchrun and the ranks."""
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        logs = {"LOG_LOCATION": str(self.logs), "METRICS_LOCATION": str(self.logs)}
        return {**os.environ, **logs, "PATH": path, VARIABLE: self.token}

    def command(self, java: Java, config: dict[str, str]) -> list[str]:
        """How to start the frontend, as TorchServe's own launcher does it.

        That launcher keeps one pid file per temporary folder, so it allows one server for each user; and its way to
        move the folder would move that of the model's processes too, with their compile caches.
        """
        home = torchserve_home()
        command = [java.executable, f"-Dmodel_server_home={home}", f"-Djava.io.tmpdir={self.temporary}"]
        command += [f"-Dlog4j.configurationFile={(ROOT / 'log4j2.xml').as_uri()}", *config.get("vmargs", "").split()]
        if java.major >= 24:
            command += ["--enable-native-access=ALL-UNNAMED", "--sun-misc-unsafe-memory-access=allow"]
        command += ["-cp", f"{self.frontend}:{home}/ts/frontend/*"]
        command += ["org.pytorch.serve.ModelServer", "--python", sys.executable]
        return [*command, "-f", str(self.path / "config.properties"), "-s", str(self.model_store), "-ncs"]


def path_of(port: int) -> Path:
    """The folder of the server at `port`."""
    return ROOT / "build" / f"run-{port}"


def read_properties(text: str) -> dict[str, str]:
    """The keys and values of a Java properties file (one a line, no escapes)."""
    lines = (line.strip() for line in text.splitlines())
    pairs = (line.partition("=") for line in lines if line and not line.startswith("#"))
    return {key.strip(): value.strip() for key, _, value in pairs}


def torchserve_home() -> Path:
    """The folder that holds TorchServe's package `ts`."""
    spec = importlib.util.find_spec("ts")
    if spec is None or spec.origin is None:
        raise ServerError("TorchServe is not installed in this Python; run make venv")
    return Path(spec.origin).resolve().parent.parent


def _temporary_folder() -> str:
    folder = tempfile.mkdtemp(prefix="llama2-")
    if len(os.fsencode(folder)) > LONGEST_TEMPORARY:
        os.rmdir(folder)
        folder = tempfile.mkdtemp(prefix="llama2-", dir="/tmp")
    return folder


def port_in_use(port: int) -> bool:
    """Whether something listens at 127.0.0.1:`port`."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return True
    return False


def check_ports(port: int) -> None:
    """Raises ServerError naming the first of the five ports that can't be used."""
    if not 1 <= port <= LAST_PORT:
        raise ServerError(f"port is {port}, expected 1 to {LAST_PORT} (the four after it are used as well)")
    for offset, use in enumerate(PORTS):
        if port_in_use(port + offset):
            raise ServerError(f"port {port + offset} ({use}) is in use; choose another: PORT={port + 10 + offset}")


def free_port() -> int:
    """A port that is free together with the four after it."""
    while True:
        with socket.socket() as probe:
            probe.bind((HOST, 0))
            port: int = probe.getsockname()[1]
        if port <= LAST_PORT and not any(port_in_use(port + offset) for offset in range(len(PORTS))):
            return port

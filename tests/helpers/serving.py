"""A real TorchServe server on a free port, as tests drive it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import requests

from scripts.package_archive import ArchiveOptions
from scripts.serve.processes import marked
from scripts.serve.run_dir import RunDir, free_port
from scripts.server import MODEL, start, stop_run


@dataclass(frozen=True)
class Server:
    """A running server, and what its model is."""

    run: RunDir
    checkpoint: Path

    @property
    def url(self) -> str:
        return f"{self.run.url}/predictions/{MODEL}"

    def post(self, body: Any, **more: Any) -> requests.Response:
        return requests.post(self.url, json=body, timeout=120, **more)

    def ask(self, body: Any) -> Any:
        reply = self.post(body)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def ask_all(self, bodies: list[Any]) -> list[requests.Response]:
        """All at once."""
        with ThreadPoolExecutor(len(bodies)) as pool:
            return list(pool.map(self.post, bodies))

    def health(self) -> dict[str, Any]:
        reply = requests.get(f"{self.url}/1.0/v1/health", timeout=60)
        assert reply.status_code == 200, reply.text
        found: dict[str, Any] = reply.json()
        return found

    def ranks(self) -> dict[int, int]:
        """Process id of each rank, where there is one worker."""
        return {int(process.environ()["RANK"]): process.pid for process in self.rank_processes()}

    def rank_processes(self) -> list[psutil.Process]:
        """All ranks of all workers."""
        return [
            process
            for process in marked(self.run.token)
            if "model_service_worker" in " ".join(process.cmdline()) and "RANK" in process.environ()
        ]


@contextmanager
def serving(
    checkpoint: Path,
    ranks: int,
    *,
    mar: bool = False,
    frontend: Mapping[str, Any] | None = None,
    properties: Mapping[str, str] | None = None,
    **handler: Any,
) -> Iterator[Server]:
    """A server of `checkpoint`; with `mar` from one file that holds the weights too.

    `frontend` are TorchServe's keys in model-config.yaml, `properties` those in config.properties.
    """
    options = ArchiveOptions(
        checkpoint,
        ranks,
        include_weights=mar,
        device="cpu",
        handler={"dtype": "float32", **handler},
        frontend=frontend or {},
    )
    archive_format = "default" if mar else "no-archive"
    run, process = start(free_port(), options, archive_format=archive_format, properties=properties)
    try:
        yield Server(run, checkpoint)
    finally:
        stop_run(run)
        process.wait(30)
        assert not marked(run.token)


def until(condition: Callable[[], Any], timeout: float = 60.0) -> Any:
    """The first true value of `condition`, asked again and again."""
    waiting = threading.Event()
    for _ in range(int(timeout / 0.05)):
        if value := condition():
            return value
        waiting.wait(0.05)
    raise AssertionError(f"nothing within {timeout} s")

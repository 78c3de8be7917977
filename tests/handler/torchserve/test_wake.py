"""The request that a stalled worker sends to the frontend, and what the worker that gets it does."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from generation.interface import Output
from handler.torchserve import wake
from handler.torchserve.frontend import Frontend, find_frontend
from handler.torchserve.jobs import JobTable, Part, Piece
from tests.handler.desk import Desk, make_job


class Recorder(BaseHTTPRequestHandler):
    """Keeps path and authorization of each request; answers as the inference API's /ping does."""

    seen: list[tuple[str, str, str | None]]

    def do_GET(self) -> None:
        self.seen.append((self.command, self.path, self.headers["Authorization"]))
        body = b'{"status": "Healthy"}'
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.seen.append((self.command, self.path, self.headers["Authorization"]))

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def listener() -> Iterator[tuple[HTTPServer, list[Any]]]:
    seen: list[Any] = []
    server = HTTPServer(("127.0.0.1", 0), type("Handler", (Recorder,), {"seen": seen}))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server, seen
    server.shutdown()
    thread.join()
    server.server_close()


def test_requests_carry_the_key_where_there_is_one(listener: Any, tmp_path: Path) -> None:
    server, seen = listener
    frontend = Frontend("127.0.0.1", server.server_port, False, tmp_path / "key_file.json")
    assert frontend.get("/ping")[0] == 200
    (tmp_path / "key_file.json").write_text(json.dumps({"inference": {"key": "abc", "expiration time": "soon"}}))
    frontend.get("/ping")
    assert seen == [("GET", "/ping", None), ("GET", "/ping", "Bearer abc")]


def test_no_frontend_among_the_parents_of_this_process() -> None:
    assert find_frontend() is None


def test_stalled_worker_sends_a_request_to_its_own_version(
    listener: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, seen = listener
    frontend = Frontend("127.0.0.1", server.server_port, False, tmp_path / "key_file.json")
    monkeypatch.setattr(wake, "find_frontend", lambda: frontend)
    waker = wake.Waker(JobTable(lambda request_id: None, stream_interval=0), "my model", "2.0")
    waker._wake()
    while not seen:
        threading.Event().wait(0.01)
    assert seen == [("POST", f"/predictions/my%20model/2.0/internal/wake/{os.getpid()}", None)]


def test_worker_that_finds_no_frontend_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(wake, "find_frontend", lambda: None)
    waker = wake.Waker(JobTable(lambda request_id: None, stream_interval=0), "llama2", "1.0")
    waker._wake()
    waker._wake()
    assert caplog.text.count("its inference address was not found") == 1


@pytest.mark.parametrize(
    ("path", "batch_size", "held"),
    [("internal/wake/1", 64, True), ("internal/wake/1", 1, False), (f"internal/wake/{os.getpid()}", 64, False)],
    ids=["from another worker", "one place only", "from itself"],
)
def test_request_is_held_or_answered(path: str, batch_size: int, held: bool) -> None:
    assert wake.is_wake(path)
    found = wake.answer("id", path, batch_size)
    if held:
        assert isinstance(found, wake.WakeJob)
        assert not found.done
    else:
        assert found == Piece(b"{}", Part.WHOLE, found.content_type)


def test_held_request_shows_a_sign_of_life_after_two_seconds() -> None:
    """Its client has left, so that TorchServe then drops it."""
    desk = Desk()
    desk.table.add(wake.WakeJob("w"))
    assert desk.take_at(1.9, "w") is None
    piece = desk.take_at(2.0, "w")
    assert piece is not None
    assert piece.part is Part.MORE


def test_stall_is_open_work_without_a_poll() -> None:
    table = JobTable(lambda request_id: None, stream_interval=0)
    stalled = threading.Event()

    def watch() -> None:
        table.wait_for_stall(0.01)
        stalled.set()

    threading.Thread(target=watch, daemon=True).start()
    table.rest()
    table.add(wake.WakeJob("w"))  # no work
    assert not stalled.wait(0.1)
    table.add(make_job("a", stream=False))
    assert stalled.wait(30)


def test_no_stall_while_polls_come_or_when_the_work_is_done() -> None:
    table = JobTable(lambda request_id: None, stream_interval=0)
    stalled = threading.Event()

    def watch() -> None:
        table.wait_for_stall(0.01)
        stalled.set()

    table.add(make_job("a", stream=False))
    table.cancel_missing({"a"})  # a poll has begun
    threading.Thread(target=watch, daemon=True).start()
    assert not stalled.wait(0.1)
    table.deliver([Output("a/0", [5], "x", ["x"], finish_reason="stop")])
    assert table.take("a") is not None
    table.rest()
    assert not stalled.wait(0.1)

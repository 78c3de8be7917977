"""The load test tells right answers from wrong ones: a small HTTP server gives both."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from scripts import load_test
from scripts.load_test import LoadError, Tally, load, report, stream, wait_idle

Answer = Callable[[dict[str, Any]], tuple[int, bytes]]
IDLE = {"running": 0, "waiting": 0}


def events(*deltas: str, end: str = "data: [DONE]\n\n") -> bytes:
    lines = [f"data: {json.dumps({'index': 0, 'delta': delta}, ensure_ascii=False)}\n\n" for delta in deltas]
    return (": waiting\n\n" + "".join(lines) + end).encode()


@pytest.fixture
def serve() -> Iterator[Callable[[Answer], str]]:
    """Start a server with the given answers (to health with the body {}); returns the model's URL."""
    servers: list[tuple[ThreadingHTTPServer, threading.Thread]] = []

    def start(answer: Answer) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self._send(*answer(json.loads(self.rfile.read(int(self.headers["content-length"])))))

            def do_GET(self) -> None:
                self._send(*answer({}))

            def _send(self, status: int, content: bytes) -> None:
                self.send_response(status)
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *args: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        servers.append((server, thread))
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server, thread in servers:
        server.shutdown()
        thread.join()
        server.server_close()


def test_stream(serve: Callable[[Answer], str]) -> None:
    url = serve(lambda body: (200, events(body["prompt"], "é")))
    assert list(stream(url, "a", 5)) == ["a", "é"]


@pytest.mark.parametrize(
    ("status", "content", "message"),
    [
        (503, b"full", "status 503: full"),
        (200, events("a", end=""), "ended early"),
        (200, events("a", end='data: {"error": {"message": "bad"}}\n\n'), "bad"),
    ],
)
def test_broken_streams(serve: Callable[[Answer], str], status: int, content: bytes, message: str) -> None:
    url = serve(lambda body: (status, content))
    with pytest.raises(LoadError, match=message):
        list(stream(url, "a", 5))


def run(url: str, expected: dict[str, str], leavers: float = 0.0) -> Tally:
    """One request of each of four clients: the time is over when they have it."""
    return load(url, expected, clients=4, seconds=0.05, tokens=5, leavers=leavers)


def test_right_and_wrong_answers_are_told_apart(serve: Callable[[Answer], str]) -> None:
    url = serve(lambda body: (200, events(body["prompt"], "!")))
    tally = run(url, {"a": "a!"})
    assert len(tally.finished) >= 4
    assert not tally.wrong + tally.errors + tally.left
    assert len(tally.first_s) == len(tally.gaps_s) == len(tally.finished)
    tally = run(url, {"a": "a?"})
    assert tally.wrong == tally.finished
    assert "wrong: 'a'" in report(tally, 1)


def test_clients_that_leave_are_counted_apart(serve: Callable[[Answer], str]) -> None:
    url = serve(lambda body: (200, events(*"abcdefghijklmn")))
    tally = run(url, {"a": "abcdefghijklmn"}, leavers=0.5)
    assert len(tally.left) >= 2
    assert len(tally.finished) >= 2
    assert not tally.wrong + tally.errors


def test_errors_are_counted_and_shown(serve: Callable[[Answer], str]) -> None:
    tally = run(serve(lambda body: (429, b"later")), {"a": "a"})
    assert len(tally.errors) >= 4
    assert report(tally, 2).startswith(f"requests read to the end 0, left 0, failed {len(tally.errors)}")
    assert "error: LoadError: status 429: later" in report(tally, 2)


def test_waits_until_nothing_runs(serve: Callable[[Answer], str], monkeypatch: pytest.MonkeyPatch) -> None:
    states = [IDLE, IDLE | {"running": 1}]
    url = serve(lambda body: (200, json.dumps(states.pop()).encode()))
    assert wait_idle(url) == IDLE
    monkeypatch.setattr(load_test, "IDLE_WITHIN_S", 0.0)
    states[:] = [IDLE | {"waiting": 2}] * 9
    with pytest.raises(LoadError, match="still run 0 s after the last client left"):
        wait_idle(url)

"""The smoke test tells right answers from wrong ones: a small HTTP server gives both."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from scripts import demo
from scripts.smoke import events, smoke

Answer = Callable[[dict[str, Any]], tuple[int, str, bytes]]
USAGE = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}


def right(body: dict[str, Any]) -> tuple[int, str, bytes]:
    """What the server should answer: status, content type, body."""
    if body.get("temperature", 0) < 0:
        return 400, "application/json", b'{"error": {"message": "temperature is -1, expected 0 to 2"}}'
    if body.get("stream"):
        deltas = [{"index": 0, "delta": text, "finish_reason": end} for text, end in (("é", None), ("b", "stop"))]
        lines = [json.dumps(delta, ensure_ascii=False) for delta in deltas] + ["[DONE]"]
        return 200, "text/event-stream; charset=utf-8", "".join(f"data: {x}\n\n" for x in lines).encode()
    generation: Any = {"role": "assistant", "content": "éb"} if "dialog" in body else "text"
    reply: Any = {"generation": generation, "usage": USAGE}
    if isinstance(body.get("prompt"), list):
        reply = [reply] * len(body["prompt"])
    return 200, "application/json", json.dumps(reply).encode()


@pytest.fixture
def serve() -> Iterator[Callable[[Answer], str]]:
    """Start a server with the given answers; returns the model's URL."""
    servers = []

    def start(answer: Answer) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                status, kind, content = answer(body)
                self.send_response(status)
                self.send_header("content-type", kind)
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        servers.append((server, thread))
        return f"http://127.0.0.1:{server.server_port}/predictions/llama2"

    yield start
    for server, thread in servers:
        server.shutdown()
        server.server_close()
        thread.join()


def test_right_answers(serve: Callable[[Answer], str], capsys: pytest.CaptureFixture[str]) -> None:
    assert smoke(serve(right))
    assert capsys.readouterr().out.count("ok ") == 5


@pytest.mark.parametrize(
    ("wrong", "failing"),
    [
        (lambda body: (200, "application/json", b"not json"), 5),
        (lambda body: (500, "text/plain", b"oops"), 5),
        (lambda body: right({**body, "stream": False}), 1),
        (lambda body: right({**body, "temperature": 0}), 1),
        (lambda body: (*right(body)[:2], right(body)[2].replace(b"data: [DONE]\n\n", b"")), 1),
        (lambda body: (*right(body)[:2], right(body)[2].replace(b'"delta": "b"', b'"delta": "c"')), 1),
        (lambda body: (*right(body)[:2], right(body)[2].replace(b"generation", b"answer")), 4),
    ],
)
def test_wrong_answers(
    serve: Callable[[Answer], str], capsys: pytest.CaptureFixture[str], wrong: Answer, failing: int
) -> None:
    assert not smoke(serve(wrong))
    assert capsys.readouterr().out.count("FAIL ") == failing


def test_no_server() -> None:
    assert not smoke("http://127.0.0.1:9/predictions/llama2")


def test_events_take_data_lines_only() -> None:
    assert list(events(iter([b": comment", b"data: a", b"", b"data: \xc3\xa9"]))) == ["a", "é"]


def test_demo_prints_requests_and_answers(serve: Callable[[Answer], str], capsys: pytest.CaptureFixture[str]) -> None:
    demo.ask(serve(right))
    printed = capsys.readouterr().out
    assert "Chat: POST" in printed
    assert "What is the capital of France?" in printed
    assert '"content": "éb"' in printed

"""Requests by gRPC: how they are told from others, and replies in the form that TorchServe's frontend takes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from handler.torchserve.calls import Way, way_of
from tests.handler.desk import Desk
from tests.handler.frontend import Frontend, archive, configuration

PREDICTIONS = {"grpc_call": "PREDICT"}
STREAM = {"grpc_call": "STREAMPREDICT"}
UNMENDED: dict[str, str] = {}
SHORT = {"prompt": "Hello", "temperature": 0, "max_gen_len": 6, "ignore_eos": True}


@pytest.fixture
def frontend(tiny_checkpoint: Path, tmp_path: Path) -> Iterator[Frontend]:
    found = Frontend(archive(tmp_path, configuration(tiny_checkpoint)))
    yield found
    found.close()


@pytest.mark.parametrize(
    ("headers", "way"),
    [
        ({"url_path": ""}, Way.HTTP),
        ({"Host": "x", "grpc_call": "STREAMPREDICT"}, Way.HTTP),
        ({"host": "x", "ts_request_sequence_id": "1"}, Way.HTTP),
        ({"body": {"content-type": ""}}, Way.ANY_CALL),
        ({"host": {"content-type": ""}}, Way.ANY_CALL),
        ({}, Way.ANY_CALL),
        ({"body": {"content-type": ""}, "grpc_call": "PREDICT"}, Way.PREDICTIONS),
        ({"grpc_call": "STREAMPREDICT"}, Way.STREAM),
        ({"grpc_call": "OTHER"}, Way.ANY_CALL),
        ({"grpc_call": "STREAMPREDICT2", "ts_request_sequence_id": "1"}, Way.SEQUENCE),
        ({"ts_request_sequence_id": "1", "ts_request_sequence_start": "true"}, Way.LOST),
    ],
)
def test_way(headers: dict[str, Any], way: Way) -> None:
    assert way_of(headers) is way


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("headers", [PREDICTIONS, UNMENDED])
def test_one_message_has_the_whole_answer(frontend: Frontend, headers: dict[str, str], stream: bool) -> None:
    """The first message ends the call, so that a piece of a stream would be taken for all of it."""
    expected = frontend.ask(SHORT).json
    reply = frontend.call("call", {**SHORT, "stream": stream}, headers)
    frontend.finish()
    assert len(reply.pieces) == 1
    assert reply.json == expected


@pytest.mark.parametrize("stream", [False, True])
def test_stream_call_streams_whatever_the_body_says(frontend: Frontend, stream: bool) -> None:
    expected = frontend.ask({**SHORT, "stream": True}).events
    reply = frontend.call("call", {**SHORT, "stream": stream}, STREAM)
    frontend.finish()
    assert "".join(e.get("delta", "") for e in reply.events) == "".join(e.get("delta", "") for e in expected)
    assert reply.events[-1]["usage"] == expected[-1]["usage"]
    assert reply.headers["ts_stream_next"] == "false"


@pytest.mark.parametrize("headers", [PREDICTIONS, STREAM])
def test_error_is_a_status_with_its_text(frontend: Frontend, headers: dict[str, str]) -> None:
    reply = frontend.call("call", {**SHORT, "temperature": 3}, headers)
    frontend.finish()
    assert (reply.status, reply.data) == (400, b"temperature is 3, expected a number between 0 and 2")


def test_error_is_the_reply_where_no_status_can_be_sent(frontend: Frontend) -> None:
    reply = frontend.call("call", {**SHORT, "temperature": 3}, UNMENDED)
    frontend.finish()
    assert reply.status == 200
    assert reply.json["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("name", ["url_path", "grpc_call", "host", "ts_request_sequence_id", ""])
def test_field_named_like_a_header(frontend: Frontend, name: str) -> None:
    reply = frontend.call("call", SHORT, PREDICTIONS, name)
    frontend.finish()
    assert reply.status == 400
    assert reply.data.startswith(b"unexpected form field " + json.dumps(name).encode())


def test_client_is_asked_for_without_a_message() -> None:
    desk = Desk()
    desk.add("plain").came_by(Way.PREDICTIONS)
    desk.add("stream").came_by(Way.STREAM)
    for job_id in ("plain", "stream"):
        assert desk.take_at(1.9, job_id) is None
        piece = desk.take_at(2.0, job_id)
        assert piece is not None
        assert (piece.data, piece.status, piece.part.value) == (b"", 200, "more")


def test_unmended_frontend_is_never_asked() -> None:
    """Anything that is sent would end the call."""
    desk = Desk()
    desk.add("call").came_by(Way.ANY_CALL)
    desk.deliver("call", "some")
    assert desk.take_at(500, "call") is None
    desk.table.wait(0)
    desk.deliver("call", "", "stop")
    assert desk.take_at(501, "call") is not None


def test_call_by_sequence_is_refused(frontend: Frontend) -> None:
    headers = {"grpc_call": "STREAMPREDICT2", "ts_request_sequence_id": "1"}
    reply = frontend.call("call", SHORT, headers)
    frontend.finish()
    assert reply.json["error"]["message"] == "StreamPredictions2 is not served, use StreamPredictions"


def test_call_by_sequence_is_never_answered_to_an_unmended_frontend(frontend: Frontend) -> None:
    """TorchServe has closed the call, and an answer would end the worker."""
    lost = frontend.call("lost", SHORT, {"ts_request_sequence_id": "1"})
    other = frontend.send("other", SHORT)
    while not other.done:
        frontend.poll()
    frontend.poll()
    assert not lost.pieces
    del frontend.open["lost"]
    frontend.poll()
    assert "lost" not in frontend.handler.jobs


def test_stream_that_fails_ends_with_a_status() -> None:
    desk = Desk()
    desk.add("stream").came_by(Way.STREAM)
    desk.deliver("stream", "some")
    assert desk.take_at(1, "stream") is not None
    desk.deliver("stream", "", "error", error="numbers are not finite")
    piece = desk.take_at(2, "stream")
    assert piece is not None
    assert (piece.status, piece.message) == (500, "numbers are not finite")

"""The table of HTTP requests in flight: what is sent for each, when, and how a reply ends."""

from __future__ import annotations

import json
from typing import Any

import pytest

from generation.interface import Output
from handler.errors import InternalError, InvalidRequest, QueueFull
from handler.torchserve.jobs import Part, Piece, failure
from tests.handler.desk import INTERVAL, Desk
from tests.helpers.report import report

JSON, EVENTS = "application/json; charset=utf-8", "text/event-stream; charset=utf-8"
DONE = "data: [DONE]\n\n"


def sent(piece: Piece | None) -> Piece:
    assert piece is not None
    return piece


def text_of(piece: Piece | None) -> str:
    return sent(piece).data.decode("utf-8")


def events(piece: Piece | None) -> list[Any]:
    blocks = text_of(piece).split("\n\n")[:-1]
    return [json.loads(block.removeprefix("data: ")) for block in blocks if not block.endswith("[DONE]")]


@pytest.fixture
def desk() -> Desk:
    return Desk()


# --- replies that don't stream


def test_fast_job_is_one_whole_reply(desk: Desk) -> None:
    desk.add("a")
    desk.deliver("a", "Hello", None)
    assert desk.take_at(0.1, "a") is None
    desk.deliver("a", " you", "stop")
    piece = sent(desk.take_at(0.2, "a"))
    assert (piece.part, piece.content_type, piece.status, piece.phrase) == (Part.WHOLE, JSON, 200, "OK")
    assert json.loads(piece.data)["generation"] == "Hello you"
    assert len(desk.table) == 0
    assert desk.canceled == []


def test_slow_job_gives_signs_of_life(desk: Desk) -> None:
    """B025, B155: nothing for 2 s, then a blank each second, so that a closed connection is noticed."""
    desk.add("a")
    desk.deliver("a", "Hello")
    assert desk.take_at(1.99, "a") is None
    for second in (2.0, 3.0, 4.5):
        assert desk.take_at(second, "a") == Piece(b" ", Part.MORE, JSON)
        assert desk.take_at(second + 0.99, "a") is None
    desk.deliver("a", " you", "length")
    piece = sent(desk.take_at(5.49, "a"))
    assert piece.part is Part.LAST
    assert json.loads(b"   " + piece.data)["finish_reason"] == "length"
    assert "a" not in desk.table


@pytest.mark.parametrize("stream", [False, True])
def test_error_before_the_head_keeps_its_status(desk: Desk, stream: bool) -> None:
    """B153: no 200 before an error."""
    for job_id, error in (("a", InvalidRequest("no", param="n")), ("b", QueueFull("full"))):
        job = desk.add(job_id, stream=stream)
        job.fail(error)
        piece = sent(desk.take_at(0.1, job_id))
        assert piece == failure(error)
        assert (piece.part, piece.status, piece.phrase) == (Part.WHOLE, error.status, error.phrase)
        assert piece.content_type == "application/json"
        assert json.loads(piece.data) == error.body()
    assert sent(piece).retry_after == 1
    assert len(desk.table) == 0


def test_error_after_the_head_is_the_body(desk: Desk) -> None:
    desk.add("a")
    assert desk.take_at(2, "a") is not None
    desk.deliver("a", reason="error", error="not finite")
    piece = sent(desk.take_at(2.1, "a"))
    assert (piece.part, piece.content_type) == (Part.LAST, JSON)
    assert json.loads(b" " + piece.data)["error"]["message"] == "not finite"
    assert len(desk.table) == 0


# --- streams


def test_stream(desk: Desk) -> None:
    """The first piece at once, later ones at most every `stream_interval`, the end at once."""
    desk.add("a", stream=True)
    assert desk.take_at(0.5, "a") is None
    desk.deliver("a", "Hel")
    first = sent(desk.take_at(0.5, "a"))
    assert (first.part, first.content_type, first.status) == (Part.MORE, EVENTS, 200)
    assert events(first) == [{"index": 0, "delta": "Hel", "finish_reason": None}]
    desk.deliver("a", "lo")
    assert desk.take_at(0.54, "a") is None
    desk.deliver("a", " you")
    second = sent(desk.take_at(0.5 + INTERVAL, "a"))
    assert second.part is Part.MORE
    assert [event["delta"] for event in events(second)] == ["lo you"]
    desk.deliver("a", "!", "stop")
    last = sent(desk.take_at(0.5 + INTERVAL, "a"))
    assert last.part is Part.LAST
    assert text_of(last).endswith(DONE)
    assert [event["finish_reason"] for event in events(last)] == ["stop"]
    assert len(desk.table) == 0


def test_text_half_an_interval_old_goes_along_with_a_poll(desk: Desk) -> None:
    """So streams that began apart are soon served by the same polls."""
    desk.add("a", stream=True)
    desk.deliver("a", "x")
    assert desk.take_at(1, "a") is not None
    desk.deliver("a", "y")
    assert desk.take_at(1 + INTERVAL * 0.49, "a") is None
    assert [event["delta"] for event in events(desk.take_at(1 + INTERVAL * 0.51, "a"))] == ["y"]


def test_interval_of_zero_sends_each_token() -> None:
    desk = Desk(stream_interval=0)
    desk.add("a", stream=True)
    for text in "abc":
        desk.deliver("a", text)
        assert [event["delta"] for event in events(desk.table.take("a"))] == [text]
        assert desk.table.take("a") is None


def test_stream_whose_first_piece_is_its_last_is_whole(desk: Desk) -> None:
    """With any other ending TorchServe would never write the head."""
    desk.add("a", stream=True)
    desk.deliver("a", "Hello", "stop")
    piece = sent(desk.take_at(0, "a"))
    assert (piece.part, piece.content_type) == (Part.WHOLE, EVENTS)
    assert [event["delta"] for event in events(piece)] == ["Hello"]
    assert text_of(piece).endswith(DONE)
    assert len(desk.table) == 0


def test_silent_stream_gives_signs_of_life(desk: Desk) -> None:
    desk.add("a", stream=True)
    desk.deliver("a", "")  # a token whose text isn't certain yet
    assert desk.take_at(1.9, "a") is None
    assert desk.take_at(2, "a") == Piece(b": waiting\n\n", Part.MORE, EVENTS)
    assert desk.take_at(2.9, "a") is None
    assert text_of(desk.take_at(3, "a")) == ": waiting\n\n"
    desk.deliver("a", "x")
    assert desk.take_at(3.04, "a") is None
    assert [event["delta"] for event in events(desk.take_at(3.1, "a"))] == ["x"]
    assert desk.take_at(4.05, "a") is None
    assert text_of(desk.take_at(4.1, "a")) == ": waiting\n\n"


def test_error_in_a_stream_is_its_last_event(desk: Desk) -> None:
    """B205: text that was not sent yet comes before it, and the stream ends."""
    desk.add("a", stream=True)
    desk.deliver("a", "x")
    assert desk.take_at(0, "a") is not None
    desk.deliver("a", "y")
    desk.deliver("a", reason="error", error="not finite")
    piece = sent(desk.take_at(0.01, "a"))
    assert (piece.part, piece.content_type, piece.status) == (Part.LAST, EVENTS, 200)
    delta, error = events(piece)
    assert delta["delta"] == "y"
    assert error["error"]["type"] == "internal_error"
    assert text_of(piece).endswith(DONE)
    assert len(desk.table) == 0


# --- cancellation


@pytest.mark.parametrize("stream", [False, True])
def test_failure_of_one_choice_cancels_the_others(desk: Desk, stream: bool) -> None:
    desk.add("a", stream=stream, choices=3)
    desk.add("b")
    desk.deliver("a", "x", choice=0)
    desk.deliver("a", reason="error", error="not finite", choice=1)
    piece = sent(desk.take_at(0, "a"))
    assert (piece.part, piece.status) == (Part.WHOLE, 500)
    assert {"a/0", "a/2"} <= set(desk.canceled) <= {"a/0", "a/1", "a/2"}
    assert "b" in desk.table


def test_missing_jobs_are_canceled(desk: Desk) -> None:
    """B027, B255: every engine request of a job whose client left, and no other's."""
    desk.add("a", stream=True, choices=2)
    desk.add("b")
    desk.add("c")
    desk.table.cancel_missing({"b", "never seen"})
    assert sorted(desk.canceled) == ["a/0", "a/1", "c/0"]
    assert len(desk.table) == 1
    assert "b" in desk.table
    desk.table.cancel_missing(["b"])
    assert len(desk.canceled) == 3


@report("B028", "ray-project/ray#41199")
def test_output_for_a_vanished_job_is_ignored(desk: Desk) -> None:
    """B028."""
    desk.add("a")
    desk.add("b")
    desk.table.cancel_missing({"b"})
    desk.table.deliver(
        [Output("a/0", text="late", finish_reason="stop"), Output("b/0", text="x", finish_reason="stop")]
    )
    desk.deliver("nothing of ours", "x")
    assert desk.table.take("a") is None
    assert json.loads(sent(desk.table.take("b")).data)["generation"] == "x"
    assert desk.table.take("b") is None  # only once
    assert len(desk.table) == 0


def test_a_job_id_may_hold_slashes(desk: Desk) -> None:
    desk.add("a/b/0")
    desk.deliver("a/b/0", "x", "stop")
    assert sent(desk.table.take("a/b/0")).part is Part.WHOLE


@report("B148", "pytorch/serve#1780")
def test_nothing_is_kept_of_a_thousand_jobs(desk: Desk) -> None:
    """B148, B253."""
    for i in range(1000):
        job_id = str(i)
        desk.add(job_id, stream=i % 2 == 0)
        desk.deliver(job_id, "x", "stop" if i % 3 == 0 else None)
        desk.table.take(job_id)
        if i % 3:
            desk.table.cancel_missing(set())
    assert len(desk.table) == 0
    assert len(desk.canceled) == sum(1 for i in range(1000) if i % 3)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("head_sent", [False, True])
def test_reply_that_cannot_be_written_fails_alone(
    desk: Desk, stream: bool, head_sent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bug of ours in one reply: an exception would end the whole batch, and come again with the next poll."""

    def broken() -> Any:
        raise ValueError("a bug")

    job = desk.add("a", stream=stream, choices=2)
    if head_sent:
        assert desk.take_at(2, "a") is not None
    desk.deliver("a", "x", "stop", choice=0)
    desk.deliver("a", "x", "stop", choice=1)
    monkeypatch.setattr(job, "take_events" if stream else "body", broken)
    piece = sent(desk.table.take("a"))
    assert (piece.part, piece.status) == (Part.LAST if head_sent else Part.WHOLE, 500)
    assert json.loads(piece.data)["error"]["type"] == "internal_error"
    assert len(desk.table) == 0
    assert sorted(desk.canceled) == ["a/0", "a/1"]


def test_internal_error_is_a_500() -> None:
    assert failure(InternalError("a bug")).status == 500

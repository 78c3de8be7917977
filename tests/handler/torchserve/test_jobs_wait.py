"""How long the job table lets a poll wait."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from generation.interface import Output
from handler.torchserve import jobs as job_table
from handler.torchserve.jobs import JobTable
from tests.handler.desk import INTERVAL, Desk, make_job


@pytest.fixture
def desk() -> Desk:
    return Desk()


def wait_in_thread(table: JobTable, timeout: float, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Start `table.wait` in a thread and return once it rests; the result joins it."""
    resting = threading.Event()
    condition = table._changed
    rest = condition.wait

    def noticed(timeout: float | None = None) -> bool:
        resting.set()  # with the lock held, which `rest` lets go of
        return rest(timeout)

    monkeypatch.setattr(condition, "wait", noticed)
    thread = threading.Thread(target=table.wait, args=(timeout,), daemon=True)
    thread.start()
    assert resting.wait(30)

    def join() -> None:
        thread.join(30)
        assert not thread.is_alive()

    return join


@pytest.mark.parametrize("stream", [False, True])
def test_wait_ends_when_something_is_due(stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    table = JobTable(lambda request_id: None, stream_interval=INTERVAL)
    table.add(make_job("a", stream=stream))
    monkeypatch.setattr(job_table, "FIRST_SIGN_OF_LIFE_S", 1000.0)
    join = wait_in_thread(table, 1000, monkeypatch)
    table.deliver([Output("a/0", [5], "x", ["x"], finish_reason=None if stream else "stop")])
    join()
    assert table.take("a") is not None


def test_wait_goes_on_while_nothing_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    table = JobTable(lambda request_id: None, stream_interval=INTERVAL)
    table.add(make_job("a", stream=False))
    monkeypatch.setattr(job_table, "FIRST_SIGN_OF_LIFE_S", 1000.0)
    join = wait_in_thread(table, 1000, monkeypatch)
    table.deliver([Output("a/0", [5], "x", ["x"])])  # more will come
    assert table.take("a") is None
    table.deliver([Output("a/0", [6], "y", ["y"], finish_reason="stop")])
    join()


def test_wait_does_not_rest_when_something_is_due(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(desk.table._changed, "wait", lambda timeout: pytest.fail("rested"))
    desk.add("a")
    desk.deliver("a", "x", "stop")
    desk.table.wait(1000)
    desk.add("b", stream=True)
    desk.deliver("b", "x")
    desk.table.take("a")
    desk.table.wait(1000)
    desk.table.take("b")
    desk.add("c")
    desk.clock.now += 2
    desk.table.wait(1000)


@pytest.mark.parametrize(
    ("prepare", "timeout", "rest"),
    [
        (lambda desk: None, 0.5, 0.5),
        (lambda desk: desk.add("a"), 0.5, 0.5),
        (lambda desk: desk.add("a"), 5, 2),
        (lambda desk: (desk.add("a"), desk.take_at(2, "a")), 5, 1),
        (lambda desk: (desk.add("a", stream=True), desk.deliver("a", "x"), desk.table.take("a")), 5, 1),
        (
            lambda desk: (
                desk.add("a", stream=True),
                desk.deliver("a", "x"),
                desk.table.take("a"),
                desk.deliver("a", "y"),
            ),
            5,
            INTERVAL,
        ),
    ],
    ids=["empty", "timeout", "first sign", "next sign", "silent stream", "interval"],
)
def test_wait_rests_until_the_next_piece_or_the_timeout(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, prepare: Callable[[Desk], Any], timeout: float, rest: float
) -> None:
    rests: list[float] = []

    def pass_time(seconds: float) -> None:
        rests.append(seconds)
        desk.clock.now += seconds

    monkeypatch.setattr(desk.table._changed, "wait", pass_time)
    prepare(desk)
    desk.table.wait(timeout)
    assert sum(rests) == pytest.approx(rest)
    assert len(rests) <= 2  # a stream is looked at once more when its interval is over


def test_wait_ends_by_the_timeout() -> None:
    table = JobTable(lambda request_id: None, stream_interval=INTERVAL)
    table.add(make_job("a", stream=False))
    table.wait(0.01)
    assert table.take("a") is None

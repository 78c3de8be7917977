"""The engine's own thread: it works when there is work, rests when there is none, and ends the process on failure."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from generation.engine.engine import Engine, EngineSettings
from generation.engine.thread import EngineThread
from generation.interface import Output, Request, SamplingParams
from tests.helpers.ranks import make_model
from tests.helpers.report import report
from tests.helpers.tiny import random_weights, tiny_config


@pytest.fixture
def engine() -> Engine:
    config = tiny_config()
    return Engine(make_model(config, random_weights(config)), EngineSettings(kv_cache_tokens=1024))


class Collector:
    def __init__(self) -> None:
        self.outputs: list[Output] = []
        self.ended = threading.Event()
        self.died = threading.Event()

    def deliver(self, outputs: list[Output]) -> None:
        self.outputs += outputs
        if any(o.finish_reason for o in outputs):
            self.ended.set()

    def die(self, code: int) -> None:
        assert code == 1
        self.died.set()


def test_submitted_from_another_thread(engine: Engine) -> None:
    collector = Collector()
    thread = EngineThread(engine, collector.deliver, die=collector.die)
    thread.start()
    for _ in range(3):  # again after it has come to rest
        collector.ended.clear()
        engine.submit(Request("r", [5, 6], SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)))
        assert collector.ended.wait(30)
    thread.stop()
    assert sum(len(o.token_ids) for o in collector.outputs) == 15
    assert not collector.died.is_set()
    assert not thread._thread.is_alive()


def test_failure_ends_the_process(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    collector = Collector()

    def broken() -> Any:
        raise RuntimeError("a rank is gone")

    monkeypatch.setattr(engine, "step", broken)
    thread = EngineThread(engine, collector.deliver, die=collector.die)
    thread.start()
    engine.submit(Request("r", [5], SamplingParams()))
    assert collector.died.wait(30)
    thread.stop()


@report("B029", "openvinotoolkit/model_server#4503")
def test_hanging_step_ends_the_process(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """B029: a stuck engine doesn't stay up with every request hanging."""
    collector = Collector()
    release = threading.Event()
    monkeypatch.setattr(engine, "step", lambda: release.wait(60) and [])
    thread = EngineThread(engine, collector.deliver, step_timeout=0.2, die=collector.die)
    thread.start()
    engine.submit(Request("r", [5], SamplingParams()))
    assert collector.died.wait(30)
    monkeypatch.undo()
    release.set()
    thread.stop()

"""What the handler tells TorchServe, as the lines its frontend reads."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from generation.engine.engine import Engine, EngineSettings
from generation.interface import Request, SamplingParams
from handler.torchserve import metrics
from handler.torchserve.metrics import HISTOGRAMS, OTHERS, MetricsThread, let_lines_through
from scripts.serve.run_dir import ROOT
from tests.handler.frontend import metrics_cache
from tests.helpers.ranks import make_model
from tests.helpers.tiny import random_weights, tiny_config

LINE = re.compile(r"\[METRICS\](\w+)\.\w+:([0-9\-,.e]+)\|#([^|]*)\|#type:(\w+)\|#hostname:[^,]+,\d+")
"""As the frontend reads it."""


class Told(logging.Handler):
    """The metrics told since `take` was called: (name with the label after the model, value)."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def take(self) -> list[tuple[str, float]]:
        found = []
        for line in self.lines:
            match = LINE.fullmatch(line)
            assert match is not None, line
            labels = match[3].split(",")
            assert labels[0] == "ModelName:llama2"
            found.append((" ".join([match[1].removeprefix("llama_"), *labels[1:]]), float(match[2])))
        self.lines.clear()
        return found


@pytest.fixture
def told() -> Iterator[Told]:
    logger = logging.getLogger("ts.metrics.caching_metric")
    level, handler = logger.level, Told()
    let_lines_through()
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(level)


@pytest.fixture
def engine() -> Engine:
    config = tiny_config()
    return Engine(make_model(config, random_weights(config)), EngineSettings(1024))


@pytest.fixture
def thread(engine: Engine) -> MetricsThread:
    return MetricsThread(metrics_cache(), "llama2", engine)


def run(engine: Engine, prompt_tokens: int = 40, new: int = 3, name: str = "r") -> None:
    params = SamplingParams(max_tokens=new, temperature=0, ignore_eos=True)
    engine.submit(Request(name, list(range(3, 3 + prompt_tokens)), params))
    while engine.busy:
        engine.step()


def test_the_first_time_everything_then_only_changes(thread: MetricsThread, told: Told) -> None:
    thread.tell()
    first = told.take()
    assert all(value == 0 for _, value in first)
    assert {name.split()[0] for name, _ in first} == {m.name.removeprefix("llama_") for m in OTHERS}
    thread.tell()
    assert told.take() == []


def test_a_request_is_counted_and_timed(thread: MetricsThread, engine: Engine, told: Told) -> None:
    """B260."""
    thread.tell()
    told.take()
    run(engine)
    run(engine, name="again")
    thread.tell()
    found = told.take()
    counts = dict(found[8:])
    assert counts == {
        "prompt_tokens_total": 80,
        "prefix_hit_tokens_total": 32,
        "generated_tokens_total": 6,
        "requests_finished_total FinishReason:length": 2,
    }
    names = [name for name, _ in found[:8]]
    assert names == [HISTOGRAMS[what].name.removeprefix("llama_") for what in HISTOGRAMS] * 2
    times = dict(found[:8])
    assert 0 <= times["queue_time_seconds"] <= times["time_to_first_token_seconds"] < 60
    assert 0 < times["inter_token_time_seconds"] <= times["longest_token_gap_seconds"] < 60


def test_gauges_rise_and_fall(thread: MetricsThread, engine: Engine, told: Told) -> None:
    thread.tell()
    engine.submit(Request("r", [3] * 20, SamplingParams(max_tokens=5, ignore_eos=True)))
    told.take()
    thread.tell()
    assert told.take() == [("requests_waiting", 1)]
    engine.step()
    thread.tell()
    assert dict(told.take()).items() >= {
        ("requests_running", 1.0),
        ("requests_waiting", 0.0),
        ("kv_cache_usage_percent", 3.12),
    }
    engine.cancel("r")
    engine.step()
    thread.tell()
    assert told.take() == [
        ("requests_running", 0),
        ("kv_cache_usage_percent", 0),
        ("requests_finished_total FinishReason:cancelled", 1),
    ]


def test_one_token_has_no_time_between_tokens(thread: MetricsThread, engine: Engine, told: Told) -> None:
    run(engine, new=1)
    thread.tell()
    assert [name for name, _ in told.take()[:3]][-1] == "requests_running"


def test_errors_by_status(thread: MetricsThread, told: Told) -> None:
    thread.tell()
    told.take()
    for status in (400, 400, 418):
        thread.count_error(status)
    thread.tell()
    assert told.take() == [("errors_total Status:400", 2), ("errors_total Status:418", 1)]


def test_what_torchserve_tells_at_each_poll_is_held_back(told: Told) -> None:
    cache = metrics_cache()
    cache.set_request_ids({0: "a"})
    cache.add_time("PredictionTime", 1.5)
    assert told.lines == []


def test_metrics_that_the_file_lacks_are_told_too(engine: Engine, told: Told, tmp_path: Path) -> None:
    other = tmp_path / "metrics.yaml"
    other.write_text("model_metrics: {gauge: [{name: Other, unit: ms, dimensions: []}]}\n", encoding="utf-8")
    MetricsThread(metrics_cache(other), "llama2", engine).tell()
    assert ("errors_total Status:400", 0) in told.take()


def test_the_file_declares_the_same_metrics() -> None:
    declared: Any = yaml.safe_load((ROOT / "metrics.yaml").read_text(encoding="utf-8"))["model_metrics"]
    found = {(m["name"], kind, m["unit"], tuple(m["dimensions"])) for kind, items in declared.items() for m in items}
    assert found == {
        (m.name, m.kind.value, m.unit, ("ModelName", *([m.label] if m.label else [])))
        for m in (*HISTOGRAMS.values(), *OTHERS)
    }
    assert all(m.name.startswith(metrics.PREFIX) for m in (*HISTOGRAMS.values(), *OTHERS))


def test_the_thread_tells_by_itself_and_ends(thread: MetricsThread, engine: Engine, told: Told) -> None:
    run(engine)
    thread.start()
    thread.stop()
    assert ("generated_tokens_total", 3) in told.take()


def test_a_failure_is_logged_once(
    thread: MetricsThread, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(thread, "tell", lambda: 1 / 0)
    thread.start()
    thread.stop()
    assert [record.message for record in caplog.records if record.levelno > logging.INFO] == [
        "metrics can't be told any more; requests are answered as before"
    ]

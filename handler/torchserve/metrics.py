"""The engine's metrics on their way to TorchServe's metrics address.

TorchServe's workers tell the frontend a metric by a line on standard output that begins with "[METRICS]"; in its
Prometheus mode the frontend adds them up. What is told at once for each token would cost more than the token, so a
thread tells what has changed, once a second; while nothing changes it says nothing.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from typing import Any, get_args

from ts.metrics.metric_cache_errors import MetricsCacheKeyError
from ts.metrics.metric_type_enum import MetricTypes

from generation.engine.engine import Engine
from generation.interface import FinishReason

logger = logging.getLogger(__name__)

INTERVAL_S = 1.0
PREFIX = "llama_"
MODEL = "ModelName"
ERROR_STATUSES = (400, 404, 413, 429, 500, 503)
_LINES = logging.getLogger("ts.metrics.caching_metric")


@dataclass(frozen=True)
class Metric:
    """One metric as metrics.yaml declares it, beside the label `ModelName` and the `Hostname` TorchServe adds."""

    name: str
    kind: MetricTypes
    unit: str
    label: str | None = None


HISTOGRAMS = {
    "queue": Metric("llama_queue_time_seconds", MetricTypes.HISTOGRAM, "s"),
    "first_token": Metric("llama_time_to_first_token_seconds", MetricTypes.HISTOGRAM, "s"),
    "inter_token": Metric("llama_inter_token_time_seconds", MetricTypes.HISTOGRAM, "s"),
    "longest_gap": Metric("llama_longest_token_gap_seconds", MetricTypes.HISTOGRAM, "s"),
}
"""By the engine's name of the duration. The frontend's buckets are fixed: 5 ms to 10 s."""
RUNNING = Metric("llama_requests_running", MetricTypes.GAUGE, "count")
WAITING = Metric("llama_requests_waiting", MetricTypes.GAUGE, "count")
CACHE_USE = Metric("llama_kv_cache_usage_percent", MetricTypes.GAUGE, "percent")
PROMPT_TOKENS = Metric("llama_prompt_tokens_total", MetricTypes.COUNTER, "count")
PREFIX_HIT_TOKENS = Metric("llama_prefix_hit_tokens_total", MetricTypes.COUNTER, "count")
GENERATED_TOKENS = Metric("llama_generated_tokens_total", MetricTypes.COUNTER, "count")
PREEMPTIONS = Metric("llama_preemptions_total", MetricTypes.COUNTER, "count")
FINISHED = Metric("llama_requests_finished_total", MetricTypes.COUNTER, "count", "FinishReason")
ERRORS = Metric("llama_errors_total", MetricTypes.COUNTER, "count", "Status")
OTHERS = (
    RUNNING,
    WAITING,
    CACHE_USE,
    PROMPT_TOKENS,
    PREFIX_HIT_TOKENS,
    GENERATED_TOKENS,
    PREEMPTIONS,
    FINISHED,
    ERRORS,
)


class MetricsThread:
    """Tells the metrics of one model, once a second at most.

    Args:
        cache: TorchServe's `context.metrics`. Metrics that its metrics.yaml doesn't declare are added to it.
        model_name: value of the label `ModelName`.
    """

    def __init__(self, cache: Any, model_name: str, engine: Engine) -> None:
        self._engine = engine
        self._model_name = model_name
        self._emitters = {m.name: _emitter(cache, m) for m in (*HISTOGRAMS.values(), *OTHERS)}
        self._errors = dict.fromkeys(ERROR_STATUSES, 0)
        self._told: dict[tuple[str, str], float] = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._main, name="metrics", daemon=True)

    def count_error(self, status: int) -> None:
        """A request was answered with `status`, 400 or above. Called by the handler's thread only."""
        self._errors[status] = self._errors.get(status, 0) + 1

    def start(self) -> None:
        let_lines_through()
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()

    def _main(self) -> None:
        try:
            self.tell()
            while not self._stopping.wait(INTERVAL_S):
                self.tell()
        except Exception:
            logger.exception("metrics can't be told any more; requests are answered as before")

    def tell(self) -> None:
        """Tell what has changed since the last call; the first time everything."""
        engine = self._engine
        for what, seconds in engine.meter.take_durations():
            self._emit(HISTOGRAMS[what], round(seconds, 6))
        stats = engine.stats()
        self._set(RUNNING, stats.running)
        self._set(WAITING, stats.waiting)
        used = stats.kv_blocks_total - stats.kv_blocks_free
        self._set(CACHE_USE, round(100 * used / stats.kv_blocks_total, 2))
        self._raise_to(PROMPT_TOKENS, stats.prompt_tokens)
        self._raise_to(PREFIX_HIT_TOKENS, stats.prefix_hit_tokens)
        self._raise_to(GENERATED_TOKENS, stats.generated_tokens)
        self._raise_to(PREEMPTIONS, stats.preemptions)
        for reason in get_args(FinishReason):
            self._raise_to(FINISHED, stats.finished.get(reason, 0), reason)
        for status, count in list(self._errors.items()):
            self._raise_to(ERRORS, count, str(status))

    def _set(self, metric: Metric, value: float) -> None:
        if self._told.get((metric.name, "")) != value:
            self._told[metric.name, ""] = value
            self._emit(metric, value)

    def _raise_to(self, metric: Metric, total: int, label: str = "") -> None:
        """The frontend's counters take what is added to them."""
        told = self._told.get((metric.name, label))
        if told != total:
            self._told[metric.name, label] = total
            self._emit(metric, total - (told or 0), label)

    def _emit(self, metric: Metric, value: float, label: str = "") -> None:
        labels = [self._model_name] if metric.label is None else [self._model_name, label]
        self._emitters[metric.name].add_or_update(value, labels)


def _emitter(cache: Any, metric: Metric) -> Any:
    """TorchServe's object for a metric; the frontend takes also those that metrics.yaml doesn't declare."""
    try:
        return cache.get_metric(metric.name, metric.kind)
    except MetricsCacheKeyError:
        labels = [MODEL] if metric.label is None else [MODEL, metric.label]
        return cache.add_metric_to_cache(metric.name, metric.unit, labels, metric.kind)


def let_lines_through() -> None:
    """Let this module's lines out at INFO, and hold back TorchServe's own, which are several a poll."""
    _LINES.setLevel(logging.INFO)
    _LINES.addFilter(_wanted)


def _wanted(record: logging.LogRecord) -> bool:
    return record.levelno > logging.INFO or str(record.msg).startswith(f"[METRICS]{PREFIX}")

"""What the project wants to reach, and how it is read from the benchmark's results.

A ratio is the median over the rounds of the quotient within a round, as the machine's speed changes between rounds.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Result = dict[str, Any]
"""What `scripts.benchmark --json` wrote."""
BIG = 10**9
"""Parameters from which a model is far larger than the caches of a processor."""

BUSY = 0.3
"""Load average for each core above which a machine is too busy for figures to mean much."""


@dataclass(frozen=True)
class Rows:
    """Some rows of a round: those of a program that have these values; of several the first is meant."""

    program: str
    values: tuple[tuple[str, object], ...] = ()

    def find(self, found: dict[str, Any]) -> dict[str, Any] | None:
        rows = found.get(self.program, [])
        return next((row for row in rows if all(row.get(key) == value for key, value in self.values)), None)


def rows(program: str, **values: object) -> Rows:
    return Rows(program, tuple(values.items()))


def engine(result: Result, quantization: str = "none", **values: object) -> Rows:
    """Of the engine on the number of ranks that the run is about."""
    return rows("engine", **{"quantization": quantization, "ranks": result["ranks"], **values})


def over_rounds(result: Result, value: Callable[[dict[str, Any]], float | None]) -> float | None:
    """The median of what `value` makes of each round; None where it can't be had of one."""
    values = [value(found) for found in result["rounds"]]
    known = [v for v in values if v is not None]
    return statistics.median(known) if known and len(known) == len(values) else None


def ratio(result: Result, one: Rows, other: Rows, figure: str = "decode_tok_s") -> float | None:
    def quotient(found: dict[str, Any]) -> float | None:
        first, second = one.find(found), other.find(found)
        return first[figure] / second[figure] if first and second else None

    return over_rounds(result, quotient)


def bandwidth_share(result: Result, wanted: Rows) -> float | None:
    """Of the bandwidth at which memory is read, what a step's weights are read at."""

    def share(found: dict[str, Any]) -> float | None:
        row = wanted.find(found)
        if row is None:
            return None
        steps = row["decode_tok_s"] / row["streams"]
        return float(steps * row["step_bytes"] / 1e9 / found["memory"][0]["read_gb_s"])

    return over_rounds(result, share)


def context_share(result: Result, streams: int, short: int, long: int) -> float | None:
    """The same of the keys and values that a long context adds to a step, by the time that it adds."""

    def share(found: dict[str, Any]) -> float | None:
        near = engine(result, streams=streams, prompt_tokens=short).find(found)
        far = engine(result, streams=streams, prompt_tokens=long).find(found)
        if near is None or far is None:
            return None
        seconds = streams / far["decode_tok_s"] - streams / near["decode_tok_s"]
        n_bytes = streams * (long - short) * near["kv_bytes_per_token"]
        return float(n_bytes / 1e9 / max(seconds, 1e-9) / found["memory"][0]["read_gb_s"])

    return over_rounds(result, share)


@dataclass(frozen=True)
class Target:
    text: str
    limits: tuple[float, ...]
    measure: Callable[[Result], list[float | None]]
    """One value for each limit."""
    big: bool = False
    """Whether it is about a model beyond the caches."""
    at_most: bool = False

    def values(self, results: list[Result]) -> list[float | None]:
        """Each from the last result that has it."""
        found: list[float | None] = [None] * len(self.limits)
        for result in results:
            if (result["parameters"] >= BIG) == self.big:
                found = [old if new is None else new for old, new in zip(found, self.measure(result), strict=True)]
        return found

    def reached(self, value: float, limit: float) -> bool:
        return value <= limit if self.at_most else value >= limit


def _against(peer: str, *streams: int, quantization: str = "none", figure: str = "decode_tok_s") -> Any:
    def measure(result: Result) -> list[float | None]:
        cases = [{"streams": n, "prompt_tokens": 128} for n in streams]
        return [ratio(result, engine(result, quantization, **c), rows(peer, **c), figure) for c in cases]

    return measure


def _ranks(result: Result) -> list[float | None]:
    cases = [{"streams": n, "prompt_tokens": 128} for n in (1, 32)]
    pairs = [(rows("engine", quantization="none", ranks=n, **c) for n in (2, 1)) for c in cases]
    return [ratio(result, one, other) for one, other in pairs]


def _server(result: Result) -> list[float | None]:
    cases = [{"streams": n, "prompt_tokens": 128} for n in (1, 8, 32)]
    kind = result["quantization"]
    return [ratio(result, rows("server", **c), engine(result, kind, **c)) for c in cases]


def _ready(result: Result) -> list[float | None]:
    return [result.get("ready_s") if result["ranks"] == 2 else None]


def _shares(result: Result) -> list[float | None]:
    return [bandwidth_share(result, engine(result, kind, streams=1, prompt_tokens=128)) for kind in ("none", "int8")]


def _lookup(result: Result) -> list[float | None]:
    return [
        ratio(result, rows("lookup", prompt=kind, lookup=True), rows("lookup", prompt=kind, lookup=False))
        for kind in ("copy", "free")
    ]


TARGETS = (
    Target("bf16 decode / vLLM bf16: 1, 8, 32 streams", (2.2, 2.2, 1.8), _against("vllm", 1, 8, 32)),
    Target("bf16 prefill / vLLM bf16: 1, 32 prompts", (1.2, 1.2), _against("vllm", 1, 32, figure="prefill_tok_s")),
    Target(
        "int8 decode / llama.cpp Q4_1: 1, 8, 32 streams",
        (1.6, 3, 6),
        _against("llama.cpp", 1, 8, 32, quantization="int8"),
    ),
    Target("int4 decode / llama.cpp Q4_1: 1 stream", (1.8,), _against("llama.cpp", 1, quantization="int4")),
    Target("2 ranks of 1 thread / 1 rank of 2 threads, bf16: 1, 32 streams", (1.0, 1.0), _ranks),
    Target("server / engine tokens/s: 1, 8, 32 streams", (0.95, 0.95, 0.95), _server),
    Target("prompt lookup / without: copy-heavy prompt, free text", (1.5, 0.97), _lookup),
    Target(
        "read bandwidth reached by what a context of 4096 adds to one of 128, 8 streams: share",
        (0.6,),
        lambda result: [context_share(result, 8, 128, 4096)],
    ),
    Target("1.1B shape, 1 stream: share of the read bandwidth, bf16, int8", (0.8, 0.8), _shares, big=True),
    Target("1.1B shape, bf16 decode / vLLM bf16: 1, 16 streams", (1.2, 1.2), _against("vllm", 1, 16), big=True),
    Target("process start to ready, warm caches, 2 ranks: seconds", (10.0,), _ready, at_most=True),
)

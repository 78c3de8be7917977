"""What the benchmark makes of a stream's events."""

from __future__ import annotations

from scripts.benchmark import tokens_of


def test_tokens_are_spread_as_the_text() -> None:
    usage = {"usage": {"completion_tokens": 9}}
    events = [{"delta": "a"}, {"delta": "bb"}, {"delta": "cccccc"}, {"delta": "", **usage}]
    assert tokens_of(events) == [(0, 1), (1, 2), (2, 6), (3, 0)]


def test_a_single_event() -> None:
    assert tokens_of([{"delta": "a", "usage": {"completion_tokens": 1}}]) == [(0, 1)]

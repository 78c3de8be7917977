"""What the benchmark makes of arrival times, on numbers worked out by hand."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from scripts.benchmark.measure import Stream, gather_numbers, median_rows, peak_rss_mb, percentiles, summarize
from tests.helpers.ranks import on_ranks

ROOT = Path(__file__).parents[3]


def stream(start: float, *arrivals: tuple[float, int]) -> Stream:
    made = Stream(start)
    for now, tokens in arrivals:
        made.add(now, tokens)
    return made


def test_percentiles() -> None:
    assert percentiles([3.0]) == {"p50": 3.0, "p99": 3.0}
    assert percentiles([4, 1, 3, 2]) == {"p50": 2.5, "p99": 4}
    assert percentiles(range(1, 201)) == {"p50": 100.5, "p99": 199}


def test_arrivals_without_tokens_are_left_out() -> None:
    assert stream(0, (1, 0), (2, 1), (3, 0)).arrivals == [(2, 1)]


def test_one_stream() -> None:
    """100 prompt tokens in 0.5 s, then a token every 0.25 s."""
    row = summarize([stream(10.0, (10.5, 1), (10.75, 1), (11.0, 1))], 100)
    assert row == {
        "streams": 1,
        "prompt_tokens": 100,
        "decode_tok_s": pytest.approx(4),
        "prefill_tok_s": pytest.approx(200),
        "ttft_ms": {"p50": pytest.approx(500), "p99": pytest.approx(500)},
        "inter_token_ms": {"p50": pytest.approx(250), "p99": pytest.approx(250)},
    }


def test_decoding_is_counted_while_every_stream_decodes() -> None:
    """From 2.0, the second stream's first token, to 4.0, the first stream's last."""
    first = stream(0.0, (1.0, 1), (2.0, 1), (3.0, 1), (4.0, 1))
    second = stream(0.5, (2.0, 1), (3.0, 1), (4.0, 1), (5.0, 1), (6.0, 1))
    row = summarize([first, second], 8)
    assert row["decode_tok_s"] == pytest.approx(4 / 2)  # two tokens of each, those at 2.0 not counted
    assert row["prefill_tok_s"] == pytest.approx(16 / 2)
    assert row["ttft_ms"] == {"p50": pytest.approx(1250), "p99": pytest.approx(1500)}


def test_tokens_that_come_together_share_their_gap() -> None:
    row = summarize([stream(0.0, (1.0, 1), (1.4, 4), (1.5, 1))], 1)
    assert row["decode_tok_s"] == pytest.approx(5 / 0.5)
    assert row["inter_token_ms"] == {"p50": pytest.approx(100), "p99": pytest.approx(100)}


def test_what_cannot_be_measured_is_an_error() -> None:
    with pytest.raises(ValueError, match="no tokens"):
        summarize([stream(0.0, (1.0, 1), (2.0, 1)), stream(0.0)], 8)
    early, late = stream(0.0, (1.0, 1), (2.0, 1)), stream(0.0, (3.0, 1), (4.0, 1))
    for streams in ([early, late], [stream(0.0, (1.0, 5))]):
        with pytest.raises(ValueError, match="at the same time"):
            summarize(streams, 8)


def test_median_rows() -> None:
    rounds = [
        [{"streams": 1, "rate": rate, "ms": {"p50": rate / 10}}, {"streams": 8, "rate": 2 * rate, "ms": {"p50": 1.0}}]
        for rate in (30.0, 10.0, 20.12345)
    ]
    assert median_rows(rounds) == [
        {"streams": 1, "rate": 20.123, "ms": {"p50": 2.012}},
        {"streams": 8, "rate": 40.247, "ms": {"p50": 1.0}},
    ]
    assert all(isinstance(row["streams"], int) for row in median_rows(rounds))
    assert median_rows([]) == []


def test_rounds_of_different_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="shorter"):
        median_rows([[{"streams": 1}, {"streams": 2}], [{"streams": 1}]])


def test_numbers_of_every_rank() -> None:
    rows = on_ranks(3, lambda comm: gather_numbers(comm, [comm.rank, 0.5]))
    assert rows == [[[0, 0.5], [1, 0.5], [2, 0.5]], None, None]


def test_peak_is_this_process_own() -> None:
    """A child that holds little reports little, however much the process that started it holds."""
    ballast = bytearray(b"x" * (300 << 20))
    code = "from scripts.benchmark.measure import peak_rss_mb; print(peak_rss_mb())"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert 10 < float(done.stdout) < peak_rss_mb()
    assert peak_rss_mb() > len(ballast) / 2**20

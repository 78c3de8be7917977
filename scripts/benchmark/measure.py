"""What is measured of a stream of tokens, the same for the engine, the server and other programs."""

from __future__ import annotations

import resource
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from model.distributed.collectives import Communicator


@dataclass
class Stream:
    """Arrival times of one request's tokens, in seconds of one clock."""

    start: float
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    """(time, how many tokens came)."""

    def add(self, now: float, tokens: int) -> None:
        if tokens:
            self.arrivals.append((now, tokens))

    def gaps_ms(self) -> list[float]:
        """Before each token but the first, in ms; tokens that came together share theirs."""
        pairs = zip(self.arrivals, self.arrivals[1:], strict=False)
        return [(t - before) * 1000 / n for (before, _), (t, n) in pairs for _ in range(n)]

    def tokens_by(self, now: float) -> float:
        """How many tokens were there at `now`, those of an event spread evenly over the time since the one before."""
        total, before = 0.0, self.start
        for t, n in self.arrivals:
            if t > now:
                return total + n * max(now - before, 0.0) / (t - before)
            total, before = total + n, t
        return total


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """{"p50", "p99"} of `values`."""
    ordered = sorted(values)
    return {"p50": statistics.median(ordered), "p99": ordered[min(int(0.99 * len(ordered)), len(ordered) - 1)]}


def summarize(streams: list[Stream], prompt_tokens: int) -> dict[str, Any]:
    """One row of the benchmark.

    Decoding is measured from when the last stream got its first token to when the first stream ended, prefill
    from the start to when the last stream got its first token. Times in ms, rates in tokens/s.

    Raises:
        ValueError: a stream got no tokens, or all of them before another one got its first.
    """
    if not all(s.arrivals for s in streams):
        raise ValueError("a stream got no tokens")
    start = min(s.start for s in streams)
    all_began = max(s.arrivals[0][0] for s in streams)
    first_end = min(s.arrivals[-1][0] for s in streams)
    if first_end <= all_began:
        raise ValueError("the streams never decode at the same time: ask for more new tokens")
    decoded = sum(s.tokens_by(first_end) - s.tokens_by(all_began) for s in streams)
    gaps = [gap for s in streams for gap in s.gaps_ms()]
    return {
        "streams": len(streams),
        "prompt_tokens": prompt_tokens,
        "decode_tok_s": decoded / (first_end - all_began),
        "prefill_tok_s": len(streams) * prompt_tokens / (all_began - start),
        "ttft_ms": percentiles([(s.arrivals[0][0] - s.start) * 1000 for s in streams]),
        "inter_token_ms": percentiles(gaps),
    }


def median_rows(rounds: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Row by row, the median of each figure over the rounds, with three decimals."""
    return [_median(list(rows)) for rows in zip(*rounds, strict=True)]


def _median(values: list[Any]) -> Any:
    if isinstance(values[0], dict):
        return {key: _median([v[key] for v in values]) for key in values[0]}
    if isinstance(values[0], (str, bool)):
        return values[0]  # the same in every round
    middle = statistics.median(values)
    return int(middle) if isinstance(values[0], int) else round(middle, 3)


def peak_rss_mb() -> float:
    """The most memory this process has held, in MiB. `ru_maxrss` would count what its parent held when it forked."""
    status = Path("/proc/self/status")
    for line in status.read_text(encoding="utf-8").splitlines() if status.exists() else ():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def gather_numbers(
    comm: Communicator, numbers: Sequence[float], device: torch.device | None = None
) -> list[list[float]] | None:
    """Every rank's numbers (as many on each, with float32's precision) on rank 0, else None."""
    row = torch.tensor([numbers], dtype=torch.float32, device=device)
    rows = comm.gather(row, [len(numbers)] * comm.world_size)
    return None if rows is None else rows.view(comm.world_size, -1).tolist()

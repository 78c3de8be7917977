"""The server under load, for `scripts.benchmark`: streams that ask all at once, or requests that come by chance."""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
import urllib.parse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.benchmark.engine import prompts
from scripts.benchmark.measure import Stream, percentiles, summarize
from scripts.package_archive import ArchiveOptions
from scripts.serve.run_dir import free_port
from scripts.server import MODEL, start, stop_run


class RequestFailed(RuntimeError):
    """The server's answer is an error, or the connection broke."""


def measure_server(
    options: ArchiveOptions,
    *,
    cases: Sequence[tuple[int, int]],
    new_tokens: int,
    vocabulary: int,
    rates: Sequence[float] = (),
    requests: int = 0,
) -> dict[str, Any]:
    """Start a server, ask it, stop it.

    Args:
        cases: (streams, prompt tokens) of each closed loop.
        rates: requests per second of each open loop.
        requests: how many each open loop has, with prompts as long as those of the first case.

    Returns:
        {"rows", "open_loop", "ready_s"}; the last from the start to the first answer, packaging included.
    """
    began = time.perf_counter()
    run, _ = start(free_port(), options)
    ready_s = time.perf_counter() - began
    try:
        url = f"{run.url}/predictions/{MODEL}"
        ask(url, prompts(1, cases[0][1], 256), 4)
        rows = [summarize(ask(url, prompts(n, length, vocabulary), new_tokens), length) for n, length in cases]
        length = cases[0][1]
        waves = [open_loop(url, prompts(requests, length, vocabulary), new_tokens, rate) for rate in rates]
        return {"rows": rows, "open_loop": waves, "ready_s": ready_s}
    finally:
        stop_run(run)


def options_for(checkpoint: Path, ranks: int, device: str, dtype: str, quantization: str) -> ArchiveOptions:
    # Drafts and cached prompts would make the figures depend on what the random prompts happen to repeat.
    handler = {"dtype": dtype, "quantization": quantization, "prefix_cache": False, "speculation": "none"}
    return ArchiveOptions(checkpoint=checkpoint, ranks=ranks, device=device, handler=handler)


def ask(url: str, asked: list[list[int]], new_tokens: int) -> list[Stream]:
    """One streaming client for each prompt, all at once.

    Raises:
        RequestFailed: the first that one of them met.
    """
    streams, errors = _clients(url, asked, new_tokens, [0.0] * len(asked))
    if errors:
        raise RequestFailed(f"a request failed: {errors[0]}")
    return streams


def open_loop(url: str, asked: list[list[int]], new_tokens: int, rate: float, seed: int = 0) -> dict[str, Any]:
    """Requests at random moments, `rate` per second on average, whether earlier ones are done or not (Poisson).

    Returns:
        {"rate", "requests", "failed", "prompt_tokens", "new_tokens", "tok_s", "ttft_ms", "inter_token_ms"}; "tok_s"
        from the first request to the end of the last answer.
    """
    streams, errors = _clients(url, asked, new_tokens, arrival_times(rate, len(asked), seed))
    done = [s for s in streams if s.arrivals]
    row: dict[str, Any] = {"rate": rate, "requests": len(asked), "failed": len(errors)}
    row |= {"prompt_tokens": len(asked[0]), "new_tokens": new_tokens}
    if not done:
        raise RequestFailed(f"every request failed: {errors[0]}")
    tokens = sum(n for s in done for _, n in s.arrivals)
    row["tok_s"] = tokens / (max(s.arrivals[-1][0] for s in done) - min(s.start for s in streams))
    row["ttft_ms"] = percentiles([(s.arrivals[0][0] - s.start) * 1000 for s in done])
    row["inter_token_ms"] = percentiles([gap for s in done for gap in s.gaps_ms()] or [0.0])
    return row


def arrival_times(rate: float, count: int, seed: int = 0) -> list[float]:
    """When each of `count` requests comes, in seconds from the start; the same for every run."""
    rng = random.Random(f"{seed} {rate}")
    times, now = [], 0.0
    for _ in range(count):
        times.append(now)
        now += rng.expovariate(rate)
    return times


def _clients(
    url: str, asked: list[list[int]], new_tokens: int, delays: Sequence[float]
) -> tuple[list[Stream], list[Exception]]:
    """A thread for each prompt, which asks after its delay; what came, and what failed (its stream stays empty)."""
    began = time.perf_counter()
    streams = [Stream(began + delay) for delay in delays]
    errors: list[Exception] = []

    def client(stream: Stream, prompt: list[int]) -> None:
        if (wait := stream.start - time.perf_counter()) > 0:
            time.sleep(wait)
            stream.start = time.perf_counter()
        try:
            follow(url, prompt, new_tokens, stream)
        except (OSError, http.client.HTTPException, ValueError, KeyError, RequestFailed) as error:
            errors.append(error)

    threads = [threading.Thread(target=client, args=pair) for pair in zip(streams, asked, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return streams, errors


def follow(url: str, prompt: list[int], new_tokens: int, stream: Stream) -> None:
    """Read one stream to its end, with as little work as can be: the client runs on the server's cores."""
    body = {"prompt": prompt, "max_gen_len": new_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    parts = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(parts.netloc, timeout=600)
    try:
        connection.request("POST", parts.path, json.dumps(body), {"Content-Type": "application/json"})
        reply = connection.getresponse()
        if reply.status != 200:
            raise RequestFailed(f"status {reply.status}: {reply.read()[:500]!r}")
        events = [(time.perf_counter(), line) for line in reply if line.startswith(b"data: {")]
    finally:
        connection.close()
    for arrived, tokens in tokens_of([json.loads(line[len(b"data: ") :]) for _, line in events]):
        stream.add(events[arrived][0], tokens)


def tokens_of(events: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """(number of the event, tokens it brought). The first brings one, as it is sent at once.

    Later events may hold several: of the tokens in all, which the last event tells, each gets a part as its part of the
    text. To spread them evenly instead would credit too many to those that came while other prompts were read.

    Raises:
        RequestFailed: the stream ended without its last event.
    """
    if not events or "usage" not in events[-1]:
        raise RequestFailed(f"a stream ended early, after {events[-1:]}")
    done = events[-1]["usage"]["completion_tokens"]
    lengths = [len(event.get("delta") or "") for event in events[1:]]
    total, seen, told = sum(lengths) or 1, 0, 0
    tokens = [(0, 1)]
    for i, length in enumerate(lengths, start=1):
        seen += length
        upto = round((done - 1) * seen / total)
        tokens.append((i, upto - told))
        told = upto
    return tokens

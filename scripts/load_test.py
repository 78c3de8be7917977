"""Many streaming clients at once, some of which leave: `python -m scripts.load_test --url http://127.0.0.1:8080`.

Each client asks one request after the other. A leaving client closes its stream after a random number of events.
What the others get must be what the same request got alone, before the load. Prints counts, the time between events
and the memory of the ranks before and after; ends with status 1 if a request failed or an answer was another one.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import psutil
import requests

from scripts.benchmark.measure import percentiles
from scripts.serve.processes import marked
from scripts.serve.run_dir import RunDir
from scripts.server import MODEL

TIMEOUT = 300
IDLE_WITHIN_S = 30.0
PROMPTS = (
    "Hello",
    "The capital of France is",
    "Once upon a time there was a small dog",
    "Give me three tips for healthy eating.",
    "1, 2, 3, 4,",
    "In the year 2050 people will",
    "To bake bread you need",
    "The quick brown fox",
)


class LoadError(RuntimeError):
    """The server's answer is an error, or no whole stream."""


@dataclass
class Tally:
    """What all clients together saw. Each list is only appended to, so no lock is needed."""

    finished: list[str] = field(default_factory=list)
    """Prompts of the streams that were read to their end."""
    left: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    """Prompts whose answer was not the expected one."""
    errors: list[str] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    """From the request to its first event."""
    gaps_s: list[float] = field(default_factory=list)
    """Between two events of one stream."""


def stream(url: str, prompt: str, tokens: int) -> Iterator[str]:
    """The deltas of one greedy stream, as they come. Closing the iterator closes the connection.

    Raises:
        LoadError: another status than 200, or a stream that ends early.
    """
    body = {"prompt": prompt, "max_gen_len": tokens, "temperature": 0, "stream": True}
    with requests.post(url, json=body, stream=True, timeout=TIMEOUT) as reply:
        if reply.status_code != 200:
            raise LoadError(f"status {reply.status_code}: {reply.text[:200]}")
        line = b""
        for line in reply.iter_lines(chunk_size=None):
            if line.startswith(b"data: {"):
                event: dict[str, Any] = json.loads(line[len(b"data: ") :])
                if "error" in event:
                    raise LoadError(str(event["error"]))
                yield str(event.get("delta", ""))
            elif line == b"data: [DONE]":
                return
        raise LoadError(f"a stream ended early, after {line[:100]!r}")


def expected_texts(url: str, tokens: int) -> dict[str, str]:
    """The answer to each prompt when it is asked alone."""
    return {prompt: "".join(stream(url, prompt, tokens)) for prompt in PROMPTS}


def load(
    url: str, expected: dict[str, str], *, clients: int, seconds: float, tokens: int, leavers: float, seed: int = 0
) -> Tally:
    """Let `clients` ask for `seconds`, then let them finish their last request.

    Args:
        url: of the model.
        expected: the prompts to ask, and the right answer to each.
        tokens: most new tokens per request.
        leavers: share of the clients that close each of their streams before its end.
        seed: of the choice of prompts and of the moments at which clients leave.
    """
    tally = Tally()
    end = time.monotonic() + seconds
    leaving = round(clients * leavers)

    def client(number: int) -> None:
        rng = random.Random(f"{seed} {number}")
        while time.monotonic() < end:
            prompt = rng.choice(list(expected))
            events = rng.randrange(1, 12) if number < leaving else None
            try:
                _ask(url, prompt, tokens, events, expected[prompt], tally)
            except (LoadError, requests.RequestException) as error:
                tally.errors.append(f"{type(error).__name__}: {error}")

    with ThreadPoolExecutor(clients) as pool:
        list(pool.map(client, range(clients)))
    return tally


def _ask(url: str, prompt: str, tokens: int, leave_after: int | None, expected: str, tally: Tally) -> None:
    """One request of a client that leaves after so many events, or reads to the end."""
    deltas: list[str] = []
    last = time.perf_counter()
    events = stream(url, prompt, tokens)
    for delta in events:
        now = time.perf_counter()
        (tally.gaps_s if deltas else tally.first_s).append(now - last)
        last = now
        deltas.append(delta)
        if len(deltas) == leave_after:
            events.close()  # type: ignore[attr-defined]  # a generator's
            tally.left.append(prompt)
            return
    tally.finished.append(prompt)
    if "".join(deltas) != expected:
        tally.wrong.append(prompt)


def health(url: str) -> dict[str, Any]:
    reply = requests.get(f"{url}/1.0/v1/health", timeout=TIMEOUT)
    reply.raise_for_status()
    found: dict[str, Any] = reply.json()
    return found


def wait_idle(url: str) -> dict[str, Any]:
    """The health object once nothing runs or waits.

    Raises:
        LoadError: something still runs after IDLE_WITHIN_S seconds.
    """
    end = time.monotonic() + IDLE_WITHIN_S
    while True:
        found = health(url)
        if found["running"] + found["waiting"] == 0:
            return found
        if time.monotonic() > end:
            raise LoadError(f"requests still run {IDLE_WITHIN_S:g} s after the last client left: {found}")
        threading.Event().wait(0.1)


def rank_memory(token: str) -> dict[int, float]:
    """Resident memory of each rank of the server with this token, in MB, by rank."""
    found = {}
    for process in marked(token):
        rank = process.environ().get("RANK")
        if rank is not None and "model_service_worker" in " ".join(process.cmdline()):
            found[int(rank)] = process.memory_info().rss / 1e6
    return found


def report(tally: Tally, seconds: float) -> str:
    """The tally as lines of text."""
    lines = [
        f"requests read to the end {len(tally.finished)}, left {len(tally.left)}, "
        f"failed {len(tally.errors)}, wrong answers {len(tally.wrong)}, in {seconds:.0f} s"
    ]
    for name, values in (("first event", tally.first_s), ("between events", tally.gaps_s)):
        if values:
            found = percentiles([1000 * value for value in values])
            lines.append(
                f"{name}: p50 {found['p50']:.0f} ms, p99 {found['p99']:.0f} ms, most {1000 * max(values):.0f} ms"
            )
    lines += [f"error: {error}" for error in tally.errors[:5]]
    return "\n".join(lines + [f"wrong: {prompt!r}" for prompt in sorted(set(tally.wrong))])


def _memory_line(when: str, memory: dict[int, float]) -> str:
    return f"memory {when}: " + ", ".join(f"rank {rank} {size:.0f} MB" for rank, size in sorted(memory.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8080", help="of the server, without a path")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--tokens", type=int, default=64, help="most new tokens of a request")
    parser.add_argument("--leavers", type=float, default=1 / 3, help="share of the clients that leave early")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    url = f"{args.url.rstrip('/')}/predictions/{MODEL}"
    run = RunDir.load(urlsplit(args.url).port or 80)  # of a server started by `make start` on this machine
    try:
        expected = expected_texts(url, args.tokens)
        before = wait_idle(url)
        if run is not None:
            print(_memory_line("before", rank_memory(run.token)), flush=True)
        began = time.monotonic()
        tally = load(
            url,
            expected,
            clients=args.clients,
            seconds=args.seconds,
            tokens=args.tokens,
            leavers=args.leavers,
            seed=args.seed,
        )
        print(report(tally, time.monotonic() - began))
        after = wait_idle(url)
    except (LoadError, requests.RequestException, psutil.Error) as error:
        sys.exit(f"error: {error}")
    if run is not None:
        print(_memory_line("after", rank_memory(run.token)))
    lost = after["kv_blocks_total"] - after["kv_blocks_free"]
    print(
        f"tokens generated {after['generated_tokens'] - before['generated_tokens']}, cache blocks not given back {lost}"
    )
    sys.exit(1 if tally.errors or tally.wrong or lost else 0)


if __name__ == "__main__":
    main()

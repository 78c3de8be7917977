"""Reads what a server shows at its metrics address."""

from __future__ import annotations

import re
import threading

import requests

from tests.helpers.serving import Server, until

_SAMPLE = re.compile(r"(\w+)(?:\{(.*?),?\})? (\S+)")


def read_metrics(server: Server) -> dict[str, float]:
    """Value by name; of the labels only those other than the model and host count: `name{Status="400"}`."""
    reply = requests.get(f"http://127.0.0.1:{server.run.port + 2}/metrics", timeout=30)
    assert reply.status_code == 200
    found = {}
    for line in reply.text.splitlines():
        if line and not line.startswith("#"):
            sample = _SAMPLE.fullmatch(line)
            assert sample is not None, line
            labels = [pair for pair in (sample[2] or "").split(",") if not pair.startswith(("ModelName=", "Hostname="))]
            name = sample[1] + (f"{{{','.join(labels)}}}" if any(labels) else "")
            found[name] = float(sample[3])
    return found


def settled(server: Server) -> dict[str, float]:
    """The metrics once nothing more is told: they come once a second, and later than the answers they are of."""
    seen: list[dict[str, float]] = [{}]
    waiting = threading.Event()

    def quiet() -> bool:
        seen.append(read_metrics(server))
        waiting.wait(1.5)
        return ours(seen[-1]) == ours(seen[-2])

    def ours(metrics: dict[str, float]) -> dict[str, float]:
        return {name: value for name, value in metrics.items() if name.startswith("llama_")}

    until(quiet, timeout=20)
    return seen[-1]

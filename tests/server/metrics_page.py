"""Reads what a server shows at its metrics address."""

from __future__ import annotations

import re

import requests

from tests.serving import Server, until

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
    """The metrics once the end of every request so far is among them."""
    finished = server.health()["finished"]

    def told() -> dict[str, float] | None:
        found = read_metrics(server)
        names = {reason: f'llama_requests_finished_total{{FinishReason="{reason}"}}' for reason in finished}
        return found if all(found[names[reason]] == finished[reason] for reason in finished) else None

    metrics: dict[str, float] = until(told, timeout=10)
    return metrics

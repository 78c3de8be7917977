"""Reading the native route's event streams, strictly."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import requests


@dataclass
class StreamedChoice:
    """One choice as it came."""

    deltas: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    usage: dict[str, int] | None = None

    @property
    def text(self) -> str:
        return "".join(self.deltas)


def read_stream(reply: requests.Response) -> list[StreamedChoice]:
    """The choices of a whole stream; every rule of the format is checked."""
    assert reply.status_code == 200, reply.text
    assert reply.headers["Content-Type"] == "text/event-stream; charset=utf-8"
    events = reply.content.decode("utf-8").split("\n\n")
    assert events.pop() == ""
    assert events.pop() == "data: [DONE]"
    choices: dict[int, StreamedChoice] = {}
    for event in events:
        if event.startswith(":"):
            continue
        assert event.startswith("data: ")
        assert "\n" not in event
        data: dict[str, Any] = json.loads(event[6:])
        choice = choices.setdefault(data["index"], StreamedChoice())
        assert choice.finish_reason is None
        if "delta" in data:
            assert data["delta"] != ""
            choice.deltas.append(data["delta"])
        choice.finish_reason, choice.usage = data["finish_reason"], data.get("usage")
    assert sorted(choices) == list(range(len(choices)))
    assert all(c.finish_reason is not None and c.usage is not None for c in choices.values())
    return [choices[i] for i in sorted(choices)]

"""`GET .../v1/health`: whether the engine makes progress, and what it holds."""

from __future__ import annotations

import dataclasses
import json
import time
from typing import Any

from handler.torchserve.jobs import Part, Piece
from handler.torchserve.startup import Serving


def report(serving: Serving) -> dict[str, Any]:
    """The health object; `status` is "stalled" when work is waiting and no step has ended for `step_timeout`."""
    stats = dataclasses.asdict(serving.engine.stats())
    age = stats["last_step_age_s"]
    waiting = stats["running"] + stats["waiting"] > 0
    stalled = waiting and age is not None and age > serving.context.settings.step_timeout
    uptime = round(time.monotonic() - serving.started, 3)
    return {"status": "stalled" if stalled else "ok", **stats, "uptime_s": uptime}


def reply(serving: Serving) -> Piece:
    """200, or 503 when the engine is stalled."""
    body = report(serving)
    status, phrase = (200, "OK") if body["status"] == "ok" else (503, "Service Unavailable")
    return Piece(json.dumps(body).encode("utf-8"), Part.WHOLE, "application/json; charset=utf-8", status, phrase)

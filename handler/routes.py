"""Which address below the model is answered by what."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from handler.dialects.openai import api as openai_api
from handler.dialects.plain.api import build_job
from handler.dialects.reply import JSON, Job
from handler.errors import NotFound
from handler.requests.body import Body, parse_body
from handler.requests.encode import ServingContext
from handler.requests.limits import check_queue
from handler.torchserve import health
from handler.torchserve.jobs import Part, Piece
from handler.torchserve.startup import Serving

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Call:
    """A new request as TorchServe passes it: the fields of its body, and its headers."""

    job_id: str
    row: dict[str, Any]
    headers: dict[str, Any]

    @property
    def path(self) -> str:
        """What comes behind the model's own address, without slashes at its ends; the method isn't passed."""
        path = self.headers.get("url_path")
        return path.strip("/") if isinstance(path, str) else ""  # otherwise a field of this name

    @property
    def content_type(self) -> str | None:
        """The content type of the only field, as TorchServe passes it beside the real headers."""
        for name in self.row:
            value = self.headers.get(name)
            if isinstance(value, dict):
                return str(value.get("content-type") or "")
        value = self.headers.get("content-type") or self.headers.get("Content-Type")
        return str(value) if value else None


def answer(call: Call, serving: Serving) -> Piece | Job:
    """The reply to a request, or its job where the engine has to work for it.

    Raises:
        RequestError: what the client is to be told instead.
    """
    route = ROUTES.get(call.path)
    if route is not None:
        return route(call, serving)
    prefix = "v1/models/"
    if call.path.startswith(prefix):
        return _json(openai_api.model(call.path.removeprefix(prefix), serving.context))
    known = ", ".join(sorted(filter(None, ROUTES)))
    raise NotFound(
        f"there is nothing at {call.path[:200]!r}; this model answers at its own path and below it at {known}"
    )


def _body(call: Call, serving: Serving) -> Body:
    body = parse_body(call.row, call.content_type)
    if serving.context.settings.log_prompts:
        logger.info("request %s: %r", call.job_id, body)
    return body


def _native(call: Call, serving: Serving) -> Job:
    return _generate(build_job, call, serving)


def _chat(call: Call, serving: Serving) -> Job:
    return _generate(openai_api.chat_job, call, serving)


def _completions(call: Call, serving: Serving) -> Job:
    return _generate(openai_api.completion_job, call, serving)


def _generate(build: Callable[[str, Body, ServingContext], Job], call: Call, serving: Serving) -> Job:
    body = _body(call, serving)
    check_queue(serving.engine.stats().waiting, serving.context.settings)
    return build(call.job_id, body, serving.context)


def _tokenize(call: Call, serving: Serving) -> Piece:
    return _json(openai_api.tokenize(_body(call, serving), serving.context))


def _detokenize(call: Call, serving: Serving) -> Piece:
    return _json(openai_api.detokenize(_body(call, serving), serving.context))


def _models(call: Call, serving: Serving) -> Piece:
    return _json(openai_api.models(serving.context))


def _health(call: Call, serving: Serving) -> Piece:
    return health.reply(serving)


def _json(value: Any) -> Piece:
    return Piece(json.dumps(value, ensure_ascii=False).encode("utf-8"), Part.WHOLE, JSON)


ROUTES: dict[str, Callable[[Call, Serving], Piece | Job]] = {
    "": _native,
    "v1/chat/completions": _chat,
    "v1/completions": _completions,
    "v1/models": _models,
    "v1/tokenize": _tokenize,
    "v1/detokenize": _detokenize,
    "v1/health": _health,
}

"""One exception tree for all that can go wrong with a request, with its HTTP status.

RequestError            what the client sees; carries status, type, parameter and code
├── InvalidRequest      400  the request is wrong: names the field, its value and the limit
├── NotFound            404  no such path or model
├── TooLarge            413  body or reply beyond its limit
├── QueueFull           429  try again after `retry_after` seconds
├── Unsupported         501  a call that this server doesn't serve
├── Unavailable         503  the engine is restarting or stopping
└── InternalError       500  a bug of the server's
"""

from __future__ import annotations

import json
from typing import Any


class RequestError(Exception):
    """A request that gets an error reply. Only its own request is affected."""

    status = 500
    phrase = "Internal Server Error"
    type = "internal_error"
    retry_after: int | None = None

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        """The reply's JSON, in the shape of OpenAI's errors."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def json(self) -> bytes:
        """The reply's body in UTF-8."""
        return json.dumps(self.body(), ensure_ascii=False).encode("utf-8")


class InvalidRequest(RequestError):
    status, phrase, type = 400, "Bad Request", "invalid_request_error"


class NotFound(RequestError):
    status, phrase, type = 404, "Not Found", "not_found_error"


class TooLarge(RequestError):
    status, phrase, type = 413, "Payload Too Large", "invalid_request_error"


class QueueFull(RequestError):
    status, phrase, type = 429, "Too Many Requests", "rate_limit_error"
    retry_after = 1


class Unsupported(RequestError):
    status, phrase, type = 501, "Not Implemented", "invalid_request_error"


class Unavailable(RequestError):
    status, phrase, type = 503, "Service Unavailable", "unavailable_error"
    retry_after = 5


class InternalError(RequestError):
    pass

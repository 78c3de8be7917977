"""How a request came: by HTTP, or by one of the calls of TorchServe's gRPC service.

TorchServe passes neither the protocol nor the call. It adds at least one header to a request by HTTP and none to one
by gRPC; `scripts/serve/frontend_fix.py`, which mends the frontend's gRPC, adds one that names the call.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

CALL_HEADER = "grpc_call"
SEQUENCE_HEADERS = {"ts_request_sequence_id", "ts_request_sequence_start", "ts_request_sequence_end"}


class Way(Enum):
    """How a request came, and with it what a reply may look like."""

    HTTP = "HTTP"
    PREDICTIONS = "PREDICT"
    """One message ends the call. An empty one isn't sent, but shows whether the client is still there."""
    STREAM = "STREAMPREDICT"
    """Messages until the last; empty ones as above."""
    SEQUENCE = "STREAMPREDICT2"
    """The frontend has failed this call before the handler sees it, as the model isn't served by sequences."""
    LOST = "sequence"
    """The same, of a frontend that wasn't mended: any answer would end the worker, as the call is closed."""
    ANY_CALL = "gRPC"
    """Some call, of a frontend that wasn't mended: it takes one message, and can't be asked for the client."""

    @property
    def has_status(self) -> bool:
        """Whether an error can be told as a gRPC status."""
        return self in (Way.PREDICTIONS, Way.STREAM)

    @property
    def may_wait(self) -> bool:
        """Whether something may be sent before the reply, to learn whether the client is still there."""
        return self in (Way.HTTP, Way.PREDICTIONS, Way.STREAM)


def way_of(headers: dict[str, Any]) -> Way:
    """`headers` as TorchServe passes them: texts, and for each field of the body a dictionary."""
    texts = {name.lower(): value for name, value in headers.items() if isinstance(value, str)}
    if texts.keys() - SEQUENCE_HEADERS - {CALL_HEADER}:
        return Way.HTTP
    if CALL_HEADER in texts:
        return next((way for way in Way if way.value == texts[CALL_HEADER]), Way.ANY_CALL)
    return Way.LOST if texts else Way.ANY_CALL

"""The TorchServe handler. TorchServe demands that it is the only class in its module."""

from __future__ import annotations

import logging
import os
import socket
import sys
from pathlib import Path
from typing import Any, NoReturn

from ts.torch_handler.base_handler import BaseHandler

from handler.dialects.reply import Lost
from handler.errors import InternalError, RequestError, Unsupported
from handler.routes import Call, answer
from handler.torchserve import wake
from handler.torchserve.calls import Way, way_of
from handler.torchserve.jobs import JobTable, Part, Piece, failure, fitted
from handler.torchserve.metrics import MetricsThread
from handler.torchserve.socket_buffer import read_ahead_from_frontend
from handler.torchserve.startup import Serving, start_serving

logger = logging.getLogger("handler.llama_handler")  # TorchServe imports this file as a module of its own

POLL_S = 0.05
"""Longest wait of one poll. New requests come only with the next one, so a longer wait would delay them."""


class LlamaHandler(BaseHandler):  # type: ignore[misc]
    """Text and chat completion with a Llama model whose ranks torchrun has started.

    Rank 0 answers; the other ranks take part in the engine's steps and answer nothing themselves.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rank = 0
        self.serving: Serving | None = None
        self.metrics: MetricsThread | None = None
        self.jobs = JobTable(lambda request_id: None, stream_interval=0)

    def initialize(self, context: Any) -> None:
        """Load this rank's part of the model and start its engine.

        Raises:
            RuntimeError: one clear line that says what to mend (TorchServe catches no other kind).
        """
        # Bodies come as bytes: the frontend's own decoding accepts NaN and logs the rest.
        os.environ["TS_DECODE_INPUT_REQUEST"] = "false"
        self.rank = int(os.environ.get("RANK", "0"))
        read_ahead_from_frontend()
        _quiet_logs(self.rank)
        model_dir = Path(context.system_properties["model_dir"])
        try:
            self.serving = start_serving(context.model_yaml_config or {}, model_dir, context.model_name, self._deliver)
        except Exception as error:
            raise RuntimeError(f"{context.model_name} can't be served: {error}") from error
        engine = self.serving.engine
        settings = self.serving.context.settings
        self.jobs = JobTable(
            engine.cancel, stream_interval=settings.stream_interval, max_reply_bytes=settings.max_reply_bytes
        )
        if self.rank == 0:
            self.metrics = MetricsThread(context.metrics, context.model_name, engine)
            self.metrics.start()
            version = str((context.manifest or {}).get("model", {}).get("modelVersion", "1.0"))
            wake.Waker(self.jobs, context.model_name, version).start()
        self.initialized = True

    def _deliver(self, outputs: Any) -> None:
        self.jobs.deliver(outputs)

    def handle(self, data: list[dict[str, Any]], context: Any) -> list[bytes | str]:
        """One poll of the frontend, with every open request: see `job_table.py`."""
        if self.rank != 0:
            drain(context.cl_socket)
        ids = {index: context.get_request_id(index) for index in range(len(data))}
        answered = self._admit(data, context, ids)
        self.jobs.cancel_missing(set(ids.values()))
        if not answered:
            self.jobs.wait(POLL_S)
        pieces = {index: answered.get(index) or self.jobs.take(job_id) for index, job_id in ids.items()}
        self.jobs.rest()
        self._count_errors(pieces)
        return _reply(pieces, context)

    def _count_errors(self, pieces: dict[int, Piece | None]) -> None:
        for piece in pieces.values():
            if piece is not None and piece.status >= 400 and self.metrics is not None:
                self.metrics.count_error(piece.status)

    def _admit(self, data: list[dict[str, Any]], context: Any, ids: dict[int, str]) -> dict[int, Piece]:
        """Hand the new requests to the engine. Returns the replies to those that need none of it, by index."""
        answered = {}
        for index, job_id in ids.items():
            if job_id in self.jobs:
                continue
            try:
                piece = self._route(Call(job_id, data[index], context.get_all_request_header(index)), context)
            except RequestError as error:
                piece = failure(error)
            except Exception:
                logger.exception("request %s failed while it was read", job_id)
                piece = failure(InternalError("the server failed to read this request; its log says why"))
            if piece is not None:
                answered[index] = piece
        return answered

    def _route(self, call: Call, context: Any) -> Piece | None:
        """Answer a new request, or start its job and return None."""
        if self.serving is None:
            raise InternalError("the model is not loaded")
        way = way_of(call.headers)
        if way is Way.SEQUENCE:
            raise Unsupported("StreamPredictions2 is not served, use StreamPredictions")
        if way is Way.LOST:
            logger.warning(
                "StreamPredictions2 took a place of batchSize for good: the frontend isn't mended (docs/grpc.md)"
            )
            self.jobs.add(Lost(call.job_id))
            return None
        if wake.is_wake(call.path):
            job = wake.answer(call.job_id, call.path, context.system_properties["batch_size"])
        else:
            job = answer(call, self.serving)
        if isinstance(job, Piece):
            return job
        job.came_by(way)
        for request in job.requests:
            self.serving.engine.check(request)
        self.jobs.add(job)
        for request in job.requests:
            self.serving.engine.submit(request)
        return None


def _quiet_logs(rank: int) -> None:
    """Warnings only, as TorchServe logs several lines a poll at INFO; of this project's own, rank 0's at INFO."""
    logging.getLogger().setLevel(logging.WARNING)
    if rank == 0:
        for package in ("handler", "generation", "model"):
            logging.getLogger(package).setLevel(logging.INFO)


def drain(frontend: socket.socket) -> NoReturn:
    """Read on and throw away what the frontend sends to a rank that has no say, until it closes the connection.

    The frontend sends every poll to every rank, but waits for rank 0's reply only. Taking each message apart, as
    TorchServe's own loop does, would cost these ranks about a millisecond of every step.
    """
    while frontend.recv(1 << 20):
        pass
    sys.exit(0)  # as TorchServe's own loop ends


def _reply(pieces: dict[int, Piece | None], context: Any) -> list[bytes | str]:
    """Put each request's piece, status and place in its reply where TorchServe looks for them."""
    replies: list[bytes | str] = []
    endings: dict[int, bool | None] = {}
    for index, piece in pieces.items():
        if piece is None:
            del context.request_ids[index]  # left out of this reply, and polled again
            replies.append("")
            continue
        piece = fitted(piece, way_of(context.get_all_request_header(index)))
        endings[index] = {Part.WHOLE: None, Part.MORE: False, Part.LAST: True}[piece.part]
        context.set_response_content_type(index, piece.content_type)
        context.set_response_status(piece.status, piece.phrase, index)
        if piece.retry_after is not None:
            context.set_response_header(index, "Retry-After", str(piece.retry_after))
        replies.append(piece.data)
    context.stopping_criteria = {index: (lambda _, ending=ending: ending) for index, ending in endings.items()}
    return replies

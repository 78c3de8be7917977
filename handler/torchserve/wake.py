"""Keeps several workers of one model going.

TorchServe's frontend has one queue for each version of a model. A worker without requests waits there for its first
one with the queue's lock held, and without a limit (`Model.pollInferJob` in TorchServe 0.12). A worker with requests
needs that lock before each poll: so while one worker is idle, the busy ones are not polled, and their answers do not
leave.

Only a request frees the lock. A worker that has open requests and is not polled therefore sends one itself, to the
route `internal/wake/<its pid>` of its own model and version. The idle worker takes it and leaves it open; while it is
open, that worker is polled too and waits without the lock. The sender has closed the connection, so the first sign of
life after two seconds ends the request, and the next stall, if there is one, is found anew.
"""

from __future__ import annotations

import http.client
import logging
import os
import threading
import urllib.parse
from typing import Any

from handler.dialects.reply import JSON, Job
from handler.torchserve.frontend import Frontend, find_frontend
from handler.torchserve.jobs import JobTable, Part, Piece

logger = logging.getLogger(__name__)

ROUTE = "internal/wake/"
STALL_S = 0.05
"""A worker with open requests is usually polled again after a few milliseconds."""
RETRY_S = 0.1


def is_wake(path: str) -> bool:
    """Whether a request below the model's address came from a worker's `Waker`."""
    return path.startswith(ROUTE)


def answer(job_id: str, path: str, batch_size: int) -> Piece | Job:
    """Hold the request, unless this process sent it (then it is polled again), or it would take the only place."""
    if path == f"{ROUTE}{os.getpid()}" or batch_size == 1:
        return Piece(b"{}", Part.WHOLE, JSON)
    return WakeJob(job_id)


class WakeJob(Job):
    """Open until its client is seen to have left; it has no work for the engine."""

    def __init__(self, job_id: str) -> None:
        super().__init__(job_id, stream=False, choices=[])

    @property
    def done(self) -> bool:
        return False

    def reply(self) -> Any:
        return {}


class Waker(threading.Thread):
    """Sends the request when `jobs` are open and no poll has come for `STALL_S` seconds."""

    def __init__(self, jobs: JobTable, model_name: str, version: str) -> None:
        super().__init__(name="waker", daemon=True)
        self._jobs = jobs
        name, number = (urllib.parse.quote(part, safe="") for part in (model_name, version))
        self._path = f"/predictions/{name}/{number}/{ROUTE}{os.getpid()}"
        self._frontend: Frontend | None = None
        self._failed = False

    def run(self) -> None:
        while True:
            self._jobs.wait_for_stall(STALL_S)
            self._wake()
            threading.Event().wait(RETRY_S)

    def _wake(self) -> None:
        try:
            self._frontend = self._frontend or find_frontend()
            if self._frontend is not None:
                self._frontend.post_and_leave(self._path)
                return
            reason = "its inference address was not found"
        except (OSError, http.client.HTTPException) as error:
            self._frontend, reason = None, str(error)
        if not self._failed:
            self._failed = True
            logger.warning(
                "the frontend has not polled this worker for %g s and can't be asked to (%s); with more than one "
                "worker of a model, requests may wait until another one comes",
                STALL_S,
                reason,
            )

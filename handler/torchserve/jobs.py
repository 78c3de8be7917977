"""The requests in flight: between TorchServe's polls and the engine's thread.

The frontend calls the handler again and again with every request that is still open. Each call is a poll:
it admits what is new, cancels what has vanished, waits until something can be sent, and sends it. A request
that has nothing to send is left out of the reply and stays open.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import Enum

from generation.interface import Output
from handler.dialects.reply import Job
from handler.errors import InternalError, RequestError, TooLarge
from handler.torchserve.calls import Way

logger = logging.getLogger(__name__)

FIRST_SIGN_OF_LIFE_S = 2.0
"""A request this old gets its head and a blank even without output: only so is a closed connection noticed."""
SIGN_OF_LIFE_S = 1.0
ABANDONED_S = 3.0
"""The frontend stops polling when the last client leaves. Without a poll for so long, nobody waits any more."""


class Part(Enum):
    """Where a piece stands in its reply."""

    WHOLE = "whole"
    """The whole reply, with its status; the request is done."""
    MORE = "more"
    """A piece, with the head if it is the first; more will come."""
    LAST = "last"
    """The end of a reply whose head was sent."""


@dataclass(frozen=True)
class Piece:
    """What a poll sends for one request."""

    data: bytes
    part: Part
    content_type: str
    status: int = 200
    phrase: str = "OK"
    retry_after: int | None = None
    message: str = ""
    """What an error's `data` says, as plain text."""


@dataclass
class _Entry:
    job: Job
    arrived: float
    head_sent: bool = False
    last_sent: float = 0.0


def failure(error: RequestError) -> Piece:
    """The reply to a request that failed before anything of it was sent."""
    return Piece(
        error.json(),
        Part.WHOLE,
        "application/json",
        error.status,
        error.phrase,
        retry_after=error.retry_after,
        message=error.message,
    )


def fitted(piece: Piece, way: Way) -> Piece:
    """The piece as the frontend can send it. Every gRPC reply is ended explicitly: otherwise it ends the worker."""
    if way is Way.HTTP or piece.part is Part.MORE:
        return piece
    if piece.status < 400:
        return dataclasses.replace(piece, part=Part.LAST)
    if way.has_status:
        return dataclasses.replace(piece, part=Part.LAST, data=piece.message.encode("utf-8"))
    return dataclasses.replace(piece, part=Part.LAST, status=200, phrase="OK")


class JobTable:
    """Jobs by id. `deliver` is called by the engine's thread, everything else by the handler's.

    Args:
        cancel: drops a request from the engine, by its request id.
        stream_interval: least seconds between two pieces of one stream; the first is sent at once.
        max_reply_bytes: a longer reply that isn't streamed is replaced by an error.
    """

    def __init__(
        self,
        cancel: Callable[[str], None],
        *,
        stream_interval: float,
        max_reply_bytes: int = 6_500_000,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cancel = cancel
        self._interval = stream_interval
        self._max_bytes = max_reply_bytes
        self._clock = clock
        self._entries: dict[str, _Entry] = {}
        self._polled: float | None = None
        """When the last poll ended; None during one."""
        self._changed = threading.Condition()
        self._working = threading.Event()
        """Set when a job is added; see `wait_for_stall`."""

    def __contains__(self, job_id: str) -> bool:
        return job_id in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, job: Job) -> None:
        with self._changed:
            self._entries[job.job_id] = _Entry(job, self._clock())
        self._working.set()

    def deliver(self, outputs: list[Output]) -> None:
        """Hand the engine's outputs to their jobs; those of jobs that have left are dropped.

        Cancels all jobs when the frontend has stopped polling, as it does when the last client leaves.
        """
        with self._changed:
            now = self._clock()
            due = False
            for output in outputs:
                entry = self._entries.get(output.request_id.rpartition("/")[0])
                if entry is not None:
                    self._add(entry.job, output)
                    due = due or self._due(entry, now) <= now
            if due:  # else `wait` looks again by itself: to wake it at each step would cost more than its polls
                self._changed.notify()
            abandoned = self._polled is not None and now - self._polled > ABANDONED_S
        if abandoned:
            self.cancel_missing(())

    def _add(self, job: Job, output: Output) -> None:
        try:
            job.add(output)
        except Exception:  # in the engine's thread it would end the process, with every other request
            logger.exception("an output of request %s can't be taken in", job.job_id)
            job.fail(InternalError("the server failed on this request; its log says why"))

    def rest(self) -> None:
        """A poll has ended. While jobs are open the next one follows at once."""
        self._polled = self._clock()

    def wait_for_stall(self, stall_s: float) -> None:
        """Return when jobs with work for the engine are open and no poll has come for `stall_s` seconds."""
        while True:
            self._working.clear()
            with self._changed:
                working = any(entry.job.requests for entry in self._entries.values())
                polled = self._polled
            if not working:
                self._working.wait()
            elif polled is not None and self._clock() - polled > stall_s:
                return
            else:
                time.sleep(stall_s / 2)

    def cancel_missing(self, present: Collection[str]) -> None:
        """Cancel the jobs that the frontend no longer asks for: their clients have left."""
        self._polled = None
        with self._changed:
            gone = [job_id for job_id in self._entries if job_id not in present]
            entries = [self._entries.pop(job_id) for job_id in gone]
        for entry in entries:
            self._abandon(entry.job)

    def _abandon(self, job: Job) -> None:
        for request in job.requests:
            self._cancel(request.request_id)

    def wait(self, timeout: float) -> None:
        """Until a job has something to send, or `timeout` seconds have passed."""
        end = self._clock() + timeout
        with self._changed:
            while True:
                now = self._clock()
                next_look = end
                for entry in self._entries.values():
                    due = self._due(entry, now)
                    if due <= now:
                        return
                    if entry.job.stream and entry.last_sent + self._interval > now:
                        due = min(due, entry.last_sent + self._interval)  # by then it may have text
                    next_look = min(next_look, due)
                if now >= end:
                    return
                self._changed.wait(next_look - now)

    def _due(self, entry: _Entry, now: float) -> float:
        """When the entry's next piece should be sent, as things stand."""
        job = entry.job
        if job.way is Way.LOST:
            return math.inf
        if job.done or (job.stream and job.pending and not entry.head_sent):
            return now
        if not job.way.may_wait:
            return math.inf
        sign_of_life = entry.last_sent + SIGN_OF_LIFE_S if entry.head_sent else entry.arrived + FIRST_SIGN_OF_LIFE_S
        if job.stream and job.pending:
            return min(entry.last_sent + self._interval, sign_of_life)
        return sign_of_life

    def _may_go(self, entry: _Entry, now: float) -> bool:
        """Whether a poll that is made anyway takes the entry's piece along: what is due, and text half as old.

        So streams that began at different times soon share their polls, each of which costs the frontend time.
        """
        if entry.job.stream and entry.job.pending and entry.last_sent + self._interval / 2 <= now:
            return True
        return self._due(entry, now) <= now

    def take(self, job_id: str) -> Piece | None:
        """What can be sent for a job now; None leaves it open. A job that is done leaves the table."""
        with self._changed:
            entry = self._entries.get(job_id)
            if entry is None:
                return None
            now = self._clock()
            if not self._may_go(entry, now):
                return None
            try:
                piece = self._piece(entry)
            except Exception:  # out of the handler it would end every reply of the batch
                logger.exception("the reply to request %s can't be written", job_id)
                entry.job.error = InternalError("the server failed to write this reply; its log says why")
                part = Part.LAST if entry.head_sent else Part.WHOLE
                piece = dataclasses.replace(failure(entry.job.error), part=part)
            entry.head_sent, entry.last_sent = True, now
            if piece.part is not Part.MORE:
                del self._entries[job_id]
        if piece.part is not Part.MORE and entry.job.error is not None:
            self._abandon(entry.job)  # one choice failed: the others need not go on
        return piece

    def _piece(self, entry: _Entry) -> Piece:
        job = entry.job
        if job.done:
            part = Part.LAST if entry.head_sent else Part.WHOLE
            if job.error is not None and (job.way.has_status or not entry.head_sent):
                return failure(job.error)
            if job.stream:
                return Piece(job.take_events().encode("utf-8"), part, job.content_type)
            body = job.body()
            if len(body) <= self._max_bytes:
                return Piece(body, part, job.content_type)
            error = TooLarge(
                f"the reply has {len(body)} bytes, expected at most {self._max_bytes} (max_reply_bytes): ask for a "
                "stream, for fewer prompts or for fewer top_logprobs"
            )
            return dataclasses.replace(failure(error), part=part)
        if job.way.has_status:
            return Piece(job.take_events().encode("utf-8") if job.stream else b"", Part.MORE, job.content_type)
        if job.stream:
            return Piece((job.take_events() or ": waiting\n\n").encode("utf-8"), Part.MORE, job.content_type)
        return Piece(b" ", Part.MORE, job.content_type)  # JSON may begin with blanks

"""A job table with a clock that stands still, and jobs made by hand."""

from __future__ import annotations

from typing import cast

from generation.interface import FinishReason, Output, Request, SamplingParams
from handler.dialects.plain.reply import Choice, Job
from handler.torchserve.jobs import JobTable, Piece
from model.tokenizer.tokenizer import Tokenizer

INTERVAL = 0.1
NO_TOKENIZER = cast(Tokenizer, None)  # asked only for the texts of alternatives


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Desk:
    """A table with a clock that stands still, and what it canceled."""

    def __init__(self, stream_interval: float = INTERVAL) -> None:
        self.clock = Clock()
        self.canceled: list[str] = []
        self.table = JobTable(self.canceled.append, stream_interval=stream_interval, clock=self.clock)

    def add(self, job_id: str, *, stream: bool = False, choices: int = 1) -> Job:
        job = make_job(job_id, stream=stream, choices=choices)
        self.table.add(job)
        return job

    def deliver(
        self, job_id: str, text: str = "", reason: FinishReason | None = None, *, choice: int = 0, error: str = ""
    ) -> None:
        output = Output(f"{job_id}/{choice}", [5], text, [text], finish_reason=reason, error=error or None)
        self.table.deliver([output])

    def take_at(self, seconds: float, job_id: str) -> Piece | None:
        """What is sent `seconds` after the start."""
        self.clock.now = 1000 + seconds
        return self.table.take(job_id)


def make_job(job_id: str, *, stream: bool, choices: int = 1) -> Job:
    requests = [Request(f"{job_id}/{i}", [1, 2, 3], SamplingParams()) for i in range(choices)]
    items = [Choice(i, request, NO_TOKENIZER, None) for i, request in enumerate(requests)]
    return Job(job_id, stream, chat=False, many=choices > 1, choices=items)

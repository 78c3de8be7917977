"""What the engine counts and times for its metrics, on rank 0. Cheap: one look into a table per token."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from generation.interface import Sequence

Timing = Literal["queue", "first_token", "inter_token", "longest_gap"]
MOST_UNREAD = 10_000
"""Durations kept until somebody takes them; without a reader the oldest go."""


@dataclass
class _Record:
    """One sequence's times, by `time.monotonic()`."""

    arrived: float
    scheduled: bool = False
    first: float = 0.0
    last: float = 0.0
    longest_gap: float = 0.0
    tokens: int = 0


class Meter:
    """Token counts since the start, and durations in seconds. Written by the engine's thread, read by any other.

    `durations` holds pairs (what, seconds), one of each kind per request: "queue" from arrival to the first step,
    "first_token" from arrival to the first token, and at the end "inter_token", the mean time from one token to the
    next, and "longest_gap", the longest.
    """

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.prefix_hit_tokens = 0
        self.generated_tokens = 0
        """Only those that are part of an answer, as in `Output.completion_tokens`."""
        self.draft_tokens = 0
        self.accepted_draft_tokens = 0
        self.durations: deque[tuple[Timing, float]] = deque(maxlen=MOST_UNREAD)
        self._records: dict[int, _Record] = {}

    def arrived(self, sequence: Sequence, when: float) -> None:
        self._records[sequence.order] = _Record(when)

    def scheduled(self, sequences: Iterable[Sequence], now: float) -> None:
        """These are part of a step that begins; what counts is each one's first."""
        for sequence in sequences:
            record = self._records[sequence.order]
            if not record.scheduled:
                record.scheduled = True
                self.durations.append(("queue", now - record.arrived))
                self.prompt_tokens += sequence.n_prompt
                self.prefix_hit_tokens += sequence.cached

    def token(self, sequence: Sequence, now: float) -> None:
        """A token was chosen for the sequence; it may be the one that ends it."""
        record = self._records[sequence.order]
        if record.tokens == 0:
            record.first = now
            self.durations.append(("first_token", now - record.arrived))
        else:
            record.longest_gap = max(record.longest_gap, now - record.last)
        record.last = now
        record.tokens += 1

    def ended(self, sequence: Sequence) -> None:
        record = self._records.pop(sequence.order)
        if record.tokens > 1:
            self.durations.append(("inter_token", (record.last - record.first) / (record.tokens - 1)))
            self.durations.append(("longest_gap", record.longest_gap))

    def take_durations(self) -> list[tuple[Timing, float]]:
        """Those since the last call."""
        return [self.durations.popleft() for _ in range(len(self.durations))]

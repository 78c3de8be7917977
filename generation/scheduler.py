"""Who computes what in the next step. Runs on rank 0 only and knows no tensors.

First come, first served; sequences join and leave at any step. Each running sequence gets its next token,
prompts are computed in chunks within a token budget, so that a long one never stalls the others. When
cache blocks run out, the youngest sequence gives its blocks back and is computed again later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from model.kv_cache import BLOCK_TOKENS

from .types import Sequence, StepPlan


class BlockPool:
    """The free cache blocks, by number. Block 0 belongs to nobody."""

    def __init__(self, n_blocks: int) -> None:
        self.total = n_blocks - 1
        self._free = list(range(n_blocks - 1, 0, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, n: int) -> list[int] | None:
        """`n` blocks, or None where there are fewer."""
        if n > len(self._free):
            return None
        return [self._free.pop() for _ in range(n)]

    def give_back(self, blocks: Iterable[int]) -> None:
        self._free.extend(blocks)


@dataclass(frozen=True)
class Scheduled:
    """A step's plan, and whose tokens it holds."""

    plan: StepPlan
    sequences: list[Sequence]
    """In the plan's order."""
    rows: list[tuple[Sequence, int]]
    """For each logit row: the sequence, and the position of the token that the logits follow."""


def blocks_for(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)


class Scheduler:
    """Waiting and running sequences and their cache blocks."""

    def __init__(self, n_blocks: int, *, max_seqs: int, prefill_chunk: int) -> None:
        self.pool = BlockPool(n_blocks)
        self.max_seqs = max_seqs
        self.prefill_chunk = prefill_chunk
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.preemptions = 0
        self._scrub: list[int] = []

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence, *, scrub: bool = False) -> None:
        """Take a sequence out, wherever it is; `scrub` zeroes its blocks, which may hold numbers that aren't finite."""
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        if scrub:
            self._scrub += sequence.blocks
        self._release(sequence)

    def _release(self, sequence: Sequence) -> None:
        blocks, sequence.blocks, sequence.computed = sequence.blocks, [], 0
        self.pool.give_back(blocks)

    def plan(self) -> Scheduled:
        """The next step; may hold no sequence when every one that could run waits for memory."""
        chosen: list[tuple[Sequence, int]] = []
        budget = self.prefill_chunk
        for sequence in list(self.running):
            if sequence not in self.running:  # preempted for an older one just now
                continue
            missing = len(sequence.ids) - sequence.computed
            count = missing if missing == 1 else min(missing, budget)
            if count and self._reserve(sequence, sequence.computed + count):
                chosen.append((sequence, count))
                budget -= 0 if missing == 1 else count
        while self.waiting and budget > 0 and len(self.running) < self.max_seqs:
            sequence = self.waiting[0]
            blocks = self.pool.take(blocks_for(len(sequence.ids)))
            if blocks is None:
                break
            self.waiting.popleft()
            self.running.append(sequence)
            sequence.blocks = blocks
            count = min(len(sequence.ids), budget)
            budget -= count
            chosen.append((sequence, count))
        chosen = [(s, n) for s, n in chosen if s in self.running]
        chosen.sort(key=lambda pair: pair[1] > 1)  # single tokens first: they are attended as one block of rows
        scrub, self._scrub = self._scrub, []
        return _scheduled(chosen, scrub)

    def _reserve(self, sequence: Sequence, length: int) -> bool:
        """Blocks for `length` tokens, taken from the youngest others if need be; False: it was preempted itself."""
        while True:
            blocks = self.pool.take(blocks_for(length) - len(sequence.blocks))
            if blocks is not None:
                sequence.blocks += blocks
                return True
            youngest = max(self.running, key=lambda s: s.order)
            self.running.remove(youngest)
            self._release(youngest)
            self.waiting.appendleft(youngest)
            self.preemptions += 1
            if youngest is sequence:
                return False


def _scheduled(chosen: list[tuple[Sequence, int]], scrub: list[int]) -> Scheduled:
    """The plan for (sequence, how many of its next tokens) pairs."""
    tokens: list[int] = []
    rows: list[tuple[Sequence, int]] = []
    logit_rows: list[int] = []
    for sequence, count in chosen:
        start, end = sequence.computed, sequence.computed + count
        for position in _logit_positions(sequence, start, end):
            rows.append((sequence, position))
            logit_rows.append(len(tokens) + position - start)
        tokens += sequence.ids[start:end]
    width = max((len(s.blocks) for s, _ in chosen), default=0)
    blocks = np.zeros((len(chosen), width), dtype=np.int32)
    for row, (sequence, _) in zip(blocks, chosen, strict=True):
        row[: len(sequence.blocks)] = sequence.blocks
    plan = StepPlan(
        tokens=np.array(tokens, dtype=np.int32),
        starts=np.array([s.computed for s, _ in chosen], dtype=np.int32),
        counts=np.array([n for _, n in chosen], dtype=np.int32),
        blocks=blocks,
        logit_rows=np.array(logit_rows, dtype=np.int32),
        scrub=np.array(scrub, dtype=np.int32),
    )
    return Scheduled(plan, [s for s, _ in chosen], rows)


def _logit_positions(sequence: Sequence, start: int, end: int) -> Iterable[int]:
    """Positions in [start, end) whose logits are needed: the last known token's, and scored prompt tokens'."""
    if sequence.request.params.prompt_logprobs:
        # Scored already: after a preemption the prompt is computed again, but not scored again.
        yield from range(max(start, len(sequence.prompt_logprobs)), min(end, sequence.n_prompt - 1))
    if end == len(sequence.ids):
        yield end - 1

"""Who computes what in the next step. Runs on rank 0 only and knows no tensors.

First come, first served; sequences join and leave at any step. Each running sequence gets its next token,
prompts are computed in chunks within a token budget, which is smaller while others wait for their next token, so
that a long prompt never stalls them. When
cache blocks run out, the youngest sequence gives its blocks back and is computed again later.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from generation.engine.blocks import BlockPool, extend_hashes
from generation.engine.speculation import PromptLookup
from generation.interface import Sequence, StepPlan
from model.kv_cache import BLOCK_TOKENS

BUSY_SHARE = 5
"""While sequences are decoding, prompts get this part of the budget: their next token then comes two to three times
as late as without a prompt beside them, not ten times."""


COST_DOUBLES_AT = 1024
"""Tokens of context at which a prompt token costs twice what the first one does: attention grows with what it sees."""


def chunk_within(budget: int, start: int, missing: int) -> int:
    """How many of `missing` tokens from position `start` on cost at most `budget`, in costs of a first token; >= 1."""
    if budget <= 0:
        return 0
    # n tokens cost n (1 + (start + n / 2) / c), solved for n
    c = COST_DOUBLES_AT
    count = int(math.sqrt((c + start) ** 2 + 2 * c * budget) - (c + start))
    return min(missing, max(count, 1))


def cost_of(count: int, start: int) -> int:
    """Cost of `count` prompt tokens from position `start` on, in costs of a first token."""
    return math.ceil(count * (1 + (start + count / 2) / COST_DOUBLES_AT))


@dataclass(frozen=True)
class Scheduled:
    """A step's plan, and whose tokens it holds."""

    plan: StepPlan
    sequences: list[Sequence]
    """In the plan's order, each once."""
    counts: list[int]
    """How many of each one's known tokens are computed."""
    rows: list[tuple[Sequence, int]]
    """For each logit row: the sequence, and the position of the token that the logits follow. Those of a draft follow
    the row of the last known token."""
    drafted: int = 0
    """Tokens of drafts, over all sequences."""


def blocks_for(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)


class Scheduler:
    """Waiting and running sequences and their cache blocks."""

    def __init__(
        self,
        n_blocks: int,
        *,
        max_seqs: int,
        prefill_chunk: int,
        prefix_cache: bool = True,
        speculation: PromptLookup | None = None,
    ) -> None:
        self.pool = BlockPool(n_blocks)
        self.max_seqs = max_seqs
        self.prefill_chunk = prefill_chunk
        self.prefix_cache = prefix_cache
        self.speculation = speculation
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.preemptions = 0

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is."""
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        self._release(sequence)

    def _release(self, sequence: Sequence) -> None:
        blocks, sequence.blocks, sequence.computed = sequence.blocks, [], 0
        self.pool.give_back(blocks)

    def plan(self) -> Scheduled:
        """The next step; may hold no sequence when every one that could run waits for memory."""
        chosen: list[tuple[Sequence, int]] = []
        budget = self._budget()
        for sequence in list(self.running):
            if sequence not in self.running:  # preempted for an older one just now
                continue
            missing = len(sequence.ids) - sequence.computed
            count = 1 if missing == 1 else chunk_within(budget, sequence.computed, missing)
            if count and self._reserve(sequence, sequence.computed + count):
                chosen.append((sequence, count))
                budget -= 0 if missing == 1 else cost_of(count, sequence.computed)
        chosen += self._admit(budget)
        chosen = [(s, n) for s, n in chosen if s in self.running]
        chosen.sort(key=lambda pair: pair[1] > 1)  # single tokens first: they are attended as one block of rows
        return _scheduled(chosen, self._drafts(chosen))

    def _drafts(self, chosen: list[tuple[Sequence, int]]) -> list[list[int]]:
        """For each chosen sequence the tokens proposed beyond its known ones, with blocks for them."""
        if self.speculation is None:
            return [[] for _ in chosen]
        drafts = []
        for sequence, count in chosen:
            due = count == 1 and sequence.computed + 1 == len(sequence.ids)
            draft = self.speculation.draft(sequence, len(chosen)) if due else []
            if draft:
                missing = blocks_for(len(sequence.ids) + len(draft)) - len(sequence.blocks)
                sequence.blocks += self.pool.take(max(missing, 0)) or []  # nobody gives up blocks for a draft
                draft = draft[: len(sequence.blocks) * BLOCK_TOKENS - len(sequence.ids)]
            drafts.append(draft)
        return drafts

    def _budget(self) -> int:
        """What the prompt tokens of the next step may cost, in costs of a first token."""
        if all(len(s.ids) - s.computed > 1 for s in self.running):
            return self.prefill_chunk
        return max(self.prefill_chunk // BUSY_SHARE, min(BLOCK_TOKENS, self.prefill_chunk))

    def _admit(self, budget: int) -> list[tuple[Sequence, int]]:
        """Let waiting sequences run, first come, first served, while budget and blocks last."""
        chosen = []
        coming = self._coming()
        for sequence in list(self.waiting):
            if budget <= 0 or len(self.running) >= self.max_seqs:
                break
            known = self._known(sequence)
            hashes = sequence.hashes
            if len(known) < len(hashes) and hashes[len(known)] in coming:
                continue  # what it begins with is being computed: it will find it there
            self.pool.share(known)
            blocks = self.pool.take(blocks_for(len(sequence.ids)) - len(known))
            if blocks is None:
                self.pool.give_back(known)
                break
            self.waiting.remove(sequence)
            self.running.append(sequence)
            sequence.blocks = known + blocks
            sequence.computed = len(known) * BLOCK_TOKENS
            if sequence.n_generated == 0:
                sequence.cached = sequence.computed
            coming.update(hashes[len(known) :])
            count = chunk_within(budget, sequence.computed, len(sequence.ids) - sequence.computed)
            budget -= cost_of(count, sequence.computed)
            chosen.append((sequence, count))
        self.running.sort(key=lambda s: s.order)
        return chosen

    def _known(self, sequence: Sequence) -> list[int]:
        """Blocks that hold the sequence's beginning already; its last token is always left to compute."""
        if not self.prefix_cache or sequence.request.params.prompt_logprobs:
            return []  # a prompt that is scored needs the logits of all its tokens
        extend_hashes(sequence.hashes, sequence.ids)
        return self.pool.find(sequence.hashes[: (len(sequence.ids) - 1) // BLOCK_TOKENS])

    def _coming(self) -> set[bytes]:
        """Hashes of the blocks that running sequences are about to fill with their prompts."""
        found: set[bytes] = set()
        for sequence in self.running:
            if sequence.computed < len(sequence.ids) - 1:
                found.update(sequence.hashes[sequence.computed // BLOCK_TOKENS :])
        return found

    def computed(self, sequence: Sequence, count: int) -> None:
        """`count` more tokens of a sequence are in the cache; the blocks they filled can be found from now on."""
        first = sequence.computed // BLOCK_TOKENS
        sequence.computed += count
        last = sequence.computed // BLOCK_TOKENS
        if not self.prefix_cache or first == last:
            return
        extend_hashes(sequence.hashes, sequence.ids)
        for i in range(first, last):
            self.pool.learn(sequence.blocks[i], sequence.hashes[i])

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


def _scheduled(chosen: list[tuple[Sequence, int]], drafts: list[list[int]]) -> Scheduled:
    """The plan for (sequence, how many of its next tokens) pairs, with a draft for each."""
    tokens: list[int] = []
    rows: list[tuple[Sequence, int]] = []
    logit_rows: list[int] = []
    parts: list[tuple[Sequence, int, int]] = []  # the plan's sequences: whose, first position, tokens
    for (sequence, count), draft in zip(chosen, drafts, strict=True):
        start, end = sequence.computed, sequence.computed + count
        for position in (*_logit_positions(sequence, start, end), *range(end, end + len(draft))):
            rows.append((sequence, position))
            logit_rows.append(len(tokens) + position - start)
        tokens += sequence.ids[start:end] + draft
        parts.append((sequence, start, count))
        parts += [(sequence, end + i, 1) for i in range(len(draft))]
    width = max((len(s.blocks) for s, _ in chosen), default=0)
    blocks = np.zeros((len(parts), width), dtype=np.int32)
    for row, (sequence, _, _) in zip(blocks, parts, strict=True):
        row[: len(sequence.blocks)] = sequence.blocks
    plan = StepPlan(
        tokens=np.array(tokens, dtype=np.int32),
        starts=np.array([start for _, start, _ in parts], dtype=np.int32),
        counts=np.array([count for _, _, count in parts], dtype=np.int32),
        blocks=blocks,
        logit_rows=np.array(logit_rows, dtype=np.int32),
    )
    sequences, counts = [s for s, _ in chosen], [n for _, n in chosen]
    return Scheduled(plan, sequences, counts, rows, len(parts) - len(chosen))


def _logit_positions(sequence: Sequence, start: int, end: int) -> Iterable[int]:
    """Positions in [start, end) whose logits are needed: the last known token's, and scored prompt tokens'."""
    if sequence.request.params.prompt_logprobs:
        # Scored already: after a preemption the prompt is computed again, but not scored again.
        yield from range(max(start, len(sequence.prompt_logprobs)), min(end, sequence.n_prompt - 1))
    if end == len(sequence.ids):
        yield end - 1

"""Speculative decoding without a second model: what a sequence is likely to say next, looked up in itself.

Answers often repeat what stands in the prompt (quotes, edited code, a list worked through) or in the answer so far.
Where the last tokens occurred before, those that followed then are proposed as a draft. The next step computes the
draft together with the token that is due, one more row of the step for each. The engine then chooses token after token
from the rows' logits, just as it would have done step by step, and uses the rows as far as the draft was right. Nothing
is ever accepted that would not have been chosen anyway, so the answer is the same: greedy or drawn (a draw takes the
request's own next random number, and only for tokens that count), with penalties, log probabilities and stop strings.

"The same" holds bit for bit where a row's logits don't depend on the step's other rows: with the native kernels in
every dtype, as the rows of a draft are computed like single tokens of several sequences. Elsewhere (torch's or a GPU's
matrix products) float rounding may differ with the number of rows, in bfloat16 enough to decide a near tie otherwise,
as it may when other requests come and go.

A row costs time even where it turns out useless, so a draft is as long as pays by how often drafts of this sequence
were right so far. That is counted for every token, also while nothing is proposed: an expected token can be compared
with the one that comes without having been computed.

Sources: Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (2023); Saxena, "Prompt Lookup
Decoding" (2023).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from generation.interface import Sequence

MOST_ROWS = 16
"""Most rows in a step with drafts, over all sequences."""
MOST_DRAFT = 7
"""Tokens in the longest draft: with the one that is due, as many rows as the integer kernels are good at."""
ROW_COST = 0.12
"""What a further row adds to a step of one row, as a part of it, in a short context."""
COST_DOUBLES_AT = 1500
"""Tokens of context at which a row costs twice that, as each row's attention reads the whole cache."""
SEARCHED = (2, 3, 4, 6)
"""How many last tokens are looked for; where fewer aren't found, more can't be."""
PRIOR = {24: 0.9, 12: 0.8, 6: 0.7, 4: 0.5, 3: 0.3, 2: 0.15}
"""By how many tokens match at least: how often the next one is right, until a sequence's own tokens tell."""
MEMORY = 0.95
"""What counts of right and wrong keep of their weight with each token counted."""
_BYTES = 4


def row_cost(context: int, sequences: int) -> float:
    """What a draft token for each of `sequences` adds to their step, as a part of it."""
    one = ROW_COST * (1 + context / COST_DOUBLES_AT)
    return one * sequences / (1 + one * (sequences - 1))


def best_length(trust: float, cost: float, most: int) -> int:
    """How many draft tokens give most tokens per time.

    Args:
        trust: probability that a draft token is right, given that those before it are.
        cost: what each adds to the step's time, as a part of it without any.
    """
    length, tokens, time, chance = 0, 1.0, 1.0, trust
    while length < most and chance * time > cost * tokens:
        length, tokens, time, chance = length + 1, tokens + chance, time + cost, chance * trust
    return length


class PromptLookup:
    """Drafts for the sequences of a step.

    Args:
        max_seq_len: the engine's longest sequence, in tokens.
    """

    def __init__(self, max_seq_len: int) -> None:
        self.max_seq_len = max_seq_len

    def draft(self, sequence: Sequence, sharing: int) -> list[int]:
        """Tokens that may follow all of `sequence.ids`, of which the last is still to be computed.

        Args:
            sharing: how many sequences share the step.
        """
        if sequence.request.constraint is not None:
            return []  # its mask is made for one token at a time
        left = min(sequence.request.params.max_tokens - sequence.n_generated, self.max_seq_len - len(sequence.ids))
        most = min(MOST_ROWS // sharing - 1, left - 1)
        if most <= 0:
            return []
        if sequence.drafter is None:
            sequence.drafter = Drafter()
        return sequence.drafter.draft(sequence.ids, most, sharing)


class Drafter:
    """The drafts of one sequence. Reads the sequence's ids only; what it holds follows from them.

    Memory: four bytes per token.
    """

    def __init__(self) -> None:
        self._ids = bytearray()
        """The sequence's ids so far, as little-endian int32."""
        self._source = -1
        """Where the token stands that is expected next; -1: nowhere."""
        self._match = 0
        """How many tokens before `_source` are known to equal the last ones."""
        self._right = dict.fromkeys(PRIOR, 0.0)
        self._wrong = dict.fromkeys(PRIOR, 0.0)

    def draft(self, ids: list[int], most: int, sequences: int = 1) -> list[int]:
        """The tokens expected after `ids`, which begin with those of the last call.

        Args:
            ids: all of the sequence, at least one.
            most: limit of the draft's length.
            sequences: how many share the step.

        Returns:
            As many as pay, often none.
        """
        self._read(ids)
        length = best_length(self._trust(), row_cost(len(ids), sequences), min(most, MOST_DRAFT))
        return self._copy(length) if length > 0 else []

    def _read(self, ids: list[int]) -> None:
        """Compare the tokens that are new with what was expected, and look for the last ones where that was wrong."""
        if not self._ids:
            self._ids += np.array(ids, dtype="<i4").tobytes()
        for new in ids[len(self._ids) // _BYTES :]:
            token, expected = new.to_bytes(_BYTES, "little"), self._source
            if expected >= 0:
                self._count(right := self._ids[expected * _BYTES : (expected + 1) * _BYTES] == token)
            self._ids += token
            if expected >= 0 and right:
                self._source, self._match = expected + 1, self._match + 1
            else:
                self._source = -1
        if self._source < 0:
            self._find()

    def _find(self) -> None:
        """Look for the latest earlier place of the last tokens, as many as can be found."""
        for length in SEARCHED:
            place = _find_last(self._ids, length)
            if place < 0:
                return
            self._source, self._match = place + length, length

    def _count(self, right: bool) -> None:
        kind = _kind(self._match)
        self._right[kind] = self._right[kind] * MEMORY + right
        self._wrong[kind] = self._wrong[kind] * MEMORY + (not right)

    def _trust(self) -> float:
        """How likely the expected token comes."""
        if self._source < 0:
            return 0.0
        kind = _kind(self._match)
        right, wrong = self._right[kind], self._wrong[kind]
        return (right + PRIOR[kind]) / (right + wrong + 1)

    def _copy(self, length: int) -> list[int]:
        """The `length` tokens from `_source` on; where that runs into the end, it goes on with its own beginning."""
        found = self._ids[self._source * _BYTES :][: length * _BYTES]
        while len(found) < length * _BYTES:
            found *= 2
        ids: list[int] = np.frombuffer(bytes(found[: length * _BYTES]), dtype="<i4").tolist()
        return ids


def _kind(match: int) -> int:
    return next(length for length in PRIOR if length <= match)


def _find_last(ids: bytearray, length: int) -> int:
    """Index of the latest earlier place of the last `length` of `ids` (int32 as bytes); -1: there is none."""
    size = length * _BYTES
    end = len(ids) - 1
    last = ids[-size:]
    if len(last) < size:
        return -1
    while (place := ids.rfind(last, 0, end)) >= 0:
        if place % _BYTES == 0:
            return place // _BYTES
        end = place + size - 1
    return -1

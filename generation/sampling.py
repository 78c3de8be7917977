"""From logits to tokens: pure functions over a step's rows, and what they say of log probabilities.

R rows, V vocabulary. A row's token depends on its own logits and its own random number only.
Nucleus by Meta's rule (Holtzman et al., "The Curious Case of Neural Text Degeneration", 2020, with the
token that crosses p kept): sorted by probability, a token is dropped where the sum before it exceeds p.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from generation.interface import Sequence, TokenLogprob
from generation.top_p import draw, nucleus

_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
BITS_ADDED = np.where(_BITS == 1, 0, -np.inf).astype(np.float32)
"""(256, 8): what a byte of a mask adds to the logits of its ids, lowest bit first."""


def sample_top_p(probs: Tensor, p: float) -> Tensor:
    """One token from each row's nucleus.

    Args:
        probs: (batch, vocab) probabilities.
        p: nucleus mass, 0..1; at least one token is always kept.

    Returns:
        (batch, 1) ids, drawn with torch's global generator.

    Raises:
        ValueError: p out of range, or a row that is not finite, has a negative entry or sums to zero.
    """
    if not 0 <= p <= 1:
        raise ValueError(f"p is {p!r}, expected a number between 0 and 1")
    sums = probs.sum(-1)
    bad = ~torch.isfinite(sums) | (sums <= 0) | (probs < 0).any(-1)
    if bool(bad.any()):
        rows = bad.nonzero().flatten().tolist()
        raise ValueError(f"rows {rows} of probs are no distribution: not finite, negative or summing to zero")
    ordered, ids = torch.sort(probs, dim=-1, descending=True)
    ordered = nucleus(ordered, torch.full_like(sums, p))
    return ids.gather(-1, torch.multinomial(ordered, 1))


@dataclass
class Sampled:
    """One step's choice for each row; `token_ids[i]` is None where row i has none, and `errors` says why."""

    token_ids: list[int | None]
    logprobs: list[TokenLogprob | None]
    errors: dict[int, str] = field(default_factory=dict)


def sample(logits: Tensor, sequences: SequenceOf[Sequence]) -> Sampled:
    """Choose the next token of each sequence from its row of `logits` (R, V), float32."""
    best, greedy_ids = logits.max(-1)
    finite = torch.isfinite(best).tolist()
    allowed, errors = _masks(sequences)
    errors |= {i: "the model's logits are not finite for this request" for i, ok in enumerate(finite) if not ok}
    adjusted = _adjust(_constrain(logits, allowed), sequences)
    ids = (greedy_ids if adjusted is logits else adjusted.argmax(-1)).tolist()
    rows = [i for i, s in enumerate(sequences) if i not in errors and not s.request.params.greedy]
    if rows:
        every = len(rows) == len(sequences)
        drawn = draw(
            adjusted if every else adjusted[rows],
            [sequences[i].request.params for i in rows],
            [sequences[i].rng for i in rows],
        )
        for i, token in zip(rows, drawn, strict=True):
            ids[i] = token
    wanted = [i for i, s in enumerate(sequences) if i not in errors and s.request.params.logprobs]
    logprobs: list[TokenLogprob | None] = [None] * len(sequences)
    if wanted:
        tops = [sequences[i].request.params.top_logprobs for i in wanted]
        scored = token_logprobs(logits[wanted], [ids[i] for i in wanted], tops)
        for i, logprob in zip(wanted, scored, strict=True):
            logprobs[i] = logprob
    return Sampled([None if i in errors else token for i, token in enumerate(ids)], logprobs, errors)


def token_logprobs(logits: Tensor, ids: SequenceOf[int], tops: SequenceOf[int]) -> list[TokenLogprob]:
    """Log probability of `ids[i]` in row i of `logits` (R, V), with its `tops[i]` likeliest alternatives."""
    logprobs = logits.log_softmax(-1)
    chosen = logprobs.gather(-1, torch.tensor(list(ids), device=logits.device)[:, None])[:, 0].tolist()
    most = max(tops, default=0)
    if most == 0:
        return [TokenLogprob(token, value) for token, value in zip(ids, chosen, strict=True)]
    values, indices = logprobs.topk(min(most, logits.shape[-1]), dim=-1)
    table = [tuple(zip(i, v, strict=True)) for i, v in zip(indices.tolist(), values.tolist(), strict=True)]
    return [TokenLogprob(ids[i], chosen[i], table[i][: tops[i]]) for i in range(len(ids))]


def _masks(sequences: SequenceOf[Sequence]) -> tuple[dict[int, np.ndarray], dict[int, str]]:
    """The allowed ids of each row that has a constraint, see `Constraint.mask`, and what went wrong, by row."""
    masks, errors = {}, {}
    for i, sequence in enumerate(sequences):
        if sequence.request.constraint is not None:
            try:
                masks[i] = sequence.request.constraint.mask()
            except Exception as error:  # whatever a library does with one request's grammar, the others go on
                errors[i] = str(error)
    return masks, errors


def _constrain(logits: Tensor, masks: dict[int, np.ndarray]) -> Tensor:
    """A copy of `logits` (R, V), minus infinity at what the masks don't allow; `logits` itself without masks."""
    if not masks:
        return logits
    # Adding a table's entries takes a quarter of what filling by a condition does.
    added = BITS_ADDED.take(np.stack(list(masks.values())), axis=0).reshape(len(masks), -1)[:, : logits.shape[-1]]
    penalty = torch.from_numpy(added).to(logits.device)  # (rows with a mask, V)
    if len(masks) == len(logits):
        return logits + penalty
    constrained, rows = logits.clone(), list(masks)
    constrained[rows] += penalty
    return constrained


def _adjust(logits: Tensor, sequences: SequenceOf[Sequence]) -> Tensor:
    """`logits` with penalties and biases applied to a copy; `logits` itself where no row has any.

    Repetition: Keskar et al., "CTRL" (2019), over prompt and answer. Frequency and presence: over the answer.
    """
    rows = [i for i, s in enumerate(sequences) if s.request.params.penalized or s.request.params.logit_bias]
    if not rows:
        return logits
    adjusted = logits.clone()
    for i in rows:
        sequence, params = sequences[i], sequences[i].request.params
        row = adjusted[i]
        if params.repetition_penalty != 1:
            seen = torch.tensor(sorted(set(sequence.ids)), device=logits.device)
            values, penalty = row[seen], params.repetition_penalty
            row[seen] = torch.where(values > 0, values / penalty, values * penalty)
        if sequence.n_generated and (params.frequency_penalty or params.presence_penalty):
            answer = torch.tensor(sequence.ids[sequence.n_prompt :], device=logits.device)
            said, counts = answer.unique(return_counts=True)
            row[said] -= params.frequency_penalty * counts + params.presence_penalty
        if params.logit_bias:
            tokens, biases = zip(*params.logit_bias, strict=True)
            row[list(tokens)] += torch.tensor(biases, device=logits.device)
    return adjusted

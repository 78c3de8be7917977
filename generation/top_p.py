"""Drawing a token from each row's filtered distribution, without sorting the vocabulary.

R rows, V vocabulary. A row's token depends on its own probabilities and its own generator only. The nucleus is by
Meta's rule (see `sampling.py`). Where the likeliest few tokens hold it, it is cut out of them. Where they don't, a
token is drawn from the whole row and taken if it lies in the nucleus, else drawn again: the same distribution, and
whether a token lies in it takes one sum. On average 1 / top_p draws are needed.
"""

from __future__ import annotations

import random
from collections.abc import Sequence as SequenceOf

import torch
from torch import Tensor

from generation.interface import SamplingParams

CANDIDATES = 256
"""How many of the likeliest tokens are looked at first."""


def draw(logits: Tensor, params: SequenceOf[SamplingParams], generators: SequenceOf[random.Random]) -> list[int]:
    """A token for each row of finite `logits` (R, V), which all have a temperature above 0."""
    device = logits.device
    temperature = torch.tensor([p.temperature for p in params], device=device)
    probs = (logits / temperature[:, None]).softmax(-1)
    if any(p.min_p for p in params):
        floor = probs.amax(-1) * torch.tensor([p.min_p for p in params], device=device)
        probs = probs.masked_fill(probs < floor[:, None], 0)
        probs = probs / probs.sum(-1, keepdim=True)
    tokens = [0] * len(params)
    filtered = [i for i, p in enumerate(params) if p.top_p < 1 or p.top_k > 0]
    whole = [i for i, p in enumerate(params) if not (p.top_p < 1 or p.top_k > 0)]
    for rows, function in ((filtered, _draw_filtered), (whole, _draw_whole)):
        if rows:
            part = probs if len(rows) == len(params) else probs[rows]
            found = function(part, [params[i] for i in rows], [generators[i] for i in rows])
            for i, token in zip(rows, found, strict=True):
                tokens[i] = token
    return tokens


def nucleus(ordered: Tensor, p: Tensor) -> Tensor:
    """Probabilities (R, K) in falling order, zeroed outside the nucleus of each row's p (R,)."""
    before = ordered.cumsum(-1) - ordered
    outside = before > p[:, None]
    outside[:, 0] = False
    return ordered.masked_fill(outside, 0)


def _draw_whole(probs: Tensor, _: SequenceOf[SamplingParams], generators: SequenceOf[random.Random]) -> list[int]:
    """From rows of `probs` (R, V) as they are."""
    tokens: list[int] = _invert(probs.double().cumsum(-1), _uniform(generators, probs.device)).tolist()
    return tokens


def _draw_filtered(
    probs: Tensor, params: SequenceOf[SamplingParams], generators: SequenceOf[random.Random]
) -> list[int]:
    """From rows of `probs` (R, V) cut to the top k, then to the nucleus of what is left."""
    vocabulary = probs.shape[-1]
    p = torch.tensor([x.top_p for x in params], device=probs.device)
    k = torch.tensor([min(x.top_k or vocabulary, vocabulary) for x in params], device=probs.device)
    ordered, ids = probs.topk(min(CANDIDATES, vocabulary), dim=-1)
    enough = torch.where(k < vocabulary, k <= ordered.shape[-1], ordered.sum(-1) > p).tolist()
    rows = [i for i, found in enumerate(enough) if found]
    tokens = [0] * len(params)
    if rows:
        picked = _pick(ordered[rows], ids[rows], p[rows], k[rows], _uniform([generators[i] for i in rows], p.device))
        for i, token in zip(rows, picked, strict=True):
            tokens[i] = token
    for i, found in enumerate(enough):
        if found:
            continue
        if k[i] < vocabulary:
            row = probs[i : i + 1].sort(dim=-1, descending=True)
            uniform = _uniform([generators[i]], p.device)
            tokens[i] = _pick(row.values, row.indices, p[i : i + 1], k[i : i + 1], uniform)[0]
        else:
            tokens[i] = _reject(probs[i], params[i].top_p, generators[i])
    return tokens


def _pick(ordered: Tensor, ids: Tensor, p: Tensor, k: Tensor, uniform: Tensor) -> list[int]:
    """From the likeliest tokens of each row, `ordered` probabilities (R, K) of `ids`.

    They hold the row's top k (R,), or its nucleus where k is the whole vocabulary.
    """
    places = torch.arange(ordered.shape[-1], device=ordered.device)
    kept = ordered.masked_fill(places[None, :] >= k[:, None], 0)
    cut = k <= ordered.shape[-1]
    scale = torch.where(cut, kept.sum(-1), torch.ones_like(p))  # the nucleus is of what the top k left
    kept = nucleus(kept / scale[:, None], p)
    tokens: list[int] = ids.gather(-1, _invert(kept.double().cumsum(-1), uniform)[:, None])[:, 0].tolist()
    return tokens


def _reject(probs: Tensor, p: float, generator: random.Random) -> int:
    """From the nucleus of one row (V,): draws from the whole row until a token lies inside."""
    cumulative = probs.double().cumsum(-1)[None]
    while True:
        token = int(_invert(cumulative, _uniform([generator], probs.device)))
        likelier = probs.masked_fill(probs <= probs[token], 0).sum()
        if float(likelier) <= p:
            return token


def _uniform(generators: SequenceOf[random.Random], device: torch.device) -> Tensor:
    """(R,) the next number of each row's own generator."""
    return torch.tensor([g.random() for g in generators], dtype=torch.float64, device=device)


def _invert(cumulative: Tensor, uniform: Tensor) -> Tensor:
    """(R,) index at which each row of cumulative weights (R, K) passes `uniform` (R,) of the row's total."""
    total = cumulative[:, -1:].contiguous()
    index = torch.searchsorted(cumulative, uniform[:, None] * total, right=True)
    last = torch.searchsorted(cumulative, total)  # the last with any weight; rounding must not lead beyond it
    return torch.minimum(index, last)[:, 0]

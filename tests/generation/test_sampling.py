"""Choosing tokens: Meta's nucleus rule, filters, penalties, log probabilities, and bad rows."""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from generation import sample_top_p
from generation import top_p as drawing_module
from generation.interface import Request, SamplingParams, Sequence
from generation.sampling import sample


def sequence(
    seed: int = 0, ids: list[int] | None = None, generated: list[int] | None = None, **params: Any
) -> Sequence:
    prompt = ids or [0]
    request = Request("r", prompt, SamplingParams(**params))
    return Sequence(request, 0, prompt + (generated or []), random.Random(seed))


def drawn(probs: list[float], n: int = 400, **params: Any) -> Counter[int]:
    """How often each id is drawn from `probs` over n sequences in one call."""
    logits = torch.tensor([probs] * n).log()
    return Counter(sample(logits, [sequence(seed, **params) for seed in range(n)]).token_ids)


@pytest.mark.parametrize(
    ("probs", "p", "kept"),
    [
        ([0.4, 0.3, 0.15, 0.1, 0.05], 0.9, {0, 1, 2, 3}),
        ([0.4, 0.3, 0.2, 0.1], 0.8, {0, 1, 2}),  # B224: the token that crosses p is kept
        ([0.5, 0.25, 0.125, 0.125], 0.7, {0, 1}),
        ([0.25, 0.25, 0.25, 0.25], 1e-8, {0, 1, 2, 3}),  # B193: one token is always kept; ties go either way
        ([0.1, 0.6, 0.3], 0.0, {1}),
        ([0.2, 0.3, 0.5], 1.0, {0, 1, 2}),  # B191
        ([0.2, 0.3, 0.5], 0.9999999, {0, 1, 2}),  # B225
    ],
)
def test_nucleus(probs: list[float], p: float, kept: set[int]) -> None:
    torch.manual_seed(0)
    ids = sample_top_p(torch.tensor([probs] * 400), p)
    assert ids.shape == (400, 1)
    seen = set(ids.flatten().tolist())
    engine = set(drawn(probs, temperature=1.0, top_p=p))
    if p == 1e-8:
        assert len(seen) == len(engine) == 1
    else:
        assert seen == engine == kept


def test_a_sum_equal_to_p_does_not_exceed_it() -> None:
    """B223: numbers that binary fractions hold exactly."""
    torch.manual_seed(0)
    assert set(sample_top_p(torch.tensor([[0.5, 0.25, 0.1875, 0.0625]] * 400), 0.75).flatten().tolist()) == {0, 1, 2}


@pytest.mark.parametrize("row", [[0.0, 0.0], [math.nan, 1.0], [math.inf, 1.0], [-0.5, 1.5]])
def test_bad_distribution_is_a_value_error(row: list[float]) -> None:
    with pytest.raises(ValueError, match=r"rows \[1\] of probs"):
        sample_top_p(torch.tensor([[0.5, 0.5], row]), 0.9)


@pytest.mark.parametrize("p", [-0.1, 1.1, math.nan])
def test_bad_p_is_a_value_error(p: float) -> None:
    """B195."""
    with pytest.raises(ValueError, match="expected a number between 0 and 1"):
        sample_top_p(torch.tensor([[0.5, 0.5]]), p)


def test_frequencies_follow_the_probabilities() -> None:
    counts = drawn([0.1, 0.2, 0.3, 0.4], n=4000, temperature=1.0, top_p=1.0)
    for token, expected in enumerate([0.1, 0.2, 0.3, 0.4]):
        assert abs(counts[token] / 4000 - expected) < 0.03
    cut = drawn([0.1, 0.2, 0.3, 0.4], n=4000, temperature=1.0, top_p=0.65)
    assert set(cut) == {2, 3}
    assert abs(cut[3] / 4000 - 4 / 7) < 0.03


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31), st.floats(0.05, 0.999), st.integers(0, 60), st.floats(0, 0.1))
def test_few_candidates_draw_from_the_same_nucleus(seed: int, p: float, k: int, min_p: float) -> None:
    """Looking only at the likeliest tokens is a shortcut: what can be drawn is what a full sort allows."""
    logits = torch.randn(1, 300, generator=torch.Generator().manual_seed(seed)) * 3
    probs = (logits[0] / 0.9).softmax(-1)
    probs = probs.masked_fill(probs < probs.max() * min_p, 0)
    ordered, ids = (probs / probs.sum()).sort(descending=True)
    if k:
        ordered[k:] = 0
        ordered /= ordered.sum()
    before = (ordered.cumsum(0) - ordered).tolist()
    surely = {int(t) for t, b, w in zip(ids, before, ordered, strict=True) if (b <= p - 1e-5 or b == 0) and w > 0}
    perhaps = {int(t) for t, b, w in zip(ids, before, ordered, strict=True) if b <= p + 1e-5 and w > 0}
    rows = logits.expand(100, -1)
    few = drawing_module.CANDIDATES
    try:
        for drawing_module.CANDIDATES in (16, 10**9):
            sequences = [sequence(i, temperature=0.9, top_p=p, top_k=k, min_p=min_p) for i in range(100)]
            found = {t for t in sample(rows, sequences).token_ids if t is not None}
            assert found <= perhaps
            assert len(found) > 1 or max(ordered.tolist()) > 0.9 or len(surely) == 1
    finally:
        drawing_module.CANDIDATES = few


def test_rejection_draws_with_the_right_frequencies() -> None:
    """A nucleus that the likeliest few don't hold."""
    weights = torch.arange(1.0, 601.0)
    probs = weights / weights.sum()
    ordered, ids = probs.sort(descending=True)
    inside = ids[(ordered.cumsum(0) - ordered) <= 0.7]
    assert len(inside) > drawing_module.CANDIDATES
    n = 4000
    found = sample(probs.log().expand(n, -1), [sequence(i, temperature=1.0, top_p=0.7) for i in range(n)]).token_ids
    assert set(found) <= set(inside.tolist())
    lower, upper = inside.min().item(), inside.max().item()
    middle = (lower + upper) // 2
    expected = (probs[middle : upper + 1].sum() / probs[inside].sum()).item()
    share = sum(t >= middle for t in found if t is not None) / n
    assert abs(share - expected) < 0.03


def test_row_is_independent_of_its_neighbors() -> None:
    """B083, B085, B086: the seed belongs to the request, not to its place."""
    logits = torch.randn(5, 300, generator=torch.Generator().manual_seed(3))
    alone = [sample(logits[i : i + 1], [sequence(i + 10, temperature=1.0, top_p=0.95)]).token_ids[0] for i in range(5)]
    order = [3, 1, 4, 0, 2]
    mixed = [sequence(i + 10, temperature=1.0, top_p=0.95) for i in order]
    assert sample(logits[order], mixed).token_ids == [alone[i] for i in order]


def test_greedy_forms() -> None:
    """B079, B080, B082: temperature 0 divides by nothing; top_p 0 and top_k 1 are greedy too."""
    logits = torch.tensor([[1.0, 5.0, 2.0]] * 4)
    sequences = [
        sequence(temperature=0),
        sequence(temperature=1e-8),
        sequence(top_p=0.0),
        sequence(top_k=1, temperature=0.01, top_p=0.8),  # B226
    ]
    assert sample(logits, sequences).token_ids == [1, 1, 1, 1]


def test_top_k_then_top_p_is_renormalized() -> None:
    probs = [0.4, 0.3, 0.2, 0.1]
    assert set(drawn(probs, temperature=1.0, top_p=1.0, top_k=2)) == {0, 1}
    # Of the two left, the likeliest holds 0.57 > 0.5.
    assert set(drawn(probs, temperature=1.0, top_p=0.5, top_k=2)) == {0}
    assert set(drawn(probs, temperature=1.0, top_p=1.0, min_p=0.6)) == {0, 1}


def test_bad_row_fails_alone() -> None:
    """B005: logits that are not finite fail their own request."""
    logits = torch.tensor([[1.0, 2.0], [math.nan, 1.0], [math.inf, 0.0], [-math.inf, -math.inf], [3.0, 1.0]])
    sequences = [sequence(temperature=t) for t in (0, 0.7, 0.7, 0, 0)]
    assert sample(logits, sequences).token_ids == [1, None, None, None, 0]


def test_masked_tokens_are_never_drawn() -> None:
    logits = torch.full((50, 10), -math.inf)
    logits[:, 4] = 0.0
    found = sample(logits, [sequence(i, temperature=1.0, top_p=p) for i in range(50) for p in [1.0]]).token_ids
    assert set(found) == {4}


def test_logprobs_are_of_the_chosen_token() -> None:
    """B217, B183: from the distribution before temperature and filters."""
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    sequences = [sequence(i, temperature=1.3, top_p=0.9, logprobs=True, top_logprobs=i) for i in range(3)]
    found = sample(logits, sequences)
    expected = logits.log_softmax(-1)
    for i in range(3):
        logprob = found.logprobs[i]
        assert logprob is not None
        assert logprob.token_id == found.token_ids[i]
        assert logprob.logprob == pytest.approx(expected[i, logprob.token_id].item(), abs=1e-6)
        assert logprob.logprob < 0
        top = expected[i].topk(max(i, 1))
        assert [t for t, _ in logprob.top] == top.indices.tolist()[:i]


def test_penalties_and_bias() -> None:
    logits = torch.tensor([[2.0, 1.9, -1.0]])
    assert sample(logits, [sequence(ids=[0], temperature=0, repetition_penalty=1.5)]).token_ids == [1]
    assert sample(logits, [sequence(ids=[0], temperature=0, frequency_penalty=2)]).token_ids == [0]  # prompt: not said
    said = {"ids": [2], "generated": [0, 0], "temperature": 0}
    assert sample(logits, [sequence(**said, frequency_penalty=0.06)]).token_ids == [1]
    assert sample(logits, [sequence(**said, presence_penalty=0.06)]).token_ids == [0]
    assert sample(logits, [sequence(**said, presence_penalty=0.11)]).token_ids == [1]
    assert sample(logits, [sequence(temperature=0, logit_bias=((0, -100.0),))]).token_ids == [1]  # B214
    assert logits.tolist() == [[2.0, pytest.approx(1.9), -1.0]]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 3),
        ("temperature", math.nan),
        ("top_p", 1.1),
        ("top_k", -1),
        ("min_p", 2),
        ("max_tokens", -1),
        ("repetition_penalty", 0),
        ("frequency_penalty", 3),
        ("top_logprobs", 21),
        ("stop", ("",)),
        ("seed", 1.5),
    ],
)
def test_bad_parameters_name_field_and_value(field: str, value: Any) -> None:
    """B195, B196, B197."""
    with pytest.raises(ValueError, match=field):
        SamplingParams(**{field: value})

"""The scheduler alone, with made-up tokens: no block is lost or given twice, nobody starves."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from generation.engine.blocks import BlockPool, extend_hashes
from generation.engine.scheduler import Scheduler
from generation.interface import Request, SamplingParams, Sequence, StepPlan
from model.kv_cache import BLOCK_TOKENS


def make(order: int, n_prompt: int, n_new: int) -> Sequence:
    ids = [order % 3] * n_prompt  # many begin alike
    request = Request(str(order), ids, SamplingParams(max_tokens=n_new))
    return Sequence(request, order, list(ids), random.Random(0))


def check_blocks(scheduler: Scheduler, total: int) -> None:
    held = {b for s in scheduler.running for b in s.blocks}
    assert 0 not in held
    assert len(held) + scheduler.pool.free == total
    assert all(len(set(s.blocks)) == len(s.blocks) for s in scheduler.running)
    assert all(not s.blocks for s in scheduler.waiting)
    for i, one in enumerate(scheduler.running):
        for other in scheduler.running[:i]:  # shared blocks hold the same beginning
            shared = len(set(one.blocks) & set(other.blocks))
            assert one.blocks[:shared] == other.blocks[:shared]
            assert one.ids[: shared * BLOCK_TOKENS] == other.ids[: shared * BLOCK_TOKENS]


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 70), st.integers(1, 30), st.integers(0, 20)), min_size=1, max_size=12),
    st.integers(7, 20),
    st.integers(1, 40),
    st.integers(1, 6),
    st.randoms(use_true_random=False),
)
def test_everything_ends_and_no_block_is_lost(
    jobs: list[tuple[int, int, int]], n_blocks: int, chunk: int, max_seqs: int, rng: random.Random
) -> None:
    scheduler = Scheduler(n_blocks + 1, max_seqs=max_seqs, prefill_chunk=chunk)
    arriving = sorted(((step, i, p, n) for i, (p, n, step) in enumerate(jobs)), reverse=True)
    ended = []
    for step in range(10_000):
        while arriving and arriving[-1][0] <= step:
            _, i, n_prompt, n_new = arriving.pop()
            scheduler.add(make(i, min(n_prompt, (n_blocks - 2) * BLOCK_TOKENS - 30), n_new))
        if not arriving and not scheduler.busy:
            break
        scheduled = scheduler.plan()
        check_blocks(scheduler, n_blocks)
        plan = scheduled.plan
        assert len(scheduled.sequences) <= max_seqs
        assert plan.counts[plan.counts > 1].sum() <= chunk
        assert StepPlan.decode(np.append(plan.encode(), 99)).encode().tolist() == plan.encode().tolist()
        for sequence, count in zip(scheduled.sequences, plan.counts.tolist(), strict=True):
            scheduler.computed(sequence, count)
            assert sequence.computed <= len(sequence.blocks) * BLOCK_TOKENS
            if sequence.computed == len(sequence.ids):
                sequence.ids.append(rng.randrange(2))
                if sequence.n_generated >= sequence.request.params.max_tokens or rng.random() < 0.05:
                    scheduler.remove(sequence)
                    ended.append(sequence.order)
        if scheduler.running and rng.random() < 0.03:
            victim = rng.choice(scheduler.running)
            scheduler.remove(victim)
            ended.append(victim.order)
    assert sorted(ended) == list(range(len(jobs)))
    assert scheduler.pool.free == n_blocks


def test_pool() -> None:
    pool = BlockPool(4)
    assert pool.take(4) is None
    blocks = pool.take(3)
    assert blocks is not None
    assert sorted(blocks) == [1, 2, 3]
    assert pool.take(1) is None
    assert pool.take(0) == []
    pool.give_back(blocks)
    assert pool.free == pool.total == 3


def test_known_blocks_are_shared_and_forgotten_last() -> None:
    pool = BlockPool(4)
    hashes: list[bytes] = []
    extend_hashes(hashes, list(range(BLOCK_TOKENS * 2 + 5)))
    assert len(hashes) == 2
    first, second = pool.take(2) or []
    pool.learn(first, hashes[0])
    pool.learn(second, hashes[1])
    assert pool.find(hashes) == [first, second]
    pool.share([first])
    pool.give_back([first, second])
    assert pool.free == 2
    assert pool.find(hashes) == [first, second]
    assert second not in (pool.take(1) or [])
    assert pool.take(1) == [second]
    assert pool.find(hashes) == [first]
    assert pool.take(1) is None


def test_a_hash_covers_all_before() -> None:
    one: list[bytes] = []
    other: list[bytes] = []
    extend_hashes(one, [1] * BLOCK_TOKENS + [2] * BLOCK_TOKENS)
    extend_hashes(other, [3] * BLOCK_TOKENS + [2] * BLOCK_TOKENS)
    assert not set(one) & set(other)

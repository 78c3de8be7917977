"""The engine on a tiny real model: what a request gets must not depend on what else is going on."""

from __future__ import annotations

import math
import random
import time
from typing import Any

import pytest
import torch

from generation.engine.engine import Engine, EngineSettings
from generation.engine.scheduler import chunk_within, cost_of
from generation.interface import Output, Request, SamplingParams
from model.llama import Llama
from tests.helpers.ranks import make_model
from tests.helpers.report import report
from tests.helpers.tiny import random_weights, tiny_config

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module")
def model() -> Llama:
    config = tiny_config(stop_ids=frozenset({2}))
    return make_model(config, random_weights(config))


def make_engine(model: Llama, **settings: Any) -> Engine:
    return Engine(model, EngineSettings(**({"kv_cache_tokens": 4096} | settings)))


def finish(engine: Engine) -> dict[str, list[Output]]:
    outputs: dict[str, list[Output]] = {}
    while engine.busy:
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    return outputs


def ids_of(outputs: list[Output]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def answer(model: Llama, prompt: list[int], **params: Any) -> list[int]:
    engine = make_engine(model)
    engine.submit(Request("r", prompt, SamplingParams(**(GREEDY | params))))
    return ids_of(finish(engine)["r"])


def prompts(n: int, seed: int = 0, longest: int = 90) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, 384) for _ in range(rng.randint(1, longest))] for _ in range(n)]


def assert_empty(engine: Engine) -> None:
    """Nothing of any request is left (B148, B253)."""
    stats = engine.stats()
    assert (stats.running, stats.waiting) == (0, 0)
    assert stats.kv_blocks_free == stats.kv_blocks_total
    assert not engine._sequences


def test_32_at_once_equal_each_alone(model: Llama) -> None:
    """B158, B159, B026: ragged requests that join and leave at any step."""
    engine = make_engine(model, prefill_chunk=40, max_seqs=20)
    asked = prompts(32)
    for i, prompt in enumerate(asked):
        engine.submit(Request(str(i), prompt, SamplingParams(**(GREEDY | {"max_tokens": 3 + i}))))
    outputs = finish(engine)
    for i, prompt in enumerate(asked):
        assert ids_of(outputs[str(i)]) == answer(model, prompt, max_tokens=3 + i)
    assert_empty(engine)


def test_seed_decides_whatever_else_runs(model: Llama) -> None:
    """B083, B085, B086."""
    params = {"temperature": 0.9, "seed": 5}
    alone = answer(model, [7, 8, 9], **params)
    engine = make_engine(model, prefill_chunk=16)
    for i, prompt in enumerate(prompts(9, seed=4)):
        engine.submit(Request(f"other-{i}", prompt, SamplingParams(temperature=1.0, max_tokens=i + 2)))
    engine.step()
    engine.submit(Request("r", [7, 8, 9], SamplingParams(**(GREEDY | params))))
    engine.submit(Request("s", [7, 8, 9], SamplingParams(**(GREEDY | params | {"seed": 6}))))
    outputs = finish(engine)
    assert ids_of(outputs["r"]) == alone
    assert ids_of(outputs["s"]) != alone


def test_unseeded_requests_differ_and_follow_torch(model: Llama) -> None:
    torch.manual_seed(11)
    first = [answer(model, [7], temperature=1.5, top_p=1.0) for _ in range(3)]
    assert len({tuple(x) for x in first}) == 3
    torch.manual_seed(11)
    assert [answer(model, [7], temperature=1.5, top_p=1.0) for _ in range(3)] == first


def test_cache_too_small_for_all_preempts_and_answers_stay(model: Llama) -> None:
    engine = make_engine(model, kv_cache_tokens=16 * 12)
    asked = prompts(8, seed=2, longest=60)
    for i, prompt in enumerate(asked):
        engine.submit(Request(str(i), prompt, SamplingParams(**(GREEDY | {"max_tokens": 40}))))
    outputs = finish(engine)
    assert engine.stats().preemptions > 0
    for i, prompt in enumerate(asked):
        assert ids_of(outputs[str(i)]) == answer(model, prompt, max_tokens=40)
    assert_empty(engine)


def test_preempted_seeded_request_draws_the_same(model: Llama) -> None:
    engine = make_engine(model, kv_cache_tokens=16 * 7)
    asked = prompts(4, seed=3, longest=30)
    params = {"temperature": 1.0, "max_tokens": 40, "prompt_logprobs": True, "logprobs": True}
    for i, prompt in enumerate(asked):
        engine.submit(Request(str(i), prompt, SamplingParams(seed=i, ignore_eos=True, **params)))
    outputs = finish(engine)
    assert engine.stats().preemptions > 0
    for i, prompt in enumerate(asked):
        assert ids_of(outputs[str(i)]) == answer(model, prompt, seed=i, **params)
        scored = [o.prompt_logprobs for o in outputs[str(i)] if o.prompt_logprobs is not None]
        assert [len(s) for s in scored] == [len(prompt) - 1]


def test_blocks_are_reused_without_a_trace(model: Llama) -> None:
    """B254: B after A, in A's blocks, is B alone."""
    engine = make_engine(model, kv_cache_tokens=64)
    for i, prompt in enumerate(prompts(6, seed=9, longest=40)):
        engine.submit(Request(str(i), prompt, SamplingParams(**GREEDY)))
        assert ids_of(finish(engine)[str(i)]) == answer(model, prompt)


def test_cancel_frees_everything_at_the_next_step(model: Llama) -> None:
    engine = make_engine(model, max_seqs=3, prefill_chunk=20)
    for i, prompt in enumerate(prompts(10)):
        engine.submit(Request(str(i), prompt, SamplingParams(**(GREEDY | {"max_tokens": 100}))))
    for _ in range(4):
        engine.step()
    for i in range(10):
        engine.cancel(str(i))
        engine.cancel("unknown")
    assert engine.step() == []
    assert_empty(engine)
    assert engine.stats().finished == {"cancelled": 10}


@report("B136", "pytorch/serve#1812")
def test_deadline_ends_with_what_there_is(model: Llama) -> None:
    """B136."""
    engine = make_engine(model)
    engine.submit(Request("r", [5], SamplingParams(**(GREEDY | {"max_tokens": 200})), deadline=time.monotonic() + 3600))
    for _ in range(3):
        engine.step()
    engine._sequences["r"].request.deadline = 0.0
    (last,) = engine.step()
    assert last.finish_reason == "timeout"
    assert last.completion_tokens == 3
    assert_empty(engine)


def test_not_finite_fails_alone_and_leaves_no_trace(model: Llama) -> None:
    """B005: NaN in one request's cache reaches neither its neighbors nor the next owner of its blocks."""
    config = tiny_config()
    poisoned = make_model(config, random_weights(config))
    poisoned.tok_embeddings[300] = math.nan
    engine = make_engine(poisoned, kv_cache_tokens=96)
    engine.submit(Request("good", [5, 6, 7], SamplingParams(**GREEDY)))
    engine.submit(Request("bad", [5, 300, 7], SamplingParams(**GREEDY)))
    outputs = finish(engine)
    (bad,) = outputs["bad"]
    assert (bad.finish_reason, bad.token_ids) == ("error", [])
    assert "not finite" in str(bad.error)
    assert ids_of(outputs["good"]) == answer(model, [5, 6, 7])
    for i, prompt in enumerate(prompts(5, seed=6, longest=60)):
        engine.submit(Request(str(i), prompt, SamplingParams(**GREEDY)))
    for request_id, found in finish(engine).items():
        assert found[-1].finish_reason == "length", request_id
    assert_empty(engine)


def test_stop_id_ends_and_is_not_returned() -> None:
    """B164: tokens from the first stop id on are cut."""
    config = tiny_config()
    weights = random_weights(config)
    free = answer(make_model(config, weights), [9, 10])
    stopping = make_model(tiny_config(stop_ids=frozenset({free[4]})), weights)
    engine = make_engine(stopping)
    engine.submit(Request("r", [9, 10], SamplingParams(temperature=0, max_tokens=12)))
    outputs = finish(engine)["r"]
    assert ids_of(outputs) == free[: free.index(free[4])]
    assert outputs[-1].finish_reason == "stop"
    assert outputs[-1].completion_tokens == free.index(free[4])


def test_stop_ids_of_a_request(model: Llama) -> None:
    """They end its answer, also where the model's own don't, and are not returned."""
    free = answer(model, [9, 10])
    engine = make_engine(model)
    engine.submit(Request("r", [9, 10], SamplingParams(**GREEDY, stop_token_ids=frozenset({free[4], 5}))))
    outputs = finish(engine)["r"]
    assert ids_of(outputs) == free[: free.index(free[4])]
    assert outputs[-1].finish_reason == "stop"


def test_length_limits(model: Llama) -> None:
    """B046, B244: a prompt of max_seq_len - 1 gets one token, a longer one is refused with both lengths."""
    limit = model.max_seq_len
    assert len(answer(model, [4] * (limit - 1))) == 1
    assert len(answer(model, [4] * (limit - 5), max_tokens=100)) == 5
    engine = make_engine(model)
    with pytest.raises(ValueError, match=f"{limit} tokens, but at most {limit - 1} fit"):
        engine.submit(Request("r", [4] * limit, SamplingParams(**GREEDY)))
    with pytest.raises(ValueError, match="token id 384 is out of range, expected 0 to 383"):
        engine.submit(Request("r", [1, 384], SamplingParams(**GREEDY)))
    with pytest.raises(ValueError, match="at least 1"):
        engine.submit(Request("r", [], SamplingParams(**GREEDY)))
    assert not engine.busy


@report("B218", "meta-llama/llama#869")
def test_scoring_only(model: Llama) -> None:
    """B034, B035, B037, B218, B219: no new token, every prompt token but the first scored."""
    engine = make_engine(model, prefill_chunk=8)
    prompt = list(range(10, 40))
    params = SamplingParams(max_tokens=0, logprobs=True, prompt_logprobs=True, top_logprobs=2)
    engine.submit(Request("r", prompt, params))
    (output,) = finish(engine)["r"]
    assert (output.finish_reason, output.completion_tokens, output.token_ids) == ("length", 0, [])
    assert output.prompt_logprobs is not None
    assert [x.token_id for x in output.prompt_logprobs] == prompt[1:]
    assert all(x.logprob < 0 and len(x.top) == 2 for x in output.prompt_logprobs)


@report("B250", "exo-explore/exo#1908")
@report("B251", "sgl-project/sglang#32775")
def test_long_prompt_does_not_stall_running_streams(model: Llama) -> None:
    """B250, B251: every step that computes a part of a prompt gives the running sequences their token too."""
    engine = make_engine(model, prefill_chunk=16)
    engine.submit(Request("short", [5], SamplingParams(**(GREEDY | {"max_tokens": 30}))))
    engine.step()
    engine.submit(Request("long", list(range(3, 203)), SamplingParams(**GREEDY)))
    for _ in range(12):  # 200 tokens in chunks of at most 16
        assert [o.request_id for o in engine.step()] == ["short"]
    steps = next(n for n in range(10) if {o.request_id for o in engine.step()} == {"short", "long"})
    assert steps < 5


def test_a_chunk_of_a_long_prompt_shrinks_with_what_it_sees() -> None:
    """Attention's share grows with the context, so the time of a step would grow with it."""
    for budget in (16, 128, 512):
        for start in (0, 100, 1000, 5000):
            count = chunk_within(budget, start, 10_000)
            assert 1 <= count <= budget
            assert count == 1 or cost_of(count, start) <= budget + 1
            assert cost_of(count + 2, start) > budget
    assert chunk_within(128, 4000, 10_000) < 30
    assert chunk_within(128, 0, 5) == 5
    assert chunk_within(0, 0, 5) == 0


def test_first_come_first_served(model: Llama) -> None:
    engine = make_engine(model, max_seqs=1)
    for i in range(4):
        engine.submit(Request(str(i), [5 + i], SamplingParams(**(GREEDY | {"max_tokens": 2}))))
    ended = []
    while engine.busy:
        ended += [o.request_id for o in engine.step() if o.finish_reason]
    assert ended == ["0", "1", "2", "3"]


def test_second_turn_computes_only_what_is_new(model: Llama) -> None:
    """A prompt that begins like an earlier one, its answer included, finds those blocks in the cache."""
    engine = make_engine(model)
    first = prompts(1, seed=1, longest=90)[0] + list(range(3, 53))
    engine.submit(Request("1", first, SamplingParams(**(GREEDY | {"max_tokens": 30}))))
    said = ids_of(finish(engine)["1"])
    second = [*first, *said, 7, 8, 9]
    engine.submit(Request("2", second, SamplingParams(**GREEDY)))
    outputs = finish(engine)["2"]
    assert ids_of(outputs) == answer(model, second)
    whole = (len(first) + len(said) - 1) // 16 * 16  # the last token said was never computed
    assert outputs[0].cached_tokens == whole > len(first) - 16
    assert_empty(engine)


def test_choices_share_the_prompt(model: Llama) -> None:
    """The same prompt many times at once is computed once."""
    engine = make_engine(model, kv_cache_tokens=16 * 30, prefill_chunk=32)
    prompt = list(range(5, 165))
    for i in range(8):
        engine.submit(Request(str(i), prompt, SamplingParams(temperature=1.0, seed=i, max_tokens=10, ignore_eos=True)))
    outputs = finish(engine)
    assert [outputs[str(i)][0].cached_tokens for i in range(8)] == [0] + [144] * 7
    for i in range(8):
        assert ids_of(outputs[str(i)]) == answer(model, prompt, temperature=1.0, seed=i, max_tokens=10)
    assert_empty(engine)


def test_shared_beginnings_are_evicted_when_needed(model: Llama) -> None:
    engine = make_engine(model, kv_cache_tokens=16 * 12)
    asked = [[3 + i] * 100 for i in range(6)] * 3
    for i, prompt in enumerate(asked):
        engine.submit(Request(str(i), prompt, SamplingParams(**GREEDY)))
        assert ids_of(finish(engine)[str(i)]) == answer(model, prompt)
    assert_empty(engine)


def test_scored_prompt_is_computed_whole(model: Llama) -> None:
    engine = make_engine(model)
    prompt = list(range(5, 105))
    params = SamplingParams(**(GREEDY | {"logprobs": True, "prompt_logprobs": True}))
    for i in range(2):
        engine.submit(Request(str(i), prompt, params))
        outputs = finish(engine)[str(i)]
        assert outputs[0].cached_tokens == 0
        assert outputs[0].prompt_logprobs is not None
        assert len(outputs[0].prompt_logprobs) == 99


def test_prefix_cache_can_be_off(model: Llama) -> None:
    engine = make_engine(model, prefix_cache=False)
    for i in range(2):
        engine.submit(Request(str(i), list(range(5, 105)), SamplingParams(**GREEDY)))
        assert finish(engine)[str(i)][0].cached_tokens == 0

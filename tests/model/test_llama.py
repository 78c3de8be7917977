"""The model against transformers, against itself on other numbers of ranks, and against other batches."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from generation.engine.engine import Engine, EngineSettings
from generation.interface import Request, SamplingParams
from model.config import CheckpointError
from model.distributed.collectives import Communicator
from model.distributed.parallel import deal, plan_shards
from model.kv_cache import KVCache, make_batch
from model.llama import Llama
from model.loader import load_model
from scripts.benchmark.peers.peer import transformers_model
from tests.helpers.ranks import make_model, on_ranks
from tests.helpers.report import report
from tests.helpers.tiny import random_weights, save_meta, tiny_config, train_sentencepiece

RATIOS = [(4, 4), (8, 2), (8, 1), (9, 3), (12, 4)]
PROMPTS = [[5], [7, 300, 12, 9, 9], list(range(3, 60)), [250, 1, 17] * 9]


def logprobs_of(model: Llama, prompts: list[list[int]], chunk: int = 512) -> list[torch.Tensor]:
    """For each prompt, the log probabilities of its tokens and the greedy continuation's; [] on ranks above 0."""
    engine = Engine(model, EngineSettings(kv_cache_tokens=1024, prefill_chunk=chunk))
    if model.comm.rank != 0:
        engine.follow()
        return []
    params = SamplingParams(max_tokens=8, temperature=0, logprobs=True, prompt_logprobs=True)
    found: dict[str, list[float]] = {str(i): [] for i in range(len(prompts))}
    for i, prompt in enumerate(prompts):
        engine.submit(Request(str(i), prompt, params))
    while engine.busy:
        for output in engine.step():
            found[output.request_id] += [x.logprob for x in [*(output.prompt_logprobs or []), *output.logprobs]]
    engine.heartbeat(stop=True)
    return [torch.tensor(values) for values in found.values()]


def all_logits(model: Llama, ids: list[int]) -> torch.Tensor | None:
    """(len(ids), vocabulary) logits on rank 0."""
    cache = KVCache(model.config, model.shard, 32, model.dtype, model.device)
    n = len(ids)
    blocks = np.arange(1, 32, dtype=np.int32)[None]
    batch = make_batch(np.array(ids), np.array([0]), np.array([n]), blocks, np.arange(n), model.device)
    return model.forward(batch, cache)


@report("B110", "ggml-org/llama.cpp#2376")
@report("B111", "ggml-org/llama.cpp#3364")
@report("B112", "huggingface/transformers#31554")
@pytest.mark.parametrize(("heads", "kv_heads"), RATIOS)
@pytest.mark.parametrize("tied", [False, True])
def test_logits_equal_transformers(heads: int, kv_heads: int, tied: bool) -> None:
    """Also B110, B111, B112: every ratio of heads to key/value heads."""
    config = tiny_config(n_heads=heads, n_kv_heads=kv_heads, tied_output=tied, rope_theta=50000.0)
    weights = random_weights(config)
    ids = torch.randint(0, config.vocab_size, (70,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.inference_mode():
        expected = transformers_model(config, weights)(torch.tensor([ids])).logits[0]
    logits = all_logits(make_model(config, weights), ids)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


@report("B231", "Lightning-AI/litgpt#1663")
@report("B271", "huggingface/transformers#48307")
@report("B272", "vllm-project/vllm#414")
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize(("heads", "kv_heads"), RATIOS)
def test_ranks_agree(heads: int, kv_heads: int, ranks: int) -> None:
    """Groups that don't divide, and more ranks than key/value heads; B231, B271, B272."""
    config = tiny_config(n_heads=heads, n_kv_heads=kv_heads, vocab_size=389, hidden_dim=100)
    weights = random_weights(config)
    ids = list(range(1, 300, 7))
    alone = all_logits(make_model(config, weights), ids)
    shared = on_ranks(ranks, lambda comm: all_logits(make_model(config, weights, comm), ids))
    assert shared[1:] == [None] * (ranks - 1)
    torch.testing.assert_close(shared[0], alone, atol=1e-4, rtol=0)


@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (8, 2), (9, 3), (12, 4), (8, 1)])
def test_eight_ranks(heads: int, kv_heads: int) -> None:
    """Up to a rank for each head, key/value heads on several of them, sizes that don't divide."""
    config = tiny_config(n_heads=heads, n_kv_heads=kv_heads, vocab_size=389, hidden_dim=100, head_dim=8)
    weights = random_weights(config)
    ids = list(range(1, 200, 9))
    alone = all_logits(make_model(config, weights), ids)
    for ranks in (5, 8):
        shared = on_ranks(ranks, lambda comm: all_logits(make_model(config, weights, comm), ids))
        torch.testing.assert_close(shared[0], alone, atol=1e-4, rtol=0)


def test_generation_on_ranks_equals_one() -> None:
    config = tiny_config(n_heads=9, n_kv_heads=3)
    weights = random_weights(config)
    alone = logprobs_of(make_model(config, weights), PROMPTS)
    shared = on_ranks(2, lambda comm: logprobs_of(make_model(config, weights, comm), PROMPTS, chunk=16))[0]
    for a, b in zip(alone, shared, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=0)


@report("B158", "huggingface/transformers#22861")
@report("B159", "turboderp-org/exllamav2#200")
def test_batch_and_chunks_do_not_matter() -> None:
    """B158, B159, B250: a ragged batch and a chunked prompt give what each prompt gets alone."""
    config = tiny_config()
    model = make_model(config, random_weights(config))
    together = logprobs_of(model, PROMPTS, chunk=11)
    for prompt, found in zip(PROMPTS, together, strict=True):
        torch.testing.assert_close(found, logprobs_of(model, [prompt])[0], atol=1e-5, rtol=0)


def test_bfloat16_is_near_float32() -> None:
    config = tiny_config()
    weights = random_weights(config)
    exact = all_logits(make_model(config, weights), PROMPTS[2])
    rough = all_logits(make_model(config, weights, dtype=torch.bfloat16), PROMPTS[2])
    assert exact is not None
    assert rough is not None
    assert rough.dtype == torch.float32
    assert (exact - rough).abs().mean() < 0.02 * exact.std()


def test_deal_is_a_partition() -> None:
    for n, parts, unit in [(9, 2, 1), (3, 2, 1), (1536, 4, 32), (100, 3, 32), (389, 4, 16), (32, 8, 32)]:
        ranges = deal(n, parts, unit)
        assert [i for r in ranges for i in r] == list(range(n))
        assert all(len(r) > 0 for r in ranges)


def test_too_many_ranks_names_the_limit() -> None:
    with pytest.raises(CheckpointError, match=r"nproc-per-node is 5, but the model has 4 heads: use 1 to 4"):
        plan_shards(tiny_config(), 5)


@report("B128", "karpathy/llama2.c#356")
def test_rope_theta_matters() -> None:
    """B128: the configured base is used."""
    config = tiny_config()
    weights = random_weights(config)
    ids = list(range(40, 80))
    other = dataclasses.replace(config, rope_theta=1e6)
    one, two = (all_logits(make_model(c, weights), ids) for c in (config, other))
    assert one is not None
    assert two is not None
    assert (one - two).abs().max() > 1e-2


@report("B009", "meta-llama/llama#415")
@report("B010", "meta-llama/llama#551")
@report("B165", "meta-llama/llama#594")
@report("B166", "meta-llama/llama#665")
@pytest.mark.parametrize("shards", [1, 2, 4])
def test_meta_shards_on_any_number_of_ranks(tmp_path: Path, shards: int) -> None:
    """B009, B010, B013, B165, B166: saved for 1, 2 or 4 ranks, loaded on 1 to 4."""
    config = tiny_config(n_heads=8, n_kv_heads=4)
    weights = random_weights(config)
    save_meta(tmp_path, config, weights, shards=shards)
    train_sentencepiece(tmp_path / "tokenizer.model")
    ids = list(range(3, 100))
    expected = all_logits(make_model(config, weights), ids)
    for ranks in (1, 2, 3, 4):

        def on_rank(comm: Communicator) -> torch.Tensor | None:
            model, _ = load_model(tmp_path, device="cpu", dtype="float32", comm=comm)
            return all_logits(model, ids)

        torch.testing.assert_close(on_ranks(ranks, on_rank)[0], expected, atol=1e-4, rtol=0)


def test_ranks_get_even_work() -> None:
    """9 heads over 3 key/value heads on 2 ranks: whole groups of heads, and the hidden units halved all the same."""
    shards = plan_shards(tiny_config(n_heads=9, n_kv_heads=3, head_dim=64, dim=576, hidden_dim=1536), 2)
    assert [len(s.heads) for s in shards] == [6, 3]
    assert [len(s.hidden) for s in shards] == [768, 768]
    for ranks in (1, 2, 4):
        assert len({len(s.hidden) for s in plan_shards(tiny_config(hidden_dim=512), ranks)}) == 1

"""Packed and quantized weights in the whole engine: what a request gets doesn't depend on how many others run."""

from __future__ import annotations

import random

import pytest
import torch

from generation.engine.engine import Engine, EngineSettings
from generation.interface import Request, SamplingParams
from model.distributed.collectives import Communicator, init_communicator
from model.kernels.linear import packed_kind
from model.llama import Llama
from model.loader import load_weights
from tests.helpers.ranks import Weights, on_ranks
from tests.helpers.tiny import random_weights, tiny_config

CPU = torch.device("cpu")
KINDS = ("native", "int8", "int4")
GREEDY = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True, logprobs=True, prompt_logprobs=True)
Scored = list[tuple[int, float]]
"""Ids with their log probabilities."""


def make_model(kind: str, comm: Communicator | None = None) -> Llama:
    """A tiny model in bfloat16 whose weights are packed as `kind`."""
    if kind == "native" and packed_kind(torch.bfloat16, CPU) != "native":
        pytest.skip("bfloat16 runs on oneDNN here, whose results depend on the number of rows")
    config = tiny_config(head_dim=32, n_heads=6, n_kv_heads=3, hidden_dim=224)
    quantization = None if kind == "native" else kind
    model = Llama(config, comm or init_communicator(CPU), torch.bfloat16, CPU, config.max_seq_len, quantization)
    load_weights(model, Weights(random_weights(config)))  # type: ignore[arg-type]
    return model


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest) -> Llama:
    return make_model(request.param)


def prompts(n: int) -> list[list[int]]:
    rng = random.Random(7)
    return [[rng.randrange(3, 384) for _ in range(rng.randint(1, 90))] for _ in range(n)]


def run(model: Llama, waves: list[list[list[int]]]) -> list[tuple[Scored, Scored]]:
    """(prompt, answer) of each prompt; each wave comes two steps after the one before."""
    engine = Engine(model, EngineSettings(kv_cache_tokens=8192, prefill_chunk=16384))
    found: dict[int, tuple[Scored, Scored]] = {}
    for wave in waves:
        for prompt in wave:
            engine.submit(Request(str(len(found)), prompt, GREEDY))
            found[len(found)] = ([], [])
        for _ in range(2):
            _step(engine, found)
    while engine.busy:
        _step(engine, found)
    return [found[i] for i in range(len(found))]


def _step(engine: Engine, found: dict[int, tuple[Scored, Scored]]) -> None:
    for output in engine.step():
        assert output.error is None
        for kept, scored in zip(found[int(output.request_id)], (output.prompt_logprobs, output.logprobs), strict=True):
            kept += [(x.token_id, x.logprob) for x in scored or ()]


def test_32_at_once_are_bitwise_each_alone(model: Llama) -> None:
    """B158, B159: ids and log probabilities of ragged prompts and their greedy answers."""
    asked = prompts(32)
    together = run(model, [asked[:9], asked[9:20], asked[20:]])
    assert [len(answer) for _, answer in together] == [20] * 32
    for prompt, expected in zip(asked, together, strict=True):
        assert run(model, [[prompt]]) == [expected]


def test_the_number_of_threads_changes_nothing(model: Llama) -> None:
    threads, asked = torch.get_num_threads(), prompts(6)
    try:
        torch.set_num_threads(1)
        alone = run(model, [asked])
        torch.set_num_threads(3)
        assert run(model, [asked]) == alone
    finally:
        torch.set_num_threads(threads)


def _unpacked(model: Llama) -> dict[str, torch.Tensor]:
    """Every quantized matrix, as the numbers that its codes stand for."""
    found = {"output": model.output.packed}
    for i, layer in enumerate(model.layers):
        attention, feed_forward = layer.attention, layer.feed_forward
        found |= {f"{i}.wqkv": attention.wqkv.packed, f"{i}.wo": attention.wo.packed}
        found |= {f"{i}.w13": feed_forward.w13.packed, f"{i}.w2": feed_forward.w2.packed}
    return {
        name: packed.rows(torch.arange(packed.out_features)) for name, packed in found.items() if packed is not None
    }


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_hold_parts_of_the_same_numbers(kind: str, ranks: int) -> None:
    """Where the parts' borders are multiples of 32 inputs, as they are with heads of 32, 64 or 128."""
    whole = make_model(kind)
    expected, config = _unpacked(whole), whole.config
    shared = on_ranks(ranks, lambda comm: (lambda model: (model.shard, _unpacked(model)))(make_model(kind, comm)))
    q, kv, dim = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim, config.head_dim
    for shard, parts in shared:
        heads = torch.arange(shard.heads.start * dim, shard.heads.stop * dim)
        keys = torch.arange(shard.kv_heads.start * dim, shard.kv_heads.stop * dim)
        hidden = torch.tensor(shard.hidden)
        assert torch.equal(parts["output"], expected["output"][torch.tensor(shard.vocab)])
        for i in range(config.n_layers):
            rows = torch.cat((heads, q + keys, q + kv + keys))
            assert torch.equal(parts[f"{i}.wqkv"], expected[f"{i}.wqkv"][rows])
            assert torch.equal(parts[f"{i}.wo"], expected[f"{i}.wo"][:, heads])
            assert torch.equal(parts[f"{i}.w13"], expected[f"{i}.w13"][torch.cat((hidden, config.hidden_dim + hidden))])
            assert torch.equal(parts[f"{i}.w2"], expected[f"{i}.w2"][:, hidden])

"""Temperature, nucleus and the other knobs: what is accepted, what is refused, what they do."""

from __future__ import annotations

import random
from typing import Any

import pytest
import requests
import torch

from generation import sample_top_p
from generation.interface import Request, SamplingParams, Sequence
from generation.sampling import sample
from tests.conformance.asking import GREEDY, byte_id, error_of, refusal, strict_json
from tests.helpers.report import report
from tests.helpers.serving import Server

PROMPT = {"prompt": "The quick brown fox", "max_gen_len": 12, "ignore_eos": True}


def kept(probs: list[float], p: float) -> set[int]:
    """The ids that are ever drawn from the nucleus of mass `p`."""
    torch.manual_seed(0)
    rows = torch.tensor([probs]).repeat(4000, 1)
    return set(sample_top_p(rows, p).flatten().tolist())


@report("B079", "ggml-org/llama.cpp#684")
@report("B080", "ggml-org/ggml#37")
@report("B081", "meta-llama/llama#687")
@report("B082", "suno-ai/bark#270")
@pytest.mark.parametrize("temperature", [0, 0.0, 1e-8])
def test_greedy(server: Server, temperature: float) -> None:
    """Each token is the likeliest after those before it."""
    reply = server.ask({**PROMPT, "temperature": temperature, "top_logprobs": 1})
    assert reply["logprobs"] == [max(top.values()) for top in reply["top_logprobs"]]
    assert len(reply["logprobs"]) == 12


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(
            {"temperature": 1.0, "top_p": 0.0},
            marks=[
                report("B191", "huggingface/text-generation-inference#2228"),
                report("B194", "hiyouga/LlamaFactory#10710"),
            ],
            id="B191, B194",
        ),
        pytest.param(
            {"temperature": 1.0, "top_p": 1e-8},
            marks=report("B193", "huggingface/text-generation-inference#544"),
            id="B193",
        ),
        pytest.param(
            {"temperature": 0.01, "top_p": 0.8, "top_k": 1}, marks=report("B226", "ml-explore/mlx-lm#388"), id="B226"
        ),
    ],
)
def test_nucleus_of_one_is_greedy(server: Server, body: dict[str, Any]) -> None:
    for seed in range(3):
        assert server.ask({**PROMPT, **body, "seed": seed}) == server.ask({**PROMPT, "temperature": 0})


@report("B191", "huggingface/text-generation-inference#2228")
def test_top_p_1_filters_nothing(server: Server) -> None:
    assert server.post({**PROMPT, "top_p": 1.0}).status_code == 200
    assert kept([0.9, 0.09, 0.01], 1.0) == {0, 1, 2}


@report("B194", "hiyouga/LlamaFactory#10710")
def test_zero_is_a_seed_and_a_temperature(server: Server) -> None:
    """Zero is a value: drawn twice with seed 0 the same comes, without a seed something else."""
    drawn = {**PROMPT, "temperature": 1.5, "top_p": 1.0}
    first, again = (server.ask({**drawn, "seed": 0})["generation"] for _ in range(2))
    assert first == again
    assert len({server.ask(drawn)["generation"] for _ in range(4)} - {first}) > 1
    assert server.ask({**PROMPT, "temperature": 0, "seed": 1}) == server.ask({**PROMPT, "temperature": 0, "seed": 2})


@report("B195", "google-deepmind/gemma#790")
@pytest.mark.parametrize("value", [-0.1, 1.1])
def test_top_p_out_of_range(server: Server, value: float) -> None:
    assert refusal(server, {**PROMPT, "top_p": value}, "top_p", str(value), "0 and 1")["param"] == "top_p"
    with pytest.raises(ValueError, match=str(value)):
        sample_top_p(torch.tensor([[0.5, 0.5]]), value)


@report("B196", "vllm-project/vllm#44965")
@pytest.mark.parametrize("value", [-0.1, 3])
def test_temperature_out_of_range(server: Server, value: float) -> None:
    error = refusal(server, {**PROMPT, "temperature": value}, "temperature", str(value), "0 and 2")
    assert error["param"] == "temperature"


@report("B197", "sgl-project/sglang#28153")
@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_are_none(server: Server, value: str) -> None:
    body = f'{{"prompt": "x", "temperature": {value}}}'
    for headers in ({"Content-Type": "application/json"}, {}):
        reply = requests.post(server.url, data=body, headers=headers, timeout=60)
        assert error_of(reply)["param"] == "temperature"
    assert server.ask({"prompt": "x", **GREEDY})


@report("B223", "huggingface/transformers#18976")
def test_nucleus_at_its_boundary() -> None:
    """A token is dropped where the sum before it is greater than p; numbers that floats hold exactly."""
    assert kept([0.5, 0.25, 0.125, 0.125], 0.75) == {0, 1, 2}
    assert kept([0.5, 0.3, 0.1, 0.1], 0.75) == {0, 1}


@report("B224", "Biohub/esm#360")
def test_token_that_crosses_is_kept() -> None:
    assert kept([0.4, 0.3, 0.2, 0.1], 0.8) == {0, 1, 2}
    assert kept([0.4, 0.3, 0.15, 0.1, 0.05], 0.9) == {0, 1, 2, 3}


@report("B225", "NVIDIA/TensorRT-LLM#19485")
def test_sum_that_never_reaches_p() -> None:
    probs = torch.full((1, 1000), 0.0009999)
    assert 0 <= int(sample_top_p(probs, 0.9999999)) < 1000


@report("B193", "huggingface/text-generation-inference#544")
def test_tiny_nucleus_keeps_the_likeliest() -> None:
    assert kept([0.2, 0.5, 0.3], 1e-8) == {1}


@report("B005", "meta-llama/llama#380")
def test_logits_that_are_not_finite_fail_alone() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [0.0, float("nan"), 1.0], [2.0, float("inf"), 0.0], [5.0, 1.0, 0.0]])
    rows = [Sequence(Request(str(i), [0], SamplingParams(temperature=0)), i, [0], random.Random(0)) for i in range(4)]
    assert sample(logits, rows).token_ids == [1, None, None, 0]


@report("B176", "ggml-org/llama.cpp#11738")
def test_loud_sampling_gives_valid_json(server: Server) -> None:
    body = {"prompt": "x", "temperature": 1.5, "top_k": 100, "top_p": 1.0, "max_gen_len": 100, "ignore_eos": True}
    replies = server.ask_all([body | {"seed": seed} for seed in range(8)])
    assert all(reply.status_code == 200 for reply in replies)
    texts = [strict_json(reply.content)["generation"] for reply in replies]
    assert any("�" in text for text in texts)


@report("B214", "ggml-org/llama.cpp#14946")
def test_logit_bias(server: Server) -> None:
    body = {**PROMPT, "temperature": 0, "max_gen_len": 4}
    assert server.ask(body | {"logit_bias": {str(byte_id(ord("A"))): 100}})["generation"] == "AAAA"
    assert (
        server.ask(body | {"logit_bias": {str(i): -100 for i in range(384) if i != byte_id(ord("B"))}})["generation"]
        == "BBBB"
    )
    refusal(server, body | {"logit_bias": {"15043": -100}}, "15043", "383")
    refusal(server, body | {"logit_bias": {"5": -101}}, "-101", "-100")


@report("B215", "abetlen/llama-cpp-python#169")
def test_penalties(server: Server) -> None:
    """A token that every step prefers is left once its repetitions weigh more than the preference."""
    bias = {str(byte_id(ord("A"))): 100, str(byte_id(ord("B"))): 90}
    body = {**PROMPT, "temperature": 0, "logit_bias": bias}
    assert server.ask(body)["generation"] == "A" * 12
    assert set(server.ask(body | {"frequency_penalty": 2})["generation"]) == {"A", "B"}
    refusal(server, body | {"frequency_penalty": 3}, "frequency_penalty", "3", "-2 and 2")
    refusal(server, body | {"presence_penalty": -2.5}, "presence_penalty", "-2.5", "-2 and 2")


@report("B278", "pytorch/serve tp_llama llama-handler.py")
def test_each_request_has_its_own_sampling(server: Server) -> None:
    greedy, drawn, short = server.ask_all(
        [
            {**PROMPT, "temperature": 0},
            {**PROMPT, "temperature": 1.5, "top_p": 1.0, "seed": 3},
            {**PROMPT, "temperature": 0, "max_gen_len": 3, "logprobs": True, "echo": True},
        ]
    )
    assert greedy.json()["generation"] != drawn.json()["generation"]
    assert "logprobs" not in greedy.json()
    assert short.json()["usage"]["completion_tokens"] == 3
    assert short.json()["generation"].startswith("The quick brown fox")
    assert len(short.json()["logprobs"]) == len(short.json()["tokens"])
    for field, value in (("temperature", "hot"), ("top_p", 2), ("max_gen_len", 0), ("logprobs", 3), ("seed", 1.5)):
        assert refusal(server, {**PROMPT, field: value}, field)["param"] == field

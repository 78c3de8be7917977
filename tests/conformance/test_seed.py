"""Seeds belong to a request: neighbors, order and ranks change nothing."""

from __future__ import annotations

from typing import Any

from generation import text_completion
from tests.conformance.asking import LOUD
from tests.helpers.report import report
from tests.helpers.serving import Server

DRAWN = {"prompt": "Hello", "max_gen_len": 12, **LOUD}


@report("B083", "vllm-project/vllm#1595")
@report("B085", "vllm-project/vllm#17524")
def test_order_and_neighbors_change_nothing(server: Server) -> None:
    bodies = [DRAWN | {"seed": seed} for seed in range(12)]
    alone = [server.ask(body)["generation"] for body in bodies]
    assert [reply.json()["generation"] for reply in server.ask_all(bodies)] == alone
    backwards = [reply.json()["generation"] for reply in server.ask_all(bodies[::-1])]
    assert backwards[::-1] == alone


@report("B086", "triton-inference-server/tensorrtllm_backend#468")
def test_different_seeds_differ(server: Server) -> None:
    assert len({server.ask(DRAWN | {"seed": seed})["generation"] for seed in range(8)}) == 8
    unseeded = server.ask_all([DRAWN] * 8)
    assert len({reply.json()["generation"] for reply in unseeded}) == 8


@report("B199", "mlc-ai/web-llm#335")
def test_choices_of_one_seed(server: Server) -> None:
    body = {**DRAWN, "n": 3, "seed": 7, "temperature": 1}
    first, again = server.ask(body), server.ask(body)
    assert first == again
    assert len({choice["generation"] for choice in first}) == 3
    several = server.ask(body | {"prompt": ["Hello", "World"]})
    assert len(several) == 6
    assert several[:3] == first
    assert several[3:] == server.ask(body | {"prompt": "World"})


@report("B087", "vllm-project/vllm#11204")
def test_greedy_is_the_same_each_time(server: Server) -> None:
    body = {"prompt": "The quick brown fox", "temperature": 0, "max_gen_len": 40, "logprobs": True}
    expected = server.ask(body)
    crowd = server.ask_all([body, *[DRAWN] * 7] * 2)
    assert [crowd[i].json()["generation"] for i in (0, 8)] == [expected["generation"]] * 2


@report("B088", "NVIDIA/TensorRT-LLM#12024")
@report("B089", "huggingface/transformers#36634")
def test_ranks_draw_the_same(server: Server, tiny_library: Any) -> None:
    """On two ranks a long drawn answer is the library's on one: no rank went its own way."""
    body = {"prompt": "Hello", "temperature": 0.8, "seed": 11, "max_gen_len": 200, "ignore_eos": True}
    model, tokenizer = tiny_library
    (expected,) = text_completion(model, tokenizer, ["Hello"], 200, temperature=0.8, seed=11, ignore_eos=True)
    assert server.ask(body)["generation"] == expected["generation"]

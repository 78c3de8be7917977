"""Stop strings: cut exactly, never shown, nothing lost."""

from __future__ import annotations

from typing import Any

import pytest

from generation.detokenizer import StopMatcher
from tests.conformance.asking import GREEDY
from tests.helpers.report import report
from tests.helpers.serving import Server
from tests.helpers.sse import read_stream


@pytest.mark.parametrize(
    ("stops", "pieces", "shown"),
    [
        pytest.param(
            ["DEFGHIJ"],
            ["ABC", "DEF", "GHI", "J"],
            ["ABC", "", "", "", ""],
            marks=report("B073", "vllm-project/vllm#3574"),
            id="B073",
        ),
        pytest.param(
            ["DEFGHIJ"],
            ["ABC", "DEF", "x"],
            ["ABC", "", "DEFx", ""],
            marks=report("B073", "vllm-project/vllm#3574"),
            id="B073 other",
        ),
        pytest.param(
            ["\nUser:"],
            ["hi", "\nUser", ":"],
            ["hi", "", "", ""],
            marks=report("B074", "SharpAI/SwiftLM#126"),
            id="B074",
        ),
        pytest.param(
            ["\nUser:"],
            ["hi", "\nUser"],
            ["hi", "", "\nUser"],
            marks=report("B074", "SharpAI/SwiftLM#126"),
            id="B074 at the end",
        ),
        pytest.param(
            ["x" * 40],
            ["aaaa", "bx", "c"],
            ["aaaa", "b", "xc", ""],
            marks=report("B075", "smg-project/smg#2203"),
            id="B075",
        ),
        pytest.param(["ma d"], ["gamma delta"], ["gam", ""], marks=report("B076", "mzau/mlx-knife#68"), id="B076"),
        pytest.param(
            ["ask"], ["b", "as"], ["b", "", "as"], marks=report("B077", "LostRuins/koboldcpp#1031"), id="B077"
        ),
        pytest.param(
            ["\n", "Alice:"],
            [" Alice", "!"],
            [" ", "Alice!", ""],
            marks=report("B247", "ggml-org/llama.cpp#10914"),
            id="B247",
        ),
        pytest.param(["\n"], ["\n", "more"], ["", "", ""], marks=report("B181", "ggml-org/llama.cpp#7038"), id="B181"),
    ],
)
def test_pieces(stops: list[str], pieces: list[str], shown: list[str]) -> None:
    matcher = StopMatcher(stops)
    assert [*(matcher.feed(piece) for piece in pieces), matcher.finish()] == shown


@pytest.fixture
def text(server: Server) -> str:
    """What is said without a stop."""
    found: str = server.ask({"prompt": "Hello", **GREEDY, "max_gen_len": 24, "ignore_eos": True})["generation"]
    assert len(found) > 12
    return found


def ask(server: Server, **fields: Any) -> dict[str, Any]:
    """A plain answer; the streamed one is the same."""
    body = {"prompt": "Hello", **GREEDY, "max_gen_len": 24, "ignore_eos": True, **fields}
    reply: dict[str, Any] = server.ask(body)
    (choice,) = read_stream(server.post(body | {"stream": True}))
    assert (choice.text, choice.finish_reason) == (reply["generation"], reply["finish_reason"])
    return reply


@report("B073", "vllm-project/vllm#3574")
@report("B076", "mzau/mlx-knife#68")
@report("B248", "ai-dynamo/dynamo#12562")
@pytest.mark.parametrize("length", [1, 2, 5, 9])
def test_text_is_cut_before_the_stop(server: Server, text: str, length: int) -> None:
    for start in range(0, len(text) - length, 4):
        stop = text[start : start + length]
        reply = ask(server, stop=[stop])
        assert reply["generation"] == text[: text.index(stop)]
        assert reply["finish_reason"] == "stop"


@report("B077", "LostRuins/koboldcpp#1031")
@report("B074", "SharpAI/SwiftLM#126")
def test_beginning_of_a_stop_at_the_end_is_kept(server: Server, text: str) -> None:
    reply = ask(server, stop=[text[-3:] + "never"])
    assert reply["generation"] == text
    assert reply["finish_reason"] == "length"


@report("B181", "ggml-org/llama.cpp#7038")
@report("B245", "lm-sys/FastChat#1048")
def test_stop_at_once(server: Server, text: str) -> None:
    reply = ask(server, stop=["never said", text[0]], top_logprobs=10)
    assert (reply["generation"], reply["tokens"], reply["logprobs"], reply["top_logprobs"]) == ("", [], [], [])
    assert reply["finish_reason"] == "stop"


@report("B109", "ggml-org/llama.cpp#28711")
@report("B163", "meta-llama/llama#969")
def test_what_ended_the_answer(server: Server) -> None:
    """A model that never ends by itself: its limit, the context or a stop string ends it, each under its name."""
    body = {"prompt": "Hello", "temperature": 0, "ignore_eos": True}
    limit = server.ask(body | {"max_gen_len": 3})
    default = server.ask(body)
    context = server.ask(body | {"max_gen_len": 5000})
    assert [r["finish_reason"] for r in (limit, default, context)] == ["length"] * 3
    assert limit["usage"]["completion_tokens"] == 3
    assert context["usage"]["total_tokens"] == 256
    assert server.ask(body | {"stop": default["generation"][5]})["finish_reason"] == "stop"

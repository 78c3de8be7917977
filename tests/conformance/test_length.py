"""The context: what fits, what is cut, what is refused, and what the answer says of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from handler.settings import HandlerSettings
from tests.conformance.asking import CONTEXT, GREEDY, refusal
from tests.helpers.report import report
from tests.helpers.serving import Server

LONG: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


def counts(reply: Any) -> tuple[str, int]:
    return reply["finish_reason"], reply["usage"]["completion_tokens"]


@report("B045", "vllm-project/vllm#525")
@report("B047", "sgl-project/sglang#436")
@report("B243", "huggingface/text-generation-inference#1108")
@report("B287", "ggml-org/llama.cpp#17284")
@pytest.mark.parametrize("tokens", [256, 300, 2664])
def test_prompt_beyond_the_context(server: Server, tokens: int) -> None:
    error = refusal(server, {"prompt": [5] * tokens, "max_gen_len": 1}, f"{tokens} tokens", "255", "context of 256")
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == "prompt"


@report("B287", "ggml-org/llama.cpp#17284")
def test_history_beyond_the_context(server: Server) -> None:
    turn = [{"role": "user", "content": "Once more, please."}, {"role": "assistant", "content": "Once more."}]
    error = refusal(server, {"messages": [*turn * 20, turn[0]]}, "tokens", "context of 256")
    assert error["param"] == "messages"


@report("B046", "tenstorrent/tt-metal#15918")
@pytest.mark.parametrize(("tokens", "room"), [(254, 2), (255, 1)])
def test_prompt_at_the_limit(server: Server, tokens: int, room: int) -> None:
    assert counts(server.ask({"prompt": [5] * tokens, **LONG, "max_gen_len": 50})) == ("length", room)


@report("B099", "modular/modular#6673")
@report("B241", "huggingface/text-generation-inference#65")
@report("B242", "huggingface/text-generation-inference#2421")
@report("B244", "lm-sys/FastChat#2544")
@report("B033", "huggingface/transformers#40479")
@report("B044", "meta-llama/llama#645")
@pytest.mark.parametrize("asked", [100_000_000, 3000, None])
def test_what_fits_is_answered(server: Server, asked: int | None) -> None:
    reply = server.ask({"prompt": [5] * 6, **LONG, "max_gen_len": asked})
    assert counts(reply) == ("length", CONTEXT - 6)
    assert reply["usage"]["total_tokens"] == CONTEXT


@report("B044", "meta-llama/llama#645")
def test_default_context_is_the_models() -> None:
    assert HandlerSettings.model_validate({"checkpoint": Path("x")}).max_seq_len is None


@report("B106", "ggml-org/llama.cpp#7198")
@report("B190", "meta-llama/codellama#89")
@report("B286", "lmstudio-ai/lmstudio-bug-tracker#2335")
@pytest.mark.parametrize("most", [1, 50])
def test_counts_at_the_limit(server: Server, most: int) -> None:
    assert counts(server.ask({"prompt": "Hello", **LONG, "max_gen_len": most})) == ("length", most)
    chat = {"messages": [{"role": "user", "content": "Hello"}], **LONG, "max_gen_len": most}
    assert counts(server.ask(chat)) == ("length", most)


@report("B101", "ROCm/ATOM#2188")
@pytest.mark.parametrize("most", [0, -1])
def test_limits_that_allow_nothing(server: Server, most: int) -> None:
    assert refusal(server, {"prompt": "x", "max_gen_len": most}, str(most), "at least 1")["param"] == "max_gen_len"


@report("B221", "meta-llama/llama#1043")
def test_more_dialogs_than_fit(server: Server) -> None:
    """Six are answered, however many run at a time; beyond the limit of a request it is named."""
    dialog = [{"role": "user", "content": "Hello"}]
    replies = server.ask({"dialogs": [dialog] * 6, **GREEDY})
    assert len(replies) == 6
    assert all(reply == replies[0] for reply in replies)
    assert refusal(server, {"dialogs": [dialog] * 65}, "65", "at most 64")["param"] == "dialogs"


@report("B139", "pytorch/serve#730")
@report("B160", "meta-llama/llama-cookbook#163")
def test_list_of_prompts_is_one_reply(server: Server) -> None:
    prompts = ["Hello", "The quick brown fox", "a", "", "One, two", "x" * 40, "Where?", "Z"]
    replies = server.ask({"prompt": prompts, **GREEDY})
    assert replies == [server.ask({"prompt": prompt, **GREEDY}) for prompt in prompts]

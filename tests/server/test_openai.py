"""The OpenAI routes of real servers, through the official client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import requests
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion

from generation import generate, load
from tests.helpers.openai_shapes import check_chat_stream, strict
from tests.helpers.readme_examples import README, blocks
from tests.helpers.report import report
from tests.helpers.serving import Server, until

QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
TIPS: list[Any] = [{"role": "user", "content": "Give me three tips for healthy eating."}]


def base_url(server: Server) -> str:
    return f"{server.url}/1.0/v1"


@pytest.fixture
def client(demo_server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=base_url(demo_server), api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def tiny(tiny_server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=base_url(tiny_server), api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def library(demo_checkpoint: Path) -> Any:
    return load(demo_checkpoint, device="cpu", dtype="float32")


def test_models(client: openai.OpenAI) -> None:
    """B152, B202."""
    (model,) = client.models.list().data
    strict(Model, model.model_dump())
    assert model.id == "llama2"
    assert client.models.retrieve("llama2") == model
    for unknown in ("gpt-4", "meta/llama 2"):
        with pytest.raises(openai.NotFoundError) as caught:
            client.models.retrieve(unknown)
        assert caught.value.code == "model_not_found"
        assert unknown in caught.value.message


def test_chat(client: openai.OpenAI) -> None:
    """B107, B152, B183: known answer, shape, log probabilities."""
    reply = client.chat.completions.create(
        model="llama2", messages=QUESTION, temperature=0, logprobs=True, top_logprobs=3
    )
    strict(ChatCompletion, reply.model_dump(exclude_unset=True))
    (choice,) = reply.choices
    assert choice.message.content == "The capital of France is Paris."
    assert choice.finish_reason == "stop"
    assert reply.model == "llama2"
    assert reply.id.startswith("chatcmpl-")
    assert reply.usage is not None
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + 7
    assert choice.logprobs is not None
    content = choice.logprobs.content or []
    assert len(content) == reply.usage.completion_tokens == 7
    assert "".join(token.token for token in content) == choice.message.content
    for token in content:
        assert bytes(token.bytes or []).decode() == token.token
        assert len(token.top_logprobs) == 3
        best = token.top_logprobs[0]  # greedy: the token itself
        assert (best.token, best.bytes, best.logprob) == (token.token, token.bytes, token.logprob)
        assert token.logprob < 0


def test_chat_stream_equals_whole(client: openai.OpenAI) -> None:
    """B098, B184, B203, B248: order of chunks, usage at the end, the same text and as many log probabilities."""
    body: dict[str, Any] = {"model": "llama2", "messages": TIPS, "temperature": 0, "max_tokens": 30, "logprobs": True}
    whole = client.chat.completions.create(**body)
    chunks = list(client.chat.completions.create(**body, stream=True, stream_options={"include_usage": True}))
    assert whole.usage is not None
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 30
    logprobs = [c.choices[0].logprobs for c in chunks[:-1]]
    tokens = [token for scores in logprobs if scores is not None for token in scores.content or []]
    assert whole.choices[0].logprobs is not None
    assert tokens == whole.choices[0].logprobs.content
    assert whole.choices[0].finish_reason == chunks[-2].choices[0].finish_reason == "length"
    assert check_chat_stream(chunks, 1, usage=True) == [whole.choices[0].message.content]


def test_json(client: openai.OpenAI) -> None:
    """An answer of a form, whole and streamed."""
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "large": {"type": "boolean"}},
        "required": ["city", "large"],
        "additionalProperties": False,
    }
    body: dict[str, Any] = {
        "model": "llama2", "messages": QUESTION, "temperature": 0,
        "response_format": {"type": "json_schema", "json_schema": {"name": "city", "schema": schema, "strict": True}},
    }  # fmt: skip
    whole = client.chat.completions.create(**body).choices[0]
    assert whole.finish_reason == "stop"
    value = json.loads(whole.message.content or "")
    assert set(value) == {"city", "large"}
    assert isinstance(value["large"], bool)
    assert check_chat_stream(list(client.chat.completions.create(**body, stream=True)), 1) == [whole.message.content]


@report("B034", "ggml-org/llama.cpp#27174")
@report("B035", "BerriAI/litellm#699")
def test_completion_is_scored_as_the_model_scores(client: openai.OpenAI, library: Any) -> None:
    """B034, B035, B038, B218: a prompt's log probabilities, as evaluations of models ask for them."""
    model, tokenizer = library
    prompt = "The capital of France is Paris. 你好 😀"
    reply = client.completions.create(model="llama2", prompt=prompt, max_tokens=0, echo=True, logprobs=2)
    strict(Completion, reply.model_dump(exclude_unset=True))
    (choice,) = reply.choices
    assert choice.text == prompt
    assert choice.finish_reason == "length"
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 0
    assert choice.logprobs is not None
    tokens, offsets = choice.logprobs.tokens or [], choice.logprobs.text_offset or []
    assert "".join(tokens) == prompt
    assert offsets == [len("".join(tokens[:i])) for i in range(len(tokens))]
    assert len(tokens) == reply.usage.prompt_tokens == len(choice.logprobs.top_logprobs or [])
    ids = tokenizer.encode(prompt, bos=False, eos=False)
    _, expected = generate(model, [ids], 1, temperature=0, logprobs=True, echo=True)
    assert expected is not None
    scores = choice.logprobs.token_logprobs or []
    assert scores[0] is None
    assert scores[1:] == pytest.approx(expected[0][1 : len(ids)], abs=1e-3)


def test_completion_of_all_prompt_forms(tiny: openai.OpenAI, tiny_library: Any) -> None:
    """B206: text, texts, ids, lists of ids; each prompt gets what it would get alone."""
    _, tokenizer = tiny_library
    texts = ["Hello", "The quick brown fox"]
    ids = [tokenizer.encode(text, bos=True, eos=False) for text in texts]
    how: dict[str, Any] = {"model": "llama2", "temperature": 0, "max_tokens": 12}
    alone = [tiny.completions.create(prompt=text, **how).choices[0].text for text in texts]
    for prompt in (texts, ids):
        reply = tiny.completions.create(prompt=prompt, **how)
        assert [choice.text for choice in reply.choices] == alone
        assert [choice.index for choice in reply.choices] == [0, 1]
    assert tiny.completions.create(prompt=ids[1], **how).choices[0].text == alone[1]


def test_completion_stream_equals_whole(tiny: openai.OpenAI) -> None:
    """B199, B039: choices of two prompts, seeded, with echo and log probabilities; mostly broken UTF-8."""
    body: dict[str, Any] = {
        "model": "llama2", "prompt": ["Hello 你", "World"], "n": 2, "seed": 7, "max_tokens": 20, "echo": True,
        "logprobs": 3, "extra_body": {"ignore_eos": True, "top_k": -1, "min_p": 0.0},
    }  # fmt: skip
    whole = tiny.completions.create(**body)
    assert len({choice.text for choice in whole.choices}) == 4
    assert tiny.completions.create(**body).choices == whole.choices
    texts, tokens, offsets = (["" for _ in range(4)], [[] for _ in range(4)], [[] for _ in range(4)])  # type: ignore[var-annotated]
    for chunk in tiny.completions.create(**body, stream=True):
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
        if choice.logprobs is not None:
            tokens[choice.index] += choice.logprobs.tokens or []
            offsets[choice.index] += choice.logprobs.text_offset or []
    for choice in whole.choices:
        assert choice.logprobs is not None
        assert texts[choice.index] == choice.text == "".join(choice.logprobs.tokens or [])
        assert tokens[choice.index] == choice.logprobs.tokens
        assert offsets[choice.index] == choice.logprobs.text_offset


def test_async_client_and_concurrency(tiny_server: Server) -> None:
    """B185: sixteen at once, half of them streams, equal one after the other."""

    async def ask(client: openai.AsyncOpenAI, i: int, *, stream: bool) -> str:
        body: Any = {
            "model": "llama2", "messages": [{"role": "user", "content": f"{i} foxes"}], "seed": i, "max_tokens": 15
        }  # fmt: skip
        if not stream:
            return (await client.chat.completions.create(**body)).choices[0].message.content or ""
        chunks = [chunk async for chunk in await client.chat.completions.create(**body, stream=True)]
        return check_chat_stream(chunks, 1)[0]

    async def main() -> None:
        async with openai.AsyncOpenAI(base_url=base_url(tiny_server), api_key="none", max_retries=0) as client:
            assert [model.id async for model in client.models.list()] == ["llama2"]
            together = await asyncio.gather(*[ask(client, i, stream=i % 2 == 0) for i in range(16)])
            assert together == [await ask(client, i, stream=i % 2 == 1) for i in range(16)]

    asyncio.run(main())


def test_tokens(demo_server: Server, library: Any) -> None:
    """B103: what a prompt costs, without asking for an answer."""
    _, tokenizer = library
    url = base_url(demo_server)
    reply = requests.post(f"{url}/tokenize", json={"model": "llama2", "prompt": "Hello 你好"}, timeout=60).json()
    assert reply["tokens"] == tokenizer.encode("Hello 你好", bos=False, eos=False)
    assert (reply["count"], reply["max_model_len"]) == (len(reply["tokens"]), 8192)
    back = requests.post(f"{url}/detokenize", json={"tokens": reply["tokens"]}, timeout=60)
    assert back.json() == {"prompt": "Hello 你好"}
    chat = requests.post(f"{url}/tokenize", json={"messages": QUESTION}, timeout=60).json()
    assert chat["count"] == demo_server.ask({"dialog": QUESTION, "max_gen_len": 1})["usage"]["prompt_tokens"]


def test_mistakes_are_what_the_client_expects(tiny: openai.OpenAI) -> None:
    """B101, B200, B201, B205, B207: exceptions of the right class, with message, param and code."""
    messages: list[Any] = [{"role": "user", "content": "x"}]
    with pytest.raises(openai.BadRequestError) as bad:
        tiny.chat.completions.create(model="llama2", messages=messages, max_tokens=0)
    assert bad.value.param == "max_tokens"
    assert bad.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError, match="bogus"):
        tiny.chat.completions.create(model="llama2", messages=messages, extra_body={"bogus": 1})
    with pytest.raises(openai.BadRequestError, match="n is 0"):
        tiny.chat.completions.create(model="llama2", messages=messages, stream=True, n=0)
    with pytest.raises(openai.BadRequestError, match="tools"):
        tiny.chat.completions.create(
            model="llama2", messages=messages, tools=[{"type": "function", "function": {"name": "f"}}]
        )
    with pytest.raises(openai.BadRequestError) as long:
        tiny.completions.create(model="llama2", prompt=[5] * 300)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError) as other:
        tiny.chat.completions.create(model="gpt-4", messages=messages)
    assert other.value.code == "model_not_found"


def test_example_of_the_readme(demo_server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = blocks(README, "py")
    exec(compile(block.text.replace("http://127.0.0.1:8080", demo_server.run.url), "README.md", "exec"), {})
    assert capsys.readouterr().out == "The capital of France is Paris.\n" + "The capital of France is Paris."


def test_client_may_leave_a_stream(tiny_server: Server, tiny: openai.OpenAI) -> None:
    """B027: what it asked for does not go on."""
    messages: list[Any] = [{"role": "user", "content": "x"}]
    with tiny.chat.completions.create(model="llama2", messages=messages, stream=True, n=4) as stream:
        next(iter(stream))
    until(lambda: tiny_server.health()["running"] == 0)

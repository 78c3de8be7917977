"""Replies of the OpenAI routes, held against the official client's own types."""

from __future__ import annotations

import json
from typing import Any, TypeVar

import pydantic
from openai.types import Completion
from openai.types.chat import ChatCompletionChunk

Model = TypeVar("Model", bound=pydantic.BaseModel)


def strict(model: type[Model], value: dict[str, Any]) -> Model:
    """`value` as the client's type: every field of the right type, none that the type doesn't know.

    The one exception are the nulls of an echoed prompt's first token, which OpenAI sends too.
    """
    value = json.loads(json.dumps(value))
    if model is Completion:
        for choice in value["choices"]:
            scores = choice["logprobs"] or {}
            for key in ("token_logprobs", "top_logprobs"):
                if scores.get(key) and scores[key][0] is None:
                    del scores[key][0]
    parsed = model.model_validate(value, strict=True)
    _no_extra(parsed)
    return parsed


def _no_extra(value: Any) -> None:
    if isinstance(value, pydantic.BaseModel):
        assert not value.model_extra, value.model_extra
        for name in type(value).model_fields:
            _no_extra(getattr(value, name))
    elif isinstance(value, list):
        for item in value:
            _no_extra(item)


def chunks_of(stream: str, model: type[Model]) -> list[Model]:
    """The chunks of a whole stream, which ends with [DONE]."""
    blocks = stream.split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""]
    values = [json.loads(block.removeprefix("data: ")) for block in blocks[:-2] if not block.startswith(":")]
    return [strict(model, value) for value in values]


def check_chat_stream(chunks: list[ChatCompletionChunk], choices: int, *, usage: bool = False) -> list[str]:
    """The text of each choice; the order of the chunks is checked."""
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
    if usage:
        last = chunks.pop()
        assert last.choices == []
        assert last.usage is not None
    texts: dict[int, list[str]] = {}
    ended: set[int] = set()
    for chunk in chunks:
        assert chunk.usage is None
        assert ("usage" in chunk.model_fields_set) == usage
        (choice,) = chunk.choices
        assert choice.index not in ended
        if choice.index not in texts:
            assert choice.delta.model_dump(exclude_unset=True) == {"role": "assistant", "content": ""}
            texts[choice.index] = []
        elif choice.finish_reason is not None:
            assert choice.delta.model_dump(exclude_unset=True) == {}
            ended.add(choice.index)
        else:
            assert set(choice.delta.model_dump(exclude_unset=True)) == {"content"}
            texts[choice.index].append(choice.delta.content or "")
    assert sorted(texts) == sorted(ended) == list(range(choices))
    return ["".join(texts[i]) for i in range(choices)]

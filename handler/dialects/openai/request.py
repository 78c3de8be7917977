"""The fields of requests to the OpenAI routes, checked. Build each with its `read`.

As with OpenAI's own API, null is the same as absent, and a field that isn't known is refused by name. Fields that have
no effect here are accepted; those that ask for what this server can't do are refused, unless their value asks for
nothing.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator

from handler.dialects.openai.messages import messages_of
from handler.errors import InvalidRequest
from handler.requests.body import Body
from handler.requests.fields import BOOL, EchoField, PromptField, SharedFields, checked, is_id
from handler.requests.messages import limited, shorten

NO_EFFECT = frozenset(
    {
        "metadata", "parallel_tool_calls", "prediction", "prompt_cache_key", "prompt_cache_options",
        "prompt_cache_retention", "safety_identifier", "service_tier", "store", "user", "verbosity",
        "spaces_between_special_tokens",
    }
)  # fmt: skip
# Field -> the values that ask for nothing.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    # OpenAI's
    "audio": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "moderation": (),
    "reasoning_effort": ("none",),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "web_search_options": (),
    # vLLM's
    "bad_words": ([],),
    "include_stop_str_in_output": (False,),
    "min_tokens": (0,),
    "skip_special_tokens": (True,),
    "use_beam_search": (False,),
}
FOREIGN = {
    "max_gen_len": "max_tokens",
    "max_new_tokens": "max_tokens",
    "max_length": "max_tokens",
    "dialog": "messages",
    "inputs": "prompt",
    "stop_sequences": "stop",
}

Fields = TypeVar("Fields", bound="OpenAIFields")


def _stream_options(value: Any) -> bool:
    """Whether the usage is to be told in the end."""
    if not isinstance(value, dict):
        raise ValueError(f' is {shorten(value)}, expected an object like {{"include_usage": true}}')
    for key, item in value.items():
        # include_obfuscation adds random characters that hide a token's length on the way; there are none here.
        if key not in ("include_usage", "include_obfuscation"):
            raise ValueError(f".{key[:50]} is not a known field, expected include_usage")
        if not isinstance(item, bool) and item is not None:
            raise ValueError(f".{key} is {shorten(item)}, expected {BOOL}")
    return bool(value.get("include_usage"))


def _stop_token_ids(value: Any) -> frozenset[int]:
    if not isinstance(value, list) or not all(is_id(item) and item >= 0 for item in value):
        raise ValueError(f" is {shorten(value)}, expected a list of token ids")
    return frozenset(value)


def _response_format(value: Any) -> dict[str, Any] | None:
    """None for plain text."""
    kinds = ("text", "json_object", "json_schema")
    if not isinstance(value, dict) or value.get("type") not in kinds:
        raise ValueError(f" is {shorten(value)}, expected an object whose type is one of {', '.join(kinds)}")
    return None if value["type"] == "text" else value


def _all(value: Any) -> Any:
    """vLLM's -1: no limit."""
    return 0 if is_id(value) and value == -1 else value


def _alternatives(value: Any) -> Any:
    """`logprobs` of a completion is a number; a boolean is what chat has under this name."""
    return (1 if value else None) if isinstance(value, bool) else value


class OpenAIFields(BaseModel):
    """What all requests have: the model's name, and the way they are read."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)

    KEEP_NULL: ClassVar[frozenset[str]] = frozenset()
    """Fields of which null says something else than their absence."""

    model: str | None = Field(None, description="the model's name as a string")

    @classmethod
    def read(cls: type[Fields], body: Body) -> Fields:
        """Check a parsed body.

        Raises:
            InvalidRequest: naming each wrong field, its value and the limit.
        """
        if not isinstance(body, dict):
            raise InvalidRequest(f"the body is {shorten(body)}, expected a JSON object")
        fields = {}
        for name, value in body.items():
            if name in cls.model_fields:
                if value is not None or name in cls.KEEP_NULL:
                    fields[name] = value
            elif name in UNSUPPORTED:
                if value is not None and value not in UNSUPPORTED[name]:
                    raise InvalidRequest(
                        f"{name} is {shorten(value)}, which is not supported by this server; leave it out", param=name
                    )
            elif name not in NO_EFFECT:
                fields[name] = value  # refused with the others that are wrong
        asked = checked(cls, fields, {}, FOREIGN)
        asked.check_together()
        return asked

    def check_together(self) -> None:
        """Rules over several fields."""


class GenerationFields(SharedFields, OpenAIFields):
    """What chat and text completion have in common. Sampling is at OpenAI's defaults."""

    temperature: float = limited(1.0, 0, 2)
    top_p: float = limited(1.0, 0, 1)
    top_k: Annotated[int, BeforeValidator(_all)] = limited(0, 0, what="-1 or an integer")
    stop_token_ids: Annotated[frozenset[int], PlainValidator(_stop_token_ids)] = frozenset()
    stream_options: Annotated[bool, PlainValidator(_stream_options)] = False
    """Whether it asks for the usage in the end."""

    def check_together(self) -> None:
        if "stream_options" in self.model_fields_set and not self.stream:
            raise InvalidRequest("stream_options is given, which needs stream: true", param="stream_options")


class ChatRequest(GenerationFields):
    """POST v1/chat/completions."""

    messages: Annotated[list[Any], PlainValidator(messages_of)] = Field(description="a list of messages")
    max_tokens: int | None = Field(None, ge=1, description="an integer of at least 1")
    max_completion_tokens: int | None = Field(None, ge=1, description="an integer of at least 1")
    logprobs: bool = Field(False, description=BOOL)
    top_logprobs: int = limited(0, 0, 20, what="an integer")
    response_format: Annotated[dict[str, Any] | None, PlainValidator(_response_format)] = None
    continue_final_message: bool = Field(False, description=BOOL)
    add_generation_prompt: bool | None = Field(None, description=BOOL)

    @property
    def most(self) -> int | None:
        """Most new tokens; None = what fits."""
        return self.max_completion_tokens if self.max_tokens is None else self.max_tokens

    def check_together(self) -> None:
        super().check_together()
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise InvalidRequest(
                f"max_tokens is {self.max_tokens} and max_completion_tokens is {self.max_completion_tokens}, "
                "expected one of them",
                param="max_tokens",
            )
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest(
                f"top_logprobs is {self.top_logprobs}, which needs logprobs: true", param="top_logprobs"
            )
        if self.add_generation_prompt is self.continue_final_message:
            raise InvalidRequest(
                f"add_generation_prompt and continue_final_message are both {str(self.add_generation_prompt).lower()}, "
                "expected one of them to be true",
                param="add_generation_prompt",
            )


class CompletionRequest(GenerationFields):
    """POST v1/completions."""

    KEEP_NULL = frozenset({"max_tokens"})

    prompt: PromptField = Field(description="a string, a list of strings, token ids or a list of such lists")
    max_tokens: int | None = Field(16, ge=0, description="an integer of at least 0, or null for what fits")
    best_of: int | None = Field(None, ge=1, description="the same as n")
    echo: EchoField = Field(False, description=BOOL)
    logprobs: Annotated[int | None, BeforeValidator(_alternatives)] = Field(
        None, ge=0, le=20, description="an integer between 0 and 20"
    )

    def check_together(self) -> None:
        super().check_together()
        if self.max_tokens == 0 and not self.echo:
            raise InvalidRequest(
                "max_tokens is 0, expected an integer of at least 1 (0 only with echo: true)", param="max_tokens"
            )
        if self.best_of not in (None, self.n):
            raise InvalidRequest(
                f"best_of is {self.best_of}, expected n, which is {self.n}: every choice is returned", param="best_of"
            )


class TokenizeRequest(OpenAIFields):
    """POST v1/tokenize."""

    prompt: str | None = Field(None, description="a string")
    messages: Annotated[list[Any] | None, PlainValidator(messages_of)] = None
    add_special_tokens: bool = Field(True, description=BOOL)
    continue_final_message: bool = Field(False, description=BOOL)

    def check_together(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            got = "none of them" if self.prompt is None else "both"
            raise InvalidRequest(f"got {got}, expected exactly one of prompt and messages", param="prompt")


class DetokenizeRequest(OpenAIFields):
    """POST v1/detokenize."""

    tokens: list[int] = Field(description="a list of token ids")

"""The fields of one request of the native route, checked. `parse_body` gives what `NativeRequest.read` takes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator, PrivateAttr

from generation.interface import Dialog, Message
from handler.errors import InvalidRequest
from handler.requests.body import Body, parse_body
from handler.requests.fields import BOOL, EchoField, PromptField, Prompts, SharedFields, checked
from handler.requests.messages import limited, shorten
from handler.requests.structured import FIELDS

__all__ = ["Body", "Mode", "NativeRequest", "Prompts", "parse_body"]

Mode = Literal["text_completion", "chat"]

ALIASES = {"messages": "dialog", "max_new_tokens": "max_gen_len"}
# What other servers call our fields; only used to say what may have been meant.
FOREIGN = {
    "max_tokens": "max_gen_len",
    "max_completion_tokens": "max_gen_len",
    "max_length": "max_gen_len",
    "text": "prompt",
    "inputs": "prompt",
    "input": "prompt",
    "num_return_sequences": "n",
    "stop_sequences": "stop",
    "random_seed": "seed",
}


def _dialog(value: Any, path: str = "") -> Dialog:
    """Shape only; the order of roles and forbidden markers are the chat format's business."""
    if not isinstance(value, list) or not value:
        raise ValueError(f'{path} is {shorten(value)}, expected a non-empty list of {{"role", "content"}} objects')
    return [_message(item, f"{path}[{i}]") for i, item in enumerate(value)]


def _message(value: Any, path: str) -> Message:
    if not isinstance(value, dict):
        raise ValueError(f'{path} is {shorten(value)}, expected an object with "role" and "content"')
    for key in value:
        if key not in ("role", "content"):
            raise ValueError(f'{path}.{key[:50]} is not a known field, expected only "role" and "content"')
    for key in ("role", "content"):
        if key not in value:
            raise ValueError(f"{path}.{key} is missing")
    if value["role"] not in ("system", "user", "assistant"):
        raise ValueError(f"{path}.role is {shorten(value['role'])}, expected 'system', 'user' or 'assistant'")
    if not isinstance(value["content"], str):
        raise ValueError(f"{path}.content is {shorten(value['content'])}, expected a string")
    return Message(role=value["role"], content=value["content"])


def _dialogs(value: Any) -> list[Dialog]:
    if not isinstance(value, list) or not value:
        raise ValueError(f" is {shorten(value)}, expected a non-empty list of dialogs")
    return [_dialog(item, f"[{i}]") for i, item in enumerate(value)]


class NativeRequest(SharedFields):
    """One request of the native route. Build it with `read`, which turns every mistake into an InvalidRequest."""

    prompt: PromptField = None
    # Really `Dialog`, but pydantic looks into the type and refuses typing's TypedDict before Python 3.12.
    dialog: Annotated[list[Any] | None, PlainValidator(_dialog)] = None
    dialogs: Annotated[list[list[Any]] | None, PlainValidator(_dialogs)] = None
    mode: Mode | None = Field(None, description="'text_completion' or 'chat'")
    continue_final_message: bool = Field(False, description=BOOL)
    max_gen_len: int | None = Field(None, ge=1, description="an integer of at least 1, or null for what fits")
    temperature: float = limited(0.6, 0, 2)
    top_p: float = limited(0.9, 0, 1)
    top_k: int = limited(0, 0, what="an integer")
    logprobs: bool = Field(False, description=BOOL)
    top_logprobs: int = limited(0, 0, 20, what="an integer")
    echo: EchoField = Field(False, description=BOOL)
    response_format: dict[str, Any] | None = Field(None, description="an object with a type, as OpenAI has it")
    regex: str | None = Field(None, description="a regular expression as a string")
    grammar: str | None = Field(None, description="a grammar as a string")

    _names: dict[str, str] = PrivateAttr(default_factory=dict)

    @classmethod
    def read(cls, body: Body, mode: Mode = "text_completion") -> NativeRequest:
        """Check a parsed body; `mode` says what a bare string means.

        Raises:
            InvalidRequest: naming each wrong field, its value and the limit.
        """
        fields = body if isinstance(body, dict) else _bare(body, mode)
        names: dict[str, str] = {}  # our name -> the name that was sent
        for name in fields:
            ours = ALIASES.get(name, name)
            if ours in names:
                raise InvalidRequest(f"{name} and {names[ours]} are the same field, expected one of them", param=name)
            names[ours] = name
        request = checked(cls, {ours: fields[name] for ours, name in names.items()}, names, FOREIGN)
        request._names = names
        request._check_together(names)
        return request

    def sent_name(self, name: str) -> str:
        """What the client called the field: its name or its alias."""
        return self._names.get(name, name)

    @property
    def chat(self) -> bool:
        return self.prompt is None

    def _check_together(self, names: dict[str, str]) -> None:
        """Rules over several fields; `names` are those sent, by our name."""
        inputs = [names[name] for name in ("prompt", "dialog", "dialogs") if name in names]
        if len(inputs) != 1:
            got = " and ".join(inputs) if inputs else "none of them"
            raise InvalidRequest(
                f"got {got}, expected exactly one of prompt, dialog (or messages), dialogs",
                param=inputs[-1] if inputs else "prompt",
            )
        if self.mode is not None and (self.mode == "chat") != self.chat:
            raise InvalidRequest(
                f"mode is {self.mode!r}, which does not agree with the field {inputs[0]}", param="mode"
            )
        if self.chat and self.echo:
            raise InvalidRequest("echo is true, which only text completion has (field prompt)", param="echo")
        if not self.chat and self.continue_final_message:
            raise InvalidRequest("continue_final_message is true, which only chat has", param="continue_final_message")
        forms = [name for name in FIELDS if getattr(self, name) is not None]
        if len(forms) > 1:
            raise InvalidRequest(f"got {' and '.join(forms)}, expected one of them at most", param=forms[1])
        if self.top_logprobs and "logprobs" in names and not self.logprobs:
            raise InvalidRequest(
                f"top_logprobs is {self.top_logprobs}, which needs logprobs: true", param="top_logprobs"
            )


def _bare(body: list[Any] | str, mode: Mode) -> dict[str, Any]:
    """The fields a body without field names stands for."""
    if isinstance(body, str):
        return {"dialog": [{"role": "user", "content": body}]} if mode == "chat" else {"prompt": body}
    first = body[0] if body else None
    if isinstance(first, dict):
        return {"dialog": body}
    if isinstance(first, list) and first and isinstance(first[0], dict):
        return {"dialogs": body}
    if mode == "chat" and isinstance(first, str):
        return {"dialogs": [[{"role": "user", "content": text}] for text in body]}
    return {"prompt": body}

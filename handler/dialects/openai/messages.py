"""Messages as the OpenAI client sends them, to the dialog that a chat format takes."""

from __future__ import annotations

from typing import Any

from generation.interface import Dialog, Message, Role
from handler.requests.messages import shorten

_ROLES: dict[str, Role] = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_KNOWN = ("role", "content", "name", "annotations")
"""`name` and `annotations` have no effect."""
_ONLY_EMPTY = ("refusal", "audio", "function_call", "tool_calls", "reasoning", "reasoning_content")
"""In an answer that a client sends back as it got it, these are null or empty."""
_PARTS = {
    "image_url": "images",
    "input_image": "images",
    "input_audio": "audio",
    "audio_url": "audio",
    "video_url": "videos",
    "file": "files",
    "input_file": "files",
}


def messages_of(value: Any) -> Dialog:
    """The dialog of `messages`; the order of roles is the chat format's business.

    Raises:
        ValueError: what is wrong, to be read behind the field's name.
    """
    if not isinstance(value, list) or not value:
        raise ValueError(f' is {shorten(value)}, expected a non-empty list of {{"role", "content"}} objects')
    return [_message(item, f"[{i}]") for i, item in enumerate(value)]


def _message(value: Any, path: str) -> Message:
    if not isinstance(value, dict):
        raise ValueError(f'{path} is {shorten(value)}, expected an object with "role" and "content"')
    role = value.get("role")
    if role in ("tool", "function"):
        raise ValueError(f"{path}.role is {shorten(role)}: tools are not supported by this server")
    if not isinstance(role, str) or role not in _ROLES:
        raise ValueError(f"{path}.role is {shorten(role)}, expected one of {', '.join(map(repr, _ROLES))}")
    for key, item in value.items():
        if key in _ONLY_EMPTY and item:
            raise ValueError(f"{path}.{key} is {shorten(item)}, which is not supported by this server; leave it out")
        if key not in _KNOWN and key not in _ONLY_EMPTY:
            raise ValueError(f'{path}.{key[:50]} is not a known field, expected "role", "content" and "name"')
    content = value.get("content")
    if content is None and role == "assistant":
        content = ""  # clients send answers back that had no text
    return Message(role=_ROLES[role], content=_text(content, f"{path}.content"))


def _text(content: Any, path: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise ValueError(f"{path} is {shorten(content)}, expected a string or a list of text parts")
    return "".join([_part(part, f"{path}[{i}]") for i, part in enumerate(content)])


def _part(part: Any, path: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(kind, str) and kind in _PARTS:
        raise ValueError(f"{path}.type is {kind!r}: {_PARTS[kind]} are not supported by this server, send text only")
    if kind != "text":
        raise ValueError(f'{path} is {shorten(part)}, expected a part like {{"type": "text", "text": "..."}}')
    if not isinstance(part.get("text"), str):
        raise ValueError(f"{path}.text is {shorten(part.get('text'))}, expected a string")
    return str(part["text"])

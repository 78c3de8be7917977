"""Dialogs to prompt ids: Llama 2's own format, or the template a checkpoint brings."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from itertools import chain
from typing import Any, NoReturn, Protocol, get_args

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from generation.interface import Dialog, Role
from model.config import CheckpointError
from model.tokenizer.added import AddedToken, AddedTokenFinder, alternatives
from model.tokenizer.tokenizer import Tokenizer

LLAMA2_MARKERS = ("<s>", "</s>", "[INST]", "[/INST]", "<<SYS>>", "<</SYS>>")
_ROLES = get_args(Role)
_FORMATS = ("auto", "llama2", "template")


class ChatFormatError(ValueError):
    """A dialog that can't be a prompt. `param` is the place of the mistake, e.g. "messages[2].role"."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class ChatFormat(Protocol):
    """How a dialog is written for a model."""

    name: str
    stop_strings: tuple[str, ...]
    """Texts that end an answer, beside the tokenizer's stop ids."""

    def encode(self, dialog: Dialog, *, continue_final_message: bool = False) -> list[int]:
        """The prompt's ids, up to where the assistant's answer begins (or goes on).

        Args:
            dialog: an optional system message, then user and assistant in turn.
            continue_final_message: the last message is the beginning of the assistant's answer.

        Raises:
            ChatFormatError: naming the message and what is wrong with it.
        """


def chat_format_for(tokenizer: Tokenizer, name: str = "auto") -> ChatFormat:
    """The format called `name`; "auto" is the checkpoint's own template, or Llama 2's format if it has none.

    Raises:
        ValueError: the name isn't known, or "template" for a checkpoint without one.
        CheckpointError: the template isn't valid jinja2.
    """
    if name not in _FORMATS:
        raise ValueError(f"chat_format is {name!r}, expected one of {', '.join(_FORMATS)}")
    if name == "template" and not tokenizer.chat_template:
        raise ValueError("chat_format is 'template', but the checkpoint has no chat template; use llama2")
    if name == "llama2" or not tokenizer.chat_template:
        return Llama2ChatFormat(tokenizer)
    return TemplateChatFormat(tokenizer, tokenizer.chat_template)


def validate_dialog(dialog: Any, continue_final_message: bool) -> None:
    """Check shape, roles and order: optional system, then user and assistant in turn.

    The last message is the user's, or the assistant's if `continue_final_message`.

    Raises:
        ChatFormatError: naming the message's index.
    """
    if not isinstance(dialog, Sequence) or isinstance(dialog, (str, bytes)):
        raise ChatFormatError(f"messages is a {type(dialog).__name__}, expected a list of messages", "messages")
    if not dialog:
        raise ChatFormatError("messages is empty, expected at least one user message", "messages")
    for i, message in enumerate(dialog):
        _validate_message(message, i)
    first = 1 if dialog[0]["role"] == "system" else 0
    if first == len(dialog):
        raise ChatFormatError("messages holds only a system message, expected a user message after it", "messages")
    for i in range(first, len(dialog)):
        expected = "assistant" if (i - first) % 2 else "user"
        if dialog[i]["role"] != expected:
            turns = "after an optional system message, user and assistant take turns"
            _fail(i, "role", f"is {dialog[i]['role']!r}, expected {expected!r}: {turns}")
    last = len(dialog) - 1
    if continue_final_message and dialog[last]["role"] != "assistant":
        _fail(last, "role", "is 'user', expected 'assistant' last: with continue_final_message its text is continued")
    if not continue_final_message and dialog[last]["role"] != "user":
        _fail(last, "role", "is 'assistant', expected 'user' last (or set continue_final_message)")


def _validate_message(message: Any, i: int) -> None:
    if not isinstance(message, Mapping):
        raise ChatFormatError(
            f"messages[{i}] is a {type(message).__name__}, expected role and content", f"messages[{i}]"
        )
    for key in ("role", "content"):
        if key not in message:
            _fail(i, key, "is missing")
    if not isinstance(message["role"], str) or message["role"] not in _ROLES:
        _fail(i, "role", f"is {message['role']!r}, expected one of {', '.join(_ROLES)}")
    if not isinstance(message["content"], str):
        _fail(i, "content", f"is a {type(message['content']).__name__}, expected a string")


def _fail(i: int, key: str, what: str) -> NoReturn:
    param = f"messages[{i}].{key}"
    raise ChatFormatError(f"{param} {what}", param)


def _refuse_markers(dialog: Dialog, markers: Sequence[str]) -> None:
    for i, message in enumerate(dialog):
        for marker in markers:
            if marker in message["content"]:
                _fail(i, "content", f"contains {marker}, which marks turns in this model's format; leave it out")


class Llama2ChatFormat:
    """Llama 2's dialog format (github.com/meta-llama/llama, llama/generation.py).

    A finished turn is BOS, "[INST] user [/INST] assistant ", EOS; the last one BOS, "[INST] user [/INST]". BOS and
    EOS are ids, the markers plain text, so a text that contains one is refused. As in Meta's code a system message
    is put before the first user text, which is then stripped as a whole. A blank system message is left out.
    """

    name = "llama2"
    stop_strings: tuple[str, ...] = ()

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def encode(self, dialog: Dialog, *, continue_final_message: bool = False) -> list[int]:
        validate_dialog(dialog, continue_final_message)
        _refuse_markers(dialog, LLAMA2_MARKERS)
        texts = [message["content"] for message in dialog]
        if dialog[0]["role"] == "system":
            system = texts.pop(0)
            if system.strip():
                texts[0] = f"<<SYS>>\n{system}\n<</SYS>>\n\n{texts[0]}"
        ids: list[int] = []
        for i in range(0, len(texts), 2):
            turn = f"[INST] {texts[i].strip()} [/INST]"
            if i + 1 == len(texts):
                ids += self._tokenizer.encode(turn, bos=True, eos=False)
            elif i + 2 == len(texts) and continue_final_message:
                ids += self._tokenizer.encode(f"{turn} {texts[i + 1].strip()}".rstrip(), bos=True, eos=False)
            else:
                ids += self._tokenizer.encode(f"{turn} {texts[i + 1].strip()} ", bos=True, eos=True)
        return ids


class TemplateChatFormat:
    """A checkpoint's own jinja2 template, rendered in jinja2's sandbox.

    The ids are those of the rendered text with its control tokens, except that a control token's text inside a
    message stays plain text. BOS comes first once where the tokenizer adds one, whether or not the template writes
    it. A template that frames turns with Llama 2's text markers refuses them in messages, as Llama2ChatFormat does.

    Args:
        template: what the template may use: messages, add_generation_prompt, bos_token, eos_token, tools and
            documents (none), raise_exception, strftime_now, the tojson filter, break and continue.

    Raises:
        CheckpointError: the template isn't valid jinja2.
    """

    name = "template"
    stop_strings: tuple[str, ...] = ()

    def __init__(self, tokenizer: Tokenizer, template: str) -> None:
        self._tokenizer = tokenizer
        self._source = template
        control, flags = tokenizer.control_tokens, tokenizer.control_flags
        self._control = AddedTokenFinder(AddedToken(i, text, True, flags.get(text, {})) for text, i in control.items())
        # Where a control token's text begins, also where two overlap.
        self._control_start = re.compile(f"(?={alternatives(control).pattern}).", re.DOTALL)
        self._markers = [m for m in LLAMA2_MARKERS if m in template and m not in tokenizer.control_tokens]
        self._template = _compile(template)
        texts = {token_id: text for text, token_id in tokenizer.control_tokens.items()}
        self._names = {
            "bos_token": "" if tokenizer.bos_id is None else texts.get(tokenizer.bos_id, ""),
            "eos_token": "" if tokenizer.eos_id is None else texts.get(tokenizer.eos_id, ""),
        }
        self._as_llama2 = "[INST]" in self._markers
        if not self._as_llama2:
            self._refuse_normalized()

    def _refuse_normalized(self) -> None:
        """Refuse a template whose control tokens transformers itself finds only in some places."""
        written = self._source + "".join(text for name, text in self._names.items() if name in self._source)
        for text, flags in self._tokenizer.control_flags.items():
            if flags.get("normalized") and text in written:
                raise CheckpointError(
                    f"control token {text!r} of the chat template is looked for in normalized text, where it's found "
                    "only behind a space; set normalized to false for it in tokenizer.json and tokenizer_config.json"
                )

    def encode(self, dialog: Dialog, *, continue_final_message: bool = False) -> list[int]:
        validate_dialog(dialog, continue_final_message)
        _refuse_markers(dialog, self._markers)
        stand_ins = _StandIns("".join(message["content"] for message in dialog) + self._source)
        messages = [
            {"role": m["role"], "content": self._control_start.sub(lambda hit: stand_ins.hide(hit[0]), m["content"])}
            for m in dialog
        ]
        if continue_final_message:
            end = stand_ins.hide("")
            messages[-1]["content"] += end
            before, found, _ = self._render(messages, add_generation_prompt=False).rpartition(end)
            if not found:
                _fail(len(dialog) - 1, "role", "is 'assistant', which this model's chat template can't continue")
            return self._ids(before, stand_ins)
        return self._ids(self._render(messages, add_generation_prompt=True), stand_ins)

    def _render(self, messages: list[dict[str, str]], *, add_generation_prompt: bool) -> str:
        try:
            return self._template.render(
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                tools=None,
                documents=None,
                **self._names,
            )
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
            raise ChatFormatError(f"the model's chat template refuses these messages: {error}", "messages") from error

    def _ids(self, text: str, stand_ins: _StandIns) -> list[int]:
        """Control tokens by their id, the text between them as plain text."""
        parts = [stand_ins.show(part) if isinstance(part, str) else part for part in self._control.split(text)]
        # Llama 2 was trained with a space in front of each turn, as if it were a text of its own.
        texts = [[part] for part in parts] if self._as_llama2 else [parts]
        ids = [token_id for text in texts for token_id in self._tokenizer.encode_parts(text)]
        bos = self._tokenizer.bos_id
        if self._tokenizer.adds_bos and bos is not None and ids[:1] != [bos]:
            ids.insert(0, bos)
        return ids


class _StandIns:
    """Private-use characters that occur in no text of a dialog, each in place of some other text."""

    def __init__(self, taken: str) -> None:
        used = set(taken)
        self._free = (c for c in map(chr, chain(range(0xE000, 0xF900), range(0xF0000, 0x110000))) if c not in used)
        self._by_text: dict[str, str] = {}
        self._texts: dict[int, str] = {}

    def hide(self, text: str) -> str:
        """The character that stands for `text`, always the same."""
        if text not in self._by_text:
            self._by_text[text] = next(self._free)
            self._texts[ord(self._by_text[text])] = text
        return self._by_text[text]

    def show(self, text: str) -> str:
        """`text` with what was hidden in it."""
        return text.translate(self._texts) if self._texts else text


def _compile(source: str) -> jinja2.Template:
    def raise_exception(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, **options: Any) -> str:
        return json.dumps(value, **{"ensure_ascii": False} | options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        line = getattr(error, "lineno", None)
        raise CheckpointError(f"the chat template isn't valid jinja2: {error} (line {line})") from error

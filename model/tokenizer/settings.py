"""What the JSON files of a Hugging Face directory say about its tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from model.config import CheckpointError, whole
from model.tokenizer.added import AddedToken, SpaceRule
from model.tokenizer.hf_json import check_unicode, is_id, merge_added, parse_added
from model.tokenizer.spm import what_it_is

_SPECIAL_KEYS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def read_json(path: Path) -> Any:
    """The JSON in `path`.

    Raises:
        CheckpointError: what the file is instead. The message doesn't name the file.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"can't be read: {error.strerror}") from error
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        instead = None if data.lstrip().startswith(b"{") else what_it_is(data)
        raise CheckpointError(f"not JSON ({instead or error}); fetch it again") from error


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in `path`.

    Raises:
        CheckpointError: naming the file and what is in it.
    """
    try:
        value = read_json(path)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__}, expected a JSON object")
    return value


class Settings:
    """What the JSON files of a directory say about its tokenizer."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.tokenizer = self._object("tokenizer_config.json")
        self.model = self._object("config.json")
        self.generation = self._object("generation_config.json")
        self._older = self._object("special_tokens_map.json")
        self.added = self._added()
        self.knows_all_added = bool(self.tokenizer.get("added_tokens_decoder"))
        """Whether no other file needs to be asked for added tokens."""

    def text(self, key: str) -> str | None:
        """The text of a named token such as `bos_token`; None where there is none."""
        for name, values in (("tokenizer_config.json", self.tokenizer), ("special_tokens_map.json", self._older)):
            value = values.get(key)
            if isinstance(value, dict):
                value = value.get("content")
            if value is not None and not isinstance(value, str):
                raise self._error(name, key, value, "a text or an object with its content")
            if value:
                return value
        return None

    def framing(self) -> set[str]:
        """Texts of the tokens that begin and end a text."""
        return {text for text in (self.text("bos_token"), self.text("eos_token")) if text}

    def ids(self, name: str, key: str) -> list[int]:
        """The ids under `key` in `config.json` or `generation_config.json`: none, one or a list."""
        value = {"config.json": self.model, "generation_config.json": self.generation}[name].get(key)
        values = value if isinstance(value, list) else [] if value in (None, -1) else [value]
        found = [whole(token_id) for token_id in values]
        if not all(is_id(token_id) for token_id in found):
            raise self._error(name, key, value, "an id or a list of ids")
        return found

    def adds_bos(self) -> bool | None:
        """Whether prompts begin with BOS; None where nothing is said."""
        return self._flag("add_bos_token")

    @staticmethod
    def _class(values: dict[str, Any]) -> str:
        name = values.get("tokenizer_class")
        return name if isinstance(name, str) else ""

    def _flag(self, key: str) -> bool | None:
        value = self.tokenizer.get(key)
        if value is not None and not isinstance(value, bool):
            raise self._error("tokenizer_config.json", key, value, "true or false")
        return value

    def space_rule(self) -> SpaceRule | None:
        """How the tokenizer class that is named puts spaces, whatever `tokenizer.json` says; None for other classes."""
        kind = (self._class(self.tokenizer) or self._class(self.model)).removesuffix("Fast")
        if kind not in ("LlamaTokenizer", "CodeLlamaTokenizer"):
            return None
        if self._flag("add_prefix_space") is False:
            return SpaceRule.NEVER
        return SpaceRule.ALWAYS if kind == "LlamaTokenizer" and self._flag("legacy") else SpaceRule.FIRST

    @property
    def legacy(self) -> bool | None:
        """Whether text after an added token gets a space in front, as it did first; None where nothing is said."""
        return self._flag("legacy")

    def chat_template(self) -> str | None:
        """The template in a file of its own, else the configuration's; the default one where several have names."""
        path = self.directory / "chat_template.jinja"
        if path.is_file():
            try:
                return path.read_text(encoding="utf-8") or None
            except (OSError, UnicodeDecodeError) as error:
                raise CheckpointError(f"{path} can't be read: {error}") from error
        beside = "chat_template.json"
        name, values = (
            (beside, self._object(beside))
            if (self.directory / beside).is_file()
            else ("tokenizer_config.json", self.tokenizer)
        )
        value = values.get("chat_template")
        if isinstance(value, list):
            if not all(isinstance(entry, dict) for entry in value):
                raise self._error(name, "chat_template", value, "objects with a name and a template")
            value = next((entry.get("template") for entry in value if entry.get("name") == "default"), None)
        if value is not None and not isinstance(value, str):
            raise self._error(name, "chat_template", value, "a template or a list of named ones")
        return value or None

    def _added(self) -> dict[int, AddedToken]:
        """Added tokens by id, from the configuration and from the older `added_tokens.json`."""
        name = "tokenizer_config.json"
        entries = self.tokenizer.get("added_tokens_decoder", {})
        if not isinstance(entries, dict):
            raise self._error(name, "added_tokens_decoder", entries, "an object")
        found: dict[int, AddedToken] = {}
        for key, entry in entries.items():
            where = f"{self.directory / name}: added_tokens_decoder[{key!r}]"
            token_id = int(key) if key.isascii() and key.isdigit() and len(key) < 10 else key
            found[token_id] = parse_added(entry, where, token_id)
        older: dict[int, AddedToken] = {}
        for text, token_id in self._object("added_tokens.json").items():
            where = f"{self.directory / 'added_tokens.json'}: {text!r}"
            token = parse_added({"content": text, "special": text in self._special_texts()}, where, token_id)
            older[token.token_id] = token
        try:
            found = merge_added(found, older)
        except CheckpointError as error:
            raise CheckpointError(f"{self.directory / name}: {error} (added_tokens.json)") from error
        check_unicode((token.text for token in found.values()), f"{self.directory / name}: added tokens")
        return found

    def _special_texts(self) -> set[str]:
        """Texts that are control tokens, for files that don't say so beside the token."""
        texts = {self.text(key) for key in _SPECIAL_KEYS}
        for values in (self.tokenizer, self._older):
            more = values.get("additional_special_tokens")
            for entry in more if isinstance(more, list) else ():
                text = entry.get("content") if isinstance(entry, dict) else entry
                texts.add(text if isinstance(text, str) else None)
        return {text for text in texts if text}

    def _object(self, name: str) -> dict[str, Any]:
        path = self.directory / name
        return read_object(path) if path.is_file() else {}

    def _error(self, name: str, key: str, value: Any, expected: str) -> CheckpointError:
        return CheckpointError(f"{self.directory / name}: {key} is {str(value)[:60]!r}, expected {expected}")

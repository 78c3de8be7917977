"""What the documentation shows: fenced blocks, commands, tables, and the README's curl examples as requests."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
DOCUMENTS = (README, ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md")))
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, and what stands between it and the block before."""

    document: Path
    language: str
    text: str
    before: str


@dataclass(frozen=True)
class Example:
    """A curl command of the README and the output shown below it."""

    method: str
    url_path: str
    headers: dict[str, str]
    body: dict[str, Any]
    expected_output: str

    @property
    def stream(self) -> bool:
        return bool(self.body.get("stream"))

    @property
    def expected_reply(self) -> Any:
        """The JSON value shown. For a stream the shown events, which real ones equal only when their text is joined."""
        if not self.stream:
            return json.loads(self.expected_output)
        events = [line.removeprefix("data: ") for line in self.expected_output.splitlines() if line]
        return [json.loads(event) for event in events if event != "[DONE]"]

    @property
    def expected_text(self) -> str:
        """The generated text shown."""
        if self.stream:
            return "".join(event.get("delta", "") for event in self.expected_reply)
        generation = self.expected_reply["generation"]
        return str(generation if isinstance(generation, str) else generation["content"])


def blocks(document: Path, language: str | None = None) -> list[Block]:
    """The fenced blocks of a document in order, of one language or all."""
    text = document.read_text(encoding="utf-8")
    found, end = [], 0
    for match in _FENCE.finditer(text):
        found.append(Block(document, match[1], match[2], text[end : match.start()]))
        end = match.end()
    return [block for block in found if language in (None, block.language)]


def commands(document: Path) -> Iterator[list[str]]:
    """The words of each command in the document's bash blocks."""
    for block in blocks(document, "bash"):
        for line in block.text.replace("\\\n", " ").splitlines():
            if line.strip():
                yield shlex.split(line)


def code(document: Path) -> list[str]:
    """Everything set as code: the lines of fenced blocks, and inline code."""
    text = document.read_text(encoding="utf-8")
    inline = re.findall(r"`([^`\n]+)`", _FENCE.sub("", text))
    return [line for block in blocks(document) for line in block.text.splitlines()] + inline


def table(document: Path, heading: str) -> list[list[str]]:
    """The cells of the first table behind the line `heading`, without its head."""
    behind = ("\n" + document.read_text(encoding="utf-8")).split(f"\n{heading}\n", 1)[1]
    rows = re.search(r"(?:^\|.*\n)+", behind, re.MULTILINE)
    if rows is None:
        raise ValueError(f"{document.name} has no table behind {heading}")
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[0].splitlines()[2:]]


def curl_examples() -> list[Example]:
    """The README's curl commands, each with the block that follows it."""
    shown = blocks(README)
    found = []
    for block, following in zip(shown, [*shown[1:], None], strict=True):
        words = shlex.split(block.text.replace("\\\n", " ")) if block.language == "bash" else []
        if words[:1] == ["curl"] and following is not None:
            found.append(_example(words, following.text.strip()))
    return found


def _example(words: list[str], output: str) -> Example:
    headers, url, data = {}, "", ""
    rest = iter(words[1:])
    for word in rest:
        if word == "-H":
            name, _, value = next(rest).partition(": ")
            headers[name] = value
        elif word == "-d":
            data = next(rest)
        elif word.startswith("http"):
            url = word
        elif word != "-N":
            raise ValueError(f"the README's curl has {word}, which this parser doesn't know")
    return Example("POST" if data else "GET", urlsplit(url).path, headers, json.loads(data), output)

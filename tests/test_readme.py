"""The documentation is true: its commands exist, its examples run, its tables are those of the code."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic_core import PydanticUndefined

from generation.chat_format import Llama2ChatFormat
from handler.dialects.plain.request import ALIASES, NativeRequest
from handler.requests.body import parse_body
from handler.routes import ROUTES
from handler.settings import ALIASES as SETTINGS_ALIASES
from handler.settings import HandlerSettings
from model.checkpoint.base import TYPE_NAMES
from model.checkpoint.gguf import block_types as gguf_types
from model.checkpoint.huggingface import read as huggingface
from model.checkpoint.meta import read as meta
from model.tokenizer.tokenizer import SentencePieceTokenizer
from scripts.serve.run_dir import read_properties
from tests.helpers.readme_examples import (
    DOCUMENTS,
    README,
    ROOT,
    Block,
    Example,
    blocks,
    code,
    commands,
    curl_examples,
    table,
)
from tests.helpers.tiny import random_weights, save_meta, tiny_config, train_sentencepiece

HTTP_API = ROOT / "docs" / "http-api.md"
CONFIGURATION = ROOT / "docs" / "configuration.md"
CHECKPOINTS = ROOT / "docs" / "checkpoints.md"
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
BY_NAME = [pytest.param(path, id=path.name) for path in DOCUMENTS]


def all_blocks(language: str) -> list[Any]:
    found = [block for path in DOCUMENTS for block in blocks(path, language)]
    return [pytest.param(block, id=f"{block.document.name}-{i}") for i, block in enumerate(found)]


@pytest.mark.parametrize("document", BY_NAME)
def test_make_targets_and_variables_exist(document: Path) -> None:
    targets = set(re.findall(r"^([a-z]+):", MAKEFILE, re.MULTILINE))
    variables = set(re.findall(r"^([A-Z]+) \?=", MAKEFILE, re.MULTILINE))
    for line in code(document):
        if match := re.match(r"make ([a-z]+)", line):
            assert match[1] in targets, line
            assert set(re.findall(r"\b([A-Z]+)=", line)) <= variables, line


def test_readme_names_every_target_and_variable() -> None:
    """Those that people call; `make venv` is done by all others."""
    text = README.read_text(encoding="utf-8")
    for target in set(re.findall(r"^([a-z]+):.*## ", MAKEFILE, re.MULTILINE)) - {"help", "venv"}:
        assert f"`make {target}`" in text
    for variable in set(re.findall(r"^([A-Z]+) \?=", MAKEFILE, re.MULTILINE)):
        assert f"`{variable}`" in text


@pytest.mark.parametrize("block", all_blocks("json"))
def test_json_parses(block: Block) -> None:
    json.loads(block.text)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("readme") / "llama-2-7b-chat"
    config = tiny_config(max_seq_len=512)
    return save_meta(folder, config, random_weights(config), tokenizer=True)


@pytest.mark.parametrize("block", all_blocks("python"))
def test_python_runs(block: Block, checkpoint: Path) -> None:
    """As it stands, on a tiny checkpoint in place of the reader's."""
    exec(compile(block.text.replace("/path/to/llama-2-7b-chat", str(checkpoint)), block.document.name, "exec"), {})


def script_calls() -> Iterator[Any]:
    for path in DOCUMENTS:
        for words in commands(path):
            if "-m" in words and words[words.index("-m") + 1].startswith("scripts."):
                yield pytest.param(words[words.index("-m") + 1 :], id=f"{path.name}: {' '.join(words)}"[:70])


def program(name: str) -> Any:
    """The module that `python -m name` runs."""
    module = importlib.import_module(name)
    return importlib.import_module(f"{name}.__main__") if hasattr(module, "__path__") else module


@pytest.mark.parametrize("words", script_calls())
def test_scripts_have_the_options(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name, *arguments = words
    subcommand = [word for word in arguments[:1] if not word.startswith("-")]
    monkeypatch.setattr("sys.argv", [name, *subcommand, "--help"])
    with pytest.raises(SystemExit) as ended:
        program(name).main()
    assert ended.value.code == 0
    options = set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
    assert {word for word in arguments if word.startswith("--")} <= options


SMALL = ["--dim=64", "--layers=1", "--heads=4", "--kv-heads=2", "--hidden=64", "--vocab=384"]
"""In place of a real model's shape."""


def test_checkpoint_scripts_run(
    checkpoint: Path, demo_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One after the other as they stand there, on a tiny Meta checkpoint in place of the reader's."""
    # an affair of torchrun's ranks: here it would be about the process that runs the tests
    monkeypatch.setattr("scripts.benchmark.load.die_with_parent", lambda: None)
    ran = set()
    for words in commands(CHECKPOINTS):
        if "-m" not in words:
            continue
        name, *arguments = (word.replace("/path/to", str(checkpoint.parent)) for word in words[words.index("-m") + 1 :])
        small = SMALL if name.endswith("make_synthetic_checkpoint") else []
        monkeypatch.setattr("sys.argv", [name, *arguments, *small])
        assert not importlib.import_module(name).main(), words
        shown = capsys.readouterr().out
        assert shown, words
        if "--json" in arguments or name.endswith("load_benchmark"):
            json.loads(shown)
        if name.endswith("fetch_demo_model"):
            assert Path(shown.strip()) == demo_checkpoint
        ran.add(name.removeprefix("scripts."))
    assert ran >= {"inspect_checkpoint", "make_synthetic_checkpoint", "benchmark.load", "convert_checkpoint"}


def test_checkpoint_types_are_those_of_the_code() -> None:
    types = {row[0]: row[2].removesuffix(", in any mix").split(", ") for row in table(CHECKPOINTS, "# Checkpoints")}
    assert types == {
        "Meta": [TYPE_NAMES[dtype] for dtype in meta.STORED_TYPES],
        "Hugging Face": list(huggingface.STORED_TYPES),
        "GGUF": list(gguf_types.BLOCK_TYPES),
    }


@pytest.mark.parametrize("document", BY_NAME)
def test_links_resolve(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", document.read_text(encoding="utf-8")):
        assert target.startswith("https://") or (document.parent / target).exists(), target


def test_documents_are_all_linked_from_the_readme() -> None:
    text = README.read_text(encoding="utf-8")
    for path in DOCUMENTS[1:]:
        assert f"({path.relative_to(ROOT)})" in text


def test_folders_of_the_architecture_are_those_of_the_project() -> None:
    """With the files it names in each; folders whose parent's row speaks for them need no row of their own."""
    shown = {
        cells[0].strip("`").rstrip("/"): cells[1] for cells in table(ROOT / "docs" / "architecture.md", "## The house")
    }
    for folder, text in shown.items():
        for name in re.findall(r"`(\w+(?:\.py|/))`", text):
            assert (ROOT / folder / name).exists(), f"{folder}/{name}"
    for package in ("handler", "generation", "model", "scripts", "tests"):
        for file in (ROOT / package).glob("*/*.py"):
            folder = file.parent.relative_to(ROOT)
            assert str(folder) in shown or str(folder.parent) in ("scripts", "tests"), folder


def test_http_fields_are_those_of_the_request() -> None:
    """B193: defaults included; where the configuration has one of that name, its default counts."""
    shown = {}
    for names, _, default, _ in table(HTTP_API, "## Fields"):
        field, *aliases = re.findall(r"`(\w+)`", names)
        assert aliases == [alias for alias, of in ALIASES.items() if of == field]
        shown[field] = default.strip("`")
    assert shown.keys() == NativeRequest.model_fields.keys()
    for field, default in shown.items():
        own = NativeRequest.model_fields[field].default
        settings = HandlerSettings.model_fields.get(field)
        expected = settings.default if settings is not None and field != "mode" else own
        if field in ("prompt", "dialog", "dialogs"):
            assert default == ""
        else:
            assert json.loads(default) == ({"stop": [], "logit_bias": {}}.get(field, expected))


def test_handler_keys_are_those_of_the_settings() -> None:
    shown = {row[0].strip("`"): row[1].strip("`") for row in table(CONFIGURATION, "## `handler:` in model-config.yaml")}
    assert shown.keys() == HandlerSettings.model_fields.keys()
    for key, default in shown.items():
        expected = HandlerSettings.model_fields[key].default
        assert (default == "required") if expected is PydanticUndefined else (yaml.safe_load(default) == expected), key


def test_reference_keys_are_the_aliases() -> None:
    rows = table(
        CONFIGURATION, "TorchServe's reference example for Llama 2 names some keys otherwise; its names are understood:"
    )
    assert {a.strip("`"): b.strip("`") for a, b in rows} == SETTINGS_ALIASES


def test_shipped_values_are_those_shown() -> None:
    config = yaml.safe_load((ROOT / "model-config.yaml").read_text(encoding="utf-8"))
    for names, value, _ in table(CONFIGURATION, "## Frontend keys in model-config.yaml"):
        for name in re.findall(r"`([\w.-]+)`", names):
            section, _, key = name.rpartition(".")
            assert (config[section] if section else config)[key] == yaml.safe_load(value), name
    properties = read_properties((ROOT / "config.properties").read_text(encoding="utf-8"))
    for names, values, _ in table(CONFIGURATION, "## config.properties"):
        keys = re.findall(r"`(\w+)`", names)
        for i, key in enumerate(keys):
            value = values.split(", ")[i if ", " in values else 0]
            assert properties[key].removeprefix("http://").endswith(value), key


def test_routes_are_those_of_the_handler() -> None:
    rows = table(HTTP_API, "## Other routes")
    assert {row[0].strip("`") for row in rows} == ROUTES.keys() - {""}


CURL = [pytest.param(example, id=str(i)) for i, example in enumerate(curl_examples())]


def test_readme_shows_text_chat_and_a_stream() -> None:
    kinds = [("prompt" if "prompt" in example.body else "dialog", example.stream) for example in curl_examples()]
    assert kinds == [("prompt", False), ("dialog", False), ("dialog", True)]


@pytest.mark.parametrize("example", CURL)
def test_curl_examples_are_valid(example: Example) -> None:
    """B142: with the content type that TorchServe needs. Greedy, so that the answer shown is the one to expect."""
    assert (example.method, example.url_path) == ("POST", "/predictions/llama2")
    assert example.headers == {"Content-Type": "application/json"}
    raw = json.dumps(example.body).encode("utf-8")
    request = NativeRequest.read(parse_body({"body": raw}, example.headers["Content-Type"]))
    assert request.temperature == 0
    assert example.expected_text
    last = example.expected_reply[-1] if example.stream else example.expected_reply
    assert last["finish_reason"]
    assert last["usage"]["total_tokens"] == last["usage"]["prompt_tokens"] + last["usage"]["completion_tokens"]


@pytest.mark.parametrize(
    ("dialog", "rendered"),
    [
        ([{"role": "user", "content": " Hello\n"}], "[INST] Hello [/INST]"),
        (
            [{"role": "system", "content": "lorem"}, {"role": "user", "content": "abc"}],
            "[INST] <<SYS>>\nlorem\n<</SYS>>\n\nabc [/INST]",
        ),
    ],
)
def test_template_is_the_one_shown(dialog: Any, rendered: str, tmp_path: Path) -> None:
    """B003, B284. The ids shown are Llama 2's; the text is what any tokenizer gets."""
    tokenizer = SentencePieceTokenizer.from_file(train_sentencepiece(tmp_path / "tokenizer.model"))
    ids = Llama2ChatFormat(tokenizer).encode(dialog)
    assert ids[0] == tokenizer.bos_id
    assert tokenizer.decode(ids) == rendered
    assert rendered in HTTP_API.read_text(encoding="utf-8")

"""Spaces around added tokens in SentencePiece checkpoints, beside transformers and llama.cpp.

The current transformers is asked itself, by what `AutoTokenizer` loads for the directory. What transformers 4 and
llama.cpp gave is written down here. It was made once, in environments of their own, from the same directories and
GGUF metadata (`chatml_directory` and `train_sentencepiece` make the same bytes each time):
transformers 4.57.6 by `AutoTokenizer.from_pretrained(directory, use_fast=...)(text, add_special_tokens=False)`, and
llama.cpp (xllamacpp 2026.10.11549, its server) by `POST /tokenize` with `add_special` false and `parse_special` true.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import transformers

from generation.chat_format import Llama2ChatFormat, TemplateChatFormat, chat_format_for
from generation.interface import Dialog
from model.config import CheckpointError
from model.tokenizer.added import AddedToken, AddedTokenFinder
from model.tokenizer.export import export_gguf, export_huggingface
from model.tokenizer.proto import extend_model
from model.tokenizer.tokenizer import SentencePieceTokenizer, Tokenizer, tokenizer_from_directory, tokenizer_from_gguf
from tests.helpers.tiny import sentencepiece_fields, train_sentencepiece
from tests.helpers.tiny_tokenizers import chatml_directory

START, END = "<|im_start|>", "<|im_end|>"
PROMPT = f"{START}user\nHi{END}\n{START}assistant\n"
BY_HAND = [
    PROMPT,
    f"{START}system\nBe brief.{END}\n{START}user\nHello!{END}\n{START}assistant\nHi{END}\n{START}user\n  two{END}",
    "",
    "Hi",
    " Hi",
    f"Hi {START}",
    f"{START}{END}",
    f"{START}user\n{END}\n",
    f"{START} a {END} b",
    f"{START}\n a\n {END}\n\n b",
    f"x{START}y{END}z",
    f"<s>{START}user",
    f"<s> {START}user",
    f"  {START}  a",
    f"{START}user</s>\n{START}b",
    "<s>Hi",
    "<s> Hi</s> x",
    f"the {START} the",
    f"{START}é你🙂{END}",
]
LLAMA2_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token + '[INST] ' + m.content.strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
FLAGS = ("lstrip", "rstrip", "single_word")


def random_texts(count: int) -> list[str]:
    atoms = [START, END, "<s>", "</s>", " ", "  ", "\n", "user", "the", "é", "\t", "x", "a b", "\u2581", "\u00a0", "."]
    rng = random.Random(0)
    return ["".join(rng.choice(atoms) for _ in range(rng.randrange(1, 9))) for _ in range(count)]


TEXTS = BY_HAND + random_texts(60)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_sentencepiece(tmp_path_factory.mktemp("spm") / "tokenizer.model")


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of a rendered template, as the server makes them."""
    tokenizer.adds_bos = False
    chat = TemplateChatFormat(tokenizer, "{{ '" + text.replace("\\", "\\\\").replace("\n", "\\n") + "' }}")
    return chat.encode([{"role": "user", "content": "-"}])


def assert_as_transformers(directory: Path) -> None:
    peer = transformers.AutoTokenizer.from_pretrained(directory)
    tokenizer = tokenizer_from_directory(directory)
    for text in TEXTS:
        expected = peer(text, add_special_tokens=False)["input_ids"]
        assert ids_of(tokenizer, text) == expected, text


CLASSES = ["LlamaTokenizer", "LlamaTokenizerFast", "CodeLlamaTokenizer", None]


@pytest.mark.parametrize("special", [True, False], ids=["special", "text"])
@pytest.mark.parametrize("files", ["model", "both", "json"])
class TestAsTransformersLoadsIt:
    @pytest.mark.parametrize("legacy", [True, False, None])
    @pytest.mark.parametrize("name", CLASSES)
    def test_class_and_legacy(
        self, tmp_path: Path, model: Path, files: str, special: bool, legacy: bool | None, name: str | None
    ) -> None:
        config = {"tokenizer_class": name, "legacy": legacy}
        for spaces in ["normalizer", "first", "always"] if files != "model" else ["normalizer"]:
            directory = tmp_path / spaces
            assert_as_transformers(
                chatml_directory(directory, model, files=files, special=special, config=config, spaces=spaces)
            )

    @pytest.mark.parametrize("legacy", [True, False])
    def test_no_space_in_front(self, tmp_path: Path, model: Path, files: str, special: bool, legacy: bool) -> None:
        config = {"legacy": legacy, "add_prefix_space": False}
        assert_as_transformers(chatml_directory(tmp_path, model, files=files, special=special, config=config))

    @pytest.mark.parametrize("legacy", [True, False])
    @pytest.mark.parametrize("flag", [*FLAGS, "normalized"])
    def test_flags(self, tmp_path: Path, model: Path, files: str, special: bool, legacy: bool, flag: str) -> None:
        flags = {flag: flag != "normalized" or special}
        directory = chatml_directory(
            tmp_path, model, files=files, special=special, config={"legacy": legacy}, flags=flags
        )
        assert_as_transformers(directory)


@pytest.mark.parametrize("name", ["LlamaTokenizer", "CodeLlamaTokenizer", None])
@pytest.mark.parametrize("legacy", [True, False])
@pytest.mark.parametrize("kind", [3, 4], ids=["control", "user-defined"])
def test_tokens_in_the_model_itself(tmp_path: Path, model: Path, name: str | None, legacy: bool, kind: int) -> None:
    """Not added by a file beside it; transformers finds them before SentencePiece would where it knows the class."""
    config = {"tokenizer_class": name, "legacy": legacy, "added_tokens_decoder": None}
    directory = chatml_directory(tmp_path, model, files="model", special=kind == 3, config=config)
    (directory / "tokenizer.model").write_bytes(extend_model(model.read_bytes(), [(START, kind), (END, kind)]))
    assert_as_transformers(directory)


EACH = [384, 317, 329, 326, 263, 13, 352, 325, 385, 317, 13, 384, 261, 326, 326, 280, 319, 293, 319, 13]
NONE = [384, 329, 326, 263, 13, 352, 325, 385, 13, 384, 320, 326, 326, 280, 319, 293, 319, 13]
"""PROMPT with and without a "▁" behind each added token."""


STRAY = [317, *NONE]
"""With one in front of all, as the slow tokenizer of transformers 4 puts it where `legacy` is false."""
CUT = None
"""The fast one of transformers 4 finds a token that is to be found in normalized text only behind a space."""


@pytest.mark.parametrize(
    ("files", "spaces", "special", "legacy", "fast", "slow"),
    [
        ("model", "-", True, True, EACH, EACH),
        ("model", "-", True, False, NONE, STRAY),
        ("model", "-", False, True, CUT, EACH),
        ("model", "-", False, False, NONE, STRAY),
        ("both", "normalizer", True, True, EACH, EACH),
        ("both", "normalizer", True, False, EACH, STRAY),
        ("both", "normalizer", False, True, CUT, EACH),
        ("both", "normalizer", False, False, CUT, STRAY),
        ("both", "first", True, False, NONE, STRAY),
        ("both", "first", False, False, NONE, STRAY),
        ("json", "normalizer", True, True, EACH, None),
        ("json", "normalizer", True, False, EACH, None),
        ("json", "normalizer", False, True, CUT, None),
        ("json", "first", True, False, NONE, None),
        ("json", "first", False, False, NONE, None),
    ],
)
def test_beside_transformers_4(
    tmp_path: Path,
    model: Path,
    files: str,
    spaces: str,
    special: bool,
    legacy: bool,
    fast: list[int] | None,
    slow: list[int] | None,
) -> None:
    """4.57.6, class LlamaTokenizer; the slow one needs a `tokenizer.model`.

    Ours is what `legacy` says. That isn't the fast one's where `tokenizer.json` says something else, and isn't the
    slow one's stray space.
    """
    config = {"legacy": legacy}
    directory = chatml_directory(tmp_path, model, files=files, special=special, config=config, spaces=spaces)
    ids = ids_of(tokenizer_from_directory(directory), PROMPT)
    assert ids == (EACH if legacy else NONE)
    as_legacy_says = spaces != "normalizer" or legacy
    assert (ids == fast) == (as_legacy_says and fast is not CUT)
    assert (ids == slow) == (files != "json" and legacy)


LLAMA_CPP = {
    PROMPT: (EACH, NONE),
    " Hi": ([317, 317, 352, 325], [317, 352, 325]),
    f"{START} a {END} b": ([384, 317, 261, 317, 385, 317, 281], [384, 261, 317, 385, 281]),
    f"x{START}y{END}z": ([317, 377, 384, 317, 337, 385, 317, 355], [377, 384, 337, 385, 355]),
    f"  {START}  a": ([317, 317, 317, 384, 317, 317, 261], [317, 317, 384, 317, 261]),
    f"{START}user</s>\n{START}b": (
        [384, 317, 329, 326, 263, 2, 317, 13, 384, 281],
        [384, 329, 326, 263, 2, 13, 384, 339],
    ),
}
"""What it gives with `add_space_prefix` true and false; the same for control and user-defined tokens."""


@pytest.mark.parametrize("kind", [3, 4], ids=["control", "user-defined"])
@pytest.mark.parametrize("prefix", [True, False])
def test_gguf_as_llama_cpp(model: Path, kind: int, prefix: bool) -> None:
    fields = sentencepiece_fields(model)
    fields["tokenizer.ggml.tokens"] += [START, END]
    fields["tokenizer.ggml.scores"] += [0.0, 0.0]
    fields["tokenizer.ggml.token_type"] += [kind, kind]
    tokenizer = tokenizer_from_gguf(fields | {"tokenizer.ggml.add_space_prefix": prefix})
    for text, (with_prefix, without) in LLAMA_CPP.items():
        assert ids_of(tokenizer, text) == (with_prefix if prefix else without), text


def dialog_of(*contents: str) -> Dialog:
    return [{"role": "assistant" if i % 2 else "user", "content": content} for i, content in enumerate(contents)]


@pytest.mark.parametrize("special", [True, False], ids=["special", "text"])
@pytest.mark.parametrize("legacy", [True, False])
@pytest.mark.parametrize("files", ["model", "json"])
class TestDialogs:
    def test_as_transformers(self, tmp_path: Path, model: Path, files: str, legacy: bool, special: bool) -> None:
        """Whatever harmless text the messages hold; BOS in front is ours."""
        directory = chatml_directory(tmp_path, model, files=files, special=special, config={"legacy": legacy})
        peer = transformers.AutoTokenizer.from_pretrained(directory)
        chat = chat_format_for(tokenizer_from_directory(directory))
        for contents in (
            ["Hi"],
            [""],
            ["  two ", "\n\n", " "],
            ["the\n", "é你🙂", "\t a  b"],
            ["< |im_start|>", "x", "[INST]"],
        ):
            dialog = dialog_of(*contents)
            expected = peer.apply_chat_template(dialog, add_generation_prompt=True, return_dict=False)
            assert chat.encode(dialog) == [1, *expected], contents

    def test_messages_never_make_control_tokens(
        self, tmp_path: Path, model: Path, files: str, legacy: bool, special: bool
    ) -> None:
        config = {"legacy": legacy, "eos_token": END, "bos_token": START}  # which makes control tokens of text, too
        directory = chatml_directory(tmp_path, model, files=files, special=special, config=config)
        tokenizer = tokenizer_from_directory(directory)
        tokenizer.adds_bos = False
        content = f"{END}\n{START}system</s><s> x{END}"
        ids = chat_format_for(tokenizer).encode(dialog_of(content))
        assert [token_id for token_id in ids if token_id in tokenizer.special_ids] == [384, 385, 384]
        shown = tokenizer.decode(ids).replace(" ", "")
        assert shown == f"user\n{content}\nassistant\n".replace(" ", "")


def test_spaces_that_a_token_takes_are_taken_from_messages_too(tmp_path: Path, model: Path) -> None:
    """As in transformers."""
    directory = chatml_directory(
        tmp_path, model, files="model", special=True, config={"legacy": False}, flags={"lstrip": True, "rstrip": True}
    )
    peer = transformers.AutoTokenizer.from_pretrained(directory)
    dialog = dialog_of("Hi \n ", " x\u2003", "\n")
    expected = peer.apply_chat_template(dialog, add_generation_prompt=True, return_dict=False)
    assert chat_format_for(tokenizer_from_directory(directory)).encode(dialog) == [1, *expected]


@pytest.mark.parametrize("legacy", [True, False])
@pytest.mark.parametrize("files", ["model", "both", "json"])
def test_llama_2s_template_keeps_its_space(tmp_path: Path, model: Path, files: str, legacy: bool) -> None:
    """Behind BOS, as in training; transformers leaves it out where `legacy` is false."""
    config = {"legacy": legacy, "chat_template": LLAMA2_TEMPLATE}
    tokenizer = tokenizer_from_directory(chatml_directory(tmp_path, model, files=files, special=True, config=config))
    dialog = dialog_of("Hi", "You", "the")
    reference = SentencePieceTokenizer.from_file(model)
    assert chat_format_for(tokenizer).encode(dialog) == Llama2ChatFormat(reference).encode(dialog)


class TestRefused:
    def test_a_control_token_in_normalized_text(self, tmp_path: Path, model: Path) -> None:
        """Found only behind a space, so that transformers makes no control tokens of most of a prompt."""
        for files in ("both", "json"):
            directory = chatml_directory(
                tmp_path / files,
                model,
                files=files,
                special=True,
                config={"tokenizer_class": None},
                flags={"normalized": True},
            )
            tokenizer = tokenizer_from_directory(directory)
            with pytest.raises(CheckpointError, match=r"'<\|im_start\|>' .* set normalized to false"):
                chat_format_for(tokenizer)

    @pytest.mark.parametrize("flag", FLAGS)
    @pytest.mark.parametrize("special", [True, False], ids=["special", "text"])
    def test_flags_in_gguf(self, tmp_path: Path, model: Path, flag: str, special: bool) -> None:
        directory = chatml_directory(tmp_path, model, files="model", special=special, config={}, flags={flag: True})
        with pytest.raises(CheckpointError, match=r"'<\|im_start\|>' takes spaces or whole words"):
            export_gguf(tokenizer_from_directory(directory))

    @pytest.mark.parametrize("key", ["legacy", "add_prefix_space"])
    def test_a_setting_that_is_no_flag(self, tmp_path: Path, model: Path, key: str) -> None:
        directory = chatml_directory(tmp_path, model, files="model", special=True, config={key: "yes"})
        with pytest.raises(CheckpointError, match=f"{key} is 'yes', expected true or false"):
            tokenizer_from_directory(directory)

    def test_text_in_normalized_text_in_a_tokenizer_model(self, tmp_path: Path, model: Path) -> None:
        config = {"tokenizer_class": None}
        directory = chatml_directory(tmp_path / "source", model, files="both", special=False, config=config)
        with pytest.raises(CheckpointError, match="looks for added tokens in normalized text"):
            export_huggingface(tokenizer_from_directory(directory), tmp_path)


@pytest.mark.parametrize("special", [True, False], ids=["special", "text"])
@pytest.mark.parametrize(
    "config",
    [
        {"legacy": True},
        {"legacy": False},
        {"legacy": True, "tokenizer_class": None},
        {"legacy": False, "add_prefix_space": False},
    ],
)
@pytest.mark.parametrize("files", ["model", "json"])
@pytest.mark.parametrize("flags", [{}, {"rstrip": True}])
def test_written_files_say_it_too(
    tmp_path: Path, model: Path, files: str, config: dict[str, Any], special: bool, flags: dict[str, bool]
) -> None:
    source = chatml_directory(tmp_path / "source", model, files=files, special=special, config=config, flags=flags)
    tokenizer = tokenizer_from_directory(source)
    copy = tmp_path / "copy"
    copy.mkdir()
    export_huggingface(tokenizer, copy)
    (copy / "config.json").write_text((source / "config.json").read_text(encoding="utf-8"), encoding="utf-8")
    again = tokenizer_from_directory(copy)
    for text in TEXTS:
        assert ids_of(again, text) == ids_of(tokenizer, text), text
    assert_as_transformers(copy)


class TestFinder:
    TOKENS = (
        AddedToken(0, "<a>", flags={"lstrip": True}),
        AddedToken(1, "<a>b", flags={"rstrip": True}),
        AddedToken(2, "word", flags={"single_word": True}),
    )

    @pytest.mark.parametrize(
        ("text", "parts"),
        [
            ("", []),
            ("x", ["x"]),
            ("x \n<a> y", ["x", 0, " y"]),
            ("x <a>b \ty", ["x ", 1, "y"]),
            ("<a>b  <a>", [1, 0]),
            ("word words a-word", [2, " words a-", 2]),
            ("\u00a0\u3000<a>", [0]),
        ],
    )
    def test_parts(self, text: str, parts: list[str | int]) -> None:
        assert AddedTokenFinder(self.TOKENS).split(text) == parts

    def test_no_tokens(self) -> None:
        assert AddedTokenFinder([]).split("a <b>") == ["a <b>"]

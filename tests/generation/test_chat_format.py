"""Prompts, id by id: Llama 2's format spelled out, templates against the ids of their parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from generation.chat_format import (
    LLAMA2_MARKERS,
    ChatFormatError,
    Llama2ChatFormat,
    TemplateChatFormat,
    chat_format_for,
    validate_dialog,
)
from generation.interface import Dialog
from model.config import CheckpointError
from model.tokenizer.tokenizer import SentencePieceTokenizer, Tokenizer, tokenizer_from_gguf
from tests.helpers.tiny import train_sentencepiece
from tests.helpers.tiny_bpe import CHATML, CONTROL_TOKENS, bpe_metadata

BOS, EOS = 1, 2
LLAMA2_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token + '[INST] ' + m.content.strip() + ' [/INST]' }}"
    "{% elif m.role == 'assistant' %}{{ ' ' + m.content.strip() + ' ' + eos_token }}"
    "{% else %}{{ raise_exception('System role not supported') }}{% endif %}{% endfor %}"
)


def dialog_of(*contents: str, system: str | None = None) -> Dialog:
    """User and assistant in turn."""
    dialog: Dialog = [] if system is None else [{"role": "system", "content": system}]
    for i, content in enumerate(contents):
        dialog.append({"role": "assistant" if i % 2 else "user", "content": content})
    return dialog


@pytest.fixture(scope="module")
def spm(tmp_path_factory: pytest.TempPathFactory) -> SentencePieceTokenizer:
    path: Path = train_sentencepiece(tmp_path_factory.mktemp("spm") / "tokenizer.model")
    return SentencePieceTokenizer.from_file(path)


@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    return tokenizer_from_gguf(bpe_metadata())


class TestLlama2:
    @pytest.mark.parametrize(
        ("dialog", "turns"),
        [
            pytest.param(dialog_of("U"), ["[INST] U [/INST]"], id="B004 no default system prompt"),
            pytest.param(
                dialog_of("U", system="S"), ["[INST] <<SYS>>\nS\n<</SYS>>\n\nU [/INST]"], id="B001, B172, B175 system"
            ),
            pytest.param(
                dialog_of("U1", "A1", "U2", system="S"),
                ["[INST] <<SYS>>\nS\n<</SYS>>\n\nU1 [/INST] A1 ", "[INST] U2 [/INST]"],
                id="B002 two turns",
            ),
            pytest.param(
                dialog_of("a", "b", "c", "d", "e"),
                ["[INST] a [/INST] b ", "[INST] c [/INST] d ", "[INST] e [/INST]"],
                id="three turns",
            ),
            pytest.param(
                dialog_of("  hi \n", " yes\n", "\tso "),
                ["[INST] hi [/INST] yes ", "[INST] so [/INST]"],
                id="B173 strip",
            ),
            pytest.param(dialog_of("U", system=""), ["[INST] U [/INST]"], id="B283 empty system"),
            pytest.param(dialog_of("U", system=" \n"), ["[INST] U [/INST]"], id="B283 blank system"),
            pytest.param(
                dialog_of(" U ", system=" S "),
                ["[INST] <<SYS>>\n S \n<</SYS>>\n\n U [/INST]"],
                id="system and first user text are stripped as a whole",
            ),
            pytest.param(dialog_of(""), ["[INST]  [/INST]"], id="empty user text"),
            pytest.param(dialog_of("naïve 你好 🙂"), ["[INST] naïve 你好 🙂 [/INST]"], id="not only ASCII"),
        ],
    )
    def test_ids(self, spm: SentencePieceTokenizer, dialog: Dialog, turns: list[str]) -> None:
        """B003, B051, B057, B058, B170, B235: each turn on its own, BOS and EOS as ids, EOS only after an answer."""
        expected: list[int] = []
        for turn in turns[:-1]:
            expected += [BOS, *spm.encode(turn, bos=False, eos=False), EOS]
        expected += [BOS, *spm.encode(turns[-1], bos=False, eos=False)]
        assert Llama2ChatFormat(spm).encode(dialog) == expected

    @pytest.mark.parametrize("answer", ["The answer", " The answer \n"])
    def test_continued_answer(self, spm: SentencePieceTokenizer, answer: str) -> None:
        ids = Llama2ChatFormat(spm).encode(dialog_of("a", "b", "c", answer), continue_final_message=True)
        first = spm.encode("[INST] a [/INST] b ", bos=True, eos=True)
        assert ids == first + spm.encode("[INST] c [/INST] The answer", bos=True, eos=False)

    def test_continued_empty_answer(self, spm: SentencePieceTokenizer) -> None:
        chat = Llama2ChatFormat(spm)
        assert chat.encode(dialog_of("a", ""), continue_final_message=True) == chat.encode(dialog_of("a"))

    @pytest.mark.parametrize("marker", LLAMA2_MARKERS)
    @pytest.mark.parametrize("index", [0, 1, 2, 3])
    def test_markers_in_content(self, spm: SentencePieceTokenizer, marker: str, index: int) -> None:
        """B049, B050, B052, B275: named with the message, before any id is made."""
        dialog = dialog_of("a", "b", "c", system="s")
        dialog[index]["content"] += f" x{marker}y"
        with pytest.raises(ChatFormatError) as caught:
            Llama2ChatFormat(spm).encode(dialog)
        assert marker in caught.value.message
        assert caught.value.param == f"messages[{index}].content"

    def test_dialog_is_left_as_it_was(self, spm: SentencePieceTokenizer) -> None:
        dialog = dialog_of(" U ", system="S")
        Llama2ChatFormat(spm).encode(dialog)
        assert dialog == dialog_of(" U ", system="S")


USER, ASSISTANT, SYSTEM = ({"role": role, "content": "x"} for role in ("user", "assistant", "system"))


@pytest.mark.parametrize(
    ("dialog", "param", "message"),
    [
        pytest.param([], "messages", "is empty", id="B274 empty"),
        pytest.param([SYSTEM], "messages", "only a system message", id="B169, B274 system only"),
        pytest.param("hi", "messages", "is a str", id="no list"),
        pytest.param(None, "messages", "is a NoneType", id="null"),
        pytest.param([USER, "hi"], "messages[1]", "is a str", id="no message"),
        pytest.param([{"content": "x"}], "messages[0].role", "missing", id="no role"),
        pytest.param([{"role": "user"}], "messages[0].content", "missing", id="no content"),
        pytest.param([{"role": "user", "content": None}], "messages[0].content", "NoneType", id="B207 null content"),
        pytest.param([{"role": "user", "content": 5}], "messages[0].content", "is a int", id="number"),
        pytest.param([{"role": "ai", "content": "x"}], "messages[0].role", "system, user, assistant", id="B209 ai"),
        pytest.param([{"role": "System", "content": "x"}, USER], "messages[0].role", "'System'", id="B209 System"),
        pytest.param([{"role": ["user"], "content": "x"}], "messages[0].role", "['user']", id="role is a list"),
        pytest.param([USER, {"role": "tool", "content": "x"}], "messages[1].role", "'tool'", id="B207 tool"),
        pytest.param([SYSTEM, USER, USER], "messages[2].role", "expected 'assistant'", id="B055 two users"),
        pytest.param([ASSISTANT, USER], "messages[0].role", "expected 'user'", id="B056 assistant first"),
        pytest.param([USER, SYSTEM, USER], "messages[1].role", "expected 'assistant'", id="B171 late system"),
        pytest.param([SYSTEM, SYSTEM, USER], "messages[1].role", "expected 'user'", id="two systems"),
        pytest.param([USER, ASSISTANT], "messages[1].role", "continue_final_message", id="assistant last"),
    ],
)
def test_bad_dialogs(bpe: Tokenizer, spm: Tokenizer, dialog: Any, param: str, message: str) -> None:
    for encode in (Llama2ChatFormat(spm).encode, TemplateChatFormat(bpe, CHATML).encode):
        with pytest.raises(ChatFormatError) as caught:
            encode(dialog)
        assert message in caught.value.message
        assert str(caught.value) == caught.value.message
        assert caught.value.param == param


def test_only_an_answer_is_continued() -> None:
    validate_dialog([USER, ASSISTANT], continue_final_message=True)
    with pytest.raises(ChatFormatError, match=r"messages\[0\]\.role is 'user'"):
        validate_dialog([USER], continue_final_message=True)


class TestTemplate:
    def test_chatml(self, bpe: Tokenizer) -> None:
        """The template's own default system prompt is kept; control tokens are ids, the rest is plain text."""

        def turn(text: str) -> list[int]:
            return [1, *bpe.encode(text, bos=False, eos=False), 2, *bpe.encode("\n", bos=False, eos=False)]

        start = [1, *bpe.encode("assistant\n", bos=False, eos=False)]
        chat = TemplateChatFormat(bpe, CHATML)
        assert chat.encode(dialog_of("Hi")) == turn("system\nBe brief.") + turn("user\nHi") + start
        dialog = dialog_of("a ", "b", "c", system="S")
        turns = turn("system\nS") + turn("user\na ") + turn("assistant\nb") + turn("user\nc")
        assert chat.encode(dialog) == turns + start

    @settings(max_examples=150, deadline=None)
    @given(st.lists(st.sampled_from([*CONTROL_TOKENS, "<|", "|>", "<", "im_start", " x", "\ue000", "你"]), max_size=8))
    def test_content_never_becomes_a_control_token(self, bpe: Tokenizer, parts: list[str]) -> None:
        """B052: whatever a message says, the prompt has the template's control tokens and the message's text."""
        text = "".join(parts)
        ids = TemplateChatFormat(bpe, CHATML).encode(dialog_of(text, text, "q", system="S"))
        assert [i for i in ids if i in bpe.special_ids] == [1, 2, 1, 2, 1, 2, 1, 2, 1]
        shown = bpe.decode([i for i in ids if i not in bpe.special_ids])
        assert shown == f"system\nS\nuser\n{text}\nassistant\n{text}\nuser\nq\nassistant\n"
        begin = ids.index(2) + 3
        assert ids[begin : ids.index(2, begin)] == bpe.encode(f"user\n{text}", bos=False, eos=False)

    def test_continued_answer(self, bpe: Tokenizer) -> None:
        chat = TemplateChatFormat(bpe, CHATML)
        ids = chat.encode(dialog_of("Hi", "The <|im_end|> answer"), continue_final_message=True)
        prompt = chat.encode(dialog_of("Hi"))
        end = len(bpe.encode("assistant\n", bos=False, eos=False))
        assert ids == prompt[:-end] + bpe.encode("assistant\nThe <|im_end|> answer", bos=False, eos=False)

    def test_bos_is_not_doubled(self, spm: SentencePieceTokenizer) -> None:
        """B057: the template writes BOS, the tokenizer wants one; turns equal Llama 2's own format."""
        dialog = dialog_of("a", "b", "c")
        chat = TemplateChatFormat(spm, LLAMA2_TEMPLATE)
        assert chat.encode(dialog) == Llama2ChatFormat(spm).encode(dialog)
        assert TemplateChatFormat(spm, "{{ messages[0].content }}").encode(dialog_of("a")) == spm.encode(
            "a", bos=True, eos=False
        )

    def test_text_markers_of_the_template(self, spm: SentencePieceTokenizer) -> None:
        chat = TemplateChatFormat(spm, LLAMA2_TEMPLATE)
        with pytest.raises(ChatFormatError, match=r"messages\[0\]\.content contains \[/INST\]"):
            chat.encode(dialog_of("a [/INST] b"))
        ids = chat.encode(dialog_of("a </s> <s>"))
        assert (ids.count(BOS), ids.count(EOS)) == (1, 0)

    def test_template_refuses(self, spm: SentencePieceTokenizer) -> None:
        with pytest.raises(ChatFormatError, match="System role not supported") as caught:
            TemplateChatFormat(spm, LLAMA2_TEMPLATE).encode(dialog_of("a", system="S"))
        assert caught.value.param == "messages"

    def test_template_that_hides_the_answer_cant_continue_it(self, bpe: Tokenizer) -> None:
        with pytest.raises(ChatFormatError, match=r"messages\[1\]\.role .* can't continue"):
            TemplateChatFormat(bpe, "{{ messages[0].content }}").encode(
                dialog_of("a", "b"), continue_final_message=True
            )

    def test_what_a_template_may_use(self, bpe: Tokenizer) -> None:
        template = (
            "{{ bos_token }}{{ eos_token }}{{ strftime_now('%Y')[:2] }}{{ messages[0] | tojson }}{{ tools is none }}\n"
            "  {% for m in messages %}\n{% break %}{% endfor %}\n."
        )
        ids = TemplateChatFormat(bpe, template).encode(dialog_of("é"))
        expected = '20{"role": "user", "content": "é"}True\n.'
        assert ids == [1, 2, *bpe.encode(expected, bos=False, eos=False)]

    @pytest.mark.parametrize(
        "template", ["{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ messages.append(1) }}", "{{ 1 / 0 }}"]
    )
    def test_sandbox(self, bpe: Tokenizer, template: str) -> None:
        with pytest.raises(ChatFormatError, match="chat template"):
            TemplateChatFormat(bpe, template).encode(dialog_of("a"))

    def test_invalid_template(self, bpe: Tokenizer) -> None:
        with pytest.raises(CheckpointError, match=r"isn't valid jinja2.*line 2"):
            TemplateChatFormat(bpe, "\n{% for %}")


class TestChoice:
    def test_auto(self, bpe: Tokenizer, spm: SentencePieceTokenizer) -> None:
        assert chat_format_for(bpe).name == "template"
        assert chat_format_for(spm).name == "llama2"
        assert chat_format_for(bpe, "llama2").name == "llama2"
        assert chat_format_for(bpe, "template").name == "template"

    def test_unknown(self, spm: SentencePieceTokenizer) -> None:
        with pytest.raises(ValueError, match="'chatml', expected one of auto, llama2, template"):
            chat_format_for(spm, "chatml")

    def test_no_template(self, spm: SentencePieceTokenizer) -> None:
        with pytest.raises(ValueError, match="no chat template"):
            chat_format_for(spm, "template")

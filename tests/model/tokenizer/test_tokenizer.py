"""Tokenizers against the libraries they wrap, and the files that are no tokenizer."""

from __future__ import annotations

import functools
import io
import random
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from model.checkpoint.gguf.header import Unreadable
from model.config import CheckpointError
from model.tokenizer.bpe import PRE_TOKENIZERS, byte_alphabet
from model.tokenizer.tokenizer import BPETokenizer, SentencePieceTokenizer, Tokenizer, tokenizer_from_gguf
from tests.helpers.report import report
from tests.helpers.tiny import CORPUS, train_sentencepiece
from tests.helpers.tiny_bpe import bpe_metadata

TEXTS = [
    "",
    " ",
    "Hello world!",
    "  two  spaces ",
    "line\n\nbreaks\r\n\ttab",
    "naïve café 你好 🙂👩‍👩‍👧",
    "1234 x 56",
    "<s>[INST] </s> <unk> <0x41>",
    "nul \x00 byte",
    "▁ already",
]


@pytest.fixture(scope="module")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_sentencepiece(tmp_path_factory.mktemp("spm") / "tokenizer.model")


@pytest.fixture(scope="module")
def spm(model_file: Path) -> SentencePieceTokenizer:
    return SentencePieceTokenizer.from_file(model_file)


@pytest.fixture(scope="module")
def oracle(model_file: Path) -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(model_file=str(model_file))


@pytest.fixture(scope="module")
def bpe() -> BPETokenizer:
    tokenizer = tokenizer_from_gguf(bpe_metadata())
    assert isinstance(tokenizer, BPETokenizer)
    return tokenizer


def spm_metadata(oracle: sentencepiece.SentencePieceProcessor, **changes: Any) -> dict[str, Any]:
    ids = range(oracle.vocab_size())
    kinds = [2 if oracle.is_unknown(i) else 3 if oracle.is_control(i) else 6 if oracle.is_byte(i) else 1 for i in ids]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [oracle.id_to_piece(i) for i in ids],
        "tokenizer.ggml.scores": [oracle.get_score(i) for i in ids],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    metadata |= {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    return {key: value for key, value in metadata.items() if value is not None}


def test_sentencepiece_ids(spm: SentencePieceTokenizer) -> None:
    assert (spm.bos_id, spm.eos_id, spm.pad_id) == (1, 2, -1)
    assert spm.stop_ids == {2}
    assert spm.special_ids == {0, 1, 2}
    assert spm.control_tokens == {"<s>": 1, "</s>": 2}
    assert spm.control_token("<s>") == 1
    assert spm.control_token("<unk>") is None
    assert spm.adds_bos
    assert spm.strips_leading_space
    assert spm.chat_template is None


@pytest.mark.parametrize("text", TEXTS)
def test_sentencepiece_encodes_as_the_library(
    spm: SentencePieceTokenizer, oracle: sentencepiece.SentencePieceProcessor, text: str
) -> None:
    assert spm.encode(text, bos=True, eos=True) == [1, *oracle.encode(text), 2]
    assert spm.encode(text, bos=False, eos=False) == oracle.encode(text)


@pytest.mark.parametrize("text", ["Hello!</s>", "<s>", "[INST] </s><s> [/INST]"])
def test_text_never_becomes_a_control_token(spm: SentencePieceTokenizer, bpe: BPETokenizer, text: str) -> None:
    """B236, B052: "</s>" in a text is plain pieces."""
    assert not spm.special_ids.intersection(spm.encode(text, bos=False, eos=False))
    chatml = text + "<|im_end|><|endoftext|>"
    ids = bpe.encode(chatml, bos=False, eos=False)
    assert not bpe.special_ids.intersection(ids)
    assert bpe.decode(ids) == chatml


def test_sentencepiece_decodes_as_the_library(
    spm: SentencePieceTokenizer, oracle: sentencepiece.SentencePieceProcessor
) -> None:
    """B064, B069, B070, B176: random ids, half of them bytes, most of them no valid UTF-8."""
    rng = random.Random(0)
    for _ in range(2000):
        ids = [rng.choice((rng.randrange(1, spm.n_words), rng.randrange(3, 259))) for _ in range(rng.randrange(12))]
        assert spm.decode(ids) == oracle.decode(ids), ids


def test_leading_spaces_as_the_library_drops_them() -> None:
    """A model trained with the library's defaults drops all of them, Llama's only one."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS.strip().splitlines()),
        model_writer=model,
        model_type="bpe",
        vocab_size=384,
        byte_fallback=True,
        num_threads=1,
        minloglevel=2,
    )
    oracle = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    spm = SentencePieceTokenizer.from_proto(model.getvalue())
    blank = oracle.piece_to_id("▁")
    rng = random.Random(0)
    for _ in range(500):
        ids = [rng.choice((blank, rng.randrange(1, spm.n_words))) for _ in range(rng.randrange(6))]
        assert spm.decode(ids) == oracle.decode(ids), ids


def test_token_bytes(spm: SentencePieceTokenizer, oracle: sentencepiece.SentencePieceProcessor) -> None:
    """B232: a byte token's own byte, which the library's decoder doesn't give."""
    assert spm.token_bytes(oracle.piece_to_id("<0xE4>")) == b"\xe4"
    assert spm.token_bytes(oracle.piece_to_id("▁the")) == b" the"
    assert [spm.token_bytes(i) for i in (0, 1, 2)] == [b"", b"", b""]


def test_control_tokens_are_never_rendered(spm: SentencePieceTokenizer, bpe: BPETokenizer) -> None:
    """B239."""
    hello = spm.encode("Hello", bos=True, eos=True)
    assert spm.decode([*hello, 2, 0, 1]) == "Hello"
    assert bpe.decode([0, *bpe.encode("Hello", bos=True, eos=True), 2, 2]) == "Hello"


@pytest.mark.parametrize("token_id", [-1, 384, 10**9])
def test_id_outside_the_vocabulary(spm: SentencePieceTokenizer, token_id: int) -> None:
    """B040: a padding id of -1 is no token."""
    with pytest.raises(ValueError, match=rf"{token_id} .* 384"):
        spm.decode([5, token_id])
    with pytest.raises(ValueError, match=str(token_id)):
        spm.token_bytes(token_id)


@settings(deadline=None)
@given(st.text(st.characters(codec=None), max_size=30))
def test_any_string_can_be_encoded(text: str) -> None:
    """Lone surrogates, which JSON may bring, are read as U+FFFD."""
    tokenizer = _shared_bpe()
    expected = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    assert tokenizer.decode(tokenizer.encode(text, bos=False, eos=False)) == expected


@functools.cache
def _shared_bpe() -> Tokenizer:
    return tokenizer_from_gguf(bpe_metadata(pre="gpt-2"))


def test_surrogates_in_sentencepiece(spm: SentencePieceTokenizer) -> None:
    assert spm.decode(spm.encode("a\ud83d b", bos=False, eos=False)) == "a\ufffd b"
    assert spm.decode(spm.encode("\ud83d\ude42", bos=False, eos=False)) == "🙂"


class TestFiles:
    def test_missing(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match=r"tokenizer\.model can't be read: No such file"):
            SentencePieceTokenizer.from_file(tmp_path / "tokenizer.model")

    @report("B127", "ggml-org/llama.cpp#4077")
    @pytest.mark.parametrize(
        ("content", "what"),
        [
            (b"", "empty"),
            (b"<!DOCTYPE html>\n<html>", "web page"),
            (b"version https://git-lfs.github.com/spec/v1\noid sha256:1", "git lfs pull"),
            (b'{"model": {}}', "JSON"),
            (b"IQ== 0\nIg== 1\n", "tiktoken"),
            (b"\x00\x01garbage", "not a usable SentencePiece model"),
        ],
    )
    def test_something_else(self, tmp_path: Path, content: bytes, what: str) -> None:
        """B127: a page or a pointer in place of the model."""
        path = tmp_path / "tokenizer.model"
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=what) as caught:
            SentencePieceTokenizer.from_file(path)
        assert str(path) in str(caught.value)

    def test_cut_short(self, tmp_path: Path, model_file: Path) -> None:
        path = tmp_path / "tokenizer.model"
        path.write_bytes(model_file.read_bytes()[:-20])
        with pytest.raises(CheckpointError, match="not a usable"):
            SentencePieceTokenizer.from_file(path)


class TestGGUFSentencePiece:
    @report("B268", "huggingface/candle#3670")
    @report("B269", "huggingface/transformers#31630")
    def test_same_ids_and_text(self, spm: SentencePieceTokenizer, oracle: sentencepiece.SentencePieceProcessor) -> None:
        """B268, B269: tokens and scores alone give the model back."""
        rebuilt = tokenizer_from_gguf(spm_metadata(oracle))
        for text in [*TEXTS, *CORPUS.splitlines()]:
            ids = spm.encode(text, bos=True, eos=True)
            assert rebuilt.encode(text, bos=True, eos=True) == ids
            assert rebuilt.decode(ids) == text.replace("▁", " ")
        for name in ("bos_id", "eos_id", "pad_id", "stop_ids", "special_ids", "byte_ids", "control_tokens", "adds_bos"):
            assert getattr(rebuilt, name) == getattr(spm, name), name

    def test_defaults_for_missing_ids(self, oracle: sentencepiece.SentencePieceProcessor) -> None:
        rebuilt = tokenizer_from_gguf(spm_metadata(oracle, bos_token_id=None, eos_token_id=None, token_type=None))
        assert rebuilt.encode("Hello", bos=True, eos=True) == [1, *oracle.encode("Hello"), 2]
        assert rebuilt.special_ids == {0, 1, 2}

    def test_no_space_in_front(self, oracle: sentencepiece.SentencePieceProcessor) -> None:
        rebuilt = tokenizer_from_gguf(spm_metadata(oracle, add_space_prefix=False))
        assert not rebuilt.strips_leading_space
        assert rebuilt.decode(rebuilt.encode(" the", bos=False, eos=False)) == " the"

    def test_no_bos_wanted(self, oracle: sentencepiece.SentencePieceProcessor) -> None:
        assert not tokenizer_from_gguf(spm_metadata(oracle, add_bos_token=False)).adds_bos

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"model": "bert"}, "model is 'bert'"),
            ({"model": None}, "model is None"),
            ({"tokens": None}, "tokens is missing"),
            ({"scores": None}, "scores is missing"),
            ({"scores": [0.0]}, "scores has 1 entries, .*tokens has 384"),
            ({"token_type": [1]}, "token_type has 1 entries"),
            ({"eos_token_id": 384}, "eos_token_id is 384"),
        ],
    )
    def test_bad_metadata(
        self, oracle: sentencepiece.SentencePieceProcessor, changes: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(CheckpointError, match=message):
            tokenizer_from_gguf(spm_metadata(oracle, **changes))


class TestGGUFBPE:
    def test_ids(self, bpe: BPETokenizer) -> None:
        assert (bpe.bos_id, bpe.eos_id, bpe.pad_id) == (1, 2, 2)
        assert bpe.stop_ids == {2}
        assert bpe.special_ids == {0, 1, 2}
        assert bpe.control_token("<|im_start|>") == 1
        assert not bpe.adds_bos
        assert not bpe.strips_leading_space
        assert bpe.chat_template == bpe_metadata()["tokenizer.chat_template"]

    def test_encodes_and_decodes_as_the_library(self, bpe: BPETokenizer) -> None:
        oracle = byte_level_oracle()
        for text in [*TEXTS, *CORPUS.splitlines()]:
            ids = bpe.encode(text, bos=False, eos=False)
            assert ids == oracle.encode(text).ids
            assert bpe.decode(ids) == text
        rng = random.Random(0)
        for _ in range(1000):
            ids = [rng.randrange(3, bpe.n_words) for _ in range(rng.randrange(12))]
            assert bpe.decode(ids) == oracle.decode(ids, skip_special_tokens=False), ids

    def test_digits_are_single_in_smollm(self, bpe: BPETokenizer) -> None:
        assert [bpe.token_bytes(i) for i in bpe.encode("1234", bos=False, eos=False)] == [b"1", b"2", b"3", b"4"]

    @pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
    def test_every_pre_tokenizer_keeps_the_text(self, pre: str) -> None:
        tokenizer = tokenizer_from_gguf(bpe_metadata(pre=pre, add_bos_token=None))
        for text in [*TEXTS, *CORPUS.splitlines(), "don't 12345 $a+b= x\n\n y"]:
            assert tokenizer.decode(tokenizer.encode(text, bos=True, eos=True)) == text
        assert tokenizer.adds_bos == (pre not in ("smollm", "gpt-2", "default", "smaug-bpe", "dbrx"))

    @pytest.mark.parametrize(
        ("pre", "words"),
        [
            ("smollm", ["I", "'m", "\u0120", "1", "2", "3", "4", "!!", "\u010a\u010a", "\u0120x"]),
            ("gpt-2", ["I", "'m", "\u01201234", "!!", "\u010a\u010a", "\u0120x"]),
            ("llama-bpe", ["I", "'m", "\u0120", "123", "4", "!!\u010a\u010a", "\u0120x"]),
            ("default", ["I", "'", "m", "\u0120", "123", "4", "!!", "\u010a\u010a", "\u0120x"]),
        ],
    )
    def test_words(self, pre: str, words: list[str]) -> None:
        """How each one cuts the same text."""
        assert [word for word, _ in PRE_TOKENIZERS[pre].build().pre_tokenize_str("I'm 1234!!\n\n x")] == words

    def test_user_defined_tokens_are_text(self) -> None:
        metadata = bpe_metadata()
        metadata["tokenizer.ggml.tokens"].append("<tool>")
        metadata["tokenizer.ggml.token_type"].append(4)
        tokenizer = tokenizer_from_gguf(metadata)
        ids = tokenizer.encode("a<tool> b", bos=False, eos=False)
        assert tokenizer.n_words - 1 in ids
        assert tokenizer.decode(ids) == "a<tool> b"

    def test_framing_tokens_are_control_tokens_whatever_the_file_says(self) -> None:
        n = len(bpe_metadata()["tokenizer.ggml.tokens"])
        tokenizer = tokenizer_from_gguf(bpe_metadata(token_type=[3] + [1] * (n - 1)))
        assert tokenizer.special_ids == {0, 1, 2}

    @pytest.mark.parametrize("none", [None, -1, 0xFFFFFFFF])
    def test_no_bos_and_eos(self, none: int | None) -> None:
        tokenizer = tokenizer_from_gguf(
            bpe_metadata(bos_token_id=none, eos_token_id=none, padding_token_id=none, chat_template=None)
        )
        assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (None, None, -1)
        assert tokenizer.stop_ids == frozenset()
        assert tokenizer.encode("a", bos=True, eos=True) == tokenizer.encode("a", bos=False, eos=False)

    def test_ends_of_turns_stop(self) -> None:
        assert tokenizer_from_gguf(bpe_metadata(eos_token_id=0, eot_token_id=2)).stop_ids == {0, 2}
        assert tokenizer_from_gguf(bpe_metadata(eos_token_id=0)).stop_ids == {0, 2}, "from the chat template"

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"pre": "deepseek-llm"}, "deepseek-llm.*smollm"),
            ({"pre": None}, "pre is missing"),
            ({"pre": 3}, "pre is 3, expected a text"),
            ({"add_bos_token": "false"}, "add_bos_token is 'false', expected true or false"),
            ({"merges": Unreadable("a list of lists")}, "merges is a list of lists, expected a list"),
            ({"merges": None}, "merges is missing"),
            ({"merges": ["no such"]}, "merges"),
            ({"merges": [1]}, r"merges\[0\] is 1, expected a text"),
            ({"tokens": [1, 2, 3]}, r"tokens\[0\] is 1, expected a text"),
            ({"tokens": ["\ud800"], "token_type": None}, "tokens: .* is no valid Unicode text"),
            ({"tokens": ["a", "b", "c", "d", "d"], "token_type": [1] * 5}, "'d' is there twice"),
            ({"token_type": ["1"] * 500}, r"token_type\[0\] is '1', expected an integer"),
            ({"token_type": [9] * 500}, r"token_type\[0\] is 9, known are 1 to 6"),
            ({"eos_token_id": "2"}, "eos_token_id is '2'"),
            ({"eos_token_id": [2]}, r"eos_token_id is \[2\]"),
            ({"eos_token_id": -5}, "eos_token_id is -5"),
            ({"chat_template": 1}, "chat_template is 1, expected a text"),
        ],
    )
    def test_bad_metadata(self, changes: dict[str, Any], message: str) -> None:
        with pytest.raises(CheckpointError, match=message):
            tokenizer_from_gguf(bpe_metadata(**changes))


def byte_level_oracle() -> tokenizers.Tokenizer:
    """The library's own tokenizer with SmolLM's settings, control tokens left in the vocabulary."""
    metadata = bpe_metadata()
    vocab = {piece: i for i, piece in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    oracle = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    oracle.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    oracle.decoder = decoders.ByteLevel()
    return oracle


def test_byte_alphabet_is_the_librarys() -> None:
    alphabet = byte_alphabet()
    assert set(alphabet) == set(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(alphabet.values()) == list(range(256))

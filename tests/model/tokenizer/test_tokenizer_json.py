"""`tokenizer.json` against the library that defines it, and files that are broken or of another kind."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from model.config import CheckpointError
from model.tokenizer.hf_json import tokenizer_from_json
from model.tokenizer.tokenizer import BPETokenizer, MetaspaceTokenizer, TextDecoder, Tokenizer, tokenizer_from_directory
from tests.helpers.report import report
from tests.helpers.texts import texts
from tests.helpers.tiny import train_sentencepiece
from tests.helpers.tiny_tokenizers import LLAMA3_TOKENS, Document, byte_level_document, llama2, save

TEXTS = texts(2500)
KINDS = ["smollm", "gpt2", "llama3", "llama2", "llama2-metaspace"]


@pytest.fixture(scope="module")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_sentencepiece(tmp_path_factory.mktemp("spm") / "tokenizer.model")


@pytest.fixture(scope="module", params=KINDS)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, model_file: Path) -> Path:
    kind = request.param
    llama = kind.startswith("llama2")
    document = llama2(model_file, metaspace=kind != "llama2") if llama else byte_level_document(kind)
    return save(tmp_path_factory.mktemp(kind), document)


def streamed(tokenizer: Tokenizer, ids: list[int]) -> str:
    decoder = TextDecoder(tokenizer)
    return "".join([decoder.feed(token_id) for token_id in ids]) + decoder.finish()


@report("B235", "huggingface/transformers#25073")
def test_same_ids_and_text_as_the_library(directory: Path) -> None:
    """B235: whatever the kind; text and ids, whole and streamed."""
    oracle = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer = tokenizer_from_directory(directory)
    assert tokenizer.n_words == oracle.get_vocab_size()
    for text in TEXTS:
        ids = tokenizer.encode(text, bos=False, eos=False)
        assert ids == oracle.encode(text, add_special_tokens=False).ids, text
        assert tokenizer.decode(ids) == streamed(tokenizer, ids) == oracle.decode(ids), text


@pytest.mark.parametrize("kind", ["smollm", "llama3"])
def test_any_ids_decode_as_in_the_library(kind: str) -> None:
    document = byte_level_document(kind)
    oracle = tokenizers.Tokenizer.from_str(json.dumps(document))
    tokenizer, _ = tokenizer_from_json(document)
    rng = random.Random(0)
    for _ in range(2000):
        ids = [rng.randrange(tokenizer.n_words) for _ in range(rng.randrange(12))]
        assert streamed(tokenizer, ids) == oracle.decode(ids, skip_special_tokens=True), ids


@report("B070", "abetlen/llama-cpp-python#1375")
def test_any_ids_of_llama_2_decode_as_in_sentencepiece(model_file: Path) -> None:
    """B070: bytes that are no UTF-8 as SentencePiece itself decodes them, so that they can be streamed."""
    tokenizer, _ = tokenizer_from_json(llama2(model_file))
    oracle = sentencepiece.SentencePieceProcessor(model_file=str(model_file))
    rng = random.Random(0)
    for _ in range(2000):
        ids = [rng.choice((rng.randrange(1, 384), rng.randrange(3, 259))) for _ in range(rng.randrange(12))]
        assert tokenizer.decode(ids) == streamed(tokenizer, ids) == oracle.decode(ids), ids


@report("B236", "huggingface/tokenizers#1263")
@pytest.mark.parametrize("text", ["<s>", "Hello!</s>", "<unk>", "<|im_start|>user", "<|eot_id|>", "a<|endoftext|>b"])
def test_text_never_becomes_a_control_token(directory: Path, text: str) -> None:
    """B236: though the library itself would make one of it."""
    tokenizer = tokenizer_from_directory(directory)
    ids = tokenizer.encode(text, bos=False, eos=False)
    assert not tokenizer.special_ids.intersection(ids)
    assert tokenizer.decode(ids) == text


@settings(deadline=None, max_examples=50)
@given(st.text(max_size=30))
def test_any_text_comes_back(text: str) -> None:
    for kind in ("smollm", "gpt2", "llama3"):
        tokenizer, _ = tokenizer_from_json(byte_level_document(kind))
        assert tokenizer.decode(tokenizer.encode(text, bos=False, eos=False)) == text


def test_a_whole_word_goes_before_the_merges() -> None:
    tokenizer, front = tokenizer_from_json(byte_level_document("llama3"))
    ids = tokenizer.encode("a zebra", bos=False, eos=False)
    assert [tokenizer.token_bytes(token_id) for token_id in ids] == [b"a", b" zebra"]
    assert front == "<|begin_of_text|>"
    assert tokenizer.control_tokens == {text: 561 + i for i, text in enumerate(LLAMA3_TOKENS)}


class TestAddedTokens:
    def test_text_that_is_never_cut(self, directory: Path) -> None:
        """Its flags are the file's own, so ids are the library's with and without spaces beside it."""
        document = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
        oracle = tokenizers.Tokenizer.from_str(json.dumps(document))
        added = [
            tokenizers.AddedToken("<tool>", normalized=False),
            tokenizers.AddedToken("[x y]", normalized=True),
            tokenizers.AddedToken("<left>", lstrip=True, normalized=False),
            tokenizers.AddedToken("<right>", rstrip=True, normalized=False),
            tokenizers.AddedToken("word", single_word=True, normalized=False),
        ]
        oracle.add_tokens(added)
        tokenizer, _ = tokenizer_from_json(json.loads(oracle.to_str()))
        assert tokenizer.n_words == oracle.get_vocab_size()
        assert tokenizer.token_bytes(tokenizer.pieces.index("[x y]")) == b"[x y]"
        for text in ["a<tool>b", "a <tool> b", "<tool>", "[x y][x y]", "a <left> b", "a <right> b", "word words word"]:
            ids = tokenizer.encode(text, bos=False, eos=False)
            assert ids == oracle.encode(text, add_special_tokens=False).ids, text

    def test_code_llamas_infill_pieces_stay_pieces(self, model_file: Path) -> None:
        document = llama2(model_file)
        document["model"]["vocab"]["▁<PRE>"] = 384
        document["added_tokens"].append({"id": 384, "content": "▁<PRE>", "special": True})
        tokenizer, _ = tokenizer_from_json(document)
        assert tokenizer.token_bytes(384) == b" <PRE>"
        assert tokenizer.control_tokens == {"<s>": 1, "</s>": 2}

    def test_framing_tokens_are_control_tokens(self) -> None:
        document = byte_level_document("smollm")
        document["added_tokens"] = []
        tokenizer, _ = tokenizer_from_json(document, framing=["<|im_start|>", "<|im_end|>"])
        assert tokenizer.control_tokens == {"<|im_start|>": 1, "<|im_end|>": 2}


def test_unknown_characters_without_byte_tokens(model_file: Path) -> None:
    """The unknown token stands for them, as in the library; no text spells it."""
    document = llama2(model_file)
    names = {f"<0x{byte:02X}>": f"unused {byte}" for byte in range(256)}
    document["model"]["vocab"] = {names.get(piece, piece): i for piece, i in document["model"]["vocab"].items()}
    oracle = tokenizers.Tokenizer.from_str(json.dumps(document))
    tokenizer, _ = tokenizer_from_json(document)
    for text in ["你好 the", "the 🙂🙂 end"]:
        ids = tokenizer.encode(text, bos=False, eos=False)
        assert ids == oracle.encode(text, add_special_tokens=False).ids
        assert 0 in ids
    assert tokenizer.special_ids == {0, 1, 2}


def _set(*path: Any) -> Callable[[Document], None]:
    """A change: the last argument put where the others lead."""

    def change(document: Document) -> None:
        inner: Any = document
        for key in path[:-2]:
            inner = inner[key]
        inner[path[-2]] = path[-1]

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_set("model", None), "model is None"),
        (_set("model", "type", "WordPiece"), "model.type is 'WordPiece', only BPE"),
        (_set("model", {"type": "Unigram", "vocab": []}), "model.type is 'Unigram'"),
        (_set("model", {"vocab": {"a": 0}}), "model.type is None"),
        (_set("model", "vocab", {}), "model.vocab is dict of 0"),
        (_set("model", "vocab", ["a"]), "model.vocab is list of 1"),
        (_set("model", "vocab", "a", 3.5), "'a' has id 3.5"),
        (_set("model", "vocab", "a", True), "'a' has id True"),
        (_set("model", "vocab", "a", -1), "'a' has id -1"),
        (_set("model", "vocab", "a", 4), "id 4 is both"),
        (_set("model", "vocab", "more", 10**12), r"no token has id 560, but there are ids up to 1000000000000"),
        (_set("model", "vocab", "\ud800", 560), r"'\\ud800' is no valid Unicode"),
        (_set("model", "merges", None), "model.merges is None"),
        (_set("model", "merges", 0, "a"), r"model.merges\[0\] is 'a'"),
        (_set("model", "merges", 0, ["a", 1]), r"model.merges\[0\] is list of 2"),
        (_set("model", "merges", 0, "a b c"), r"model.merges\[0\] is 'a b c'"),
        (_set("model", "merges", 0, ["q", "\u0120"]), "model.vocab or model.merges: .*can't be used"),
        (_set("model", "end_of_word_suffix", "</w>"), "model.end_of_word_suffix is '</w>'"),
        (_set("model", "unk_token", 7), "model.unk_token is 7"),
        (_set("pre_tokenizer", {"type": "NoSuch"}), "pre_tokenizer isn't understood"),
        (_set("normalizer", {"type": "NoSuch"}), "normalizer isn't understood"),
        (_set("added_tokens", {}), "added_tokens is dict"),
        (_set("added_tokens", ["x"]), r"added_tokens\[0\] is 'x'"),
        (_set("added_tokens", 0, "id", "0"), r"added_tokens\[0\]: the id is '0'"),
        (_set("added_tokens", 0, "content", None), r"added_tokens\[0\]: content is None"),
        (_set("added_tokens", 0, "special", "yes"), r"added_tokens\[0\]: special is 'yes'"),
        (_set("added_tokens", 0, "id", 1), "id 1 is both"),
        (_set("added_tokens", 0, "content", "other"), "added token 0 is 'other', but model.vocab has"),
        (_set("added_tokens", 0, "id", 560), r"added token .* has id 560, in model.vocab 0"),
    ],
)
def test_broken_documents(tmp_path: Path, change: Callable[[Document], None], message: str) -> None:
    document = byte_level_document("smollm")
    change(document)
    save(tmp_path, document)
    with pytest.raises(CheckpointError, match=message) as caught:
        tokenizer_from_directory(tmp_path)
    assert str(tmp_path / "tokenizer.json") in str(caught.value)
    assert len(str(caught.value)) < 500


def test_bpe_of_another_kind() -> None:
    document = byte_level_document("gpt2") | {"pre_tokenizer": {"type": "Whitespace"}, "decoder": None}
    with pytest.raises(CheckpointError, match=r"neither byte-level BPE nor BPE with byte fallback"):
        tokenizer_from_json(document)


def test_a_decoder_of_another_kind(model_file: Path) -> None:
    document = llama2(model_file) | {"decoder": {"type": "Fuse"}}
    with pytest.raises(CheckpointError, match=r"decoder makes '▁x"):
        tokenizer_from_json(document)


@report("B127", "ggml-org/llama.cpp#4077")
@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"", "empty"),
        (b"<!DOCTYPE html>", "web page"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1", "git lfs pull"),
        (b'{"model": {', "not JSON"),
        (b'{"model": "\xff"}', "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "list of 0, expected an object"),
        (b"7", "holds 7, expected an object"),
    ],
)
def test_something_else_in_the_file(tmp_path: Path, content: bytes, what: str) -> None:
    """B127."""
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=what) as caught:
        tokenizer_from_directory(tmp_path)
    assert str(tmp_path / "tokenizer.json") in str(caught.value)


def test_mutated_documents_are_errors_or_tokenizers(model_file: Path) -> None:
    """Any value replaced by one of another type: never anything but a CheckpointError."""
    rng = random.Random(0)
    sources = [json.dumps(byte_level_document(kind)) for kind in ("smollm", "llama3")]
    sources.append(json.dumps(llama2(model_file)))
    for _ in range(300):
        document = json.loads(rng.choice(sources))
        inner: Any = document
        while True:
            key = rng.choice(list(inner) if isinstance(inner, dict) else range(len(inner)))
            if not isinstance(inner[key], (dict, list)) or not inner[key] or rng.random() < 0.3:
                break
            inner = inner[key]
        inner[key] = rng.choice([None, True, -1, 7, 1e9, "", "x", [], [None], {}, {"type": "BPE"}])
        try:
            tokenizer, _ = tokenizer_from_json(document)
        except CheckpointError:
            continue
        assert isinstance(tokenizer, (BPETokenizer, MetaspaceTokenizer))
        tokenizer.decode(tokenizer.encode("Hello <s> 你好", bos=True, eos=True))

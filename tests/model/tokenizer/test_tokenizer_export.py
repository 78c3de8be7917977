"""Tokenizers written as files and as GGUF metadata, and read back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tokenizers
import transformers

from model.config import CheckpointError
from model.tokenizer.export import export_gguf, export_huggingface, export_sentencepiece
from model.tokenizer.hf_json import tokenizer_from_json
from model.tokenizer.proto import build_model, model_pieces, model_traits
from model.tokenizer.tokenizer import SentencePieceTokenizer, Tokenizer, tokenizer_from_directory, tokenizer_from_gguf
from tests.helpers.texts import texts
from tests.helpers.tiny import train_sentencepiece
from tests.helpers.tiny_bpe import bpe_metadata
from tests.helpers.tiny_tokenizers import byte_level_document, llama2, save

TEXTS = texts(400)
SAME = (
    "n_words",
    "bos_id",
    "eos_id",
    "pad_id",
    "stop_ids",
    "special_ids",
    "control_tokens",
    "byte_ids",
    "adds_bos",
    "chat_template",
    "strips_leading_space",
)


def assert_same(one: Tokenizer, other: Tokenizer) -> None:
    assert type(one) is type(other)
    for name in SAME:
        assert getattr(one, name) == getattr(other, name), name
    assert list(one.pieces) == list(other.pieces)
    assert [one.token_bytes(i) for i in range(one.n_words)] == [other.token_bytes(i) for i in range(one.n_words)]
    for text in [*TEXTS, "a<tool> b<s></s><|im_end|><|eot_id|>"]:
        assert one.encode(text, bos=True, eos=True) == other.encode(text, bos=True, eos=True), text


def directory_of(kind: str, directory: Path) -> Path:
    """A checkpoint's tokenizer files of each kind, with stop ids, an added token of text and a template."""
    model = train_sentencepiece(directory / "tokenizer.model")
    if kind == "spm":
        added = {"384": {"content": "<|im_end|>", "special": True}, "385": {"content": "<tool>", "special": False}}
        config = {"added_tokens_decoder": added, "chat_template": "{{ '<|im_end|>' }}", "pad_token": "<unk>"}
        return save(directory, None, tokenizer_config=config, generation_config={"eos_token_id": [2, 384]})
    document = llama2(model) if kind == "llama2" else byte_level_document(kind)
    model.unlink()
    backend = tokenizers.Tokenizer.from_str(json.dumps(document))
    backend.add_tokens([tokenizers.AddedToken("<tool>", normalized=False)])
    names = {"llama2": ("<s>", "</s>"), "llama3": ("<|begin_of_text|>", "<|eot_id|>")}
    bos, eos = names.get(kind, ("<|endoftext|>", "<|endoftext|>"))
    config = {"bos_token": bos, "eos_token": eos, "pad_token": eos, "chat_template": "{{ messages }} \u4f60\n"}
    stops = {"llama3": [562, 563, 564]}.get(kind, [backend.token_to_id(eos)])
    save(directory, None, tokenizer_config=config, generation_config={"eos_token_id": stops})
    backend.save(str(directory / "tokenizer.json"))
    return directory


@pytest.mark.parametrize("kind", ["spm", "llama2", "smollm", "gpt2", "llama3"])
def test_huggingface_files_read_back(tmp_path: Path, kind: str) -> None:
    tokenizer = tokenizer_from_directory(directory_of(kind, tmp_path / "source"))
    (tmp_path / "copy").mkdir()
    export_huggingface(tokenizer, tmp_path / "copy")
    assert_same(tokenizer, tokenizer_from_directory(tmp_path / "copy"))


@pytest.mark.parametrize("kind", ["llama2", "smollm", "llama3"])
def test_transformers_reads_what_is_written(tmp_path: Path, kind: str) -> None:
    """Its ids are ours on texts without control tokens, BOS where we add it."""
    tokenizer = tokenizer_from_directory(directory_of(kind, tmp_path / "source"))
    (tmp_path / "copy").mkdir()
    export_huggingface(tokenizer, tmp_path / "copy")
    peer = transformers.AutoTokenizer.from_pretrained(tmp_path / "copy")
    for text in TEXTS:
        assert peer(text)["input_ids"] == tokenizer.encode(text, bos=tokenizer.adds_bos, eos=False), text
    assert (peer.bos_token_id, peer.eos_token_id) == (tokenizer.bos_id, tokenizer.eos_id)
    assert peer.chat_template == tokenizer.chat_template


@pytest.mark.parametrize("kind", ["spm", "smollm", "gpt2", "llama3"])
def test_gguf_metadata_reads_back(tmp_path: Path, kind: str) -> None:
    tokenizer = tokenizer_from_directory(directory_of(kind, tmp_path))
    metadata = export_gguf(tokenizer)
    assert_same(tokenizer, tokenizer_from_gguf(metadata))
    names = {"spm": "default", "gpt2": "gpt-2", "llama3": "llama-bpe"}
    assert metadata["tokenizer.ggml.pre"] == names.get(kind, kind)


@pytest.mark.parametrize("pre", ["smollm", "gpt-2", "default", "llama-bpe", "smaug-bpe"])
def test_gguf_to_huggingface_and_back(tmp_path: Path, pre: str) -> None:
    metadata = bpe_metadata(pre=pre)
    tokenizer = tokenizer_from_gguf(metadata)
    export_huggingface(tokenizer, tmp_path)
    again = tokenizer_from_directory(tmp_path)
    assert_same(tokenizer, again)
    written = export_gguf(again)
    assert written == metadata


def test_sentencepiece_bytes(tmp_path: Path) -> None:
    model = train_sentencepiece(tmp_path / "tokenizer.model")
    assert export_sentencepiece(SentencePieceTokenizer.from_file(model)) == model.read_bytes()
    assert export_sentencepiece(tokenizer_from_gguf(bpe_metadata())) is None


def test_a_vocabulary_without_bos(tmp_path: Path) -> None:
    pieces, kinds = ["<unk>", "a", "▁", "b"], [2, 1, 1, 1]
    model = build_model(pieces, [0.0] * 4, kinds, bos_id=None, eos_id=None)
    tokenizer = SentencePieceTokenizer.from_proto(model)
    assert (tokenizer.bos_id, tokenizer.eos_id) == (None, None)
    again = tokenizer_from_gguf(export_gguf(tokenizer))
    assert (again.bos_id, again.eos_id) == (None, None)
    assert again.special_ids == {0}


class TestWhatGGUFCannotSay:
    def test_another_pre_tokenizer(self) -> None:
        document = byte_level_document("gpt2")
        document["pre_tokenizer"]["add_prefix_space"] = True
        tokenizer, _ = tokenizer_from_json(document)
        with pytest.raises(CheckpointError, match=r"add_prefix_space.*no name in GGUF.*smollm"):
            export_gguf(tokenizer)

    def test_whole_words_where_the_name_does_not_mean_them(self) -> None:
        document = byte_level_document("smollm")
        document["model"]["ignore_merges"] = True
        tokenizer, _ = tokenizer_from_json(document)
        with pytest.raises(CheckpointError, match="ignore_merges True"):
            export_gguf(tokenizer)

    def test_a_normalizer(self) -> None:
        tokenizer, _ = tokenizer_from_json(byte_level_document("gpt2") | {"normalizer": {"type": "NFC"}})
        with pytest.raises(CheckpointError, match="NFC"):
            export_gguf(tokenizer)

    def test_an_added_token_that_takes_spaces(self) -> None:
        document = byte_level_document("gpt2")
        flags: dict[str, Any] = {"single_word": False, "lstrip": False, "rstrip": True, "normalized": False}
        entry = {"id": len(document["model"]["vocab"]), "content": "<x>", "special": False, **flags}
        document["added_tokens"].append(entry)
        tokenizer, _ = tokenizer_from_json(document)
        with pytest.raises(CheckpointError, match="'<x>' takes spaces"):
            export_gguf(tokenizer)

    def test_pieces_without_scores(self, tmp_path: Path) -> None:
        tokenizer, _ = tokenizer_from_json(llama2(train_sentencepiece(tmp_path / "tokenizer.model")))
        with pytest.raises(CheckpointError, match=r"put the model's tokenizer\.model beside it"):
            export_gguf(tokenizer)

    def test_many_stop_ids(self) -> None:
        tokenizer = tokenizer_from_gguf(bpe_metadata())
        tokenizer.stop_ids = frozenset({0, 1, 2, 300})
        with pytest.raises(CheckpointError, match=r"stop ids \[0, 1, 300\]"):
            export_gguf(tokenizer)


class TestProto:
    def test_pieces_are_the_librarys(self, tmp_path: Path) -> None:
        path = train_sentencepiece(tmp_path / "tokenizer.model")
        sp = sentencepiece.SentencePieceProcessor(model_file=str(path))
        rows = model_pieces(path.read_bytes())
        assert [(text, score) for text, score, _ in rows] == [(sp.id_to_piece(i), sp.get_score(i)) for i in range(384)]
        assert [kind for _, _, kind in rows][:4] == [2, 3, 3, 6]

    def test_traits(self, tmp_path: Path) -> None:
        traits = model_traits(train_sentencepiece(tmp_path / "tokenizer.model").read_bytes())
        assert (traits.is_bpe, traits.changes_text, traits.add_dummy_prefix) == (True, False, True)
        bare = model_traits(b"")
        assert (bare.is_bpe, bare.changes_text, bare.add_dummy_prefix) == (False, True, True)

    @pytest.mark.parametrize("data", [b"\x0a\xff", b"\x0a", b"\x12\x03\x08", b"\xff" * 20, b"\x0b\x00"])
    def test_damaged(self, data: bytes) -> None:
        with pytest.raises(CheckpointError, match="cut short or damaged"):
            model_traits(data)

"""A Hugging Face directory's tokenizer: which file counts, added tokens, BOS, stop ids and the template."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import sentencepiece

from model.config import CheckpointError
from model.tokenizer.tokenizer import (
    BPETokenizer,
    MetaspaceTokenizer,
    SentencePieceTokenizer,
    TextDecoder,
    Tokenizer,
    tokenizer_from_directory,
)
from tests.helpers.report import report
from tests.helpers.texts import texts
from tests.helpers.tiny import train_sentencepiece
from tests.helpers.tiny_tokenizers import byte_level_document, llama2, save

TIKTOKEN = b"IQ== 0\nIg== 1\n"


@pytest.fixture(scope="module")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_sentencepiece(tmp_path_factory.mktemp("spm") / "tokenizer.model")


@pytest.fixture
def spm(tmp_path: Path, model_file: Path) -> Path:
    """A directory with nothing but the SentencePiece model."""
    shutil.copy(model_file, tmp_path / "tokenizer.model")
    return tmp_path


def write(directory: Path, name: str, value: Any) -> None:
    (directory / name).write_text(json.dumps(value), encoding="utf-8")


def decoder_entry(text: str, special: bool) -> dict[str, Any]:
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    return {"content": text, "special": special, **flags}


def streamed(tokenizer: Tokenizer, ids: list[int]) -> str:
    decoder = TextDecoder(tokenizer)
    return "".join([decoder.feed(token_id) for token_id in ids]) + decoder.finish()


def test_same_ids_and_text_as_sentencepiece(spm: Path) -> None:
    tokenizer = tokenizer_from_directory(spm)
    oracle = sentencepiece.SentencePieceProcessor(model_file=str(spm / "tokenizer.model"))
    for text in texts(2500):
        ids = oracle.encode(text)
        assert tokenizer.encode(text, bos=True, eos=True) == [1, *ids, 2]
        assert tokenizer.decode(ids) == streamed(tokenizer, ids) == oracle.decode(ids)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (1, 2, -1)
    assert tokenizer.stop_ids == {2}
    assert tokenizer.adds_bos
    assert tokenizer.chat_template is None


class TestWhichFile:
    def test_the_sentencepiece_model_comes_first(self, spm: Path, model_file: Path) -> None:
        save(spm, llama2(model_file))
        assert isinstance(tokenizer_from_directory(spm), SentencePieceTokenizer)
        (spm / "tokenizer.model").unlink()
        assert isinstance(tokenizer_from_directory(spm), MetaspaceTokenizer)

    def test_llama_3s_tiktoken_file_is_no_sentencepiece_model(self, tmp_path: Path) -> None:
        save(tmp_path, byte_level_document("llama3"))
        (tmp_path / "tokenizer.model").write_bytes(TIKTOKEN)
        assert isinstance(tokenizer_from_directory(tmp_path), BPETokenizer)
        (tmp_path / "tokenizer.json").unlink()
        with pytest.raises(
            CheckpointError, match=r"tokenizer\.model: a tiktoken vocabulary \(Llama 3\).*tokenizer\.json"
        ):
            tokenizer_from_directory(tmp_path)

    def test_none(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match=r"neither tokenizer\.model nor tokenizer\.json"):
            tokenizer_from_directory(tmp_path)

    def test_broken_model(self, spm: Path, model_file: Path) -> None:
        """Though there is a tokenizer.json: a pointer in place of the model is a download gone wrong."""
        save(spm, llama2(model_file))
        (spm / "tokenizer.model").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:1")
        with pytest.raises(CheckpointError, match="git lfs pull"):
            tokenizer_from_directory(spm)


class TestAddedToSentencePiece:
    @pytest.fixture
    def chat(self, spm: Path) -> Path:
        """A fine-tune's directory: ChatML control tokens, one of text, padding."""
        added = {"384": ("<|im_start|>", True), "385": ("<|im_end|>", True), "386": ("<tool> x", False)}
        added |= {"387": ("<pad>", True), "1": ("<s>", True)}
        config = {
            "added_tokens_decoder": {key: decoder_entry(*value) for key, value in added.items()},
            "bos_token": "<s>",
            "eos_token": {"content": "<|im_end|>"},
            "pad_token": "<pad>",
        }
        write(spm, "tokenizer_config.json", config)
        return spm

    def test_ids(self, chat: Path) -> None:
        tokenizer = tokenizer_from_directory(chat)
        assert tokenizer.n_words == 388
        assert tokenizer.control_tokens == {"<s>": 1, "</s>": 2, "<|im_start|>": 384, "<|im_end|>": 385, "<pad>": 387}
        assert tokenizer.special_ids == {0, 1, 2, 384, 385, 387}
        assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (1, 385, 387)
        assert tokenizer.stop_ids == {385}

    def test_texts(self, chat: Path, model_file: Path) -> None:
        """B236: control tokens are never made from text; the others always are, and everything else is as before."""
        tokenizer = tokenizer_from_directory(chat)
        oracle = sentencepiece.SentencePieceProcessor(model_file=str(model_file))
        for text in [*texts(500), "<|im_start|>user", "a</s><pad>"]:
            assert tokenizer.encode(text, bos=False, eos=False) == oracle.encode(text)
        ids = tokenizer.encode("use <tool> x now", bos=False, eos=False)
        assert 386 in ids
        assert tokenizer.decode([384, *ids, 385]) == "use <tool> x  now"  # each stretch gets its space in front

    def test_streamed(self, chat: Path) -> None:
        tokenizer = tokenizer_from_directory(chat)
        assert isinstance(tokenizer, SentencePieceTokenizer)
        oracle = sentencepiece.SentencePieceProcessor(model_proto=tokenizer.proto())
        rng = random.Random(0)
        for _ in range(1000):
            ids = [rng.choice((rng.randrange(1, 388), rng.randrange(380, 388))) for _ in range(rng.randrange(10))]
            assert tokenizer.decode(ids) == streamed(tokenizer, ids) == oracle.decode(ids), ids

    def test_the_old_file(self, spm: Path) -> None:
        """Control tokens are those that another file calls special."""
        write(spm, "added_tokens.json", {"<pad>": 384, "<|im_end|>": 385, "<tool>": 386})
        special = {"pad_token": "<pad>", "additional_special_tokens": ["<|im_end|>", {"content": "<other>"}]}
        write(spm, "special_tokens_map.json", special)
        tokenizer = tokenizer_from_directory(spm)
        assert tokenizer.special_ids == {0, 1, 2, 384, 385}
        assert tokenizer.token_bytes(386) == b"<tool>"
        assert tokenizer.pad_id == 384

    def test_from_tokenizer_json(self, spm: Path, model_file: Path) -> None:
        document = llama2(model_file)
        document["added_tokens"].append({"id": 384, **decoder_entry("<|im_end|>", True)})
        save(spm, document)
        assert tokenizer_from_directory(spm).control_token("<|im_end|>") == 384

    def test_pieces_that_are_there_stay_what_they_are(self, spm: Path) -> None:
        """As Code Llama's infill pieces, which its configuration calls special."""
        piece = sentencepiece.SentencePieceProcessor(model_file=str(spm / "tokenizer.model")).id_to_piece(300)
        write(spm, "tokenizer_config.json", {"added_tokens_decoder": {"300": decoder_entry(piece, True)}})
        assert 300 not in tokenizer_from_directory(spm).special_ids

    @pytest.mark.parametrize(
        ("added", "message"),
        [
            ({"385": ("<x>", True)}, "none with id 384"),
            ({"300": ("<x>", True)}, "as token 300, but the files beside it add '<x>' there"),
            ({"384": ("<s>", True)}, "tokens added beside it: .*already"),
            ({"x": ("<x>", True)}, r"added_tokens_decoder\['x'\]: the id is 'x'"),
            ({"384": ("", True)}, "content is ''"),
            ({"384": ("\ud800", True)}, "no valid Unicode"),
            ({"384": ("<x>", 1)}, "special is 1"),
        ],
    )
    def test_broken(self, spm: Path, added: dict[str, Any], message: str) -> None:
        entries = {key: decoder_entry(*value) for key, value in added.items()}
        write(spm, "tokenizer_config.json", {"added_tokens_decoder": entries})
        with pytest.raises(CheckpointError, match=message) as caught:
            tokenizer_from_directory(spm)
        assert str(spm) in str(caught.value)

    def test_two_files_that_disagree(self, spm: Path) -> None:
        write(spm, "tokenizer_config.json", {"added_tokens_decoder": {"384": decoder_entry("<x>", True)}})
        write(spm, "added_tokens.json", {"<y>": 384})
        with pytest.raises(CheckpointError, match=r"384 is '<x>' here, but '<y>'.*added_tokens\.json"):
            tokenizer_from_directory(spm)


class TestStops:
    def test_all_that_the_files_name(self, tmp_path: Path) -> None:
        """Llama 3.1's list; the turn's end that the template writes."""
        save(
            tmp_path,
            byte_level_document("llama3"),
            tokenizer_config={"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"},
            generation_config={"eos_token_id": [562, 563]},
            config={"eos_token_id": 562, "bos_token_id": 561},
        )
        tokenizer = tokenizer_from_directory(tmp_path)
        assert (tokenizer.bos_id, tokenizer.eos_id) == (561, 562)
        assert tokenizer.stop_ids == {562, 563}
        (tmp_path / "chat_template.jinja").write_text("{{ '<|eot_id|>' }}", encoding="utf-8")
        assert tokenizer_from_directory(tmp_path).stop_ids == {562, 563, 564}

    def test_ids_alone(self, tmp_path: Path) -> None:
        save(tmp_path, byte_level_document("smollm"), config={"bos_token_id": 1.0, "eos_token_id": [2, 0.0]})
        tokenizer = tokenizer_from_directory(tmp_path)
        assert (tokenizer.bos_id, tokenizer.eos_id) == (1, 2)
        assert tokenizer.stop_ids == {0, 2}
        assert not tokenizer.adds_bos

    def test_the_models_own_ids_go_before_an_old_configurations(self, spm: Path) -> None:
        """Early conversions of Llama 1 name id 0 and 1, and empty texts."""
        write(spm, "config.json", {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": -1})
        write(spm, "tokenizer_config.json", {"bos_token": "", "eos_token": ""})
        tokenizer = tokenizer_from_directory(spm)
        assert (tokenizer.bos_id, tokenizer.eos_id) == (1, 2)
        assert tokenizer.stop_ids == {1, 2}

    @pytest.mark.parametrize(
        ("files", "message"),
        [
            ({"config": {"eos_token_id": "2"}}, r"config\.json: eos_token_id is '2', expected an id"),
            ({"config": {"eos_token_id": [2, None]}}, "eos_token_id"),
            ({"config": {"eos_token_id": 2.5}}, "eos_token_id is '?2.5'?, expected an id"),
            ({"generation_config": {"eos_token_id": 560}}, r"generation_config\.json: eos_token_id is 560.*560 tokens"),
            ({"tokenizer_config": {"eos_token": "<none>"}}, r"tokenizer_config\.json: eos_token is '<none>'"),
            ({"tokenizer_config": {"bos_token": 1}}, "bos_token is '1', expected a text"),
            ({"tokenizer_config": {"add_bos_token": "yes"}}, "add_bos_token is 'yes'"),
            ({"tokenizer_config": {"added_tokens_decoder": []}}, "added_tokens_decoder is"),
            ({"tokenizer_config": {"chat_template": 5}}, "chat_template is '5'"),
            ({"tokenizer_config": {"chat_template": ["x"]}}, "chat_template is"),
            ({"tokenizer_config": []}, r"tokenizer_config\.json holds a list"),
            ({"added_tokens": {"<x>": "1"}}, r"added_tokens\.json: '<x>': the id is '1'"),
        ],
    )
    def test_broken(self, tmp_path: Path, files: dict[str, Any], message: str) -> None:
        save(tmp_path, byte_level_document("smollm"), **files)
        with pytest.raises(CheckpointError, match=message) as caught:
            tokenizer_from_directory(tmp_path)
        assert str(tmp_path) in str(caught.value)

    def test_a_page_in_place_of_a_file(self, spm: Path) -> None:
        (spm / "generation_config.json").write_bytes(b"<!DOCTYPE html>")
        with pytest.raises(CheckpointError, match=r"generation_config\.json: not JSON \(a web page"):
            tokenizer_from_directory(spm)


class TestBOS:
    @report("B057", "abetlen/llama-cpp-python#1501")
    def test_as_configured_else_as_the_template_of_the_file(self, tmp_path: Path) -> None:
        """B057: BOS is put in front where the files say so, once."""
        save(tmp_path, byte_level_document("llama3"))
        tokenizer = tokenizer_from_directory(tmp_path)
        assert tokenizer.adds_bos
        assert tokenizer.encode("Hi", bos=True, eos=False).count(561) == 1
        write(tmp_path, "tokenizer_config.json", {"add_bos_token": False})
        assert not tokenizer_from_directory(tmp_path).adds_bos

    def test_no_bos_to_add(self, tmp_path: Path) -> None:
        save(tmp_path, byte_level_document("gpt2"), tokenizer_config={"add_bos_token": True})
        assert not tokenizer_from_directory(tmp_path).adds_bos


class TestTemplate:
    def test_text(self, spm: Path) -> None:
        write(spm, "tokenizer_config.json", {"chat_template": "one"})
        assert tokenizer_from_directory(spm).chat_template == "one"

    def test_the_default_of_several(self, spm: Path) -> None:
        several = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
        write(spm, "tokenizer_config.json", {"chat_template": several})
        assert tokenizer_from_directory(spm).chat_template == "plain"
        write(spm, "tokenizer_config.json", {"chat_template": several[:1]})
        assert tokenizer_from_directory(spm).chat_template is None

    def test_a_file_of_its_own_goes_first(self, spm: Path) -> None:
        write(spm, "tokenizer_config.json", {"chat_template": "one"})
        write(spm, "chat_template.json", {"chat_template": "two"})
        assert tokenizer_from_directory(spm).chat_template == "two"
        (spm / "chat_template.jinja").write_text("three", encoding="utf-8")
        assert tokenizer_from_directory(spm).chat_template == "three"

    def test_not_utf_8(self, spm: Path) -> None:
        (spm / "chat_template.jinja").write_bytes(b"\xff")
        with pytest.raises(CheckpointError, match=r"chat_template\.jinja can't be read"):
            tokenizer_from_directory(spm)

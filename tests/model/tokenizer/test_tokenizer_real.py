"""Real vocabularies: the demo model's, and a SentencePiece model of 32000 pieces where it can be fetched."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tokenizers
import transformers
from tokenizers import decoders, models, pre_tokenizers

from generation.chat_format import chat_format_for
from model.checkpoint.gguf.read import GGUFCheckpoint
from model.tokenizer.export import export_gguf, export_huggingface
from model.tokenizer.tokenizer import (
    SentencePieceTokenizer,
    TextDecoder,
    Tokenizer,
    tokenizer_from_directory,
    tokenizer_from_gguf,
)
from scripts.fetch_demo_model import FetchError, Source, fetch
from tests.helpers.report import report
from tests.helpers.texts import texts
from tests.helpers.tiny import sentencepiece_fields
from tests.helpers.tiny_tokenizers import chatml_directory, llama2, save

TEXTS = texts(2500, seed=1)
MISTRAL = Source(
    requirement="mistral-common==1.13.1",
    wheel_sha256="98b4d0755b8d90bf4691fa8f1b70cb3b4a8cd4dc1653c4ed08ef3d1c7d2c29af",
    member="mistral_common/data/tokenizer.model.v1",
    size=493_443,
    sha256="dadfd56d766715c61d2ef780a525ab43b8e6da4de6865bda3d95fdef5e134055",
)
"""A SentencePiece model of Llama 2's kind: BPE with byte fallback (Apache-2.0)."""


@pytest.fixture(scope="module")
def demo_metadata() -> dict[str, Any]:
    checkpoint = GGUFCheckpoint(fetch())
    checkpoint.close()
    return checkpoint.metadata


@pytest.fixture(scope="module")
def mistral() -> Path:
    try:
        return fetch(source=MISTRAL)
    except FetchError as error:
        pytest.skip(f"the package with the SentencePiece model can't be fetched: {error}")


def demo_document(metadata: dict[str, Any]) -> dict[str, Any]:
    """The demo model's vocabulary as its makers' `tokenizer.json` has it, made with the library alone."""
    pieces, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    backend = tokenizers.Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([piece for piece, kind in zip(pieces, kinds, strict=True) if kind == 3])
    document: dict[str, Any] = json.loads(backend.to_str())
    return document


def streamed(tokenizer: Tokenizer, ids: list[int]) -> str:
    decoder = TextDecoder(tokenizer)
    return "".join([decoder.feed(token_id) for token_id in ids]) + decoder.finish()


def test_demo_model(tmp_path: Path, demo_metadata: dict[str, Any]) -> None:
    """From GGUF metadata, from a `tokenizer.json`, and by the library: one result."""
    document = demo_document(demo_metadata)
    oracle = tokenizers.Tokenizer.from_str(json.dumps(document))
    from_gguf = tokenizer_from_gguf(demo_metadata)
    from_json = tokenizer_from_directory(save(tmp_path, document))
    assert from_json.n_words == from_gguf.n_words == 49152
    assert from_json.control_tokens == from_gguf.control_tokens
    for text in TEXTS:
        ids = oracle.encode(text, add_special_tokens=False).ids
        assert from_gguf.encode(text, bos=False, eos=False) == ids, text
        assert from_json.encode(text, bos=False, eos=False) == ids, text
        # not always the text: the vocabulary has no token for some bytes of rare planes
        assert from_gguf.decode(ids) == streamed(from_json, ids) == oracle.decode(ids), text


def test_demo_model_exported(tmp_path: Path, demo_metadata: dict[str, Any]) -> None:
    tokenizer = tokenizer_from_gguf(demo_metadata)
    export_huggingface(tokenizer, tmp_path)
    again = tokenizer_from_directory(tmp_path)
    assert (again.bos_id, again.eos_id, again.stop_ids) == (tokenizer.bos_id, tokenizer.eos_id, tokenizer.stop_ids)
    assert (again.adds_bos, again.chat_template) == (tokenizer.adds_bos, tokenizer.chat_template)
    written = export_gguf(again)
    for key in ("tokens", "token_type", "merges", "pre", "bos_token_id", "eos_token_id"):
        assert written[f"tokenizer.ggml.{key}"] == demo_metadata[f"tokenizer.ggml.{key}"], key


@report("B268", "huggingface/candle#3670")
def test_sentencepiece_rebuilt_from_gguf(mistral: Path) -> None:
    """B268: 32000 pieces; tokens and scores alone give the ids and the text of the original."""
    oracle = sentencepiece.SentencePieceProcessor(model_file=str(mistral))
    rebuilt = tokenizer_from_gguf(sentencepiece_fields(mistral))
    exported = tokenizer_from_gguf(export_gguf(SentencePieceTokenizer.from_file(mistral)))
    for text in TEXTS:
        ids = oracle.encode(text)
        assert rebuilt.encode(text, bos=False, eos=False) == exported.encode(text, bos=False, eos=False) == ids, text
        assert rebuilt.decode(ids) == streamed(rebuilt, ids) == oracle.decode(ids), text
    for token_id in range(oracle.vocab_size()):
        assert rebuilt.pieces[token_id] == oracle.id_to_piece(token_id)


@pytest.mark.parametrize(
    ("legacy", "ids"),
    [
        (False, [32000, 1838, 13, 23809, 32001, 13, 32000, 489, 11143, 13]),
        (True, [32000, 2188, 13, 23809, 32001, 28705, 13, 32000, 13892, 13]),
    ],
)
def test_chatml_behind_a_vocabulary_of_32000(tmp_path: Path, mistral: Path, legacy: bool, ids: list[int]) -> None:
    """What transformers 4.57.6 gives, fast and slow, but for the slow one's stray space where `legacy` is false.

    The current version is asked with a tokenizer.json beside: without one it orders the merges by id, not by score.
    """
    chatml_directory(tmp_path, mistral, files="both", special=True, config={"legacy": legacy})
    tokenizer = tokenizer_from_directory(tmp_path)
    assert chat_format_for(tokenizer).encode([{"role": "user", "content": "Hi"}]) == [1, *ids]
    peer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS[:200]:
        assert tokenizer.encode(text, bos=False, eos=False) == peer(text, add_special_tokens=False)["input_ids"], text


def test_tokenizer_json_of_a_sentencepiece_model(tmp_path: Path, mistral: Path) -> None:
    """As the library has it; and as SentencePiece itself, whose scores the order of the merges stands for."""
    sp = sentencepiece.SentencePieceProcessor(model_file=str(mistral))
    tokenizer = tokenizer_from_directory(save(tmp_path, llama2(mistral)))
    oracle = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.n_words == 32000
    for text in TEXTS:
        ids = tokenizer.encode(text, bos=False, eos=False)
        assert ids == oracle.encode(text, add_special_tokens=False).ids == sp.encode(text), text
        assert tokenizer.decode(ids) == streamed(tokenizer, ids) == oracle.decode(ids), text

"""What conversion refuses, and that it never leaves half a model."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from model.checkpoint import writing
from model.config import CheckpointError
from scripts.convert_checkpoint import Options, convert, parse_size
from tests.helpers.tiny import random_weights, save_meta, tiny_config, train_sentencepiece
from tests.scripts.conversion import FORMATS, NAMES, assert_same, everything, save_source


@pytest.mark.parametrize("kind", ["F16", "Q8_0"])
def test_too_large_for_f16(tmp_path: Path, kind: str) -> None:
    config = tiny_config(hidden_dim=80)
    weights = random_weights(config)
    weights["layers.0.feed_forward.w2.weight"][3, 3] = 70000
    source = save_meta(tmp_path / "source", config, weights, tokenizer=True)
    with pytest.raises(CheckpointError, match=r"layers\.0\.feed_forward\.w2\.weight holds 70000, but F16"):
        convert(source, tmp_path / "g.gguf", Options("gguf", type=kind))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["source"]


@pytest.mark.parametrize(
    ("options", "target", "message"),
    [
        (Options("gguf", type="Q4_K"), "g.gguf", "--type is Q4_K, expected one of F32, F16, BF16, Q8_0"),
        (Options("huggingface", type="Q8_0"), "h", "only GGUF holds quantized tensors"),
        (Options("onnx"), "h", "--to is 'onnx', expected one of meta, huggingface, gguf"),
        (Options("gguf"), "g", "ends in .gguf"),
        (Options("meta"), "m.gguf", "needs the name of a folder"),
        (Options("meta", shards=3), "m", "--shards is 3, expected one of 1, 2, 4, 8"),
        (Options("meta", shards=4), "m", r"n_kv_heads 2 doesn't divide by it: use 1 or 2"),
        (Options("huggingface"), "source", "is the source"),
        (Options("huggingface"), "source/inner", "is the source"),
        (Options("huggingface"), ".", "is the source"),
        (Options("huggingface"), "taken", "exists already.*--force"),
        (Options("huggingface", force=True), "taken", "other things than one model"),
    ],
)
def test_refused_before_anything_is_written(tmp_path: Path, options: Options, target: str, message: str) -> None:
    source = save_meta(tmp_path / "source", tiny_config(), random_weights(tiny_config()), tokenizer=True)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/diary.txt").write_text("dear", encoding="utf-8")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CheckpointError, match=message):
        convert(source, tmp_path / target, options)
    assert sorted(tmp_path.rglob("*")) == before


def test_disk_too_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = save_source(tmp_path, "bpe")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(writing.shutil, "disk_usage", lambda _: usage._replace(free=12_000_000))
    with pytest.raises(CheckpointError, match=r"needs 0\.07 GB, but .* has 0\.01 GB free"):
        convert(source, tmp_path / "h", Options("huggingface"))
    assert [file.name for file in tmp_path.iterdir()] == ["source.gguf"]


@pytest.mark.parametrize("to", FORMATS)
def test_broken_off_leaves_nothing(tmp_path: Path, to: str) -> None:
    source = save_source(tmp_path, "bpe")

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / NAMES[to], Options(to), stop)
    assert [file.name for file in tmp_path.iterdir()] == ["source.gguf"]


@pytest.mark.parametrize("to", FORMATS)
def test_broken_off_leaves_what_was_to_be_replaced(tmp_path: Path, to: str) -> None:
    source = save_source(tmp_path, "bpe")
    target = tmp_path / NAMES[to]
    convert(source, target, Options(to))

    def stop(done: int, total: int) -> None:
        raise OSError("no space left on device")

    with pytest.raises(CheckpointError, match="can't be written: no space left"):
        convert(source, target, Options(to, force=True), stop)
    assert_same(source, target)
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted(["source.gguf", target.name])


@pytest.mark.parametrize("to", FORMATS)
def test_force_replaces_a_model(tmp_path: Path, to: str) -> None:
    source = save_source(tmp_path, "bpe")
    target = tmp_path / NAMES[to]
    convert(source, target, Options(to))
    if target.is_dir():
        (target / "left-over.bin").write_bytes(b"old")
    convert(source, target, Options(to, force=True))
    assert_same(source, target)
    assert not (target / "left-over.bin").exists()
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted(["source.gguf", target.name])


def test_meta_without_a_tokenizer(tmp_path: Path) -> None:
    config = tiny_config()
    source = save_meta(tmp_path / "source", config, random_weights(config))
    with pytest.raises(CheckpointError, match="--tokenizer PATH"):
        convert(source, tmp_path / "h", Options("huggingface"))
    given = train_sentencepiece(tmp_path / "elsewhere.model")
    convert(source, tmp_path / "h", Options("huggingface", tokenizer=given))
    assert everything(tmp_path / "h")[2].n_words == 384


@pytest.mark.parametrize(("text", "size"), [("5GB", 5 * 10**9), ("1.5 MiB", 3 * 2**19), ("77", 77)])
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "5 parsecs", "-1", "0"])
def test_bad_sizes(text: str) -> None:
    with pytest.raises(Exception, match="isn't a size"):
        parse_size(text)

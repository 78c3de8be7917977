"""Conversion between the three formats: nothing is lost, nothing is half written, other programs read the result."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import pytest
import torch

from model.checkpoint import open_checkpoint
from model.config import CheckpointError
from model.rope import linear_factors, llama3_factors
from scripts.convert_checkpoint import Options, convert, main
from tests.helpers.tiny import (
    random_weights,
    save_gguf,
    save_meta,
    sentencepiece_fields,
    tiny_config,
    train_sentencepiece,
)
from tests.helpers.tiny_bpe import bpe_metadata
from tests.scripts.conversion import FORMATS, NAMES, TEXTS, assert_same, everything, save_source, types


@pytest.mark.parametrize("tokenizer", ["spm", "bpe"])
@pytest.mark.parametrize("last", FORMATS)
@pytest.mark.parametrize("first", FORMATS)
def test_every_pair_keeps_everything(tmp_path: Path, first: str, last: str, tokenizer: str) -> None:
    """B113: also the order of the rows of wq and wk."""
    source = save_source(tmp_path, tokenizer)
    between, target = tmp_path / f"between{NAMES[first]}", tmp_path / f"target{NAMES[last]}"
    convert(source, between, Options(first))
    convert(between, target, Options(last))
    assert_same(source, between)
    assert_same(source, target)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_come_back_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    config = tiny_config()
    source = save_meta(tmp_path / "source", config, random_weights(config, dtype=dtype), 2, tokenizer=True)
    convert(source, tmp_path / "h", Options("huggingface"))
    convert(tmp_path / "h", tmp_path / "g.gguf", Options("gguf"))
    convert(tmp_path / "g.gguf", tmp_path / "m", Options("meta", shards=2))
    name = "F16" if dtype == torch.float16 else "BF16"
    assert types(tmp_path / "g.gguf") == {(1, "F32"), (2, name)}
    assert types(tmp_path / "m") == types(source) == types(tmp_path / "h") == {(1, name), (2, name)}
    assert_same(source, tmp_path / "m")


def test_norms_that_need_f32_keep_it(tmp_path: Path) -> None:
    config = tiny_config(vocab_size=384)
    weights = random_weights(config)
    fields = sentencepiece_fields(train_sentencepiece(tmp_path / "spm.model"))
    source = save_gguf(tmp_path / "source.gguf", config, weights, dict.fromkeys(weights, "BF16"), fields=fields)
    convert(source, tmp_path / "h", Options("huggingface"))
    assert types(tmp_path / "h") == {(1, "F32"), (2, "BF16")}
    assert_same(source, tmp_path / "h")


@pytest.mark.parametrize("shards", [1, 2, 4, 8])
def test_meta_shards(tmp_path: Path, shards: int) -> None:
    """B165: as Llama 2's files, the embedding split along its width."""
    source = save_source(tmp_path, "spm", n_heads=8, n_kv_heads=8)
    convert(source, tmp_path / "m", Options("meta", shards=shards))
    files = sorted((tmp_path / "m").glob("*.pth"))
    assert [file.name for file in files] == [f"consolidated.{i:02d}.pth" for i in range(shards)]
    first = torch.load(files[0], weights_only=True)
    assert first["tok_embeddings.weight"].shape == (384, 128 // shards)
    assert first["output.weight"].shape == (384 // shards, 128)
    assert files[0].stat().st_size < sum(part.nbytes for part in first.values()) * 1.1 + 30000
    assert_same(source, tmp_path / "m")


@pytest.mark.parametrize("last", FORMATS)
def test_tied_output_stays_tied(tmp_path: Path, last: str) -> None:
    """B121, B123."""
    source = save_source(tmp_path, "bpe", tied_output=True)
    target = tmp_path / NAMES[last]
    convert(source, target, Options(last))
    assert_same(source, target)


@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (6, 2), (8, 1)])
def test_head_ratios(tmp_path: Path, heads: tuple[int, int]) -> None:
    """B112."""
    source = save_source(tmp_path, "bpe", n_heads=heads[0], n_kv_heads=heads[1], rope_theta=1e6, norm_eps=1e-6)
    convert(source, tmp_path / "h", Options("huggingface"))
    assert_same(source, tmp_path / "h")


def test_head_size_of_its_own(tmp_path: Path) -> None:
    source = save_source(tmp_path, "bpe", dim=96)
    convert(source, tmp_path / "h", Options("huggingface"))
    convert(tmp_path / "h", tmp_path / "g.gguf", Options("gguf"))
    assert_same(source, tmp_path / "g.gguf")
    with pytest.raises(CheckpointError, match=r"4 \* 16 isn't 96"):
        convert(source, tmp_path / "m", Options("meta"))


def test_indexed_files(tmp_path: Path) -> None:
    source = save_source(tmp_path, "spm")
    convert(source, tmp_path / "h", Options("huggingface", max_shard_size=100_000))
    files = sorted(file.name for file in (tmp_path / "h").glob("*.safetensors"))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads((tmp_path / "h/model.safetensors.index.json").read_text(encoding="utf-8"))
    assert set(index["weight_map"].values()) == set(files)
    assert_same(source, tmp_path / "h")


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_quantized_like_the_gguf_package(tmp_path: Path, kind: str) -> None:
    source = save_source(tmp_path, "bpe")
    target = tmp_path / "q.gguf"
    notes = convert(source, target, Options("gguf", type=kind))
    assert any(f"F32 to {kind}" in note for note in notes)
    number = gguf.GGMLQuantizationType[kind]
    _, weights, _ = everything(source)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(target).tensors}
    assert tensors["blk.0.ffn_norm.weight"].tensor_type == gguf.GGMLQuantizationType.F32
    found = tensors["blk.1.ffn_down.weight"]
    assert found.tensor_type == number
    assert (found.data == gguf.quants.quantize(weights["layers.1.feed_forward.w2.weight"].numpy(), number)).all()


def test_quantized_tensors_stay_or_become_f32(tmp_path: Path) -> None:
    source = save_source(tmp_path, "bpe")
    convert(source, tmp_path / "q.gguf", Options("gguf", type="Q4_1"))
    convert(tmp_path / "q.gguf", tmp_path / "again.gguf", Options("gguf"))
    convert(tmp_path / "q.gguf", tmp_path / "h", Options("huggingface"))
    assert types(tmp_path / "again.gguf") == {(1, "F32"), (2, "Q4_1")}
    assert types(tmp_path / "h") == {(1, "F32"), (2, "F32")}
    assert_same(tmp_path / "q.gguf", tmp_path / "again.gguf")
    assert_same(tmp_path / "q.gguf", tmp_path / "h")


def test_rows_that_fill_no_blocks_become_f16(tmp_path: Path) -> None:
    source = save_source(tmp_path, "bpe", hidden_dim=80)
    notes = convert(source, tmp_path / "q.gguf", Options("gguf", type="Q8_0"))
    assert types(tmp_path / "q.gguf") == {(1, "F32"), (2, "Q8_0"), (2, "F16")}
    assert "2 matrices went from F32 to F16" in notes


def test_padding_rows_get_unused_tokens_in_gguf(tmp_path: Path) -> None:
    """llama.cpp wants as many tokens as the embedding has rows."""
    config = tiny_config(vocab_size=400)
    source = save_meta(tmp_path / "source", config, random_weights(config))
    train_sentencepiece(source / "tokenizer.model", 384)
    convert(source, tmp_path / "g.gguf", Options("gguf"))
    before, after = everything(source)[2], everything(tmp_path / "g.gguf")[2]
    assert (before.n_words, after.n_words) == (384, 400)
    for text in [*TEXTS, "[PAD399]"]:
        assert after.encode(text, bos=True, eos=True) == before.encode(text, bos=True, eos=True)


LLAMA31 = llama3_factors(16, 500000.0)
LLAMA32 = llama3_factors(16, 500000.0, factor=32.0)


@pytest.mark.parametrize("factors", [linear_factors(16, 2.0), LLAMA31, LLAMA32], ids=["linear", "3.1", "3.2"])
def test_rotary_scaling(tmp_path: Path, factors: tuple[float, ...]) -> None:
    """Through GGUF's float32 and back to the same parameters."""
    source = save_source(tmp_path, "bpe", rope_theta=500000.0)
    convert(source, tmp_path / "h", Options("huggingface"))
    config_file = tmp_path / "h/config.json"
    values = json.loads(config_file.read_text(encoding="utf-8"))
    if factors[0] == 2:
        values["rope_scaling"] = {"rope_type": "linear", "factor": 2.0}
    else:
        values["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": 8.0 if factors is LLAMA31 else 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
    config_file.write_text(json.dumps(values), encoding="utf-8")
    convert(tmp_path / "h", tmp_path / "g.gguf", Options("gguf"))
    convert(tmp_path / "g.gguf", tmp_path / "back", Options("huggingface"))
    with open_checkpoint(tmp_path / "g.gguf") as checkpoint:
        assert checkpoint.config.rope_factors == pytest.approx(factors, rel=1e-6)
    assert_same(tmp_path / "h", tmp_path / "back")
    if factors[0] == 1:
        convert(tmp_path / "g.gguf", tmp_path / "m", Options("meta"))
        assert_same(tmp_path / "h", tmp_path / "m")
    else:
        with pytest.raises(CheckpointError, match=r"linear scaling.*use_scaled_rope.*--to huggingface"):
            convert(tmp_path / "g.gguf", tmp_path / "m", Options("meta"))


def test_rotary_factors_of_no_known_scheme(tmp_path: Path) -> None:
    extra = {"rope_freqs.weight": torch.linspace(1, 3, 8)}
    metadata = bpe_metadata()
    config = tiny_config(vocab_size=len(metadata["tokenizer.ggml.tokens"]))
    weights = random_weights(config)
    source = save_gguf(tmp_path / "source.gguf", config, weights, fields=metadata, extra=extra)
    convert(source, tmp_path / "g.gguf", Options("gguf"))
    assert_same(source, tmp_path / "g.gguf")
    for to in ("huggingface", "meta"):
        with pytest.raises(CheckpointError, match="gguf"):
            convert(source, tmp_path / to, Options(to))
        assert not (tmp_path / to).exists()


def test_bpe_in_meta_is_read_beside_params(tmp_path: Path) -> None:
    source = save_source(tmp_path, "bpe")
    notes = convert(source, tmp_path / "m", Options("meta"))
    assert any("tokenizer.json" in note for note in notes)
    assert not (tmp_path / "m/tokenizer.model").exists()


def test_progress_counts_every_byte(tmp_path: Path) -> None:
    source = save_source(tmp_path, "bpe")
    for to in FORMATS:
        steps: list[tuple[int, int]] = []
        convert(source, tmp_path / NAMES[to], Options(to), lambda *step, steps=steps: steps.append(step))
        assert steps[-1][0] == steps[-1][1]


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = save_source(tmp_path, "spm")
    target = tmp_path / "m"
    arguments = [str(source), str(target), "--to", "meta", "--shards", "2", "--type", "bf16"]
    assert main(arguments) == 0
    printed = capsys.readouterr()
    assert printed.out == f"{target}\n"
    assert "matrices went from F32 to BF16" in printed.err
    assert main(arguments) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert printed.err.count("\n") == 1

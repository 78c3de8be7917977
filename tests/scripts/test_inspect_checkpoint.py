"""What `inspect_checkpoint` tells of tiny checkpoints, and how it prints it."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console

from model.distributed.parallel import plan_shards
from model.memory import kv_bytes_per_token, weights_bytes
from scripts import inspect_checkpoint
from scripts.inspect_checkpoint import aligned, inspect, main, show, valid_ranks
from tests.helpers.tiny import random_weights, save_gguf, save_huggingface, save_meta, tiny_config, train_sentencepiece
from tests.helpers.tiny_bpe import bpe_metadata


@pytest.fixture
def gguf_file(tmp_path: Path) -> Path:
    """A tiny model with BPE, in Q8_0 and F32."""
    fields = bpe_metadata()
    config = tiny_config(vocab_size=len(fields["tokenizer.ggml.tokens"]), tied_output=True, rope_theta=5e5)
    weights = random_weights(config)
    return save_gguf(tmp_path / "tiny.gguf", config, weights, "Q8_0", fields=fields)


@pytest.fixture
def meta_folder(tmp_path: Path) -> Path:
    config = tiny_config()
    return save_meta(tmp_path / "meta", config, random_weights(config, dtype=torch.bfloat16), 2, tokenizer=True)


def test_gguf(gguf_file: Path) -> None:
    """B123, B265: tied output, and the types that the tensors really have."""
    report = inspect(gguf_file, dtype="float32", device="cpu")
    config = tiny_config(vocab_size=report["shape"]["vocab_size"], tied_output=True)
    weights = random_weights(config)
    assert report["format"] == "gguf"
    assert report["architecture"] == "llama"
    assert report["parameters"] == sum(weight.numel() for weight in weights.values())
    assert report["size_on_disk"] == gguf_file.stat().st_size
    assert report["tied_output"] is True
    assert report["context"] == 256
    assert report["rope"] == {"theta": 5e5, "scaling": None}
    quantized, plain = report["types"]
    matrices = sum(weight.numel() for weight in weights.values() if weight.dim() == 2)
    assert quantized == {"type": "Q8_0", "tensors": 15, "parameters": matrices, "bytes": matrices // 32 * 34}
    assert plain == {"type": "F32", "tensors": 5, "parameters": 5 * 64, "bytes": 5 * 64 * 4}


def test_bpe_with_a_template(gguf_file: Path) -> None:
    tokenizer = inspect(gguf_file)["tokenizer"]
    assert tokenizer["kind"] == "byte-level BPE"
    assert tokenizer["bos"] == {"id": 1, "text": "<|im_start|>"}
    assert tokenizer["eos"] == {"id": 2, "text": "<|im_end|>"}
    assert tokenizer["stop"] == [{"id": 2, "text": "<|im_end|>"}]
    assert tokenizer["adds_bos"] is False
    assert tokenizer["chat_template"] is True
    assert tokenizer["chat_format"] == "template"


def test_meta_with_sentencepiece(meta_folder: Path) -> None:
    report = inspect(meta_folder)
    assert report["format"] == "meta"
    assert report["size_on_disk"] == sum(file.stat().st_size for file in meta_folder.glob("*.pth"))
    assert [kind["type"] for kind in report["types"]] == ["BF16"]
    tokenizer = report["tokenizer"]
    assert tokenizer["kind"] == "SentencePiece"
    assert tokenizer["size"] == 384
    assert tokenizer["bos"] == {"id": 1, "text": "<s>"}
    assert tokenizer["adds_bos"] is True
    assert tokenizer["chat_template"] is False
    assert tokenizer["chat_format"] == "llama2"


def test_huggingface(tmp_path: Path) -> None:
    """B128: rope theta is the configuration's."""
    config = tiny_config(rope_theta=1e6)
    folder = save_huggingface(tmp_path / "hf", config, random_weights(config, dtype=torch.float16))
    train_sentencepiece(folder / "tokenizer.model")
    report = inspect(folder)
    assert report["format"] == "huggingface"
    assert report["rope"]["theta"] == 1e6
    assert [kind["type"] for kind in report["types"]] == ["F16"]
    assert report["size_on_disk"] > report["types"][0]["bytes"]


def test_rotary_scaling_is_named(tmp_path: Path) -> None:
    config = tiny_config(rope_theta=5e5)
    params = {"use_scaled_rope": True}
    folder = save_meta(tmp_path / "meta", config, random_weights(config), params=params, tokenizer=True)
    scaling = inspect(folder)["rope"]["scaling"]
    assert (scaling["rope_type"], scaling["factor"]) == ("llama3", 8)


def test_memory_of_each_rank(meta_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """B009, B013: any number of ranks, with the memory it takes."""
    monkeypatch.setattr(inspect_checkpoint, "available_bytes", lambda _: 10_000_000)
    memory = inspect(meta_folder, dtype="float32", device="cpu", ranks=3)["memory"]
    shards = plan_shards(tiny_config(), 3)
    weights = [weights_bytes(tiny_config(), shard, torch.float32) for shard in shards]
    caches = [kv_bytes_per_token(tiny_config(), shard, torch.float32) for shard in shards]
    room = (10_000_000 - sum(weights)) // sum(caches)
    (entry,) = memory["ranks"]
    assert memory["dtype"] == "float32"
    assert memory["available"] == 10_000_000
    assert entry == {
        "ranks": 3,
        "weights": max(weights),
        "kv_per_1000_tokens": 1000 * max(caches),
        "cache_tokens": room,
        "full_contexts": room // 256,
        "fits": True,
    }


def test_a_model_that_does_not_fit(
    meta_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(inspect_checkpoint, "available_bytes", lambda _: 1000)
    assert main([str(meta_folder), "--device", "cpu"]) == 0
    assert "doesn't fit" in capsys.readouterr().out


def test_usual_numbers_of_ranks(gguf_file: Path) -> None:
    report = inspect(gguf_file)
    assert report["ranks"] == [1, 2, 3, 4]
    assert [entry["ranks"] for entry in report["memory"]["ranks"]] == [1, 2, 4]


def test_every_number_of_ranks_that_can_be_dealt() -> None:
    assert valid_ranks(tiny_config(n_heads=9, n_kv_heads=3)) == list(range(1, 10))


def test_tokenizer_that_is_missing_or_too_large(tmp_path: Path) -> None:
    config = tiny_config(vocab_size=300)
    folder = save_meta(tmp_path / "meta", config, random_weights(config))
    assert "no such file" in inspect(folder)["tokenizer"]["error"]
    elsewhere = train_sentencepiece(tmp_path / "elsewhere.model", 384)
    report = inspect(folder, tokenizer=elsewhere)
    assert report["tokenizer"] == {"error": "the tokenizer has 384 ids, but the embedding only 300 rows"}
    assert ("tokenizer", f"can't be used: {report['tokenizer']['error']}") in inspect_checkpoint.facts(report)


def test_json_is_one_object(gguf_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(gguf_file), "--json", "--dtype", "float32"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["memory"]["dtype"] == "float32"
    assert printed["tokenizer"]["eos"]["text"] == "<|im_end|>"


def test_plain_text_is_aligned(gguf_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(gguf_file)]) == 0
    printed = capsys.readouterr().out
    assert f"path           {gguf_file}\n" in printed  # in one line, however long
    assert 'stop ids       2 "<|im_end|>"\n' in printed
    assert "ranks          1 to 4\n" in printed
    assert "\x1b" not in printed


def test_columns() -> None:
    assert aligned([["a", "bbb", "c"], ["dd", "e", ""]]) == "a   bbb  c\ndd  e"


def test_tables_on_a_terminal(meta_folder: Path) -> None:
    """Also where texts look like rich's markup."""
    report = inspect(meta_folder)
    report["tokenizer"]["stop"] = [{"id": 5, "text": "[/INST]"}]
    screen = io.StringIO()
    show(report, Console(file=screen, force_terminal=True, width=120, color_system=None))
    printed = screen.getvalue()
    assert "┃" in printed
    assert '5 "[/INST]"' in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "5"], "nproc-per-node is 5"),
        (["--ranks", "0"], "nproc-per-node is 0"),
        (["--device", "tpu"], "device is 'tpu'"),
        (["--device", "cpu", "--dtype", "float16"], "no fast kernels on a CPU"),
    ],
)
def test_bad_settings(gguf_file: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(gguf_file), *arguments]) == 1
    assert_one_line(capsys, message)


def test_no_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "nowhere")]) == 1
    assert_one_line(capsys, "no such file or directory")
    (tmp_path / "page.gguf").write_text("<!DOCTYPE html>", encoding="utf-8")
    assert main([str(tmp_path / "page.gguf")]) == 1
    assert_one_line(capsys, "a web page")


def assert_one_line(capsys: pytest.CaptureFixture[str], message: str) -> None:
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert printed.err.count("\n") == 1
    assert message in printed.err

"""The configuration: each mistake is one line with key, value and what is allowed; all are told at once."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from handler.settings import HandlerSettings, SettingsError, load_settings, parse_bytes


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    (tmp_path / "weights").mkdir()
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    (tmp_path / "params.json").write_bytes(b"{}")
    return tmp_path


def config(handler: Any = None, **frontend: Any) -> dict[str, Any]:
    section = {"checkpoint": "weights", **handler} if isinstance(handler, dict) else handler
    return {"continuousBatching": True, "batchSize": 8, "handler": section, **frontend}


def lines(value: dict[str, Any], model_dir: Path) -> list[str]:
    with pytest.raises(SettingsError) as caught:
        load_settings(value, model_dir)
    return str(caught.value).splitlines()


def test_only_the_checkpoint_is_needed(model_dir: Path) -> None:
    settings = load_settings(config({}), model_dir)
    assert settings.checkpoint == model_dir / "weights"
    assert settings.max_seq_len is None  # B044: the model's own
    assert settings.log_prompts is False  # B280
    assert settings.stream_interval == 0.05
    assert settings.mode == "text_completion"


def test_an_absolute_checkpoint_stays(model_dir: Path) -> None:
    path = model_dir / "weights"
    assert load_settings(config({"checkpoint": str(path)}), Path("/elsewhere")).checkpoint == path


def test_the_reference_examples_keys_are_understood(model_dir: Path) -> None:
    text = """
    minWorkers: 1
    maxWorkers: 1
    batchSize: 8
    maxBatchDelay: 1
    responseTimeout: 1200
    parallelType: tp
    deviceType: cpu
    continuousBatching: true
    torchrun:
        nproc-per-node: 2
    handler:
        converted_ckpt_dir: weights
        tokenizer_path: tokenizer.model
        model_args_path: params.json
        max_new_tokens: 50
        max_seq_len: 512
        max_batch_size: 6
        temperature: 0.6
        top_p: 0.9
        manual_seed: 40
        mode: chat
    """
    settings = load_settings(yaml.safe_load(text), model_dir)
    assert settings.checkpoint == model_dir / "weights"
    assert settings.tokenizer == model_dir / "tokenizer.model"
    assert settings.model_args == model_dir / "params.json"
    assert (settings.max_gen_len, settings.max_seq_len, settings.max_seqs, settings.seed) == (50, 512, 6, 40)
    assert settings.mode == "chat"


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("device", "gpu", "'auto', 'cpu' or 'cuda'"), ("dtype", "fp16", "'bfloat16'"), ("dtype", 16, "'bfloat16'"),
        ("quantization", "q4", "'none', 'int8' or 'int4'"), ("quantization", 8, "'int8'"),
        ("max_seq_len", 1, "at least 2"), ("max_seq_len", "512", "integer"), ("max_seq_len", True, "integer"),
        ("kv_cache_memory", "2 gigs", '"2GiB"'), ("kv_cache_memory", 0, "above 0"), ("kv_cache_memory", True, "above"),
        ("kv_cache_tokens", 0, "at least 1"), ("prefill_chunk", 0, "at least 1"), ("prefix_cache", "yes", "true or"),
        ("speculation", "draft", "'prompt_lookup' or 'none'"), ("speculation", True, "'none'"),
        ("chat_format", "chatml", "'llama2' or 'template'"), ("temperature", 2.5, "between 0 and 2"),
        ("temperature", math.nan, "between 0 and 2"), ("temperature", "hot", "between 0 and 2"),
        ("top_p", 1.5, "between 0 and 1"), ("top_k", -1, "at least 0"), ("repetition_penalty", 0, "above 0"),
        ("max_gen_len", 0, "at least 1"), ("max_new_tokens", 0, "at least 1"), ("seed", 1.5, "integer"),
        ("manual_seed", "x", "integer"), ("request_timeout", 0, "above 0"), ("step_timeout", -1, "above 0"),
        ("stream_interval", -0.1, "between 0 and 10"), ("max_tokens_limit", 0, "at least 1"),
        ("max_prompts", 0, "at least 1"), ("served_model_name", "", "non-empty"), ("log_prompts", 1, "true or false"),
        ("mode", "completion", "'text_completion' or 'chat'"), ("max_batch_size", 0, "at least 1"),
        ("checkpoint", 7, "file or directory"), ("checkpoint", "", "file or directory"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_one_line(model_dir: Path, key: str, value: Any, allowed: str) -> None:
    (line,) = lines(config({key: value}), model_dir)
    assert line.startswith(f"model-config.yaml: handler.{key} is ")
    assert allowed in line


def test_all_mistakes_are_told_at_once(model_dir: Path) -> None:
    wrong = config({"temperature": 3, "temprature": 1, "tokenizer": "no.model"}, batchSize=0, continuousBatching=False)
    found = lines(wrong, model_dir)
    assert len(found) == 5
    text = "\n".join(found)
    assert "handler.temprature is not a known field (did you mean 'temperature'?)" in text
    assert "handler.temperature is 3, expected a number between 0 and 2" in text
    assert "there is no no.model in" in text
    assert "batchSize is 0" in text
    assert "continuousBatching is false, expected true" in text


@pytest.mark.parametrize(("key", "meant"), [("ckpt_dir", "checkpoint"), ("max_tokens", "max_gen_len"),
                                            ("prefil_chunk", "prefill_chunk"), ("Dtype", "dtype")])  # fmt: skip
def test_an_unknown_key_is_named_with_the_one_meant(model_dir: Path, key: str, meant: str) -> None:
    (line,) = lines(config({key: 1}), model_dir)
    assert f"handler.{key} is not a known field (did you mean '{meant}'?)" in line
    (line,) = lines(config({key: None}), model_dir)
    assert key in line


def test_a_missing_checkpoint_is_told(model_dir: Path) -> None:
    """B008: the directory is named."""
    (line,) = lines(config({"checkpoint": "wights"}), model_dir)
    assert f'handler.checkpoint is "wights": there is no wights in {model_dir}' in line
    (line,) = lines(config({"checkpoint": "a/b"}), model_dir)
    assert f"there is no directory {model_dir / 'a'}" in line
    (line,) = lines(config({"checkpoint": None}), model_dir)
    assert "handler.checkpoint is missing" in line
    section = {"converted_ckpt_dir": "wights"}
    assert any("handler.converted_ckpt_dir is" in line for line in lines(config() | {"handler": section}, model_dir))


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_quantization_is_for_a_cpu(model_dir: Path, name: str) -> None:
    assert load_settings(config({"quantization": name}), model_dir).quantization == name
    (line,) = lines(config({"quantization": name, "device": "cuda:1"}), model_dir)
    assert (
        f"handler.quantization is '{name}', expected 'none' with device 'cuda:1': quantized weights run on a CPU"
        in line
    )


@pytest.mark.parametrize("section", [None, "weights", [], 3])
def test_a_missing_section_is_told(model_dir: Path, section: Any) -> None:
    (line,) = lines(config(section), model_dir)
    assert "handler is" in line
    assert "checkpoint" in line


def test_keys_that_exclude_each_other(model_dir: Path) -> None:
    (line,) = lines(config({"kv_cache_memory": "1GiB", "kv_cache_tokens": 64}), model_dir)
    assert "kv_cache_memory" in line
    assert "kv_cache_tokens" in line
    (line,) = lines(config({"converted_ckpt_dir": "weights"}), model_dir)
    assert "same key" in line


@pytest.mark.parametrize(
    ("frontend", "words"),
    [
        ({"batchSize": "8"}, 'batchSize is "8", expected an integer of at least 1'),
        ({"continuousBatching": None}, "continuousBatching is missing, expected true"),
        ({"continuousBatching": "true"}, 'continuousBatching is "true", expected true'),
        ({"parallelType": "pp", "torchrun": {"nproc-per-node": 2}}, "parallelType is \"pp\", expected 'tp'"),
        ({"parallelType": "tp", "torchrun": {"nproc-per-node": 0}}, "torchrun.nproc-per-node is 0"),
        ({"parallelType": "tp", "torchrun": 2}, "torchrun is 2"),
        ({"torchrun": {"nproc-per-node": 2}}, "parallelType is missing, expected 'tp'"),
    ],
)
def test_frontend_keys_that_would_fail_later(model_dir: Path, frontend: dict[str, Any], words: str) -> None:
    (line,) = lines(config({}, **frontend), model_dir)
    assert words in line


@pytest.mark.parametrize("frontend", [{}, {"torchrun": {"nproc-per-node": 1}}, {"parallelType": "tp"},
                                      {"parallelType": "tp", "torchrun": {"nproc-per-node": 8}}])  # fmt: skip
def test_frontend_keys_that_are_fine(model_dir: Path, frontend: dict[str, Any]) -> None:
    load_settings(config({}, **frontend), model_dir)


def test_null_is_absent_or_no_limit(model_dir: Path) -> None:
    """B242."""
    nulls = dict.fromkeys(["tokenizer", "kv_cache_memory", "max_seq_len", "temperature", "seed"])
    settings = load_settings(config({**nulls, "max_gen_len": None, "request_timeout": None}), model_dir)
    assert settings.temperature == 0.6
    assert settings.max_gen_len is None
    assert settings.request_timeout is None


@pytest.mark.parametrize(
    ("value", "size"),
    [
        (1024, 1024),
        ("1024", 1024),
        ("2GiB", 2 << 30),
        ("1.5 GB", 1_500_000_000),
        ("512MiB", 512 << 20),
        (" 1KiB ", 1024),
    ],
)
def test_sizes(value: Any, size: int) -> None:
    assert parse_bytes(value) == size


@pytest.mark.parametrize("value", [-1, 0, "0GiB", "GiB", "1gib", "-1GB", "1e3", 1.5, False, None, [], "1 GB x"])
def test_sizes_that_are_none(value: Any) -> None:
    with pytest.raises(ValueError, match="expected a size"):
        parse_bytes(value)


def test_every_field_says_what_is_allowed() -> None:
    quiet = [name for name, field in HandlerSettings.model_fields.items() if not field.description]
    assert quiet == ["kv_cache_memory"]  # its parser says it

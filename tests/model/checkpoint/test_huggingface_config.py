"""`config.json`: the values that are taken over, defaults, and refusal of what isn't computed here."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from model.checkpoint import open_checkpoint
from model.config import CheckpointError
from model.rope import linear_factors, llama3_factors
from tests.helpers.report import report
from tests.helpers.tiny import random_weights, save_huggingface, tiny_config

CONFIG = tiny_config(n_heads=6, n_kv_heads=2, norm_eps=1e-6)
WEIGHTS = random_weights(CONFIG)
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


def test_defaults(tmp_path: Path) -> None:
    """Those of transformers; the vocabulary is the embedding's."""
    config = tiny_config(n_kv_heads=4, norm_eps=1e-6, max_seq_len=2048)
    keys = ("num_key_value_heads", "head_dim", "rope_theta", "rms_norm_eps", "max_position_embeddings")
    values = {**dict.fromkeys((*keys, "tie_word_embeddings", "architectures")), "vocab_size": 7}
    path = save_huggingface(tmp_path, config, random_weights(config), values=values)
    assert open_checkpoint(path).config == config


@pytest.mark.parametrize(
    ("values", "factors"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 2}}, linear_factors(16, 2.0)),
        ({"rope_scaling": {"rope_type": "default"}}, None),
        ({"rope_scaling": {}, "rope_parameters": {"rope_theta": 10000}}, None),
        ({"rope_parameters": {"type": "linear", "factor": 3.0}, "rope_theta": None}, linear_factors(16, 3.0)),
        (
            {"rope_scaling": {"type": "llama3", **LLAMA3}},
            llama3_factors(16, 10000.0, original_max_seq_len=64),
        ),
        (
            {"rope_scaling": {"type": "llama3", **LLAMA3, "original_max_position_embeddings": None}},
            llama3_factors(16, 10000.0, original_max_seq_len=256),
        ),
        ({"pretraining_tp": 2, "hidden_act": "silu", "quantization_config": None, "attention_bias": False}, None),
    ],
)
def test_rope_and_harmless_values(tmp_path: Path, values: dict[str, Any], factors: tuple[float, ...] | None) -> None:
    config = open_checkpoint(save_huggingface(tmp_path, CONFIG, WEIGHTS, values=values)).config
    assert config.rope_factors == factors
    assert config.rope_theta == 10000


def test_whole_floats_are_integers(tmp_path: Path) -> None:
    """Of every size, as some programs write them."""
    floats = {
        "hidden_size": float(CONFIG.dim),
        "num_hidden_layers": float(CONFIG.n_layers),
        "num_attention_heads": float(CONFIG.n_heads),
        "num_key_value_heads": float(CONFIG.n_kv_heads),
        "head_dim": float(CONFIG.head_dim),
        "intermediate_size": float(CONFIG.hidden_dim),
        "vocab_size": float(CONFIG.vocab_size),
        "max_position_embeddings": float(CONFIG.max_seq_len),
    }
    original = {"rope_scaling": {"type": "llama3", **LLAMA3, "original_max_position_embeddings": 64.0}}
    config = open_checkpoint(save_huggingface(tmp_path, CONFIG, WEIGHTS, values=floats | original)).config
    assert dataclasses.replace(config, rope_factors=None) == CONFIG
    assert config.rope_factors == llama3_factors(16, 10000.0, original_max_seq_len=64)
    for field in dataclasses.fields(config):
        assert type(getattr(config, field.name)) is type(getattr(CONFIG, field.name)) or field.name == "rope_factors"


def test_one_architecture_among_others(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Served as Llama, and said."""
    path = save_huggingface(tmp_path, CONFIG, WEIGHTS, values={"architectures": ["LlamaModel", "LlamaForCausalLM"]})
    assert open_checkpoint(path).config == CONFIG
    assert caplog.messages == [
        f"{path / 'config.json'}: architectures is ['LlamaModel', 'LlamaForCausalLM']; served as LlamaForCausalLM"
    ]
    caplog.clear()
    open_checkpoint(save_huggingface(tmp_path, CONFIG, WEIGHTS))
    assert caplog.messages == []


@report("B128", "karpathy/llama2.c#356")
def test_rope_theta(tmp_path: Path) -> None:
    """B128: the base is read from either place, from `rope_parameters` first."""
    cases: list[tuple[dict[str, Any], float]] = [
        ({"rope_theta": 1e6}, 1e6),
        ({"rope_theta": 1e6, "rope_parameters": {"rope_type": "default", "rope_theta": 500000}}, 5e5),
    ]
    for values, theta in cases:
        path = save_huggingface(tmp_path, CONFIG, WEIGHTS, values=values)
        assert open_checkpoint(path).config.rope_theta == theta


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"architectures": ["MistralForCausalLM"]},
            r"architectures is \['MistralForCausalLM'\], .*'LlamaForCausal",
        ),
        ({"architectures": ["LlamaModel"]}, "LlamaModel"),
        (
            {"architectures": "LlamaForCausalLM"},
            r"architectures is 'LlamaForCausalLM', expected \['LlamaForCausalLM'\]",
        ),
        ({"architectures": []}, r"architectures is \[\]"),
        (
            {"architectures": ["LlamaForCausalLM", "MistralForCausalLM"], "model_type": "mistral"},
            "model_type is 'mistral'",
        ),
        ({"architectures": None, "model_type": None}, "architectures is missing"),
        ({"architectures": None, "model_type": "qwen2"}, "model_type is 'qwen2', expected 'llama'"),
        ({"model_type": "mistral"}, "model_type is 'mistral'"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, r"quantized \(gptq\).*GGUF"),
        ({"quantization_config": {"quant_method": "fp8"}}, r"quantized \(fp8\)"),
        ({"quantization": {"group_size": 64, "bits": 4}}, "quantized"),
        ({"attention_bias": True}, "attention_bias is True, expected false"),
        ({"mlp_bias": True}, "mlp_bias is True"),
        ({"mlp_bias": 1}, "mlp_bias is 1, expected true or false"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', expected 'silu'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic' isn't computed here, only default, lin"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "'yarn' isn't"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "'longrope' isn't"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor is missing, expected a finite number"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, r"config\.json: rope scaling: factor is 0"),
        ({"rope_scaling": {"type": "linear", "factor": 10**400}}, "factor is 1000.*finite"),
        (
            {"rope_scaling": {"type": "llama3", **LLAMA3, "high_freq_factor": 1}},
            r"config\.json.*high_freq_factor is 1",
        ),
        ({"rope_scaling": {"type": "llama3", "factor": 8}}, "low_freq_factor is missing"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear', expected an object"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "expected an object of plain values"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "default"}},
            "rope_scaling is .* the same as rope_parameters",
        ),
        ({"hidden_size": None}, "hidden_size is missing, expected an integer of at least 1"),
        ({"hidden_size": 100, "head_dim": None}, r"hidden_size is 100, .* num_attention_heads \(6\)"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"num_attention_heads": True}, "num_attention_heads is True"),
        ({"num_key_value_heads": 4}, r"config\.json: .*n_heads 6 is not a multiple of n_kv_heads 4"),
        ({"num_key_value_heads": 3}, r"k_proj.weight has shape \(32, 96\), but config.json says \(48, 96\)"),
        ({"head_dim": 10**12}, "k_proj.weight has shape"),
        ({"head_dim": 10**12, "rope_scaling": {"type": "linear", "factor": 2.0}}, "k_proj.weight has shape"),
        ({"num_hidden_layers": 3}, r"num_hidden_layers in config\.json is 3, but the files hold 2 layers"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers"),
        ({"intermediate_size": "96"}, "intermediate_size is '96'"),
        ({"max_position_embeddings": 512.5}, "max_position_embeddings is 512.5, expected an integer of at least 1"),
        ({"max_position_embeddings": float("inf")}, "max_position_embeddings is inf, expected an integer"),
        ({"max_position_embeddings": 0.0}, "max_position_embeddings is 0.0, expected an integer of at least 1"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"rms_norm_eps": -1e-5}, r"config\.json: .*norm_eps is -1e-05"),
    ],
)
def test_refused(tmp_path: Path, values: dict[str, Any], message: str) -> None:
    path = save_huggingface(tmp_path, CONFIG, WEIGHTS, values=values)
    with pytest.raises(CheckpointError, match=f"(?s)^checkpoint {tmp_path}.*{message}"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "isn't JSON .*the file is empty"),
        ("<!DOCTYPE html>", "isn't JSON .*web page"),
        ("version https://git-lfs.github.com/spec/v1\n", "isn't JSON .*git lfs pull"),
        ("[1]", "holds a list, expected a JSON object"),
        ("[" * 100_000, "isn't JSON"),
        ("9" * 10_000, "isn't JSON"),
    ],
    ids=["empty", "web page", "LFS pointer", "list", "deep", "long number"],
)
def test_broken_file(tmp_path: Path, text: str, message: str) -> None:
    save_huggingface(tmp_path, CONFIG, WEIGHTS)
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    with pytest.raises(CheckpointError, match=rf"config\.json: {message}"):
        open_checkpoint(tmp_path)


def test_missing_file(tmp_path: Path) -> None:
    save_huggingface(tmp_path, CONFIG, WEIGHTS)
    (tmp_path / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json: no such file; .*beside the weights"):
        open_checkpoint(tmp_path / "model.safetensors")
    (tmp_path / "adapter_config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(CheckpointError, match="merge it into its base model"):
        open_checkpoint(tmp_path)

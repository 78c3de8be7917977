"""Writing Hugging Face's format: safetensors, in one file or several with an index, and `config.json`.

A safetensors file is the length of its header (8 bytes, little-endian), the header in JSON, and the tensors one after
another (github.com/huggingface/safetensors); it is written here as the tensors come, so that no file is held in memory.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from model.checkpoint.huggingface.read import HALVED, huggingface_name, to_halves
from model.checkpoint.rope_scaling import find_scaling
from model.checkpoint.writing import Weights, stored_bytes
from model.config import CheckpointError, ModelConfig
from model.tokenizer.tokenizer import Tokenizer

DTYPE_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
INDEX = "model.safetensors.index.json"


def write_huggingface(directory: Path, weights: Weights, tokenizer: Tokenizer, max_shard_size: int) -> None:
    """Write weights and configuration into `directory`; the tokenizer's files are left to its own exporter.

    Peak memory: one tensor.

    Args:
        max_shard_size: bytes of tensors in one file; a larger tensor has a file of its own.

    Raises:
        CheckpointError: the rotary scaling can't be expressed.
    """
    _write_json(directory / "config.json", config_json(weights, tokenizer))
    files = _deal(weights, max_shard_size)
    if len(files) == 1:
        _write_file(directory / "model.safetensors", weights, files[0])
        return
    where: dict[str, str] = {}
    for i, names in enumerate(files):
        file = f"model-{i + 1:05d}-of-{len(files):05d}.safetensors"
        _write_file(directory / file, weights, names)
        where |= {huggingface_name(name): file for name in names}
    _write_json(directory / INDEX, {"metadata": {"total_size": weights.n_bytes}, "weight_map": where})


def config_json(weights: Weights, tokenizer: Tokenizer) -> dict[str, Any]:
    """What `transformers` calls LlamaConfig."""
    config = weights.config
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": config.dim,
        "intermediate_size": config.hidden_dim,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_seq_len,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": _rope_scaling(config),
        "tie_word_embeddings": config.tied_output,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": DTYPE_NAMES[weights.types["layers.0.attention.wq.weight"]],
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": tokenizer.eos_id,
    }


def _rope_scaling(config: ModelConfig) -> dict[str, Any] | None:
    scaling = find_scaling(config)
    if scaling is not None and scaling["rope_type"] == "unknown":
        raise CheckpointError(
            "the model's rotary factors follow neither linear scaling nor Llama 3.1's or 3.2's, so config.json "
            "can't express them: only --to gguf can hold this model"
        )
    return scaling


def _deal(weights: Weights, most: int) -> list[list[str]]:
    """The parameters of each file, in order."""
    files: list[list[str]] = [[]]
    size = 0
    for name, shape in weights.shapes.items():
        n_bytes = stored_bytes(shape, weights.types[name])
        if files[-1] and size + n_bytes > most:
            files.append([])
            size = 0
        files[-1].append(name)
        size += n_bytes
    return files


def _write_file(path: Path, weights: Weights, names: list[str]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        kind, shape = weights.types[name], weights.shapes[name]
        start, end = end, end + stored_bytes(shape, kind)
        header[huggingface_name(name)] = {"dtype": kind, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the tensors are aligned
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            tensor = weights.read(name)
            if name.endswith(HALVED):
                tensor = to_halves(tensor, weights.config.head_dim)
            data = tensor.view(torch.uint8).numpy()
            data.tofile(file)
            weights.progress(data.nbytes)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

"""Writing Meta's format: `params.json` and `consolidated.NN.pth`, split as Llama 2's files are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from model.checkpoint.meta.read import EMBEDDING, SPLIT_DIMS
from model.checkpoint.rope_scaling import find_scaling
from model.checkpoint.writing import Weights
from model.config import CheckpointError, ModelConfig

SHARD_COUNTS = (1, 2, 4, 8)


def write_meta(directory: Path, weights: Weights, shards: int = 1) -> None:
    """Write weights and parameters into `directory`; the tokenizer is left to others. Peak memory: one shard.

    Raises:
        CheckpointError: a size that doesn't divide by `shards`, or a model that `params.json` can't express.
    """
    check_expressible(weights.config, shards)
    params = params_json(weights.config)
    (directory / "params.json").write_text(json.dumps(params, indent=2) + "\n", encoding="utf-8")
    for shard in range(shards):
        state = {name: _part(weights, name, shard, shards) for name in weights.shapes}
        torch.save(state, directory / f"consolidated.{shard:02d}.pth")
        weights.progress(sum(part.nbytes for part in state.values()))


def check_expressible(config: ModelConfig, shards: int) -> None:
    """Check that Meta's format can hold this model in so many shards.

    Raises:
        CheckpointError: it can't; names the value and what can.
    """
    _check_shards(config, shards)
    params_json(config)


def params_json(config: ModelConfig) -> dict[str, Any]:
    """The model's sizes as Meta writes them.

    Raises:
        CheckpointError: the model is one that Meta's format can't express.
    """
    if config.dim != config.n_heads * config.head_dim:
        raise CheckpointError(
            f"Meta's format needs n_heads * head_dim = dim, but {config.n_heads} * {config.head_dim} isn't "
            f"{config.dim}: use --to huggingface or gguf"
        )
    params = {
        "dim": config.dim,
        "n_layers": config.n_layers,
        "n_heads": config.n_heads,
        "n_kv_heads": config.n_kv_heads,
        "vocab_size": config.vocab_size,
        "norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "max_seq_len": config.max_seq_len,
    }
    return params | _rope_params(config)


def _rope_params(config: ModelConfig) -> dict[str, Any]:
    """Llama 3.1's scheme by 8, or by another factor as Meta's later models have it."""
    scaling = find_scaling(config)
    if scaling is None:
        return {}
    if scaling["rope_type"] != "llama3":
        kind = "factors of their own" if scaling["rope_type"] == "unknown" else f"{scaling['rope_type']} scaling"
        raise CheckpointError(
            f"the model's rotary frequencies have {kind}, but Meta's format knows only Llama 3.1's scheme "
            "(use_scaled_rope): use --to huggingface (for linear scaling) or gguf"
        )
    factor = scaling["factor"]
    return {"use_scaled_rope": True} | ({} if factor == 8 else {"rope_scaling_factor": factor})


def _check_shards(config: ModelConfig, shards: int) -> None:
    if shards not in SHARD_COUNTS:
        raise CheckpointError(f"--shards is {shards}, expected one of {', '.join(map(str, SHARD_COUNTS))}")
    sizes = {"n_heads": config.n_heads, "n_kv_heads": config.n_kv_heads, "hidden_dim": config.hidden_dim}
    sizes |= {"vocab_size": config.vocab_size, "dim": config.dim}
    for name, size in sizes.items():
        if size % shards:
            fitting = [n for n in SHARD_COUNTS if all(value % n == 0 for value in sizes.values())]
            raise CheckpointError(
                f"--shards is {shards}, but {name} {size} doesn't divide by it: use {' or '.join(map(str, fitting))} "
                "(the number of ranks doesn't depend on it)"
            )


def _part(weights: Weights, name: str, shard: int, shards: int) -> torch.Tensor:
    """One shard's part, in memory of its own: a view would drag its whole tensor into the file."""
    shape = weights.shapes[name]
    if len(shape) == 1:
        return weights.read(name)
    dim = 1 if name == EMBEDDING else SPLIT_DIMS[name.split(".")[-2]]
    size = shape[dim] // shards
    return weights.read(name, dim, shard * size, (shard + 1) * size)

"""From a checkpoint on disk to one rank's model in memory."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from .checkpoint import Checkpoint, open_checkpoint
from .collectives import Communicator, init_communicator
from .config import CheckpointError
from .llama import Llama
from .parallel import part_of
from .process import cpu_threads
from .tokenizer import Tokenizer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_device(device: str, local_rank: int) -> torch.device:
    """`auto`, `cpu`, `cuda` or `cuda:N` as a device; on CUDA each local rank takes its own.

    Raises:
        CheckpointError: no such device here.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        return torch.device("cpu")
    if not re.fullmatch(r"cuda(:\d+)?", device):
        raise CheckpointError(f"device is {device!r}, expected auto, cpu, cuda or cuda:N")
    count = torch.cuda.device_count()
    index = int(device.partition(":")[2] or local_rank)
    if index >= count:
        raise CheckpointError(
            f"device cuda:{index} is needed for local rank {local_rank}, but {count} CUDA devices are visible: "
            "lower nproc-per-node or use device cpu"
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def resolve_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 where the device computes in it, else float32 (float16 on an older GPU)."""
    if dtype == "auto":
        if device.type == "cuda":
            return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
        native = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        return torch.bfloat16 if native else torch.float32
    if dtype not in DTYPES:
        raise CheckpointError(f"dtype is {dtype!r}, expected auto, {', '.join(DTYPES)}")
    if dtype == "float16" and device.type == "cpu":
        raise CheckpointError("dtype float16 has no fast kernels on a CPU: use bfloat16, float32 or auto")
    return DTYPES[dtype]


def load_model(
    checkpoint: str | Path,
    *,
    device: str = "auto",
    dtype: str = "auto",
    quantization: str | None = None,
    max_seq_len: int | None = None,
    tokenizer_path: str | Path | None = None,
    params_path: str | Path | None = None,
    comm: Communicator | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Llama, Tokenizer]:
    """Load this rank's part of a checkpoint. Under torchrun every rank calls this alike.

    Args:
        checkpoint: a GGUF file, or a directory in one of the formats of `model.checkpoint`.
        max_seq_len: longest sequence, prompt and answer together, in tokens; None = the checkpoint's own.
        tokenizer_path, params_path: where they don't lie beside the weights, see `open_checkpoint`.
        progress: called with (tensors read, tensors in all).

    Raises:
        CheckpointError: naming file, tensor or value, and what to do.
    """
    if quantization not in (None, "none"):
        raise CheckpointError(f"quantization is {quantization!r}: only none is available in this version")
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    chosen = resolve_device(device, local_rank)
    chosen_dtype = resolve_dtype(dtype, chosen)
    if chosen.type == "cpu":
        torch.set_num_threads(cpu_threads(int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
    source = open_checkpoint(checkpoint, tokenizer_path, params_path)
    try:
        tokenizer = source.tokenizer()
        if tokenizer.n_words > source.config.vocab_size:
            raise CheckpointError(
                f"{source.path}: the tokenizer has {tokenizer.n_words} ids, but the embedding only "
                f"{source.config.vocab_size} rows: tokenizer and weights belong to different models"
            )
        config = dataclasses.replace(source.config, stop_ids=tokenizer.stop_ids, bos_id=tokenizer.bos_id)
        if max_seq_len is not None and max_seq_len < 1:
            raise CheckpointError(f"max_seq_len is {max_seq_len}, expected at least 1")
        comm = comm or init_communicator(chosen)
        model = Llama(config, comm, chosen_dtype, chosen, max_seq_len or config.max_seq_len)
        load_weights(model, source, progress)
    finally:
        source.close()
    return model, tokenizer


def load_weights(model: Llama, source: Checkpoint, progress: Callable[[int, int], None] | None = None) -> None:
    """Fill `model` from `source`. Peak memory: the model's own, plus one tensor's part and its packed copy."""
    targets = _targets(model)
    for i, (name, target) in enumerate(targets.items()):
        part = part_of(name, model.shard, model.config.head_dim)
        target.copy_(source.read(name) if part is None else source.read(name, *part))
        if progress:
            progress(i + 1, len(targets))
    for layer in model.layers:
        for linear in (layer.attention.wqkv, layer.attention.wo, layer.feed_forward.w13, layer.feed_forward.w2):
            linear.prepack()
    model.output.prepack(keep=True)  # as the embedding, and to compute some logits exactly


def _targets(model: Llama) -> dict[str, Tensor]:
    """Where each parameter goes, by Meta's name; wq, wk, wv and w1, w3 are rows of one fused matrix."""
    config, shard = model.config, model.shard
    q, kv = len(shard.heads) * config.head_dim, len(shard.kv_heads) * config.head_dim
    targets = {"tok_embeddings.weight": model.tok_embeddings}
    for i, layer in enumerate(model.layers):
        attention, feed_forward = layer.attention, layer.feed_forward
        wq, wk, wv = _weight(attention.wqkv).split([q, kv, kv])
        w1, w3 = _weight(feed_forward.w13).chunk(2)
        prefix = f"layers.{i}."
        targets |= {
            prefix + "attention_norm.weight": layer.attention_norm,
            prefix + "attention.wq.weight": wq,
            prefix + "attention.wk.weight": wk,
            prefix + "attention.wv.weight": wv,
            prefix + "attention.wo.weight": _weight(attention.wo),
            prefix + "ffn_norm.weight": layer.ffn_norm,
            prefix + "feed_forward.w1.weight": w1,
            prefix + "feed_forward.w3.weight": w3,
            prefix + "feed_forward.w2.weight": _weight(feed_forward.w2),
        }
    targets["norm.weight"] = model.norm
    if not config.tied_output:
        targets["output.weight"] = _weight(model.output)
    return targets


def _weight(linear: object) -> Tensor:
    weight = getattr(linear, "weight", None)
    if not isinstance(weight, Tensor):
        raise RuntimeError("weights are loaded once, before they are packed")
    return weight

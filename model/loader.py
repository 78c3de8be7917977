"""From a checkpoint on disk to one rank's model in memory."""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from model.checkpoint import Checkpoint, open_checkpoint
from model.config import CheckpointError, parameter_shapes
from model.distributed.collectives import Communicator, init_communicator
from model.distributed.parallel import Shard, part_of, plan_shards
from model.kernels.linear import packed_kind
from model.llama import Llama
from model.memory import check_memory
from model.process import cpu_threads
from model.progress import Progress, loading_label, terminal_progress
from model.tokenizer.tokenizer import Tokenizer

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
    kv_cache_tokens: int | None = None,
    kv_cache_memory: int | None = None,
    comm: Communicator | None = None,
    progress: Progress | None = None,
) -> tuple[Llama, Tokenizer]:
    """Load this rank's part of a checkpoint. Under torchrun every rank calls this alike.

    Whether it fits is found before it is allocated. Peak memory: what stays, and one layer's matrices or the largest
    one, whichever is more.

    Args:
        checkpoint: a GGUF file, or a directory in one of the formats of `model.checkpoint`.
        max_seq_len: longest sequence, prompt and answer together, in tokens; None = the checkpoint's own.
        tokenizer_path, params_path: where they don't lie beside the weights, see `open_checkpoint`.
        kv_cache_tokens, kv_cache_memory: size of the cache that will be made for the model, in tokens or bytes per
            rank, so that it is known to fit too.
        progress: called with (bytes of the checkpoint loaded, bytes in all) at the start and after each layer, where
            it is packed; None = a bar where there is a terminal.

    Raises:
        CheckpointError: naming file, tensor or value, and what to do.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    chosen = resolve_device(device, local_rank)
    chosen_dtype = resolve_dtype(dtype, chosen)
    packed_kind(chosen_dtype, chosen, quantization)  # an error where such weights can't be had
    if chosen.type == "cpu":
        torch.set_num_threads(cpu_threads(int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
    with open_checkpoint(checkpoint, tokenizer_path, params_path) as source:
        tokenizer = source.tokenizer()
        if tokenizer.n_words > source.config.vocab_size:
            raise CheckpointError(
                f"{source.path}: the tokenizer has {tokenizer.n_words} ids, but the embedding only "
                f"{source.config.vocab_size} rows: tokenizer and weights belong to different models"
            )
        config = dataclasses.replace(source.config, stop_ids=tokenizer.stop_ids, bos_id=tokenizer.bos_id)
        if max_seq_len is not None and max_seq_len < 1:
            raise CheckpointError(f"max_seq_len is {max_seq_len}, expected at least 1")
        context = max_seq_len or config.max_seq_len
        comm = comm or init_communicator(chosen)
        check_memory(
            config,
            _neighbors(plan_shards(config, comm.world_size), comm.rank, chosen),
            chosen_dtype,
            chosen,
            ranks=comm.world_size,
            max_seq_len=context,
            quantization=quantization,
            cache_tokens=kv_cache_tokens,
            cache_memory=kv_cache_memory,
        )
        comm.barrier()  # no rank takes memory that another still counts as free
        model = Llama(config, comm, chosen_dtype, chosen, context, quantization)
        with terminal_progress(loading_label(quantization), shown=progress is None and comm.rank == 0) as bar:
            load_weights(model, source, progress or bar)
    return model, tokenizer


def _neighbors(shards: list[Shard], rank: int, device: torch.device) -> list[Shard]:
    """The parts of all ranks that share this rank's memory, its own among them."""
    if device.type != "cpu":
        return [shards[rank]]
    local = int(os.environ.get("LOCAL_WORLD_SIZE", len(shards)))
    first = rank - rank % local
    return shards[first : first + local]


def load_weights(model: Llama, source: Checkpoint, progress: Progress | None = None) -> None:
    """Fill `model` from `source`. Peak memory: the model's own; plain weights of one layer while packed ones are made.

    Raises:
        CheckpointError: NaN or infinite numbers, naming file and tensor.
    """
    sizes = {name: source.stored_bytes(name) for name in parameter_shapes(model.config)}
    total, done = sum(sizes.values()), 0

    def advance(names: Iterable[str] = ()) -> None:
        nonlocal done
        done += sum(sizes[name] for name in names)
        if progress:
            progress(done, total)

    def fill(targets: dict[str, Tensor]) -> None:
        for name, target in targets.items():
            source.read_into(target, name, *(part_of(name, model.shard, model.config.head_dim) or ()))
            _check_finite(target, name, source)

    advance()
    embedding = _weight(model.output) if model.tok_embeddings is None else model.tok_embeddings
    fill({"tok_embeddings.weight": embedding})
    advance(["tok_embeddings.weight"])
    plain: list[Tensor] = []
    for i, layer in enumerate(model.layers):
        plain = plain or [_weight(linear) for linear in layer.linears]
        for linear, memory in zip(layer.linears, plain, strict=True):
            if linear.kind != "plain":  # it will be packed: until then it uses the memory of the first layer's
                linear.weight = memory
        targets = _layer_targets(model, i)
        fill(targets)
        for linear in layer.linears:
            linear.pack()
        advance(targets)
    plain.clear()
    targets = {"norm.weight": model.norm}
    if not model.config.tied_output:
        targets["output.weight"] = _weight(model.output)
    fill(targets)
    model.loaded()
    advance(targets)


def _check_finite(target: Tensor, name: str, source: Checkpoint) -> None:
    """One pass over what was read: both extremes are finite only where all is."""
    low, high = torch.aminmax(target)
    if not (math.isfinite(low) and math.isfinite(high)):
        raise CheckpointError(
            f"checkpoint {source.where(name)}: {name} holds NaN or infinite numbers (in {target.dtype}); the file is "
            "broken or was saved from a failed training, fetch it again"
        )


def _layer_targets(model: Llama, i: int) -> dict[str, Tensor]:
    """Where each parameter of layer `i` goes, by Meta's name; wq, wk, wv and w1, w3 are rows of one fused matrix."""
    shard, head_dim = model.shard, model.config.head_dim
    q, kv = len(shard.heads) * head_dim, len(shard.kv_heads) * head_dim
    attention, feed_forward = model.layers[i].attention, model.layers[i].feed_forward
    wq, wk, wv = _weight(attention.wqkv).split([q, kv, kv])
    w1, w3 = _weight(feed_forward.w13).chunk(2)
    prefix = f"layers.{i}."
    return {
        prefix + "attention_norm.weight": model.layers[i].attention_norm,
        prefix + "attention.wq.weight": wq,
        prefix + "attention.wk.weight": wk,
        prefix + "attention.wv.weight": wv,
        prefix + "attention.wo.weight": _weight(attention.wo),
        prefix + "ffn_norm.weight": model.layers[i].ffn_norm,
        prefix + "feed_forward.w1.weight": w1,
        prefix + "feed_forward.w3.weight": w3,
        prefix + "feed_forward.w2.weight": _weight(feed_forward.w2),
    }


def _weight(linear: object) -> Tensor:
    weight = getattr(linear, "weight", None)
    if not isinstance(weight, Tensor):
        raise RuntimeError("weights are loaded once, before they are packed")
    return weight

"""What a model needs on a device, computed from its configuration alone, and what the device has.

Per rank: its part of the weights in the form that is computed with, the rotary table, and the key/value cache. On a CPU
all local ranks share the host's memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import psutil
import torch

from model.config import CheckpointError, ModelConfig
from model.distributed.parallel import Shard
from model.kernels.linear import QUANTIZATIONS, packed_bytes, packed_kind
from model.kv_cache import BLOCK_TOKENS, bytes_per_token
from model.process import control_groups, kernel_text

CPU = torch.device("cpu")


def weights_bytes(
    config: ModelConfig,
    shard: Shard,
    dtype: torch.dtype,
    device: torch.device = CPU,
    quantization: str | None = None,
) -> int:
    """Bytes of this rank's weights once they are loaded, as they are packed then.

    Raises:
        CheckpointError: quantized weights can't be had on this device.
    """
    kind = packed_kind(dtype, device, quantization)
    q, kv = len(shard.heads) * config.head_dim, len(shard.kv_heads) * config.head_dim
    dim, hidden, vocab = config.dim, len(shard.hidden), len(shard.vocab)
    layer = [(q + 2 * kv, dim), (dim, q), (2 * hidden, dim), (dim, hidden)]
    matrices = sum(packed_bytes(kind, out, inputs, dtype) for out, inputs in layer)
    norms = (2 * config.n_layers + 1) * dim * torch.float32.itemsize
    output = packed_bytes("int8" if kind == "int4" else kind, vocab, dim, dtype)
    plain = vocab * dim * dtype.itemsize
    # beside the packed output matrix: the embedding, if it is another one, and what oneDNN's logits are corrected by
    copies = (not config.tied_output) + (kind == "onednn")
    return config.n_layers * matrices + norms + output + copies * plain


def kv_bytes_per_token(config: ModelConfig, shard: Shard, dtype: torch.dtype) -> int:
    """Bytes that the keys and values of one token take on this rank."""
    return bytes_per_token(config, shard, dtype)


def available_bytes(device: torch.device) -> int:
    """Bytes free on `device`: of a GPU, or of the host within the limits of this process's control groups.

    On a CPU it is what all ranks of the host share; memory that only caches files counts as free.
    """
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return min([int(psutil.virtual_memory().available), *(_group_room(group) for group in control_groups("memory"))])


def _group_room(group: Path) -> int:
    """Bytes that a control group may still take. Source: the kernel's admin-guide/cgroup-v2 and cgroup-v1/memory."""
    for limit, used, prefix in (
        ("memory.max", "memory.current", ""),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    ):
        most, now = kernel_text(group / limit).strip(), kernel_text(group / used).strip()
        if most.isdecimal() and now.isdecimal():
            statistics = dict(line.split(maxsplit=1) for line in kernel_text(group / "memory.stat").splitlines())
            files = sum(int(statistics.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))
            return max(int(most) - int(now) + files, 0)
    return 2**63 - 1


def check_memory(
    config: ModelConfig,
    shards: Sequence[Shard],
    dtype: torch.dtype,
    device: torch.device,
    *,
    ranks: int,
    max_seq_len: int,
    quantization: str | None = None,
    cache_tokens: int | None = None,
    cache_memory: int | None = None,
    available: int | None = None,
) -> None:
    """Refuse a model that can't fit, before anything of it is allocated.

    Args:
        shards: of the ranks that share `device`'s memory: one on a GPU, the host's on a CPU.
        ranks: of the whole model, for the message.
        cache_tokens, cache_memory: size of the key/value cache where it is set, in tokens or bytes per rank. Where it
            isn't, it is chosen later from what is free then, and only its least size, one block, must fit.
        available: bytes; None = ask the device.

    Raises:
        CheckpointError: with the bytes needed and available, and what would fit.
    """
    available = available_bytes(device) if available is None else available
    per_token = max(kv_bytes_per_token(config, shard, dtype) for shard in shards)
    tokens = cache_tokens or (max(cache_memory // per_token, BLOCK_TOKENS) if cache_memory else BLOCK_TOKENS)
    rotary = len(shards) * max_seq_len * config.head_dim // 2 * torch.complex64.itemsize
    weights = sum(weights_bytes(config, shard, dtype, device, quantization) for shard in shards) + rotary
    cache = len(shards) * per_token * tokens
    if weights + cache <= available:
        return
    name = quantization if quantization in QUANTIZATIONS else str(dtype).removeprefix("torch.")
    room = (available - weights) // (len(shards) * per_token) // BLOCK_TOKENS * BLOCK_TOKENS
    remedies = [f"a cache of at most {room} tokens (kv_cache_tokens)"] if room > 0 else []
    remedies += _smaller_weights(config, shards, dtype, device, quantization, available - rotary - cache)
    if room > 0:
        remedies.append("more memory")
    else:
        remedies.append("a smaller model")
        remedies.append("more ranks on more " + ("machines" if device.type == "cpu" else "GPUs (nproc-per-node)"))
    here = f"{len(shards)} of {ranks} ranks on this host" if device.type == "cpu" else f"1 of {ranks} ranks"
    raise CheckpointError(
        f"the model doesn't fit into the memory of {device}: {here} need {size(weights)} for weights in {name} and "
        f"{size(cache)} for a key/value cache of {tokens} tokens, together {size(weights + cache)}, but "
        f"{size(available)} are available; what would fit: " + ", ".join(remedies[:-1]) + ", or " + remedies[-1]
    )


def _smaller_weights(
    config: ModelConfig,
    shards: Sequence[Shard],
    dtype: torch.dtype,
    device: torch.device,
    quantization: str | None,
    room: int,
) -> list[str]:
    """Types in which the weights would fit into `room` bytes: bfloat16, and the least of the quantizations."""

    def bytes_in(kind: torch.dtype, quantized: str | None = None) -> int:
        return sum(weights_bytes(config, shard, kind, device, quantized) for shard in shards)

    found = []
    if dtype == torch.float32 and quantization not in QUANTIZATIONS and bytes_in(torch.bfloat16) <= room:
        found.append(f"dtype bfloat16 ({size(bytes_in(torch.bfloat16))} for weights)")
    try:
        fitting = [name for name in QUANTIZATIONS if name != quantization and bytes_in(dtype, name) <= room]
    except CheckpointError:  # they can't be had here
        return found
    if fitting:
        found.append(f"quantization {fitting[0]} ({size(bytes_in(dtype, fitting[0]))} for weights)")
    return found


def size(count: int) -> str:
    """Bytes for people: "512 MiB", "13.5 GiB"."""
    if count < 2**30:
        return f"{count / 2**20:.{0 if count >= 10 * 2**20 else 2}f} MiB"
    return f"{count / 2**30:.1f} GiB"

"""Block types of GGUF tensors, and how their blocks become numbers.

A row of a quantized tensor is a run of blocks of 32 values. Layouts (little-endian, as in ggml's `block_q*` structs):

Q8_0   float16 d, 32 int8 q                       d * q
Q4_0   float16 d, 16 bytes of two 4-bit q         d * (q - 8)
Q4_1   float16 d, float16 m, 16 bytes likewise    d * q + m

A 4-bit block keeps values 0..15 in the low halves of its bytes and 16..31 in the high halves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class BlockType:
    """One type of tensor: `block` values are kept in `size` bytes."""

    name: str
    block: int
    size: int
    dtype: torch.dtype
    """Type of the numbers that `decode` gives."""
    decode: Callable[[torch.Tensor], torch.Tensor]
    """(N, size) bytes, rows contiguous and at even addresses -> (N, block) numbers."""


def _view(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda blocks: blocks.view(dtype)


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """(N, 16) bytes -> (N, 32) values of 0..15."""
    packed = packed.contiguous()  # shifts of a strided view are several times slower
    return torch.cat((packed & 15, packed >> 4), dim=1)


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    scale = blocks[:, :2].view(torch.float16).float()
    return blocks[:, 2:].contiguous().view(torch.int8) * scale


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    scale = blocks[:, :2].view(torch.float16).float()
    return _nibbles(blocks[:, 2:]).float().sub_(8).mul_(scale)


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    scale_and_least = blocks[:, :4].view(torch.float16).float()
    # two roundings, as in ggml's own code: a fused multiply-add would differ in the last bit
    return (_nibbles(blocks[:, 4:]) * scale_and_least[:, :1]).add_(scale_and_least[:, 1:])


BLOCK_TYPES = {
    kind.name: kind
    for kind in (
        BlockType("F32", 1, 4, torch.float32, _view(torch.float32)),
        BlockType("F16", 1, 2, torch.float16, _view(torch.float16)),
        BlockType("BF16", 1, 2, torch.bfloat16, _view(torch.bfloat16)),
        BlockType("Q8_0", 32, 34, torch.float32, _q8_0),
        BlockType("Q4_0", 32, 18, torch.float32, _q4_0),
        BlockType("Q4_1", 32, 20, torch.float32, _q4_1),
    )
}

CHUNK_VALUES = 1 << 18
"""Values decoded at a time: 1 MiB of float32, so that a chunk's intermediates stay in a core's cache."""


def decode_part(rows: torch.Tensor, kind: BlockType, start: int, stop: int) -> torch.Tensor:
    """Columns [start, stop) of a tensor, decoded.

    Args:
        rows: (R, bytes of a row), as they lie in the file.

    Returns:
        (R, stop - start) numbers in fresh contiguous memory. Peak memory beyond that: a few chunks of 1 MiB.
    """
    first, last = start // kind.block, -(-stop // kind.block)  # blocks that hold the columns
    out = torch.empty(rows.shape[0], stop - start, dtype=kind.dtype)
    width = (last - first) * kind.block
    step = max(1, CHUNK_VALUES // max(1, width))
    skip = start - first * kind.block
    for row in range(0, rows.shape[0], step):
        piece = rows[row : row + step, first * kind.size : last * kind.size]
        values = kind.decode(piece.reshape(-1, kind.size)).view(piece.shape[0], width)
        out[row : row + step] = values[:, skip : skip + stop - start]
    return out

"""Block types of GGUF tensors, and how their blocks become numbers.

A row of a quantized tensor is a run of blocks. Layouts (little-endian, fields in this order, as in ggml's `block_q*`
structs; d and m are float16, q the quantized values):

Q8_0   32 values: d, 32 int8 q                                   d * q
Q4_0   32 values: d, 16 bytes of low halves                      d * (q - 8)
Q4_1   32 values: d, m, 16 bytes likewise                        d * q + m
Q5_0   32 values: d, 32 fifth bits, 16 bytes likewise            d * (q - 16)
Q5_1   32 values: d, m, 32 fifth bits, 16 bytes likewise         d * q + m

A block of 32 keeps values 0..15 in the low halves of its 16 bytes and 16..31 in the high halves. Blocks of 256 have
scales of their own for each part, of 32 values (s and t of 6 bits, packed in 12 bytes) or of 16:

Q2_K   16 bytes (s low, t high), 64 bytes of 2 bits, d, m        (d * s) * q - m * t
Q3_K   32 bytes of third bits, 64 of 2, 12 bytes of s, d         (d * (s - 32)) * (q - 4)
Q4_K   d, m, 12 bytes of s and t, 128 bytes of 4 bits            (d * s) * q - m * t
Q5_K   d, m, 12 bytes of s and t, 32 of fifth bits, 128 of 4     (d * s) * q - m * t
Q6_K   128 bytes of 4 bits, 64 of 2 upper bits, 16 int8 s, d     (d * s) * (q - 32)

Their parts lie in one another: a run of 32 bytes (64 in Q6_K's lower bits) holds as many parts as fields fit into a
byte, lowest bits first. Multiplications happen in the order written, each with its own rounding as in ggml's own code
(a fused multiply-add would differ in the last bit), so that results are the same to the bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from model.checkpoint.base import copy_cast


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


def _half(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """(N, 1) float32: the float16 at byte `start` of each block."""
    return blocks[:, start : start + 2].view(torch.float16).float()


def _fields(packed: torch.Tensor, bits: int, run: int) -> torch.Tensor:
    """(N, B) bytes -> (N, 8 / bits * B): each run of `run` bytes as 8 / bits runs of its fields, lowest bits first."""
    # eight bytes at a time; a copy even where it is contiguous, as one block alone may lie at any even address
    words = packed.clone(memory_format=torch.contiguous_format).view(torch.int64)
    mask = int.from_bytes(bytes([(1 << bits) - 1] * 8), "little")
    runs = words.view(len(packed), -1, 1, run // 8)
    out = torch.cat([runs >> shift & mask for shift in range(0, 8, bits)], dim=2)
    return out.view(torch.uint8).view(len(packed), -1)


_SPREAD = ((torch.arange(256)[:, None] >> torch.arange(8)) & 1).to(torch.uint8).mul_(16).view(torch.int64)[:, 0]
"""(256,) int64: for each byte its eight bits as eight bytes of 0 or 16, lowest bit first."""


def _five_bits(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """(N, 32) values of 0..31 from four bytes of fifth bits and sixteen of halves."""
    fifth = _SPREAD[blocks[:, start : start + 4].long()].view(torch.uint8)
    return _fields(blocks[:, start + 4 :], 4, 16).bitwise_or_(fifth)


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    return blocks[:, 2:].contiguous().view(torch.int8) * _half(blocks, 0)


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    return _fields(blocks[:, 2:], 4, 16).float().sub_(8).mul_(_half(blocks, 0))


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    return _fields(blocks[:, 4:], 4, 16).float().mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q5_0(blocks: torch.Tensor) -> torch.Tensor:
    return _five_bits(blocks, 2).float().sub_(16).mul_(_half(blocks, 0))


def _q5_1(blocks: torch.Tensor) -> torch.Tensor:
    return _five_bits(blocks, 4).float().mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _scaled(q: torch.Tensor, scale: torch.Tensor, less: torch.Tensor | None = None) -> torch.Tensor:
    """(N, 256) q in P parts, each times its scale of (N, P), minus its own `less` of (N, P)."""
    parts = q.float().view(*scale.shape, -1)
    parts.mul_(scale.unsqueeze(2))
    if less is not None:
        parts.sub_(less.unsqueeze(2))
    return parts.view(q.shape)


def _scale_and_less(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(N, 8) d * s and (N, 8) m * t of Q4_K and Q5_K."""
    packed = blocks[:, 4:16].contiguous()
    a, b, c = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    s = torch.cat((a & 63, (c & 15) | (a >> 2 & 48)), dim=1)
    t = torch.cat((b & 63, (c >> 4) | (b >> 2 & 48)), dim=1)
    return _half(blocks, 0) * s, _half(blocks, 2) * t


def _q2_k(blocks: torch.Tensor) -> torch.Tensor:
    scales = blocks[:, :16].contiguous()
    scale, less = _half(blocks, 80) * (scales & 15), _half(blocks, 82) * (scales >> 4)
    return _scaled(_fields(blocks[:, 16:80], 2, 32), scale, less)


def _q3_k(blocks: torch.Tensor) -> torch.Tensor:
    upper = blocks[:, 104:108].contiguous()
    upper = torch.cat([upper >> shift & 3 for shift in range(0, 8, 2)], dim=1)
    scale = _half(blocks, 108) * (_fields(blocks[:, 96:104], 4, 8) | upper << 4).float().sub_(32)
    q = _fields(blocks[:, :32], 1, 32).mul_(4).bitwise_or_(_fields(blocks[:, 32:96], 2, 32))
    return _scaled(q.float().sub_(4), scale)


def _q4_k(blocks: torch.Tensor) -> torch.Tensor:
    return _scaled(_fields(blocks[:, 16:], 4, 32), *_scale_and_less(blocks))


def _q5_k(blocks: torch.Tensor) -> torch.Tensor:
    q = _fields(blocks[:, 16:48], 1, 32).mul_(16).bitwise_or_(_fields(blocks[:, 48:], 4, 32))
    return _scaled(q, *_scale_and_less(blocks))


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    q = _fields(blocks[:, 128:192], 2, 32).mul_(16).bitwise_or_(_fields(blocks[:, :128], 4, 64))
    scale = blocks[:, 192:208].contiguous().view(torch.int8) * _half(blocks, 208)
    return _scaled(q.float().sub_(32), scale)


BLOCK_TYPES = {
    kind.name: kind
    for kind in (
        BlockType("F32", 1, 4, torch.float32, _view(torch.float32)),
        BlockType("F16", 1, 2, torch.float16, _view(torch.float16)),
        BlockType("BF16", 1, 2, torch.bfloat16, _view(torch.bfloat16)),
        BlockType("Q8_0", 32, 34, torch.float32, _q8_0),
        BlockType("Q4_0", 32, 18, torch.float32, _q4_0),
        BlockType("Q4_1", 32, 20, torch.float32, _q4_1),
        BlockType("Q5_0", 32, 22, torch.float32, _q5_0),
        BlockType("Q5_1", 32, 24, torch.float32, _q5_1),
        BlockType("Q2_K", 256, 84, torch.float32, _q2_k),
        BlockType("Q3_K", 256, 110, torch.float32, _q3_k),
        BlockType("Q4_K", 256, 144, torch.float32, _q4_k),
        BlockType("Q5_K", 256, 176, torch.float32, _q5_k),
        BlockType("Q6_K", 256, 210, torch.float32, _q6_k),
    )
}

CHUNK_VALUES = 1 << 18
"""Values decoded at a time: 1 MiB of float32, so that a chunk's intermediates stay in a core's cache."""


def decode_part(
    rows: torch.Tensor, kind: BlockType, start: int, stop: int, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Columns [start, stop) of a tensor, decoded.

    Args:
        rows: (R, bytes of a row), as they lie in the file.
        out: (R, stop - start) of any type, to be filled.

    Returns:
        `out`, or as many numbers in fresh contiguous memory. Peak memory beyond that: a few chunks of 1 MiB.
    """
    first, last = start // kind.block, -(-stop // kind.block)  # blocks that hold the columns
    if out is None:
        out = torch.empty(rows.shape[0], stop - start, dtype=kind.dtype)
    if not out.numel():
        return out
    width = (last - first) * kind.block
    step = max(1, CHUNK_VALUES // width)
    skip = start - first * kind.block
    for row in range(0, rows.shape[0], step):
        piece = rows[row : row + step, first * kind.size : last * kind.size]
        values = kind.decode(piece.reshape(-1, kind.size)).view(piece.shape[0], width)
        copy_cast(out[row : row + step], values[:, skip : skip + stop - start])
    return out

"""What a layer computes besides its matrix products: one interface, in torch and in native code.

`TorchKernels` runs anywhere and is the reference; `NativeKernels` (native/kernels.c) is what a CPU uses where a C
compiler was found. T tokens, H heads, KV key/value heads, D head dim.
"""

from __future__ import annotations

import ctypes
import logging
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from model.kernels.build import NativeBuildError, load_library
from model.kv_cache import BLOCK_TOKENS, DecodeGroup, PrefillChunk

logger = logging.getLogger(__name__)

SHARPENED = 3.0
"""How far below a row's largest logit the others are computed exactly: 1/20 of its probability."""


class TorchKernels:
    """The reference, in torch's own operations."""

    def add_norm(self, h: Tensor, delta: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        """h (T, dim) float32 += delta, in place; returns its RMS norm times weight, in `dtype`.

        Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019).
        """
        if delta is not None:
            h += delta
        return F.rms_norm(h, weight.shape, weight, eps).to(dtype)

    def rotate_and_store(
        self, qkv: Tensor, heads: int, rotary: Tensor, positions: Tensor, slots: Tensor, keys: Tensor, values: Tensor
    ) -> Tensor:
        """Turn q and k by their positions, and write k and v to the cache rows `slots`.

        Args:
            qkv: (T, H + 2 KV, D); may be changed.
            rotary: (positions, D/2) complex64.
            keys, values: (rows, KV, D), written in place.

        Returns:
            (T, H, D) turned q.
        """
        turned = heads + keys.shape[1]
        pairs = torch.view_as_complex(qkv[:, :turned].float().unflatten(-1, (-1, 2)))  # (T, heads, D/2)
        rotation = rotary.index_select(0, positions)[:, None, :]
        qk = torch.view_as_real(pairs * rotation).flatten(-2).to(qkv.dtype)
        keys.index_copy_(0, slots, qk[:, heads:])
        values.index_copy_(0, slots, qkv[:, turned:])
        return qk[:, :heads]

    def decode(self, q: Tensor, part: DecodeGroup, keys: Tensor, values: Tensor) -> Tensor:
        """Attention of one new token per sequence, q (B, H, D), over the paged cache. Returns (B, H, D).

        The heads of a group are folded into the query length, so keys and values are never expanded.
        """
        batch, heads, dim = q.shape
        kv = keys.shape[1]
        shape = (batch, part.mask.shape[-1], kv, dim)
        k = keys.index_select(0, part.slots).view(shape).transpose(1, 2)  # (B, KV, L, D)
        v = values.index_select(0, part.slots).view(shape).transpose(1, 2)
        grouped = q.reshape(batch, kv, heads // kv, dim)
        return F.scaled_dot_product_attention(grouped, k, v, attn_mask=part.mask).reshape(batch, heads, dim)

    def prefill(self, q: Tensor, chunk: PrefillChunk, keys: Tensor, values: Tensor, out: Tensor) -> None:
        """Attention of one sequence's new tokens, q (tokens, H, D), over its paged cache, into out (tokens, H, D)."""
        tokens, heads, dim = q.shape
        kv = keys.shape[1]
        k = keys.index_select(0, chunk.slots).transpose(0, 1)  # (KV, L, D)
        v = values.index_select(0, chunk.slots).transpose(0, 1)
        grouped = q.view(tokens, kv, heads // kv, dim).permute(1, 2, 0, 3).reshape(1, kv, -1, dim)
        mask = chunk.mask.repeat(heads // kv, 1)  # (G * tokens, L)
        attended = F.scaled_dot_product_attention(grouped, k[None], v[None], attn_mask=mask)
        out.copy_(attended.view(heads, tokens, dim).transpose(0, 1))

    def sharpen(self, logits: Tensor, h: Tensor, weight: Tensor) -> Tensor:
        """The logits in float32, those that matter exact.

        A bfloat16 number near 20 has neighbors 0.125 away: rounded so, the likeliest tokens often tie, and the wrong
        one wins. Those near the top are few; they are computed again without the rounding.

        Args:
            logits: (R, vocabulary) bfloat16, h times weight.
            h: (R, dim) bfloat16.
            weight: (vocabulary, dim) bfloat16.
        """
        exact = logits.float()
        rows, tokens = (exact >= exact.amax(-1, keepdim=True) - SHARPENED).nonzero(as_tuple=True)
        exact[rows, tokens] = (h[rows].float() * weight[tokens].float()).sum(-1)
        return exact

    def silu_multiply(self, gate_up: Tensor) -> Tensor:
        """(T, 2 hidden) -> silu(first half) * second half, (T, hidden)."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up


NATIVE_DTYPES = {torch.float32: 0, torch.bfloat16: 1}
"""Numbers of the types in native/vectors.h."""
_P, _I, _F, _N = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
_ARGUMENTS = {
    "add_rms_norm": (_P, _P, _P, _P, _I, _I, _F, _N),
    "rotate_and_store": (_P, _P, _P, _P, _P, _P, _I, _I, _I, _I, _N),
    "silu_multiply": (_P, _P, _I, _I, _N),
    "sharpen_logits": (_P, _P, _P, _P, _I, _I, _I, _F),
    "paged_prefill": (_P, _I, _P, _P, _P, _I, _P, _I, _I, _I, _I, _I, _I, _F, _N, _N),
    "paged_decode": (_P, _I, _P, _P, _P, _P, _P, _I, _I, _I, _I, _I, _I, _F, _N, _N),
}


class NativeKernels(TorchKernels):
    """The same in native code, for float32 and bfloat16 on a CPU.

    Raises:
        NativeBuildError: no C compiler, or it fails.
    """

    def __init__(self) -> None:
        library = load_library()
        self._functions: dict[str, Any] = {}
        for name, arguments in _ARGUMENTS.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, None
            self._functions[name] = function
        for name in ("paged_decode", "paged_prefill"):
            self._functions[name].restype = ctypes.c_int
        self._add_norm = self._functions["add_rms_norm"]
        self._rotate = self._functions["rotate_and_store"]
        self._silu = self._functions["silu_multiply"]
        self._sharpen = self._functions["sharpen_logits"]
        self._decode = self._functions["paged_decode"]
        self._prefill = self._functions["paged_prefill"]

    def add_norm(self, h: Tensor, delta: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        out = torch.empty(h.shape, dtype=dtype)
        rows, dim = h.shape
        pointer = None if delta is None else delta.data_ptr()
        self._add_norm(h.data_ptr(), pointer, weight.data_ptr(), out.data_ptr(), rows, dim, eps, NATIVE_DTYPES[dtype])
        return out

    def rotate_and_store(
        self, qkv: Tensor, heads: int, rotary: Tensor, positions: Tensor, slots: Tensor, keys: Tensor, values: Tensor
    ) -> Tensor:
        tokens, _, dim = qkv.shape
        self._rotate(
            qkv.data_ptr(),
            rotary.data_ptr(),
            positions.data_ptr(),
            slots.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
            tokens,
            heads,
            keys.shape[1],
            dim,
            NATIVE_DTYPES[qkv.dtype],
        )
        return qkv[:, :heads]

    def decode(self, q: Tensor, part: DecodeGroup, keys: Tensor, values: Tensor) -> Tensor:
        batch, heads, dim = q.shape
        kv = keys.shape[1]
        out = torch.empty((batch, heads, dim), dtype=q.dtype)
        failed = self._decode(
            q.data_ptr(),
            q.stride(0),
            keys.data_ptr(),
            values.data_ptr(),
            out.data_ptr(),
            part.lengths.data_ptr(),
            part.blocks.data_ptr(),
            batch,
            part.blocks.shape[1],
            kv,
            heads // kv,
            dim,
            BLOCK_TOKENS,
            dim**-0.5,
            NATIVE_DTYPES[q.dtype],
            torch.get_num_threads(),
        )
        if failed:
            raise MemoryError("no memory for the attention's scores")
        return out

    def prefill(self, q: Tensor, chunk: PrefillChunk, keys: Tensor, values: Tensor, out: Tensor) -> None:
        _, heads, dim = q.shape
        kv = keys.shape[1]
        failed = self._prefill(
            q.data_ptr(),
            q.stride(0),
            keys.data_ptr(),
            values.data_ptr(),
            out.data_ptr(),
            out.stride(0),
            chunk.blocks.data_ptr(),
            chunk.start,
            chunk.count,
            kv,
            heads // kv,
            dim,
            BLOCK_TOKENS,
            dim**-0.5,
            NATIVE_DTYPES[q.dtype],
            torch.get_num_threads(),
        )
        if failed:
            raise MemoryError("no memory for the attention's scores")

    def sharpen(self, logits: Tensor, h: Tensor, weight: Tensor) -> Tensor:
        rows, vocabulary = logits.shape
        out = torch.empty((rows, vocabulary), dtype=torch.float32)
        pointers = (logits.data_ptr(), h.data_ptr(), weight.data_ptr(), out.data_ptr())
        self._sharpen(*pointers, rows, vocabulary, h.shape[1], SHARPENED)
        return out

    def silu_multiply(self, gate_up: Tensor) -> Tensor:
        rows, width = gate_up.shape
        out = torch.empty((rows, width // 2), dtype=gate_up.dtype)
        self._silu(gate_up.data_ptr(), out.data_ptr(), rows, width // 2, NATIVE_DTYPES[gate_up.dtype])
        return out


def choose_kernels(device: torch.device, dtype: torch.dtype, head_dim: int) -> TorchKernels:
    """Native kernels where they can be had, else the reference; says once why it is slow."""
    if device.type != "cpu" or dtype not in NATIVE_DTYPES or head_dim % 16:
        return TorchKernels()
    try:
        return NativeKernels()
    except NativeBuildError as error:
        logger.warning("without native kernels a step takes longer: %s", error)
        return TorchKernels()

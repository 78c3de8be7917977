"""Linear layers: y = x W^T, each weight packed once for the kernel that reads it.

On a CPU the project's own kernels (native/linear.c) hold weights in bfloat16, 8 or 4 bits; oneDNN's bfloat16 is used
where it has faster instructions. Elsewhere, and in float32, it is torch's own product of a plain weight.

Quantized weights come in groups of 32 inputs, each with a scale per output (and an offset for 4 bits); the inputs are
quantized to 8 bits in the same groups at each step, so all arithmetic inside a group is whole numbers. Each kernel sums
up a row's outputs in one order: a row's result doesn't depend on how many others are computed with it.
"""

from __future__ import annotations

import ctypes
import functools
from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from model.config import CheckpointError
from model.kernels.build import NativeBuildError, load_library
from model.kernels.operations import NATIVE_DTYPES

QUANTIZATIONS = {"int8": 8, "int4": 4}
"""Bits of each."""
GROUP = 32
"""Inputs that share a scale."""
_WIDE, _LANES = 64, 16  # outputs in a tile of native/linear.c: bfloat16, quantized

_P, _I, _N = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
_ARGUMENTS = {
    "pack_bf16": (_P, _P, _I, _I, _N),
    "unpack_rows_bf16": (_P, _P, _P, _I, _I),
    "linear_bf16": (_P, _P, _P, _I, _I, _I, _N, _N),
    "pack_int": (_P, _P, _P, _P, _I, _I, _N, _N, _N),
    "unpack_rows_int": (_P, _P, _P, _P, _P, _I, _I, _N),
    "linear_int": (_P, _P, _P, _P, _P, _I, _I, _I, _N, _N, _N, _N),
    "linear_bf16_is_fast": (),
}


@functools.cache
def _native() -> ctypes.CDLL:
    """The library with its functions' types.

    Raises:
        NativeBuildError: no C compiler, or it fails.
    """
    library = load_library()
    for name, arguments in _ARGUMENTS.items():
        function: Any = getattr(library, name)
        function.argtypes, function.restype = arguments, None
    library.linear_int.restype = library.linear_bf16_is_fast.restype = ctypes.c_int
    return library


class Packed(ABC):
    """A weight in a kernel's own order."""

    has_rows = True
    """Whether `rows` works."""

    def __init__(self, weight: Tensor) -> None:
        self.out_features, self.in_features = weight.shape

    @abstractmethod
    def __call__(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """x (T, in) -> (T, out) in `dtype`."""

    def rows(self, ids: Tensor) -> Tensor:
        """The weight's rows `ids`, (len(ids), in), for a weight that is an embedding too."""
        raise NotImplementedError


class OneDNNWeight(Packed):
    """bfloat16 in oneDNN's own order, which nearly halves the time of a plain weight."""

    has_rows = False

    def __init__(self, weight: Tensor) -> None:
        super().__init__(weight)
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, 1)

    def __call__(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        rows = len(x)
        more = padded_rows(rows) - rows
        if more:
            x = F.pad(x, (0, 0, 0, more))
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, None, "none", [], None)
        return y[:rows].to(dtype)


class NativeWeight(Packed):
    """bfloat16 in tiles of 64 outputs, zeros where the last one has fewer. The number of inputs must be even."""

    bits = 16

    def __init__(self, weight: Tensor) -> None:
        super().__init__(weight)
        weight = weight.contiguous()
        tiles = -(-self.out_features // _WIDE)
        self._packed = torch.empty(tiles * _WIDE * self.in_features, dtype=torch.bfloat16)
        sizes = (self.out_features, self.in_features, torch.get_num_threads())
        _native().pack_bf16(weight.data_ptr(), self._packed.data_ptr(), *sizes)
        self.parts = (self._packed.data_ptr(), None, None)
        """Addresses of codes, scales and offsets."""
        self._linear = _native().linear_bf16

    def __call__(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        x, rows, out = x.contiguous(), len(x), self.out_features
        y = torch.empty((rows, out), dtype=dtype)
        pointers = (x.data_ptr(), self._packed.data_ptr(), y.data_ptr())
        self._linear(*pointers, rows, self.in_features, out, NATIVE_DTYPES[dtype], torch.get_num_threads())
        return y

    def rows(self, ids: Tensor) -> Tensor:
        out = torch.empty((len(ids), self.in_features), dtype=torch.bfloat16)
        pointers = (self._packed.data_ptr(), ids.contiguous().data_ptr(), out.data_ptr())
        _native().unpack_rows_bf16(*pointers, len(ids), self.in_features)
        return out


class QuantizedWeight(Packed):
    """8 or 4 bits in tiles of 16 outputs."""

    def __init__(self, weight: Tensor, bits: int) -> None:
        super().__init__(weight)
        weight = weight.contiguous()
        self.bits = bits
        groups = -(-self.in_features // GROUP)
        scales = -(-self.out_features // _LANES) * _LANES * groups
        self._codes = torch.empty(scales * GROUP * bits // 8, dtype=torch.uint8)
        self._scales = torch.empty(scales, dtype=torch.float16)
        self._offsets = torch.empty(scales, dtype=torch.float16) if bits == 4 else None
        self.parts = (self._codes.data_ptr(), self._scales.data_ptr(), _pointer(self._offsets))
        """Addresses of codes, scales and offsets."""
        sizes = (self.out_features, self.in_features, bits, NATIVE_DTYPES[weight.dtype], torch.get_num_threads())
        _native().pack_int(weight.data_ptr(), *self.parts, *sizes)
        self._linear = _native().linear_int

    def __call__(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        x, rows, out = x.contiguous(), len(x), self.out_features
        y = torch.empty((rows, out), dtype=dtype)
        sizes = (rows, self.in_features, out, self.bits)
        kinds = (NATIVE_DTYPES[x.dtype], NATIVE_DTYPES[dtype], torch.get_num_threads())
        if self._linear(x.data_ptr(), *self.parts, y.data_ptr(), *sizes, *kinds):
            raise MemoryError("no memory for the inputs of a linear layer")
        return y

    def rows(self, ids: Tensor) -> Tensor:
        out = torch.empty((len(ids), self.in_features), dtype=torch.float32)
        _native().unpack_rows_int(
            *self.parts, ids.contiguous().data_ptr(), out.data_ptr(), len(ids), self.in_features, self.bits
        )
        return out


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def padded_rows(rows: int) -> int:
    """The next of few row counts: oneDNN builds a kernel, and keeps it, for each that it meets."""
    step = 1 if rows <= 8 else 8 if rows <= 64 else 32 if rows <= 256 else 64
    return -(-rows // step) * step


def packed_kind(dtype: torch.dtype, device: torch.device, quantization: str | None = None) -> str:
    """How weights will lie in memory: "plain", "onednn", "native", "int8" or "int4".

    Raises:
        CheckpointError: quantized weights can't be had here; says why.
    """
    if quantization not in (None, "none"):
        if quantization not in QUANTIZATIONS:
            raise CheckpointError(f"quantization is {quantization!r}, expected none, {', '.join(QUANTIZATIONS)}")
        if device.type != "cpu":
            raise CheckpointError(f"quantization {quantization} runs on a CPU only: use none with device {device.type}")
        try:
            _native()
        except NativeBuildError as error:
            raise CheckpointError(f"quantization {quantization} needs the native kernels: {error}") from error
        return quantization
    if device.type != "cpu" or dtype != torch.bfloat16:
        return "plain"
    try:
        if _native().linear_bf16_is_fast():
            return "native"
    except NativeBuildError:
        pass  # kernels.py says so
    return "onednn" if torch.backends.mkldnn.is_available() else "plain"


def packed_bytes(kind: str, out_features: int, in_features: int, dtype: torch.dtype) -> int:
    """Bytes of one layer's weight once it is packed, by its `packed_kind`."""
    if kind in QUANTIZATIONS:
        scales = -(-out_features // _LANES) * _LANES * -(-in_features // GROUP)
        return scales * (GROUP * QUANTIZATIONS[kind] // 8 + (4 if kind == "int4" else 2))
    rows = out_features
    if kind == "native" and in_features % 2 == 0:
        rows = -(-out_features // _WIDE) * _WIDE
    return rows * in_features * dtype.itemsize


class Linear:
    """One layer. Its plain weight is filled by the loader, then packed.

    Args:
        kind: how to pack it, by `packed_kind`.
        out_dtype: of the results; None = that of the inputs.
    """

    def __init__(
        self,
        out_features: int,
        in_features: int,
        dtype: torch.dtype,
        device: torch.device,
        kind: str = "plain",
        out_dtype: torch.dtype | None = None,
    ) -> None:
        self.weight: Tensor | None = torch.empty(out_features, in_features, dtype=dtype, device=device)
        self.kind = "plain" if kind == "native" and in_features % 2 else kind
        self.out_dtype = out_dtype
        self.packed: Packed | None = None

    def pack(self) -> None:
        """Bring the weight into the kernel's order; the plain one is dropped."""
        if self.weight is None or self.kind == "plain":
            return
        if self.kind == "onednn":
            self.packed = OneDNNWeight(self.weight)
        elif self.kind == "native":
            self.packed = NativeWeight(self.weight)
        else:
            self.packed = QuantizedWeight(self.weight, QUANTIZATIONS[self.kind])
        self.weight = None

    def __call__(self, x: Tensor) -> Tensor:
        """x (T, in) -> (T, out)."""
        dtype = self.out_dtype or x.dtype
        if self.packed is not None:
            return self.packed(x, dtype)
        if self.weight is None:
            raise RuntimeError("this layer has no weight yet")
        return F.linear(x, self.weight).to(dtype)

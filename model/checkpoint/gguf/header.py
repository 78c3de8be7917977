"""The header of a GGUF file: metadata, and where each tensor lies.

The `gguf` package reads the same, but makes several numpy arrays for each token of the vocabulary (2 s and 100 MB
for 49152 tokens, on every rank) and trusts the counts in the file. Here every count is checked against the bytes
that are left before anything is made of its size. Format: ggml's docs/gguf.md, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import itertools
import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT, GGMLQuantizationType, GGUFValueType

from model.checkpoint.base import Shape, TensorInfo, describe_file
from model.config import CheckpointError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_DIMS = 4
MAX_NAME = 512
"""Longest name of a tensor or metadata key, in characters; real ones have a tenth of that."""

# format characters of `struct` and numpy
SCALARS = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.FLOAT64: "d",
    GGUFValueType.BOOL: "?",
}
SMALLEST_KEY = 8 + 4 + 1  # bytes of a key without letters and a one-byte value
SMALLEST_LIST = 4 + 8
SMALLEST_TENSOR = 8 + 4 + 4 + 8


@dataclass(frozen=True)
class Unreadable:
    """Stands for a value that isn't read here, so that only a key that is asked for is refused."""

    what: str
    """Fits into "KEY is ..., expected ..."."""

    def __repr__(self) -> str:
        return self.what


@dataclass(frozen=True)
class Header:
    metadata: dict[str, Any]
    """Every key with its value as plain Python: str, int, float, bool, a list of them, or `Unreadable`."""
    tensors: dict[str, TensorInfo]
    """By GGUF's name; all lie wholly inside the file."""


def read_header(path: Path, data: mmap.mmap) -> Header:
    """Read and check the header of the memory-mapped file `path`.

    Raises:
        CheckpointError: Truncated, of another format or version, or with values that contradict each other.
    """
    cursor = _Cursor(path, data)
    if data[:4] != MAGIC:
        raise CheckpointError(f"checkpoint {path}: isn't a GGUF file: {describe_file(path)}")
    cursor.take(4)
    (version,) = cursor.unpack("I")
    if version not in VERSIONS:
        kind = "is big-endian" if version & 0xFFFF == 0 else f"has version {version}"
        raise CheckpointError(
            f"checkpoint {path}: GGUF {kind}, expected little-endian and version 2 or 3; convert it anew"
        )
    n_tensors, n_keys = cursor.unpack("QQ")
    cursor.check_count(n_keys, SMALLEST_KEY, "metadata keys")
    metadata: dict[str, Any] = {}
    for _ in range(n_keys):
        key = cursor.name("a metadata key")
        if key in metadata:
            raise CheckpointError(f"checkpoint {path}: metadata key {key!r} is there twice; the file is broken")
        metadata[key] = cursor.value(key, cursor.unpack("I")[0])
    cursor.check_count(n_tensors, SMALLEST_TENSOR, "tensors")
    entries = [cursor.tensor() for _ in range(n_tensors)]
    alignment = metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 8 or alignment & (alignment - 1):
        raise CheckpointError(
            f"checkpoint {path}: general.alignment is {alignment!r}, expected a power of two from 8 on"
        )
    base = -(-cursor.offset // alignment) * alignment
    tensors: dict[str, TensorInfo] = {}
    for name, shape, number, offset in entries:
        if name in tensors:
            raise CheckpointError(f"checkpoint {path}: tensor {name!r} is there twice; the file is broken")
        if offset % alignment:
            raise CheckpointError(
                f"checkpoint {path}: tensor {name!r} lies at offset {offset}, expected a multiple of {alignment}; "
                "the file is broken"
            )
        tensors[name] = _locate(path, len(data), name, shape, number, base + offset)
    _check_apart(path, tensors)
    return Header(metadata, tensors)


def _locate(path: Path, size: int, name: str, shape: Shape, number: int, offset: int) -> TensorInfo:
    try:
        kind = GGMLQuantizationType(number)
    except ValueError as error:
        raise CheckpointError(
            f"checkpoint {path}: tensor {name!r} has type {number}, which isn't known here"
        ) from error
    block, block_bytes = GGML_QUANT_SIZES[kind]
    if shape[-1] % block:
        raise CheckpointError(
            f"checkpoint {path}: tensor {name!r} has rows of {shape[-1]} values, "
            f"but {kind.name} needs a multiple of {block}; the file is broken"
        )
    n_bytes = math.prod(shape) // block * block_bytes
    if offset + n_bytes > size:
        raise CheckpointError(
            f"checkpoint {path}: truncated: tensor {name!r} ends at byte {offset + n_bytes}, "
            f"but the file has {size} bytes; fetch it again"
        )
    return TensorInfo(name, kind.name, shape, offset, n_bytes)


def _check_apart(path: Path, tensors: Mapping[str, TensorInfo]) -> None:
    """Refuse tensors that share bytes."""
    in_order = sorted(tensors.values(), key=lambda info: info.offset)
    for before, after in itertools.pairwise(info for info in in_order if info.n_bytes):
        if after.offset < before.offset + before.n_bytes:
            raise CheckpointError(
                f"checkpoint {path}: tensor {after.name!r} begins at byte {after.offset}, inside {before.name!r} "
                f"(up to byte {before.offset + before.n_bytes}); the file is broken, fetch it again"
            )


class _Cursor:
    """A place in the file that moves on with everything that is read."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.offset = 0

    def take(self, size: int) -> int:
        """The current offset, having moved on by `size` bytes that are really there."""
        if size > len(self.data) - self.offset:
            raise CheckpointError(
                f"checkpoint {self.path}: truncated: {size} more bytes are needed at byte {self.offset} of the header, "
                f"but the file has {len(self.data)} bytes; fetch it again"
            )
        self.offset += size
        return self.offset - size

    def unpack(self, form: str) -> tuple[Any, ...]:
        layout = struct.Struct("<" + form)
        return layout.unpack_from(self.data, self.take(layout.size))

    def check_count(self, count: int, smallest: int, what: str) -> None:
        """Refuse a count of things of at least `smallest` bytes each that the rest of the file can't hold."""
        if count * smallest > len(self.data) - self.offset:
            raise CheckpointError(
                f"checkpoint {self.path}: truncated or broken: it announces {count} {what} at byte {self.offset}, "
                f"but has {len(self.data)} bytes; fetch it again"
            )

    def string(self) -> str | Unreadable:
        (size,) = self.unpack("Q")
        start = self.take(size)
        try:
            return self.data[start : start + size].decode("utf-8")
        except UnicodeDecodeError:
            return Unreadable(f"a text that isn't UTF-8 (at byte {start})")

    def name(self, what: str) -> str:
        """A string that messages can show."""
        value = self.string()
        if isinstance(value, Unreadable):
            raise CheckpointError(f"checkpoint {self.path}: {what} is {value}; the file is broken")
        if len(value) > MAX_NAME or not value.isprintable():
            raise CheckpointError(
                f"checkpoint {self.path}: {what} is {value[:80]!r} ({len(value)} characters), expected at most "
                f"{MAX_NAME}, all printable; the file is broken"
            )
        return value

    def value(self, key: str, number: int) -> Any:
        """The value of the metadata key `key`, of the type `number`."""
        kind = self._kind(key, number)
        if kind is GGUFValueType.STRING:
            return self.string()
        if kind is not GGUFValueType.ARRAY:
            return self.unpack(SCALARS[kind])[0]
        value, inner = self._list(key)
        if not inner:
            return value
        while inner:  # they follow one another, whatever the depth
            inner += self._list(key)[1] - 1
        return Unreadable("a list of lists")

    def _list(self, key: str) -> tuple[Any, int]:
        """The next list's values; or, of a list of lists, how many lists follow."""
        item_number, count = self.unpack("IQ")
        item = self._kind(key, item_number)
        if item is GGUFValueType.ARRAY:
            self.check_count(count, SMALLEST_LIST, f"values of {key}")
            return [], count
        if item is GGUFValueType.STRING:
            self.check_count(count, 8, f"values of {key}")
            texts = [self.string() for _ in range(count)]
            return next((text for text in texts if isinstance(text, Unreadable)), texts), 0
        dtype = np.dtype("<" + SCALARS[item])
        self.check_count(count, dtype.itemsize, f"values of {key}")
        start = self.take(count * dtype.itemsize)
        return np.frombuffer(self.data[start : self.offset], dtype).tolist(), 0

    def _kind(self, key: str, number: int) -> GGUFValueType:
        try:
            return GGUFValueType(number)
        except ValueError as error:
            raise CheckpointError(
                f"checkpoint {self.path}: {key} has the value type {number}, expected 0..12; the file is broken"
            ) from error

    def tensor(self) -> tuple[str, Shape, int, int]:
        """Name, shape, number of the type, and offset of the next tensor."""
        name = self.name("a tensor's name")
        (n_dims,) = self.unpack("I")
        if not 1 <= n_dims <= MAX_DIMS:
            raise CheckpointError(
                f"checkpoint {self.path}: tensor {name!r} has {n_dims} dimensions, expected 1..{MAX_DIMS}; "
                "the file is broken"
            )
        shape = self.unpack("Q" * n_dims)[::-1]
        number, offset = self.unpack("IQ")
        return name, shape, number, offset

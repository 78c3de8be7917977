"""The header of a safetensors file: where each tensor lies, and as what.

Eight bytes (the header's length, little-endian), that many bytes of JSON, then the tensors' values one after another.
The `safetensors` package reads the same; here each error names the file and the tensor, and tensors are read out of
memory-mapped files part by part. Format: github.com/huggingface/safetensors, README, "Format".
"""

from __future__ import annotations

import json
import math
import mmap
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from model.checkpoint.base import TensorInfo, describe_file
from model.config import CheckpointError

LENGTH_BYTES = 8
MAX_HEADER = 8 * 1024 * 1024
"""Longest header that is parsed; a Llama model of 126 layers needs a fiftieth of that."""
MAX_DIMS = 8
MAX_NAME = 512
METADATA = "__metadata__"
ENTRY_KEYS = {"dtype", "shape", "data_offsets"}

TYPE_BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("BOOL", "I8", "U8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
"""Bits of one value of each type of the format."""


def read_header(path: Path, data: bytes | mmap.mmap) -> dict[str, TensorInfo]:
    """Read and check the header of the file `path`, whose bytes are `data`: its tensors by name.

    They lie wholly inside the file, in any order, and fill it without a gap. Peak memory: the header's objects.

    Raises:
        CheckpointError: Truncated, of another format, or with values that contradict each other.
    """
    length = int.from_bytes(data[:LENGTH_BYTES], "little")
    base = LENGTH_BYTES + length
    if base > len(data) or data[LENGTH_BYTES : LENGTH_BYTES + 1] != b"{":
        raise CheckpointError(f"checkpoint {path}: isn't a safetensors file: {describe_file(path)}")
    if length > MAX_HEADER:
        raise CheckpointError(
            f"checkpoint {path}: its header has {length} bytes, expected at most {MAX_HEADER}; the file is broken"
        )
    entries = _parse(path, data[LENGTH_BYTES:base])
    _check_metadata(path, entries.pop(METADATA, {}))
    tensors = {name: _tensor(path, name, entry, base) for name, entry in entries.items()}
    _check_places(path, tensors, base, len(data))
    return tensors


def _parse(path: Path, header: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) < len(pairs):
            twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
            raise CheckpointError(f"checkpoint {path}: {twice[:80]!r} is there twice in the header; the file is broken")
        return values

    try:
        entries = json.loads(header.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"checkpoint {path}: its header isn't JSON ({str(error)[:80]}); the file is broken, fetch it again"
        ) from error
    if not isinstance(entries, dict):  # can't be, as it begins with a brace, but it's typed so
        raise CheckpointError(f"checkpoint {path}: its header isn't a JSON object; the file is broken")
    return entries


def _check_metadata(path: Path, metadata: object) -> None:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"checkpoint {path}: {METADATA} in its header isn't strings by name; the file is broken")


def _tensor(path: Path, name: str, entry: object, base: int) -> TensorInfo:
    """The tensor that an entry of the header describes; its place is only checked against its own size."""
    if len(name) > MAX_NAME or not name.isprintable():
        raise CheckpointError(
            f"checkpoint {path}: a tensor's name is {name[:80]!r} ({len(name)} characters), expected at most "
            f"{MAX_NAME}, all printable; the file is broken"
        )
    if not isinstance(entry, dict) or set(entry) != ENTRY_KEYS:
        raise CheckpointError(
            f"checkpoint {path}: tensor {name!r} is described by {repr(entry)[:80]}, expected dtype, shape and "
            "data_offsets; the file is broken"
        )
    kind, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(kind, str) or kind not in TYPE_BITS:
        raise CheckpointError(f"checkpoint {path}: tensor {name!r} has type {repr(kind)[:80]}, which isn't known here")
    if not _are_sizes(shape) or len(shape) > MAX_DIMS:
        raise CheckpointError(
            f"checkpoint {path}: tensor {name!r} has shape {repr(shape)[:80]}, expected up to {MAX_DIMS} sizes; "
            "the file is broken"
        )
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(
            f"checkpoint {path}: tensor {name!r} has data_offsets {repr(offsets)[:80]}, expected its start and end; "
            "the file is broken"
        )
    n_bytes = offsets[1] - offsets[0]
    if math.prod(shape) * TYPE_BITS[kind] != 8 * n_bytes:
        raise CheckpointError(
            f"checkpoint {path}: tensor {name!r} has {n_bytes} bytes, but {kind} of shape {tuple(shape)} needs "
            f"{math.prod(shape) * TYPE_BITS[kind] / 8:g}; the file is broken"
        )
    return TensorInfo(name, kind, tuple(shape), base + offsets[0], n_bytes)


def _are_sizes(values: object) -> bool:
    """Whether it is a list of whole numbers that a file of any size could have."""
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**63 for value in values)


def _check_places(path: Path, tensors: Mapping[str, TensorInfo], base: int, size: int) -> None:
    """Check that the tensors lie one behind another, from `base` to the end of the file."""
    end = base
    for info in sorted(tensors.values(), key=lambda info: (info.offset, info.n_bytes)):
        if info.offset + info.n_bytes > size:
            raise CheckpointError(
                f"checkpoint {path}: truncated: tensor {info.name!r} ends at byte {info.offset + info.n_bytes}, "
                f"but the file has {size} bytes; fetch it again"
            )
        if info.offset != end:
            what = "overlaps the tensor before it" if info.offset < end else "leaves a gap before it"
            raise CheckpointError(
                f"checkpoint {path}: tensor {info.name!r} begins at byte {info.offset}, but {end} was expected: "
                f"it {what}; the file is broken"
            )
        end += info.n_bytes
    if end != size:
        raise CheckpointError(
            f"checkpoint {path}: {size - end} bytes behind the last tensor belong to none; the file is broken"
        )

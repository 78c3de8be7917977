"""The header reader alone, on files of a few bytes: whatever is wrong in them has an error of its own."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from model.checkpoint.base import TensorInfo
from model.checkpoint.huggingface.safetensors_header import read_header
from model.config import CheckpointError


def file_of(header: object, values: int = 0) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(values)


def entry(start: int, stop: int, shape: list[Any] | None = None, kind: Any = "U8") -> dict[str, Any]:
    return {"dtype": kind, "shape": [stop - start] if shape is None else shape, "data_offsets": [start, stop]}


def read(tmp_path: Path, data: bytes) -> Mapping[str, TensorInfo]:
    file = tmp_path / "model.safetensors"
    file.write_bytes(data)
    return read_header(file, data)


def test_any_order_and_empty_tensors(tmp_path: Path) -> None:
    header = {"b": entry(4, 8, [2], "F16"), "c": entry(4, 4, [0, 2**40], "F32"), "a": entry(0, 4, [], "F32")}
    data = file_of({"__metadata__": {"format": "pt"}, **header}, 8)
    found = read(tmp_path, data)
    assert {name: (info.kind, info.shape, info.offset - len(data) + 8) for name, info in found.items()} == {
        "b": ("F16", (2,), 4),
        "c": ("F32", (0, 2**40), 4),
        "a": ("F32", (), 0),
    }


@pytest.mark.parametrize(
    ("header", "values", "message"),
    [
        ({"a": entry(0, 4), "b": entry(2, 6)}, 6, "tensor 'b' begins at byte .*overlaps the tensor before it"),
        ({"a": entry(0, 4), "b": entry(0, 4)}, 4, "tensor 'b' .*overlaps"),
        ({"a": entry(0, 4), "b": entry(6, 8)}, 8, "tensor 'b' .*leaves a gap"),
        ({"a": entry(2, 4)}, 4, "tensor 'a' .*leaves a gap"),
        ({"a": entry(0, 4)}, 7, "3 bytes behind the last tensor"),
        ({"a": entry(0, 4)}, 3, "truncated: tensor 'a' ends at"),
        ({"a": entry(0, 2**62, [2**62])}, 8, "truncated: tensor 'a'"),
        ({"a": entry(0, 8, [2**32, 2**32], "F32")}, 8, "8 bytes, but F32 of shape"),
        ({"a": entry(0, 1, [1], "F4")}, 1, "needs 0.5"),
        ({"a": entry(0, 4, [4], "Q4_0")}, 4, "tensor 'a' has type 'Q4_0', which isn't known"),
        ({"a": entry(0, 4, [4], ["U8"])}, 4, "tensor 'a' has type"),
        ({"a": entry(0, 4, [-4])}, 4, r"tensor 'a' has shape \[-4\]"),
        ({"a": entry(0, 4, [4.0])}, 4, "tensor 'a' has shape"),
        ({"a": entry(0, 1, [True])}, 1, "tensor 'a' has shape"),
        ({"a": entry(0, 1, [1] * 9)}, 1, "tensor 'a' has shape .*up to 8 sizes"),
        ({"a": entry(0, 4, [2**63])}, 4, "tensor 'a' has shape"),
        ({"a": {**entry(0, 4), "data_offsets": [4, 0]}}, 4, r"tensor 'a' has data_offsets \[4, 0\]"),
        ({"a": {**entry(0, 4), "data_offsets": [0]}}, 4, "tensor 'a' has data_offsets"),
        ({"a": {"dtype": "U8", "shape": [4]}}, 4, "tensor 'a' is described by"),
        ({"a": [1]}, 4, "tensor 'a' is described by"),
        ({"a\n": entry(0, 4)}, 4, r"name is 'a\\n'"),
        ({"a" * 600: entry(0, 4)}, 4, r"\(600 characters\)"),
        ({"__metadata__": {"a": 1}}, 0, "__metadata__"),
        (b'{"a": {}, "a": {}}', 0, "'a' is there twice"),
        (b'{"a": {"dtype": "U8", "dtype": "I8"}}', 0, "'dtype' is there twice"),
        (b'{"a": ', 0, "isn't JSON"),
        (b"{}}", 0, "isn't JSON"),
        (b'{"\xff": 1}', 0, "isn't JSON"),
        (b'{"a":' + b"[" * 100_000, 0, "isn't JSON"),
        (b'{"a":' + b"9" * 5000 + b"}", 0, "isn't JSON"),
        (b' {"a": 1}', 0, "isn't a safetensors file"),
        (b"{" + b" " * 2**23 + b"}", 0, "expected at most 8388608"),
    ],
)
def test_refused(tmp_path: Path, header: object, values: int, message: str) -> None:
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: .*{message}") as caught:
        read(tmp_path, file_of(header, values))
    assert len(str(caught.value)) < len(str(tmp_path)) + 500


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_change(tmp_path: Path, data: st.DataObject) -> None:
    """A changed header is refused by its own error, or the `safetensors` package reads the same from it."""
    header = {"a.weight": entry(0, 24, [2, 3], "F32"), "b": entry(24, 30, [3], "BF16"), "__metadata__": {"x": "y"}}
    changed = bytearray(file_of(header, 30))
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(changed) - 1))
        new = data.draw(st.binary(max_size=2) | st.sampled_from([b"0", b"9", b"[", b"]", b"{", b"}", b'"', b","]))
        changed[place : place + data.draw(st.integers(0, 2))] = new
    try:
        found = read(tmp_path, bytes(changed))
    except CheckpointError:
        return
    with safetensors.safe_open(tmp_path / "model.safetensors", "pt") as file:
        names = set(file.keys())
        assert set(found) == names
        assert all(tuple(file.get_slice(name).get_shape()) == found[name].shape for name in names)

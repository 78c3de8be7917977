"""The header of a GGUF file: an error that helps for each thing that can't be meant, before it is believed."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest

from model.checkpoint import open_checkpoint
from model.checkpoint.gguf.read import GGUFCheckpoint
from model.config import CheckpointError
from tests.helpers.limits import little_memory
from tests.helpers.report import report
from tests.helpers.tiny import random_weights, save_gguf, tiny_config


@report("B117", "ymcui/Chinese-LLaMA-Alpaca#97")
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the file is empty"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 3\n", "Git LFS pointer"),
        (b"<html>Not found</html>", "web page"),
        (b"PK\3\4", "begins with b'PK"),
        (b"GGUF", "truncated"),
        (b"GGUF" + struct.pack(">I", 3), "big-endian"),
        (b"GGUF" + struct.pack("<I", 1), "version 1"),
    ],
)
def test_not_a_model(tmp_path: Path, content: bytes, message: str) -> None:
    """B117: a pointer, a web page or another file is called what it is."""
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"m\.gguf.*{message}"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (struct.pack("<QQ", 0, 2**60), "1152921504606846976 metadata keys"),
        (struct.pack("<QQ", 2**60, 0), "1152921504606846976 tensors"),
        (struct.pack("<QQQ", 0, 1, 2**63) + bytes(16), "9223372036854775808 more bytes"),
        (struct.pack("<QQQ1sIIQ", 0, 1, 1, b"a", 9, 0, 2**62), "4611686018427387904 values of a"),
        (struct.pack("<QQQ1sIIQ", 0, 1, 1, b"a", 9, 8, 2**62), "4611686018427387904 values of a"),
        (struct.pack("<QQQ1sIIQ", 0, 1, 1, b"a", 9, 9, 2**62), "4611686018427387904 values of a"),
        (struct.pack("<QQQ1sIIQIQ", 0, 1, 1, b"a", 9, 9, 1, 0, 2**62), "4611686018427387904 values of a"),
        (struct.pack("<QQQ1sIIQIQ", 0, 1, 1, b"a", 9, 9, 1, 9, 2), "2 values of a"),
        (struct.pack("<QQQ1sIIQIQIQ", 0, 1, 1, b"a", 9, 9, 1, 9, 1, 8, 1), "1 values of a"),
        (struct.pack("<QQQ1sIIQIQ", 0, 1, 1, b"a", 9, 9, 1, 13, 0), "a has the value type 13"),
        (struct.pack("<QQQ1sIQ", 0, 1, 1, b"a", 8, 2) + b"\xff", "2 more bytes are needed"),
        (struct.pack("<QQQ1sIQ", 0, 1, 1, b"a", 13, 0), "a has the value type 13"),
        (struct.pack("<QQQ1sI4x", 0, 1, 1, b"\xff", 4), r"a metadata key is a text that isn't UTF-8 \(at byte 32\)"),
        (
            struct.pack("<QQQ2sIQ", 0, 1, 2, b"a\n", 4, 0),
            r"a metadata key is 'a\\n' \(2 characters\), expected at most",
        ),
        (struct.pack("<QQQ600sI", 0, 1, 600, b"a" * 600, 4) + bytes(4), r"a metadata key is 'aaa.* \(600 characters\)"),
        (struct.pack("<QQQ1sIQIQ", 1, 0, 1, b"\0", 1, 1, 0, 0), r"a tensor's name is '\\x00'"),
        (struct.pack("<QQ", 0, 2) + 2 * struct.pack("<Q1sI4x", 1, b"a", 4), "'a' is there twice"),
        (struct.pack("<QQQ17sII", 0, 1, 17, b"general.alignment", 4, 12), "general.alignment is 12"),
        (struct.pack("<QQQ1sI", 1, 0, 1, b"t", 99) + bytes(16), "'t' has 99 dimensions"),
        (struct.pack("<QQQ1sIQIQ", 1, 0, 1, b"t", 1, 1, 77, 0), "'t' has type 77"),
        (struct.pack("<QQQ1sIQIQ", 1, 0, 1, b"t", 1, 33, 8, 0), "rows of 33 values, but Q8_0"),
        (struct.pack("<QQQ1sIQIQ", 1, 0, 1, b"t", 1, 1, 0, 5), "'t' lies at offset 5"),
        (struct.pack("<QQQ1sIQQIQ", 1, 0, 1, b"t", 2, 2**40, 2**40, 0, 0), "truncated: tensor 't'"),
        (
            struct.pack("<QQ", 2, 0)
            + b"".join(struct.pack("<Q1sIQIQ", 1, name, 1, 24, 0, offset) for name, offset in ((b"t", 0), (b"u", 32)))
            + bytes(256),
            r"'u' begins at byte 128, inside 't' \(up to byte 192\)",
        ),
        (
            struct.pack("<QQ", 2, 0) + 2 * struct.pack("<Q1sIQIQ", 1, b"t", 1, 0, 0, 0) + bytes(64),
            "'t' is there twice",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_values_that_can_not_be(tmp_path: Path, body: bytes, message: str) -> None:
    """Each is found before memory of the size it announces is asked for."""
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<I", 3) + body)
    with little_memory(), pytest.raises(CheckpointError, match=message):
        open_checkpoint(path)


def test_what_nobody_reads(tmp_path: Path) -> None:
    """Lists in lists of any depth, and a text in another encoding: passed over to what lies behind them."""
    config = tiny_config()
    fields = {
        "a.first": [[[1, 2], [3]], [[4, 5, 6]]],
        "a.second": [["x", "yz"], [""]],
        "general.author": "Renée".encode("latin-1"),
        "a.third": ["x", b"\xff", "y"],
        "a.last": 7,
    }
    checkpoint = open_checkpoint(save_gguf(tmp_path / "m.gguf", config, random_weights(config), fields=fields))
    assert isinstance(checkpoint, GGUFCheckpoint)
    assert checkpoint.config == config
    assert checkpoint.metadata["a.last"] == 7
    shown = [repr(checkpoint.metadata[key]) for key in ("a.first", "a.second", "general.author", "a.third")]
    assert shown[:2] == ["a list of lists"] * 2
    assert all(text.startswith("a text that isn't UTF-8 (at byte ") for text in shown[2:])


def test_very_deep_lists(tmp_path: Path) -> None:
    """No stack is needed for them."""
    path = tmp_path / "m.gguf"
    deep = struct.pack("<IQ", 9, 1) * 100_000 + struct.pack("<IQ", 4, 0)
    body = struct.pack("<QQQ1sI", 0, 1, 1, b"a", 9) + deep
    path.write_bytes(b"GGUF" + struct.pack("<I", 3) + body)
    with pytest.raises(CheckpointError, match=r"general\.architecture is missing"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"general.architecture": b"ll\xff"}, r"general\.architecture is a text that isn't UTF-8 \(at byte \d+\), exp"),
        ({"general.alignment": [[32]]}, r"general\.alignment is a list of lists, expected a power of two"),
        ({"llama.block_count": [[2]]}, r"llama\.block_count is a list of lists, expected an integer"),
        ({"llama.rope.freq_base": b"\xff"}, r"freq_base is a text that isn't UTF-8 .*, expected a finite number"),
        ({"tokenizer.ggml.tokens": ["a", b"\xff"]}, r"ggml\.tokens is a text that isn't UTF-8 .*, expected a list of"),
        ({"tokenizer.ggml.bos_token_id": [[1]]}, r"bos_token_id is a list of lists, expected an integer"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_read(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    """Refused by the key's name."""
    config = tiny_config()
    arch = fields.pop("general.architecture", "llama")
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(
            save_gguf(
                tmp_path / "m.gguf", config, random_weights(config), fields={"general.architecture": arch, **fields}
            )
        )


def test_truncated_weights(tmp_path: Path) -> None:
    config = tiny_config()
    path = save_gguf(tmp_path / "m.gguf", config, random_weights(config))
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=rf"truncated: tensor 'output\.weight' ends .* has {size - 100} bytes"):
        open_checkpoint(path)

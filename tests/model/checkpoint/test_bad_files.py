"""Files that are no model, in each format: an error that names the file, without running or allocating what is in it.

What a format alone can get wrong is in its own tests; here is what befalls them all, and what Meta's pickles can hold.
"""

from __future__ import annotations

import builtins
import functools
import os
import pickle
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from model.checkpoint import open_checkpoint
from model.config import CheckpointError, ModelConfig
from tests.helpers.limits import little_memory
from tests.helpers.report import report
from tests.helpers.tiny import (
    gguf_name,
    huggingface_tensors,
    random_weights,
    save_gguf,
    save_huggingface,
    save_meta,
    tiny_config,
)

CONFIG = tiny_config(n_layers=1, hidden_dim=64)
WEIGHTS = random_weights(CONFIG)
WQ = "layers.0.attention.wq.weight"
SHARD = "consolidated.00.pth"
Writer = Callable[[Path, ModelConfig, Mapping[str, torch.Tensor]], Path]


def _gguf(directory: Path, config: ModelConfig, weights: Mapping[str, torch.Tensor]) -> Path:
    save_gguf(directory / "m.gguf", config, weights)
    return directory


WRITERS: dict[str, tuple[Writer, str]] = {
    "Meta": (save_meta, SHARD),
    "Meta, two shards": (functools.partial(save_meta, shards=2), "consolidated.01.pth"),
    "Hugging Face": (save_huggingface, "model.safetensors"),
    "Hugging Face, indexed": (functools.partial(save_huggingface, files=2), "model-00002-of-00002.safetensors"),
    "GGUF": (_gguf, "m.gguf"),
}
"""How each is written, and the file that is broken then."""


@pytest.fixture(autouse=True)
def _little_memory() -> Iterator[None]:
    with little_memory():
        yield


@pytest.fixture(params=WRITERS)
def broken(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The file to break, in a checkpoint that is whole otherwise."""
    write, name = WRITERS[request.param]
    write(tmp_path / "model", CONFIG, WEIGHTS)
    return tmp_path / "model" / name


def own_name(name: str, file: Path) -> str:
    """What the format of `file` calls a parameter."""
    if file.suffix == ".safetensors":
        return next(iter(huggingface_tensors(CONFIG, {name: WEIGHTS[name]})))
    return gguf_name(name) if file.suffix == ".gguf" else name


def test_bogus_sizes_can_not_be_had() -> None:
    """Or the other tests here would say nothing about memory."""
    with pytest.raises(RuntimeError, match="memory"):
        torch.empty(1 << 32, dtype=torch.uint8)


@report("B117", "ymcui/Chinese-LLaMA-Alpaca#97")
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the file is empty"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 3\n", "Git LFS pointer"),
        (b"<!DOCTYPE html><html><body>Sign in</body></html>", "web page"),
        (b'{"error": "Repository not found"}', "begins with"),
        (b"\0" * 5000, "begins with"),
        (bytes(range(256)) * 20, "begins with"),
    ],
    ids=["empty", "pointer", "page", "JSON", "zeros", "noise"],
)
def test_something_else_in_its_place(broken: Path, content: bytes, message: str) -> None:
    """B117."""
    broken.write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"{re.escape(broken.name)}.*{message}"):
        open_checkpoint(broken.parent)


@report("B118", "facebookresearch/dinov3#1")
def test_truncated_anywhere(broken: Path) -> None:
    """B118."""
    content = broken.read_bytes()
    places = {0, 1, 4, 8, 9, 24, 100, len(content) - 1, *range(1, len(content), len(content) // 29)}
    for place in sorted(places, reverse=True):
        with broken.open("r+b") as file:
            file.truncate(place)
        with pytest.raises(CheckpointError, match=re.escape(broken.name)):
            open_checkpoint(broken.parent)


def test_a_directory_in_its_place(broken: Path) -> None:
    broken.unlink()
    broken.mkdir()
    with pytest.raises(CheckpointError, match=re.escape(broken.name)):
        open_checkpoint(broken.parent)


@pytest.mark.parametrize("name", ["Meta, two shards", "Hugging Face, indexed"])
def test_missing_shard(tmp_path: Path, name: str) -> None:
    write, file = WRITERS[name]
    write(tmp_path, CONFIG, WEIGHTS)
    (tmp_path / file).unlink()
    with pytest.raises(CheckpointError, match=r"00002 is missing|00002-of-00002\.safetensors is missing|should be 2"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({WQ: None}, "missing"),
        ({"layers.0.attention.wk.weight": torch.ones(32, 60)}, r"\(32, 60\)|\(64, 60\)"),
        ({"norm.weight": torch.ones(60)}, r"\(60,\)"),
    ],
    ids=["missing", "another shape", "another length"],
)
def test_tensors_of_another_model(tmp_path: Path, name: str, change: dict[str, Any], message: str) -> None:
    write, file = WRITERS[name]
    weights = {k: v for k, v in {**WEIGHTS, **change}.items() if v is not None}
    write(tmp_path, CONFIG, weights)
    called = {next(iter(change)), own_name(next(iter(change)), tmp_path / file)}
    with pytest.raises(CheckpointError, match=f"({'|'.join(map(re.escape, called))}).*({message})"):
        open_checkpoint(tmp_path)


class TestDirectories:
    def test_only_a_tokenizer(self, tmp_path: Path) -> None:
        for name in ("tokenizer.model", "tokenizer.json", "params.json"):
            (tmp_path / name).write_bytes(b"x")
        with pytest.raises(
            CheckpointError, match=r"looked for .*; it holds params\.json, tokenizer\.json, tokenizer\."
        ):
            open_checkpoint(tmp_path)

    def test_only_pickles(self, tmp_path: Path) -> None:
        for name in ("pytorch_model.bin", "config.json"):
            (tmp_path / name).write_bytes(b"x")
        with pytest.raises(CheckpointError, match=rf"{tmp_path}: \*\.bin files .* aren't read; use the .*safetensors"):
            open_checkpoint(tmp_path)

    @pytest.mark.parametrize("name", WRITERS)
    def test_a_model_one_level_down(self, tmp_path: Path, name: str) -> None:
        """As in an archive that was unpacked into a directory of its own."""
        write, _ = WRITERS[name]
        write(tmp_path / "llama", CONFIG, WEIGHTS)
        (tmp_path / "readme.md").write_bytes(b"x")
        (tmp_path / "logs").mkdir()
        folder = re.escape(str(tmp_path / "llama"))
        with pytest.raises(CheckpointError, match=rf"{tmp_path}: no model .*one level down, give its path: {folder}$"):
            open_checkpoint(tmp_path)
        open_checkpoint(tmp_path / "llama").close()

    def test_two_models_one_level_down(self, tmp_path: Path) -> None:
        for name in ("7b", "13b"):
            save_meta(tmp_path / name, CONFIG, WEIGHTS)
        with pytest.raises(CheckpointError, match=r"give its path: .*13b, .*7b$"):
            open_checkpoint(tmp_path)


class Call:
    """Pickles as a call, which is made by whoever unpickles it."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.function, self.arguments


class TestPickles:
    @pytest.mark.parametrize("how", ["zip", "old", "bare"])
    @pytest.mark.parametrize("function", ["system", "eval", "exec", "rmtree", "import"])
    def test_code_is_not_run(self, tmp_path: Path, function: str, how: str) -> None:
        marker, victim = tmp_path / "marker", tmp_path / "victim"
        victim.mkdir()
        code = f"open({str(marker)!r}, 'w').close()"
        call = {
            "system": Call(os.system, f"touch {marker}"),
            "eval": Call(builtins.eval, code),
            "exec": Call(builtins.exec, code),
            "rmtree": Call(shutil.rmtree, str(victim)),
            "import": Call(builtins.__import__, "antigravity"),
        }[function]
        file = save_meta(tmp_path / "model", CONFIG, WEIGHTS) / SHARD
        state = {**WEIGHTS, "norm.weight": call}
        if how == "bare":
            file.write_bytes(pickle.dumps(state))
        else:
            torch.save(state, file, _use_new_zipfile_serialization=how == "zip")
        names = r"posix\.system|builtins\.eval|builtins\.exec|shutil\.rmtree|builtins\.__import__"
        message = rf"\(({names})\), which could run code; nothing of it was" if how == "zip" else "is a bare pickle"
        with pytest.raises(CheckpointError, match=rf"consolidated\.00\.pth: .*{message}") as caught:
            open_checkpoint(file.parent)
        assert "weights_only" not in str(caught.value)  # torch advises to load it nevertheless
        assert not marker.exists()
        assert victim.exists()

    @pytest.mark.parametrize(
        "value",
        [
            torch.zeros(1).expand(2**30, 2**30),
            torch.zeros(1).expand(64),
            torch.empty(2**30, 2**30, device="meta"),
            torch.sparse_coo_tensor(torch.zeros(1, 0), torch.zeros(0), (64,), check_invariants=True),
        ],
        ids=["huge", "repeated", "without values", "sparse"],
    )
    def test_tensors_larger_than_the_file(self, tmp_path: Path, value: torch.Tensor) -> None:
        file = save_meta(tmp_path, CONFIG, WEIGHTS) / SHARD
        torch.save({**WEIGHTS, "norm.weight": value}, file)
        with pytest.raises(CheckpointError, match=rf"{SHARD}: norm\.weight of shape .* the file doesn't hold them"):
            open_checkpoint(tmp_path)


def test_layers_that_are_only_counted(tmp_path: Path) -> None:
    """A layer of a huge number doesn't make as many of them."""
    number = 4_000_000_000
    weights = {name.replace("layers.0.", f"layers.{number - 1}."): weight for name, weight in WEIGHTS.items()}
    path = save_gguf(tmp_path / "m.gguf", CONFIG, weights, fields={"llama.block_count": number})
    with pytest.raises(CheckpointError, match=rf"llama\.block_count is {number}, but the files hold 0 layers"):
        open_checkpoint(path)

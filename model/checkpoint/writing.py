"""What the writers of all formats share: the parameters in the types they are to get, and a target that appears whole.

Each writer goes through the parameters one at a time (Meta's through one shard at a time); none holds the whole model.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from math import prod
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from model.checkpoint.base import Checkpoint
from model.checkpoint.gguf.read import GGUFCheckpoint
from model.config import CheckpointError, ModelConfig, parameter_shapes

FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Types that every format can hold."""
QUANTIZED = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")
"""Types that only GGUF holds and that can be made of numbers here; others can only be kept as they are."""
SPARE_BYTES = 64 << 20
"""Space beside the tensors: headers, tokenizer, configuration."""


def stored_bytes(shape: tuple[int, ...], kind: str) -> int:
    """Bytes of a tensor in GGML's type `kind`."""
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    return prod(shape) // block * size


class Weights:
    """The parameters of `checkpoint`, by Meta's names, each in the type it is to be written in.

    Args:
        types: GGML's name of a type for every parameter.
        progress: called with the bytes written since the last call.
    """

    def __init__(
        self, checkpoint: Checkpoint, types: Mapping[str, str], progress: Callable[[int], None] = lambda _: None
    ) -> None:
        self._checkpoint = checkpoint
        self.config: ModelConfig = checkpoint.config
        self.shapes = parameter_shapes(checkpoint.config)
        self.types = dict(types)
        self.progress = progress

    @property
    def n_bytes(self) -> int:
        """Bytes of all parameters in their new types."""
        return sum(stored_bytes(shape, self.types[name]) for name, shape in self.shapes.items())

    def read(self, name: str, dim: int = 0, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """The part [start, stop) along `dim`, see `Checkpoint.read`, in its new type, which isn't a quantized one.

        Raises:
            CheckpointError: a number is too large for the type.
        """
        part = self._checkpoint.read(name, dim, start, stop)
        self._check_range(name, part)
        return part.to(FLOATS[self.types[name]])

    def blocks(self, name: str) -> np.ndarray:
        """The whole parameter as GGUF keeps it, (rows, bytes of a row) uint8, or one dimension for a vector.

        A quantized parameter that keeps its type is copied as it is, so nothing is lost in it.
        """
        kind = self.types[name]
        if kind not in FLOATS and self._checkpoint.stored_type(name) == kind:
            if not isinstance(self._checkpoint, GGUFCheckpoint):
                raise RuntimeError(f"{name} is {kind} outside a GGUF file")
            data: np.ndarray = self._checkpoint.blocks(name).numpy()
        elif kind in FLOATS:
            data = self.read(name).view(torch.uint8).numpy()
        else:
            values = self._checkpoint.read(name).float().numpy()
            data = gguf.quants.quantize(values, GGMLQuantizationType[kind])
        return data.reshape(*self.shapes[name][:-1], -1)

    def _check_range(self, name: str, part: torch.Tensor) -> None:
        kind = self.types[name]
        if kind != "F16" or part.dtype == torch.float16 or not part.numel():
            return
        most = float(part.abs().max())  # NaN compares as not greater: what is broken stays broken
        if most > torch.finfo(torch.float16).max:
            raise CheckpointError(f"{name} holds {most:g}, but F16 ends at 65504: choose --type BF16 or F32")


def plan_types(checkpoint: Checkpoint, target_format: str, kind: str | None) -> dict[str, str]:
    """The type of every parameter in a checkpoint of `target_format` ("meta", "huggingface" or "gguf").

    With a `kind` all parameters get it; without one each keeps its own where the format can hold it, else F32. In
    GGUF vectors are always F32, and rows that don't fill whole blocks F16. Going back from there, vectors take the type
    of the matrices where that loses nothing.

    Raises:
        CheckpointError: a type that can't be made, or not held by the format.
    """
    if kind is not None and kind not in (*FLOATS, *QUANTIZED):
        raise CheckpointError(f"--type is {kind}, expected one of {', '.join((*FLOATS, *QUANTIZED))}")
    if kind in QUANTIZED and target_format != "gguf":
        raise CheckpointError(f"--type is {kind}, but only GGUF holds quantized tensors: use {', '.join(FLOATS)}")
    shapes = parameter_shapes(checkpoint.config)
    if target_format == "gguf":
        return {name: _gguf_type(shape, kind or checkpoint.stored_type(name)) for name, shape in shapes.items()}
    if kind is not None:
        return dict.fromkeys(shapes, kind)
    types = {name: _float_type(checkpoint.stored_type(name)) for name in shapes}
    if checkpoint.format == "gguf":
        common = types["layers.0.attention.wq.weight"]
        vectors = [name for name, shape in shapes.items() if len(shape) == 1]
        types |= {name: common for name in vectors if _fits(checkpoint.read(name), FLOATS[common])}
    return types


def _float_type(stored: str) -> str:
    return stored if stored in FLOATS else "F32"


def _gguf_type(shape: tuple[int, ...], kind: str) -> str:
    if len(shape) == 1:
        return "F32"
    return "F16" if shape[-1] % GGML_QUANT_SIZES[GGMLQuantizationType[kind]][0] else kind


def _fits(values: torch.Tensor, dtype: torch.dtype) -> bool:
    return torch.equal(values.to(dtype).to(values.dtype), values)


@contextlib.contextmanager
def appearing(target: Path, n_bytes: int, *, force: bool = False) -> Iterator[Path]:
    """A path beside `target` to write a file or folder at; it becomes `target` only when the block ends well.

    Args:
        n_bytes: space that must be free.
        force: replace what is there: a file, or a folder that holds a model and no other folders.

    Raises:
        CheckpointError: `target` exists, or the disk is too full.
    """
    if target.exists() or target.is_symlink():
        _check_replaceable(target, force)
    target.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(target.parent).free
    if n_bytes > free:
        raise CheckpointError(
            f"{target} needs {n_bytes / 1e9:.2f} GB, but {target.parent} has {free / 1e9:.2f} GB free: "
            "free some space, or choose another disk or a smaller --type"
        )
    part = target.parent / f".{target.name}.{os.getpid()}.part"
    try:
        yield part
        _put(part, target)
    finally:
        _remove(part)


def _put(part: Path, target: Path) -> None:
    """Rename `part` to `target`; what was there is deleted last."""
    if not (target.exists() or target.is_symlink()):
        part.rename(target)
        return
    old = target.parent / f".{target.name}.{os.getpid()}.old"
    target.rename(old)
    try:
        part.rename(target)
    except OSError:
        old.rename(target)
        raise
    _remove(old)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _check_replaceable(target: Path, force: bool) -> None:
    if not force:
        raise CheckpointError(f"{target} exists already: choose another name, or replace it with --force")
    if target.is_symlink() or not target.is_dir():
        return
    entries = list(target.iterdir())
    model = any(entry.suffix in (".safetensors", ".pth", ".gguf") for entry in entries)
    if entries and (not model or any(entry.is_dir() for entry in entries)):
        raise CheckpointError(
            f"{target} isn't replaced even with --force: it holds other things than one model; delete it yourself"
        )

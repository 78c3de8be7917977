"""What every checkpoint format offers, and the checks they share."""

from __future__ import annotations

import ctypes
import mmap
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from model.config import CheckpointError, ModelConfig, parameter_shapes

if TYPE_CHECKING:
    from types import TracebackType

    from model.tokenizer.tokenizer import Tokenizer

Shape = tuple[int, ...]

TYPE_NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
"""GGML's names of the types that aren't quantized."""


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies in a file, and as what."""

    name: str
    kind: str
    """The format's name of the type."""
    shape: Shape
    """Slowest dimension first, as torch counts: (rows, columns)."""
    offset: int
    """From the start of the file."""
    n_bytes: int


class Checkpoint(ABC):
    """An opened checkpoint: a configuration, a tokenizer, and parameters by Meta's names to read part by part.

    Opening has checked names, shapes and file sizes; weights are memory-mapped and read only by `read`.
    """

    format: str
    """Which format it is: "meta", "gguf" or "huggingface"."""

    def __init__(self, path: Path, config: ModelConfig, tokenizer_path: Path | None = None) -> None:
        self.path = path
        self.config = config
        self._tokenizer_path = tokenizer_path
        self._shapes = parameter_shapes(config)

    def read(self, name: str, dim: int = 0, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """The part [start, stop) along `dim` of the whole model's parameter `name`, in fresh contiguous memory.

        The type is float32 for quantized parameters, else the stored one. Peak memory is the returned part and,
        for quantized parameters, a few MiB.

        Raises:
            CheckpointError: There is no such parameter or part, or the checkpoint is closed.
        """
        part = self._read(name, dim, start, self._end(name, dim, start, stop))
        self._drop(name)
        return part

    def read_into(self, out: torch.Tensor, name: str, dim: int = 0, start: int = 0, stop: int | None = None) -> None:
        """As `read`, into `out` and its type. Formats that can do so without memory of their own do."""
        self._read_into(out, name, dim, start, self._end(name, dim, start, stop))
        self._drop(name)

    def _end(self, name: str, dim: int, start: int, stop: int | None) -> int:
        """`stop`, or the end of the dimension, after all checks."""
        shape = self._shapes.get(name)
        if shape is None:
            raise CheckpointError(f"checkpoint {self.path}: the model has no parameter {name!r}")
        if not 0 <= dim < len(shape):
            raise CheckpointError(f"checkpoint {self.path}: {name} has shape {shape}, so no dimension {dim}")
        end = shape[dim] if stop is None else stop
        if not 0 <= start <= end <= shape[dim]:
            raise CheckpointError(
                f"checkpoint {self.path}: part {start}..{end} of {name} was asked for, "
                f"but its dimension {dim} has {shape[dim]} entries (shape {shape})"
            )
        return end

    def where(self, name: str) -> str:
        """The file of the parameter `name`, for messages."""
        return str(self.path)

    def _drop(self, name: str) -> None:
        """Let go of the file's pages that hold `name`, so that a rank's memory isn't the whole file in the end."""
        for view in self._mapped(name):
            drop_pages(view)

    def _mapped(self, name: str) -> list[torch.Tensor]:
        """Contiguous views of mapped files, in which the parameter lies."""
        return []

    def stored_bytes(self, name: str) -> int:
        """Bytes that the parameter `name` takes in the files, in all of Meta's shards together."""
        return sum(view.nbytes for view in self._mapped(name))

    @abstractmethod
    def _read(self, name: str, dim: int, start: int, stop: int) -> torch.Tensor:
        """`read` for arguments that were checked."""

    def _read_into(self, out: torch.Tensor, name: str, dim: int, start: int, stop: int) -> None:
        """`read_into` for arguments that were checked."""
        copy_cast(out, self._read(name, dim, start, stop))

    def stored_type(self, name: str) -> str:
        """GGML's name of the type that the parameter `name` is stored in: "F32", "BF16", "Q4_0", ..."""
        return TYPE_NAMES[self.read(name, 0, 0, 0).dtype]

    @abstractmethod
    def tokenizer(self) -> Tokenizer:
        """The tokenizer given at opening, else the checkpoint's own."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the files; `read` is an error from now on. May be called again."""

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


CAST_VALUES = 1 << 18
"""Values cast at a time: 1 MiB of float32, which stays in a core's cache."""


def copy_cast(out: torch.Tensor, source: torch.Tensor) -> None:
    """`out.copy_(source)`; torch's own cast between the two 16-bit types takes several times longer than by float32."""
    if {out.dtype, source.dtype} != {torch.float16, torch.bfloat16} or source.dim() == 0:
        out.copy_(source)
        return
    step = max(1, CAST_VALUES * len(source) // max(1, source.numel()))
    for row in range(0, len(source), step):
        out[row : row + step].copy_(source[row : row + step].float())


def drop_pages(view: torch.Tensor) -> None:
    """Forget the pages of a mapped file that `view` covers wholly; they are read again where they are needed again.

    They stay in the system's cache. Nothing may have been written to them.
    """
    if sys.platform != "linux" or not view.is_contiguous():
        return
    start = -(-view.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    stop = (view.data_ptr() + view.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if start < stop:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), mmap.MADV_DONTNEED)


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer at `path`: a SentencePiece model, a `tokenizer.json`, or a directory in Hugging Face's format.

    Raises:
        CheckpointError: There is no such file, or something else is in it.
    """
    if path.is_dir() or path.name == "tokenizer.json":
        # imported here so that weights can be read without a tokenizer library
        from model.tokenizer.tokenizer import tokenizer_from_directory

        return tokenizer_from_directory(path if path.is_dir() else path.parent)
    return load_sentencepiece(path)


def load_sentencepiece(path: Path) -> Tokenizer:
    """The SentencePiece tokenizer in the file `path`.

    Raises:
        CheckpointError: There is no such file, or something else is in it.
    """
    # imported here so that weights can be read without a tokenizer library
    from model.tokenizer.tokenizer import SentencePieceTokenizer

    if not path.is_file():
        raise CheckpointError(
            f"tokenizer {path}: no such file; put the model's tokenizer.model there, or name its path (`tokenizer`)"
        )
    return SentencePieceTokenizer.from_file(path)


def check_parameters(path: Path, config: ModelConfig, found: Mapping[str, Shape]) -> None:
    """Check that `found` (Meta's names -> whole shapes) is exactly the model that `config` describes.

    Raises:
        CheckpointError: Naming the parameters that are missing, not known, or of the wrong shape.
    """
    expected = parameter_shapes(config)
    missing = [name for name in expected if name not in found]
    if missing:
        raise CheckpointError(
            f"checkpoint {path}: {listing(missing)} missing; the files aren't a whole model, fetch them again"
        )
    surplus = [name for name in found if name not in expected]
    if surplus:
        raise CheckpointError(
            f"checkpoint {path}: {listing(surplus)} not part of a Llama model with {config.n_layers} layers; "
            "this is another architecture, or the configuration beside it belongs to another model"
        )
    for name, shape in expected.items():
        if found[name] != shape:
            raise CheckpointError(
                f"checkpoint {path}: {name} has shape {found[name]}, but the configuration says {shape}; "
                "weights and configuration belong to different models"
            )


def check_layers(path: Path, key: str, n_layers: int, names: Iterable[str]) -> None:
    """Check the number of layers against Meta's `names` before anything is made of its size."""
    matches = (re.match(r"layers\.(\d{1,9})\.", name) for name in names)
    found = {int(match[1]) for match in matches if match}
    if n_layers != len(found):
        raise CheckpointError(
            f"checkpoint {path}: {key} is {n_layers}, but the files hold {len(found)} layers; "
            "a part is missing, or the configuration belongs to another model"
        )


def listing(names: list[str], most: int = 3) -> str:
    """Some of `names` and the number of the rest, with the verb: "a, b and 3 more are"."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more} {'is' if len(names) == 1 else 'are'}"


def map_file(path: Path, format_name: str) -> mmap.mmap:
    """The file in memory, read as it is looked at. Copy on write only because torch wants writable memory."""
    if path.stat().st_size == 0:
        raise CheckpointError(f"checkpoint {path}: isn't a {format_name} file: {describe_file(path)}")
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)


def describe_file(path: Path) -> str:
    """What a file that isn't a model seems to be, and what to do about it."""
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(256)
    text = head.lstrip().lower()
    if not head:
        return "the file is empty, fetch it again"
    if text.startswith(b"version https://git-lfs"):
        return f"it is a Git LFS pointer of {size} bytes, not the model itself: run `git lfs pull`"
    if text.startswith((b"<!doctype", b"<html", b"<?xml")):
        return f"it is a web page of {size} bytes, not a model: the download failed or needs a login, fetch it again"
    return f"it has {size} bytes and begins with {head[:8]!r}; it is truncated or no model, fetch it again"

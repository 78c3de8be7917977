"""What every checkpoint format offers, and the checks they share."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from model.config import CheckpointError, ModelConfig, parameter_shapes

if TYPE_CHECKING:
    from types import TracebackType

    from model.tokenizer import Tokenizer

Shape = tuple[int, ...]


class Checkpoint(ABC):
    """An opened checkpoint: a configuration, a tokenizer, and parameters by Meta's names to read part by part.

    Opening has checked names, shapes and file sizes; weights are memory-mapped and read only by `read`.
    """

    format: str
    """Which format it is: "meta" or "gguf"."""

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
        return self._read(name, dim, start, end)

    @abstractmethod
    def _read(self, name: str, dim: int, start: int, stop: int) -> torch.Tensor:
        """`read` for arguments that were checked."""

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


def load_sentencepiece(path: Path) -> Tokenizer:
    """The SentencePiece tokenizer in the file `path`.

    Raises:
        CheckpointError: There is no such file, or something else is in it.
    """
    # imported here so that weights can be read without a tokenizer library
    from model.tokenizer import SentencePieceTokenizer

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
    matches = (re.match(r"layers\.(\d+)\.", name) for name in names)
    found = max((int(match[1]) + 1 for match in matches if match), default=0)
    if n_layers != found:
        raise CheckpointError(
            f"checkpoint {path}: {key} is {n_layers}, but the files hold {found} layers; "
            "a part is missing, or the configuration belongs to another model"
        )


def listing(names: list[str], most: int = 3) -> str:
    """Some of `names` and the number of the rest, with the verb: "a, b and 3 more are"."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more} {'is' if len(names) == 1 else 'are'}"


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

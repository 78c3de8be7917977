"""Reading Llama checkpoints, whatever their format: open one, then read the parts a rank needs.

checkpoint = open_checkpoint("llama-2-7b")
part = checkpoint.read("layers.0.attention.wq.weight", dim=0, start=0, stop=2048)
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from model.checkpoint.base import Checkpoint
from model.checkpoint.gguf.header import MAGIC
from model.checkpoint.gguf.read import GGUFCheckpoint
from model.checkpoint.huggingface.read import INDEX_SUFFIX, SUFFIX, HuggingFaceCheckpoint
from model.checkpoint.meta.read import MetaCheckpoint
from model.config import CheckpointError

__all__ = ["Checkpoint", "CheckpointError", "open_checkpoint"]

LOOKED_FOR = "consolidated.*.pth (Meta), *.gguf (GGUF) and *.safetensors (Hugging Face)"


def open_checkpoint(
    path: str | Path, tokenizer_path: str | Path | None = None, params_path: str | Path | None = None
) -> Checkpoint:
    """Open a checkpoint and check all that can be checked without reading weights.

    In a directory Meta's shards come before a GGUF file, and that before Hugging Face's files.

    Args:
        path: A directory, a GGUF file, or a safetensors file (or index) with `config.json` beside it.
        tokenizer_path: A SentencePiece model, a `tokenizer.json`, or a directory in Hugging Face's form, to use in
            place of the checkpoint's own tokenizer.
        params_path: A Meta checkpoint's `params.json`, where it doesn't lie beside the shards.

    Raises:
        CheckpointError: Nothing readable is there, or it isn't a whole Llama model.
    """
    path = Path(path).expanduser()
    tokenizer = Path(tokenizer_path).expanduser() if tokenizer_path is not None else None
    params = Path(params_path).expanduser() if params_path is not None else None
    if not path.exists():
        raise CheckpointError(f"checkpoint {path}: no such file or directory")
    try:
        return _open_directory(path, tokenizer, params) if path.is_dir() else _open_file(path, tokenizer)
    except OSError as error:
        raise CheckpointError(f"checkpoint {path}: can't be read: {error}") from error


def _open_file(path: Path, tokenizer: Path | None) -> Checkpoint:
    if path.suffix == ".pth":
        raise CheckpointError(
            f"checkpoint {path}: is one shard of a Meta checkpoint, give its directory instead: {path.parent}"
        )
    if path.name.endswith((SUFFIX, INDEX_SUFFIX)):
        return HuggingFaceCheckpoint(path, tokenizer)
    if path.suffix == ".bin" and not _is_gguf(path):
        raise _pickled(path)
    return GGUFCheckpoint(path, tokenizer)


def _open_directory(path: Path, tokenizer: Path | None, params: Path | None) -> Checkpoint:
    # names that start with a dot are downloads under way and the like
    names = sorted(entry.name for entry in path.iterdir() if not entry.name.startswith("."))
    if any(name.startswith("consolidated.") and name.endswith(".pth") for name in names):
        return MetaCheckpoint(path, tokenizer, params)
    ggufs = [name for name in names if name.endswith(".gguf")]
    if len(ggufs) > 1:
        raise CheckpointError(f"checkpoint {path}: holds {len(ggufs)} GGUF files, give one of them: {_listing(ggufs)}")
    if ggufs:
        return GGUFCheckpoint(path / ggufs[0], tokenizer)
    if any(name.endswith((SUFFIX, INDEX_SUFFIX)) for name in names):
        return HuggingFaceCheckpoint(path, tokenizer)
    if any(name.endswith((".bin", ".bin.index.json")) for name in names):
        raise _pickled(path)
    if any(name.endswith(".distcp") for name in names):
        raise CheckpointError(
            f"checkpoint {path}: torch.distributed checkpoints (*.distcp) aren't read; give the directory of Meta's "
            "own files that it was converted from, no conversion is needed here"
        )
    holds = f"it holds {_listing(names)}" if names else "it is empty"
    below = [path / name for name in names if _holds_model(path / name)]
    hint = f"; a model lies one level down, give its path: {_listing([str(p) for p in below])}" if below else ""
    raise CheckpointError(f"checkpoint {path}: no model in this directory: looked for {LOOKED_FOR}; {holds}{hint}")


def _holds_model(folder: Path) -> bool:
    """Whether it is a directory with files of one of the formats, to judge by their names."""
    try:
        names = os.listdir(folder)
    except OSError:  # a file, or not for us
        return False
    return any(re.fullmatch(r"(consolidated\..*\.pth|[^.].*(\.gguf|\.safetensors))", name) for name in names)


def _pickled(path: Path) -> CheckpointError:
    return CheckpointError(
        f"checkpoint {path}: *.bin files (pickles, the older Hugging Face form) aren't read; use the model's "
        "safetensors files, or convert it: load it in transformers and call save_pretrained(directory)"
    )


def _is_gguf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def _listing(names: list[str], most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more

"""Reading Llama checkpoints, whatever their format: open one, then read the parts a rank needs.

checkpoint = open_checkpoint("llama-2-7b")
part = checkpoint.read("layers.0.attention.wq.weight", dim=0, start=0, stop=2048)
"""

from __future__ import annotations

from pathlib import Path

from model.config import CheckpointError

from .base import Checkpoint
from .gguf import GGUFCheckpoint
from .meta import MetaCheckpoint

__all__ = ["Checkpoint", "CheckpointError", "open_checkpoint"]

LOOKED_FOR = "consolidated.*.pth (Meta), *.gguf (GGUF) and *.safetensors (Hugging Face)"


def open_checkpoint(
    path: str | Path, tokenizer_path: str | Path | None = None, params_path: str | Path | None = None
) -> Checkpoint:
    """Open the checkpoint in a directory, or a GGUF file, and check all that can be checked without reading weights.

    In a directory Meta's shards come before a GGUF file, and that before Hugging Face's files.

    Args:
        path: A directory, or a file in GGUF format.
        tokenizer_path: A SentencePiece model to use in place of the checkpoint's own tokenizer.
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
    if path.suffix == ".safetensors":
        raise _hugging_face(path)
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
    if any(name.endswith((".safetensors", ".safetensors.index.json")) for name in names):
        raise _hugging_face(path)
    if any(name.endswith(".distcp") for name in names):
        raise CheckpointError(
            f"checkpoint {path}: torch.distributed checkpoints (*.distcp) aren't read; give the directory of Meta's "
            "own files that it was converted from, no conversion is needed here"
        )
    holds = f"it holds {_listing(names)}" if names else "it is empty"
    raise CheckpointError(f"checkpoint {path}: no model in this directory: looked for {LOOKED_FOR}; {holds}")


def _hugging_face(path: Path) -> CheckpointError:
    return CheckpointError(
        f"checkpoint {path}: the Hugging Face format (*.safetensors) isn't read yet; "
        "use Meta's files (consolidated.*.pth with params.json) or a GGUF file of the same model"
    )


def _listing(names: list[str], most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more

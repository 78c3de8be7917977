"""Convert a checkpoint between Meta's format, Hugging Face's and GGUF.

    python -m scripts.convert_checkpoint llama-2-7b-chat llama-2-7b-chat.Q8_0.gguf --to gguf --type Q8_0
    python -m scripts.convert_checkpoint model.gguf model-hf --to huggingface --max-shard-size 2GB
    python -m scripts.convert_checkpoint model-hf model-meta --to meta --shards 2

Serving needs no conversion: all three are read as they are. Unquantized tensors keep every bit (unless --type says
otherwise); quantized ones become F32 outside GGUF. The target appears when it is complete.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from model.checkpoint import Checkpoint, open_checkpoint
from model.checkpoint.gguf.write import write_gguf
from model.checkpoint.huggingface.write import write_huggingface
from model.checkpoint.meta.write import check_expressible, write_meta
from model.checkpoint.writing import FLOATS, QUANTIZED, SPARE_BYTES, Weights, appearing, plan_types
from model.config import CheckpointError
from model.tokenizer.export import export_gguf, export_huggingface, export_sentencepiece
from model.tokenizer.tokenizer import Tokenizer

FORMATS = ("meta", "huggingface", "gguf")
UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass(frozen=True)
class Options:
    """What is to be written."""

    to: str
    type: str | None = None
    """GGML's name of a type; None keeps what can be kept."""
    shards: int = 1
    """Files of Meta's format."""
    max_shard_size: int = 5 * 10**9
    """Bytes of tensors in one file of Hugging Face's format."""
    tokenizer: Path | None = None
    force: bool = False


def convert(
    source: Path, target: Path, options: Options, progress: Callable[[int, int], None] = lambda done, total: None
) -> list[str]:
    """Write `source` to `target` in another format (or the same).

    Peak memory: one tensor, for Meta's format one shard.

    Args:
        progress: called with (bytes written, bytes in all).

    Returns:
        What the reader of the new checkpoint should know, in sentences.

    Raises:
        CheckpointError: nothing was written; the message says why and what to do.
    """
    if options.to not in FORMATS:
        raise CheckpointError(f"--to is {options.to!r}, expected one of {', '.join(FORMATS)}")
    source, target = Path(source).expanduser().absolute(), Path(target).expanduser().absolute()
    _check_names(source, target, options)
    done = 0

    def advance(n_bytes: int) -> None:
        nonlocal done
        done += n_bytes
        progress(done, weights.n_bytes)

    with open_checkpoint(source, options.tokenizer) as checkpoint:
        tokenizer = _tokenizer(checkpoint)
        weights = Weights(checkpoint, plan_types(checkpoint, options.to, options.type), advance)
        try:
            with appearing(target, weights.n_bytes + SPARE_BYTES, force=options.force) as part:
                notes = _write(part, weights, tokenizer, options, target.stem)
        except OSError as error:
            raise CheckpointError(f"{target} can't be written: {error}") from error
        return _type_notes(checkpoint, weights) + notes


def _check_names(source: Path, target: Path, options: Options) -> None:
    real, real_target = source.resolve(), target.resolve()
    if real_target == real or real_target in real.parents or (real.is_dir() and real in real_target.parents):
        raise CheckpointError(f"{target} is the source, holds it or lies in it: choose another name")
    if (target.suffix == ".gguf") != (options.to == "gguf"):
        wanted = "a file name that ends in .gguf" if options.to == "gguf" else "the name of a folder"
        raise CheckpointError(f"the target is {target.name}, but --to {options.to} needs {wanted}")


def _tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    try:
        tokenizer = checkpoint.tokenizer()
    except CheckpointError as error:
        raise CheckpointError(f"{error} (this program: --tokenizer PATH)") from error
    if tokenizer.n_words > checkpoint.config.vocab_size:
        raise CheckpointError(
            f"{checkpoint.path}: the tokenizer has {tokenizer.n_words} ids, but the embedding only "
            f"{checkpoint.config.vocab_size} rows: tokenizer and weights belong to different models"
        )
    return tokenizer


def _write(part: Path, weights: Weights, tokenizer: Tokenizer, options: Options, name: str) -> list[str]:
    if options.to == "gguf":
        write_gguf(part, weights, export_gguf(tokenizer), name)
        return []
    if options.to == "meta":
        check_expressible(weights.config, options.shards)  # before a folder is made
    part.mkdir()
    if options.to == "huggingface":
        export_huggingface(tokenizer, part)
        write_huggingface(part, weights, tokenizer, options.max_shard_size)
        return []
    notes = _write_meta_tokenizer(part, tokenizer)
    write_meta(part, weights, options.shards)
    return notes


def _write_meta_tokenizer(directory: Path, tokenizer: Tokenizer) -> list[str]:
    """Meta's `tokenizer.model`, and Hugging Face's files where that can't say all there is to say."""
    model = export_sentencepiece(tokenizer)
    if model is not None and not tokenizer.chat_template and tokenizer.stop_ids <= {tokenizer.eos_id}:
        (directory / "tokenizer.model").write_bytes(model)
        return []
    export_huggingface(tokenizer, directory)
    if model is None:
        return [
            "the tokenizer is no SentencePiece model: it lies beside params.json as tokenizer.json, which is read "
            "here but not by Meta's own code"
        ]
    return [
        "the chat template and further stop ids lie beside params.json in tokenizer_config.json and "
        "generation_config.json, which are read here but not by Meta's own code"
    ]


def _type_notes(checkpoint: Checkpoint, weights: Weights) -> list[str]:
    changes: dict[tuple[str, str], int] = {}
    for name, shape in weights.shapes.items():
        pair = checkpoint.stored_type(name), weights.types[name]
        if pair[0] != pair[1] and len(shape) > 1:
            changes[pair] = changes.get(pair, 0) + 1
    return [f"{n} matrices went from {old} to {new}" for (old, new), n in changes.items()]


def parse_size(text: str) -> int:
    """Bytes, from a number with an optional unit: "500MB", "2GiB"."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if match is None or match[2].upper() not in UNITS or float(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} isn't a size, expected a number with a unit such as 500MB or 5GB")
    return int(float(match[1]) * UNITS[match[2].upper()])


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.convert_checkpoint", description="Convert a Llama checkpoint to another format."
    )
    parser.add_argument("source", type=Path, help="a folder in Meta's or Hugging Face's format, or a GGUF file")
    parser.add_argument("target", type=Path, help="the folder, or the GGUF file, to write")
    parser.add_argument("--to", required=True, choices=FORMATS)
    kinds = ", ".join((*FLOATS, *QUANTIZED))
    parser.add_argument("--type", type=str.upper, metavar="TYPE", help=f"type of the matrices: {kinds} (default: kept)")
    parser.add_argument("--shards", type=int, default=1, metavar="N", help="files in Meta's format: 1, 2, 4 or 8")
    parser.add_argument(
        "--max-shard-size",
        type=parse_size,
        default=Options.max_shard_size,
        metavar="SIZE",
        help="largest file in Hugging Face's format, such as 500MB (default: 5GB)",
    )
    parser.add_argument("--tokenizer", type=Path, metavar="PATH", help="the tokenizer, where it lies elsewhere")
    parser.add_argument("--force", action="store_true", help="replace the target where it exists")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    options = Options(args.to, args.type, args.shards, args.max_shard_size, args.tokenizer, args.force)
    console = Console(stderr=True)
    bar = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    try:
        with Progress(*bar, console=console, transient=True, disable=not console.is_terminal) as shown:
            task = shown.add_task(f"writing {args.target.name}", total=None)
            notes = convert(
                args.source,
                args.target,
                options,
                lambda done, total: shown.update(task, completed=done, total=total),
            )
    except CheckpointError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted: nothing was written", file=sys.stderr)
        return 130
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    print(args.target)
    return 0


if __name__ == "__main__":
    sys.exit(main())

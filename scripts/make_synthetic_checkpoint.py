"""Make a checkpoint of random weights, to measure speed and memory with a model of any size.

    python -m scripts.make_synthetic_checkpoint build/tinyllama --shape tinyllama-1.1b --format huggingface
    python -m scripts.make_synthetic_checkpoint build/small.gguf --shape 1gib --layers 2 --format gguf --type Q8_0

What it says is noise. Its tokenizer knows every byte and as many made-up words as the vocabulary has room for.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import string
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import torch

from model.checkpoint.base import Checkpoint
from model.checkpoint.gguf.write import write_gguf
from model.checkpoint.huggingface.write import write_huggingface
from model.checkpoint.meta.write import write_meta
from model.checkpoint.writing import FLOATS, QUANTIZED, SPARE_BYTES, Weights, appearing
from model.config import CheckpointError, ModelConfig, parameter_shapes
from model.progress import terminal_progress
from model.tokenizer.proto import BYTE, CONTROL, NORMAL, SPACE, UNKNOWN, build_model
from model.tokenizer.tokenizer import SentencePieceTokenizer, Tokenizer

SHAPES = {
    "tinyllama-1.1b": ModelConfig(2048, 22, 32, 4, 64, 5632, 32000, 2048),
    "llama-2-7b": ModelConfig(4096, 32, 32, 32, 128, 11008, 32000, 4096),
    "1gib": ModelConfig(2048, 9, 32, 8, 64, 5632, 32000, 2048),  # in a type of 16 bits
}
FIELDS = {
    "dim": "dim",
    "layers": "n_layers",
    "heads": "n_heads",
    "kv_heads": "n_kv_heads",
    "hidden": "hidden_dim",
    "vocab": "vocab_size",
    "context": "max_seq_len",
}
"""Options that replace a size of the named shape."""
POOL = 1 << 20
"""Random numbers that are drawn; tensors repeat them."""


class RandomCheckpoint(Checkpoint):
    """Weights that keep activations near 1: norms around 1, matrices with columns of length 1."""

    format = "random"

    def __init__(self, config: ModelConfig, seed: int = 0) -> None:
        super().__init__(Path("random"), config)
        self._pool = torch.randn(POOL, generator=torch.Generator().manual_seed(seed))

    def _read(self, name: str, dim: int, start: int, stop: int) -> torch.Tensor:
        shape = self._shapes[name]
        values = 1 + 0.1 * self._pool if len(shape) == 1 else self._pool * shape[1] ** -0.5
        values = values.roll(zlib.crc32(name.encode()) % POOL).bfloat16()
        whole = torch.empty(math.prod(shape), dtype=torch.bfloat16)
        for piece in whole.split(POOL):
            piece.copy_(values[: len(piece)])
        return whole.view(shape).narrow(dim, start, stop - start).clone(memory_format=torch.contiguous_format)

    def stored_type(self, name: str) -> str:
        return "BF16"

    def tokenizer(self) -> Tokenizer:
        return SentencePieceTokenizer.from_proto(sentencepiece_model(self.config.vocab_size))

    def close(self) -> None:
        pass


def _pieces(count: int) -> tuple[list[str], list[float], list[int]]:
    """(text, score, kind) of `count` pieces: control tokens, bytes, printable characters, then words of letters."""
    pieces, kinds = ["<unk>", "<s>", "</s>"], [UNKNOWN, CONTROL, CONTROL]
    pieces += [f"<0x{byte:02X}>" for byte in range(256)]
    kinds += [BYTE] * 256
    pieces += list(itertools.islice(_words(), max(count - len(pieces), 0)))
    kinds += [NORMAL] * (len(pieces) - len(kinds))
    if len(pieces) != count:
        raise CheckpointError(f"the vocabulary is {count}, expected at least {len(pieces)}: control tokens and bytes")
    return pieces, [-float(i) for i in range(count)], kinds


def _words() -> Iterator[str]:
    yield SPACE
    yield from (character for character in string.printable if not character.isspace())
    for length in itertools.count(1):
        for letters in itertools.product(string.ascii_lowercase, repeat=length):
            yield SPACE + "".join(letters)
            if length > 1:
                yield "".join(letters)


def sentencepiece_model(count: int) -> bytes:
    """A `tokenizer.model` of `count` pieces.

    Raises:
        CheckpointError: too few for the bytes.
    """
    return build_model(*_pieces(count), bos_id=1, eos_id=2)


def gguf_metadata(count: int) -> dict[str, object]:
    """The same tokenizer in GGUF's terms."""
    pieces, scores, kinds = _pieces(count)
    metadata: dict[str, object] = {"model": "llama", "tokens": pieces, "scores": scores, "token_type": kinds}
    metadata |= {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0, "add_bos_token": True}
    return {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}


def make(target: Path, config: ModelConfig, to: str, kind: str = "BF16", *, force: bool = False) -> None:
    """Write a checkpoint of random weights. Peak memory: one tensor; for Meta's format, half the model.

    Args:
        target: a directory, or a file for "gguf".
        to: "meta", "huggingface" or "gguf".
        kind: GGML's name of the type of the matrices.

    Raises:
        CheckpointError: the configuration, the type or the target can't be.
    """
    if kind not in FLOATS and to != "gguf":
        raise CheckpointError(f"--type is {kind}, but only GGUF holds quantized tensors: use {', '.join(FLOATS)}")
    source = RandomCheckpoint(config)
    vectors = "F32" if to == "gguf" else kind
    types = {name: vectors if len(shape) == 1 else kind for name, shape in parameter_shapes(config).items()}
    done = 0

    def advance(n_bytes: int) -> None:
        nonlocal done
        done += n_bytes
        show(done, weights.n_bytes)

    weights = Weights(source, types, advance)
    with (
        terminal_progress(f"writing {target.name}") as show,
        appearing(target, weights.n_bytes + SPARE_BYTES, force=force) as part,
    ):
        if to == "gguf":
            write_gguf(part, weights, gguf_metadata(config.vocab_size), target.stem)
            return
        part.mkdir()
        (part / "tokenizer.model").write_bytes(sentencepiece_model(config.vocab_size))
        if to == "meta":
            write_meta(part, weights, 2 if all(n % 2 == 0 for n in (config.n_kv_heads, config.vocab_size)) else 1)
        else:
            write_huggingface(part, weights, source.tokenizer(), 5 * 10**9)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path, help="the folder, or the GGUF file, to write")
    parser.add_argument("--shape", choices=list(SHAPES), default="tinyllama-1.1b")
    parser.add_argument("--format", choices=["meta", "huggingface", "gguf"], default="huggingface")
    kinds = (*FLOATS, *QUANTIZED)
    parser.add_argument("--type", type=str.upper, choices=kinds, default="BF16", help="type of the matrices")
    for option, field in FIELDS.items():
        parser.add_argument(f"--{option.replace('_', '-')}", type=int, metavar="N", help=f"{field}, for the shape's")
    parser.add_argument("--force", action="store_true", help="replace the target where it exists")
    return parser.parse_args(arguments)


def configuration(args: argparse.Namespace) -> ModelConfig:
    """The named shape with the sizes that were given; the size of a head follows from dim and heads."""
    changes = {field: getattr(args, option) for option, field in FIELDS.items() if getattr(args, option) is not None}
    config = SHAPES[args.shape]
    if {"dim", "n_heads"} & changes.keys():
        heads = changes.get("n_heads", config.n_heads)
        changes["head_dim"] = changes.get("dim", config.dim) // max(heads, 1)
    return dataclasses.replace(config, **changes)


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    try:
        make(args.target, configuration(args), args.format, args.type, force=args.force)
    except (CheckpointError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(args.target)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Mutated GGUF and safetensors files: each either opens or is refused with a `CheckpointError`, in little memory.

`python -m tests.model.checkpoint.fuzz_headers --count 200000` runs many; a few thousand run with the tests. What
mutation number N of a seed is depends on both numbers only, so that a failure can be repeated (`--first N --count 1`).
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import faulthandler
import json
import random
import re
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import safetensors.torch

from model.checkpoint import CheckpointError, open_checkpoint
from model.checkpoint.gguf import header as gguf_header
from model.checkpoint.huggingface.read import huggingface_name
from tests.helpers.limits import little_memory
from tests.helpers.tiny import random_weights, save_gguf, sentencepiece_fields, tiny_config, train_sentencepiece

CONFIG = tiny_config(n_layers=1, n_heads=2, n_kv_heads=1, hidden_dim=32, vocab_size=8, max_seq_len=64)
LARGE = (0, 1, 2, 7, 31, 127, 255, 2**15, 2**16 - 1, 2**20, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63, 2**64 - 1)
JSON_VALUES = (
    "-1",
    "1e99",
    "null",
    "true",
    '"F64"',
    "[]",
    "[[]]",
    "{}",
    "1.5",
    "NaN",
    "9" * 30,
    "9" * 5000,
    "[" * 2000,
)
PEAK_PER_BYTE, PEAK_FLOOR = 64, 1 << 18
"""Most memory for Python's objects while a file is opened, in bytes: for each of the file's own, and in any case."""
SHARES = (0, 1, 0, 1, 0, 1, 2, 3)
"""Which of `make_targets` is mutated in turn."""
HANG_S = 60


class FuzzFailure(Exception):
    """A mutation that did something other than open or be refused."""


@dataclasses.dataclass(frozen=True)
class Target:
    """A valid checkpoint of which one file is mutated."""

    name: str
    directory: Path
    file: str
    content: bytes
    head: int
    """Bytes before the tensors' values."""
    fields: tuple[tuple[int, int], ...] = ()
    """Offset and size of each number in the header."""


def make_targets(directory: Path) -> list[Target]:
    """Small checkpoints as they should be, in subdirectories of `directory`."""
    weights = random_weights(CONFIG)
    plain = save_gguf(directory / "gguf" / "m.gguf", CONFIG, weights, "Q4_0", fields=_fields_of_each_type())
    words = tiny_config(n_layers=1, n_heads=1, n_kv_heads=1, hidden_dim=8, head_dim=2)
    tokens = sentencepiece_fields(train_sentencepiece(directory / "spm" / "tokenizer.model", words.vocab_size))
    with_tokens = save_gguf(directory / "tokens" / "m.gguf", words, random_weights(words), "F16", fields=tokens)
    for name in ("safetensors", "config"):
        (directory / name).mkdir()
        tensors = {huggingface_name(name): weight.half() for name, weight in weights.items()}
        safetensors.torch.save_file(tensors, directory / name / "model.safetensors", metadata={"format": "pt"})
        (directory / name / "config.json").write_text(json.dumps(_hugging_face_config()), encoding="utf-8")
    content = (directory / "safetensors" / "model.safetensors").read_bytes()
    head = 8 + int.from_bytes(content[:8], "little")
    config = (directory / "config" / "config.json").read_bytes()
    return [
        _gguf_target("gguf", plain),
        Target("safetensors", directory / "safetensors", "model.safetensors", content, head, ((0, 8),)),
        _gguf_target("gguf with tokens", with_tokens),
        Target("config.json", directory / "config", "config.json", config, len(config)),
    ]


def _fields_of_each_type() -> dict[str, object]:
    return {
        "a.text": "ä漢",
        "a.flag": True,
        "llama.rope.scaling.type": "linear",
        "llama.rope.scaling.factor": 2.0,
        "a.list.of.texts": ["a", "bc", ""],
        "a.list.of.numbers": [1, 2, 3],
        "a.list.of.fractions": [0.5, 1.5],
        "a.list.of.flags": [True, False],
        "a.list.of.lists": [[[1], [2, 3]], [["a"]]],
        "a.text.in.latin.1": b"caf\xe9",
        "llama.attention.head_count": [CONFIG.n_heads] * CONFIG.n_layers,
    }


def _hugging_face_config() -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": CONFIG.dim,
        "num_hidden_layers": CONFIG.n_layers,
        "num_attention_heads": CONFIG.n_heads,
        "num_key_value_heads": CONFIG.n_kv_heads,
        "intermediate_size": CONFIG.hidden_dim,
        "vocab_size": CONFIG.vocab_size,
        "max_position_embeddings": CONFIG.max_seq_len,
        "rms_norm_eps": CONFIG.norm_eps,
        "rope_theta": CONFIG.rope_theta,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
        "tie_word_embeddings": False,
    }


def _gguf_target(name: str, path: Path) -> Target:
    """The file with the places that its header was read from."""
    fields = []
    take = gguf_header._Cursor.take

    def noted(cursor: gguf_header._Cursor, size: int) -> int:
        offset = take(cursor, size)
        fields.append((offset, size))
        return offset

    with mock.patch.object(gguf_header._Cursor, "take", noted):
        open_checkpoint(path).close()
    head = sum(fields[-1])
    numbers = tuple((offset, size) for offset, size in fields if size in (1, 2, 4, 8))
    return Target(name, path.parent, path.name, path.read_bytes(), head, numbers)


def mutate(target: Target, rng: random.Random) -> bytes:
    """The file's content with one to three changes, most of them in its header."""
    content = bytearray(target.content)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        changes = [_flip, _number, _splice, _duplicate, _cut, _truncate, _insert]
        if target.fields:
            changes += [_field] * 4
        if not target.name.startswith("gguf"):
            changes += [_json] * 8
        rng.choice(changes)(content, target, rng)
    return bytes(content)


def _place(content: bytearray, target: Target, rng: random.Random) -> int:
    end = min(target.head, len(content)) if rng.random() < 0.9 else len(content)
    return rng.randrange(end) if end else 0


def _flip(content: bytearray, target: Target, rng: random.Random) -> None:
    for _ in range(rng.choice((1, 1, 2, 8))):
        if content:
            content[_place(content, target, rng)] ^= 1 << rng.randrange(8)


def _number(content: bytearray, target: Target, rng: random.Random) -> None:
    """An extreme number anywhere."""
    _write(content, _place(content, target, rng), rng.choice((1, 2, 4, 8)), rng)


def _field(content: bytearray, target: Target, rng: random.Random) -> None:
    """An extreme number where the header has one (or had, before other changes)."""
    _write(content, *rng.choice(target.fields), rng)


def _write(content: bytearray, offset: int, size: int, rng: random.Random) -> None:
    value = rng.choice((*LARGE, len(content), rng.randrange(len(content) + 1)))
    old = int.from_bytes(content[offset : offset + size], "little")
    value = rng.choice((value, value, old + rng.choice((-1, 1, 8, 32)))) % (1 << 8 * size)
    if offset + size <= len(content):
        content[offset : offset + size] = value.to_bytes(size, "little")


def _splice(content: bytearray, target: Target, rng: random.Random) -> None:
    """One stretch of bytes over another."""
    source, place, size = _place(content, target, rng), _place(content, target, rng), rng.randrange(1, 64)
    piece = content[source : source + size]
    content[place : place + len(piece)] = piece


def _duplicate(content: bytearray, target: Target, rng: random.Random) -> None:
    source, place, size = _place(content, target, rng), _place(content, target, rng), rng.randrange(1, 256)
    content[place:place] = content[source : source + size]


def _cut(content: bytearray, target: Target, rng: random.Random) -> None:
    place = _place(content, target, rng)
    del content[place : place + rng.randrange(1, 64)]


def _truncate(content: bytearray, target: Target, rng: random.Random) -> None:
    del content[_place(content, target, rng) :]


def _insert(content: bytearray, target: Target, rng: random.Random) -> None:
    place = _place(content, target, rng)
    content[place:place] = rng.randbytes(rng.randrange(1, 64))


def _json(content: bytearray, target: Target, rng: random.Random) -> None:
    """Another value for one in JSON, with the header's length put right."""
    start = 8 if target.fields else 0
    end = start + int.from_bytes(content[:8], "little") if start else len(content)
    if not start < end <= len(content) or end - start > 1 << 16:
        return
    header = bytes(content[start:end])
    spots = list(re.finditer(rb'-?[0-9][0-9.e+-]*|"[^"]*"|\[[^][]*\]|\{[^{}]*\}', header))
    if not spots:
        return
    spot = rng.choice(spots)
    other = rng.choice(spots)[0]
    new = rng.choice((rng.choice(JSON_VALUES).encode(), str(rng.choice(LARGE)).encode(), other))
    header = header[: spot.start()] + new + header[spot.end() :]
    content[start:end] = header
    if start:
        content[:8] = len(header).to_bytes(8, "little")


def run_one(target: Target, content: bytes) -> str:
    """Open the checkpoint with `content` in place of the target's file and read everything in it.

    Returns:
        "opened", or "refused" if a `CheckpointError` did it.

    Raises:
        FuzzFailure: It took too much memory.
        Exception: Any other error of the reader's.
    """
    path = target.directory / target.file
    with path.open("r+b") as file:  # a file made anew each time costs ten times as much
        file.write(content)
        file.truncate()
    tracemalloc.reset_peak()
    before, _ = tracemalloc.get_traced_memory()
    outcome = "refused"
    try:
        opened = target.directory if target.file.endswith(".json") else path
        with open_checkpoint(opened) as checkpoint:
            for name in checkpoint._shapes:
                checkpoint.read(name)
            outcome = "opened"
            if "tokens" in target.name:
                checkpoint.tokenizer()
    except CheckpointError as error:
        if "\0" in str(error) or len(str(error)) > 2000:
            raise FuzzFailure(f"an error of {len(str(error))} characters: {str(error)[:200]!r}") from error
    _, peak = tracemalloc.get_traced_memory()
    most = max(PEAK_FLOOR, PEAK_PER_BYTE * len(content))
    if peak - before > most:
        raise FuzzFailure(f"took {peak - before} bytes of memory, expected at most {most}")
    return outcome


def run(
    count: int,
    seed: int = 0,
    first: int = 0,
    progress: Callable[[int, collections.Counter[str]], None] | None = None,
) -> collections.Counter[str]:
    """Try mutations number `first` to `first + count - 1`.

    Returns:
        How many of each target ended how: "gguf opened", "gguf refused", ...

    Raises:
        FuzzFailure: Naming the first mutation that did anything else.
    """
    outcomes: collections.Counter[str] = collections.Counter()
    with tempfile.TemporaryDirectory() as directory, little_memory():
        targets = make_targets(Path(directory))
        for target in targets:
            run_one(target, target.content)  # lazy imports count for no mutation
        tracemalloc.start()
        try:
            for number in range(first, first + count):
                target = targets[SHARES[number % len(SHARES)]]
                try:
                    outcome = run_one(target, mutate(target, random.Random(seed << 32 | number)))
                except Exception as error:
                    raise FuzzFailure(f"mutation {number} of seed {seed} ({target.name}): {error!r}") from error
                outcomes[f"{target.name} {outcome}"] += 1
                if progress:
                    progress(number, outcomes)
        finally:
            tracemalloc.stop()
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description="Open mutated GGUF and safetensors files.")
    parser.add_argument("--count", type=int, default=200_000, help="how many mutations (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first mutation")
    args = parser.parse_args()
    slowest, last = 0.0, time.monotonic()

    def progress(number: int, outcomes: collections.Counter[str]) -> None:
        nonlocal slowest, last
        now = time.monotonic()
        slowest, last = max(slowest, now - last), now
        faulthandler.dump_traceback_later(HANG_S, exit=True)
        if (number + 1 - args.first) % 10_000 == 0:
            print(f"{number + 1 - args.first} mutations", file=sys.stderr, flush=True)

    started = time.monotonic()
    outcomes = run(args.count, args.seed, args.first, progress)
    for name, times in sorted(outcomes.items()):
        print(f"{name:28} {times}")
    print(f"{args.count} mutations in {time.monotonic() - started:.0f} s, the slowest in {slowest * 1000:.0f} ms")


if __name__ == "__main__":
    main()

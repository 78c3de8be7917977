"""What a checkpoint is, and what it needs: format, sizes, tokenizer, possible ranks, memory per rank.

    python -m scripts.inspect_checkpoint llama-2-13b-chat
    python -m scripts.inspect_checkpoint model.gguf --ranks 2 --dtype bfloat16 --json

Reads headers only, no weights. A checkpoint that couldn't be served is one line that says why, and exit status 1.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from generation.chat_format import chat_format_for
from model.checkpoint import Checkpoint, open_checkpoint
from model.checkpoint.rope_scaling import find_scaling
from model.checkpoint.writing import stored_bytes
from model.config import CheckpointError, ModelConfig, parameter_shapes
from model.distributed.parallel import plan_shards
from model.loader import DTYPES, resolve_device, resolve_dtype
from model.memory import available_bytes, kv_bytes_per_token, size, weights_bytes
from model.tokenizer.tokenizer import SentencePieceTokenizer, Tokenizer

FORMATS = {"meta": "Meta", "huggingface": "Hugging Face", "gguf": "GGUF"}
WEIGHT_FILES = {"meta": "consolidated.*.pth", "huggingface": "*.safetensors"}
USUAL_RANKS = (1, 2, 4, 8)


def inspect(
    path: Path, *, ranks: int | None = None, device: str = "auto", dtype: str = "auto", tokenizer: Path | None = None
) -> dict[str, Any]:
    """Everything this program tells, as plain values; sizes in bytes.

    Args:
        ranks: tell the memory for this number of ranks; None = for the usual ones that fit.
        device, dtype: as in the configuration.
        tokenizer: a SentencePiece model that doesn't lie beside the weights.

    Raises:
        CheckpointError: the checkpoint, or a setting, can't be used.
    """
    chosen = resolve_device(device, 0)
    chosen_dtype = resolve_dtype(dtype, chosen)
    with open_checkpoint(path, tokenizer) as checkpoint:
        config = checkpoint.config
        return {
            "path": str(path),
            "format": checkpoint.format,
            "architecture": "llama",
            "parameters": sum(math.prod(shape) for shape in parameter_shapes(config).values()),
            "size_on_disk": _size_on_disk(checkpoint),
            "types": _types(checkpoint),
            "shape": {
                name: getattr(config, name)
                for name in ("dim", "n_layers", "n_heads", "n_kv_heads", "head_dim", "hidden_dim", "vocab_size")
            },
            "tied_output": config.tied_output,
            "context": config.max_seq_len,
            "rope": {"theta": config.rope_theta, "scaling": find_scaling(config)},
            "tokenizer": _tokenizer(checkpoint),
            "ranks": valid_ranks(config),
            "memory": _memory(config, ranks, chosen, chosen_dtype),
        }


def valid_ranks(config: ModelConfig) -> list[int]:
    """Every number of ranks the model can be dealt to."""
    return [n for n in range(1, config.n_heads + 1) if _fits(config, n)]


def _fits(config: ModelConfig, ranks: int) -> bool:
    try:
        plan_shards(config, ranks)
    except CheckpointError:
        return False
    return True


def _size_on_disk(checkpoint: Checkpoint) -> int:
    path = checkpoint.path
    files = [path] if path.is_file() else path.glob(WEIGHT_FILES[checkpoint.format])
    return sum(file.stat().st_size for file in files)


def _types(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    """Each type that tensors are stored in, the one with most bytes first."""
    found: dict[str, dict[str, Any]] = {}
    for name, shape in parameter_shapes(checkpoint.config).items():
        kind = checkpoint.stored_type(name)
        entry = found.setdefault(kind, {"type": kind, "tensors": 0, "parameters": 0, "bytes": 0})
        entry["tensors"] += 1
        entry["parameters"] += math.prod(shape)
        entry["bytes"] += stored_bytes(shape, kind)
    return sorted(found.values(), key=lambda entry: -entry["bytes"])


def _tokenizer(checkpoint: Checkpoint) -> dict[str, Any]:
    """The tokenizer; where it can't be used, only why: the rest of the checkpoint is still worth a look."""
    try:
        tokenizer = checkpoint.tokenizer()
        chat_format = chat_format_for(tokenizer).name
    except CheckpointError as error:
        return {"error": str(error)}
    rows = checkpoint.config.vocab_size
    if tokenizer.n_words > rows:
        return {"error": f"the tokenizer has {tokenizer.n_words} ids, but the embedding only {rows} rows"}
    return {
        "kind": "SentencePiece" if isinstance(tokenizer, SentencePieceTokenizer) else "byte-level BPE",
        "size": tokenizer.n_words,
        "bos": _named(tokenizer, tokenizer.bos_id),
        "eos": _named(tokenizer, tokenizer.eos_id),
        "stop": [_named(tokenizer, token_id) for token_id in sorted(tokenizer.stop_ids)],
        "adds_bos": tokenizer.adds_bos,
        "chat_template": tokenizer.chat_template is not None,
        "chat_format": chat_format,
    }


def _named(tokenizer: Tokenizer, token_id: int | None) -> dict[str, Any] | None:
    if token_id is None:
        return None
    control = next((text for text, i in tokenizer.control_tokens.items() if i == token_id), None)
    return {"id": token_id, "text": control or tokenizer.decode([token_id])}


def _memory(config: ModelConfig, ranks: int | None, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    if ranks is not None:
        plan_shards(config, ranks)  # an error that names what fits
    valid = valid_ranks(config)
    available = available_bytes(device)
    counts = [ranks] if ranks is not None else [n for n in USUAL_RANKS if n in valid]
    return {
        "device": str(device),
        "dtype": str(dtype).removeprefix("torch."),
        "available": available,
        "shared": device.type == "cpu",
        "ranks": [_needs(config, n, device, dtype, available) for n in counts],
    }


def _needs(config: ModelConfig, ranks: int, device: torch.device, dtype: torch.dtype, available: int) -> dict[str, Any]:
    """Bytes of the largest rank, and how many tokens of cache there is room for (negative: not even the weights)."""
    shards = plan_shards(config, ranks)
    weights = [weights_bytes(config, shard, dtype, device) for shard in shards]
    caches = [kv_bytes_per_token(config, shard, dtype) for shard in shards]
    if device.type == "cpu":  # all ranks share one memory
        room = (available - sum(weights)) // sum(caches)
    else:
        room = min((available - w) // c for w, c in zip(weights, caches, strict=True))
    return {
        "ranks": ranks,
        "weights": max(weights),
        "kv_per_1000_tokens": 1000 * max(caches),
        "cache_tokens": max(room, 0),
        "full_contexts": max(room, 0) // config.max_seq_len,
        "fits": room > 0,
    }


def facts(report: dict[str, Any]) -> list[tuple[str, str]]:
    """The report's single values as (name, text)."""
    shape, rope, tokenizer = report["shape"], report["rope"], report["tokenizer"]
    scaling = rope["scaling"]
    rows = [
        ("path", report["path"]),
        ("format", FORMATS[report["format"]]),
        ("architecture", report["architecture"]),
        ("parameters", f"{report['parameters']:,}"),
        ("on disk", size(report["size_on_disk"])),
        ("layers", f"{shape['n_layers']} of width {shape['dim']}, feed-forward {shape['hidden_dim']}"),
        ("heads", f"{shape['n_heads']} of {shape['head_dim']}, key/value heads {shape['n_kv_heads']}"),
        ("embedding", f"{shape['vocab_size']} rows" + (", also the output matrix" if report["tied_output"] else "")),
        ("context", f"{report['context']} tokens"),
        ("rope", f"theta {rope['theta']:g}, {_scaling_text(scaling)}"),
    ]
    if "error" in tokenizer:
        return [*rows, ("tokenizer", f"can't be used: {tokenizer['error']}"), _ranks_fact(report)]
    own = "the checkpoint's own" if tokenizer["chat_format"] == "template" else "none, so Llama 2's format is used"
    return [
        *rows,
        ("tokenizer", f"{tokenizer['kind']}, {tokenizer['size']} ids"),
        ("BOS", _token_text(tokenizer["bos"]) + (", put before a prompt" if tokenizer["adds_bos"] else "")),
        ("EOS", _token_text(tokenizer["eos"])),
        ("stop ids", ", ".join(map(_token_text, tokenizer["stop"])) or "none"),
        ("chat template", own),
        _ranks_fact(report),
    ]


def _scaling_text(scaling: dict[str, Any] | None) -> str:
    if scaling is None:
        return "not scaled"
    if scaling["rope_type"] == "unknown":
        return "scaled by factors of the checkpoint's own"
    return f"{scaling['rope_type']} scaling by {scaling['factor']:g}"


def _token_text(token: dict[str, Any] | None) -> str:
    return "none" if token is None else f"{token['id']} {json.dumps(token['text'], ensure_ascii=False)}"


def _ranks_fact(report: dict[str, Any]) -> tuple[str, str]:
    valid = report["ranks"]
    whole = valid == list(range(1, len(valid) + 1))
    return "ranks", f"1 to {len(valid)}" if whole else ", ".join(map(str, valid))


def types_table(report: dict[str, Any]) -> list[list[str]]:
    """The types of the tensors, with a header."""
    rows = [[t["type"], str(t["tensors"]), f"{t['parameters']:,}", size(t["bytes"])] for t in report["types"]]
    return [["type", "tensors", "parameters", "size"], *rows]


def memory_table(report: dict[str, Any]) -> list[list[str]]:
    """What each number of ranks needs, with a header."""
    header = ["ranks", "weights, each", "cache of 1000 tokens, each", "room for a cache of", "full contexts"]
    rows = []
    for entry in report["memory"]["ranks"]:
        room = (
            [f"{entry['cache_tokens']} tokens", str(entry["full_contexts"])] if entry["fits"] else ["doesn't fit", ""]
        )
        rows.append([str(entry["ranks"]), size(entry["weights"]), size(entry["kv_per_1000_tokens"]), *room])
    return [header, *rows]


def memory_title(report: dict[str, Any]) -> str:
    memory = report["memory"]
    where = "this machine" if memory["shared"] else f"{memory['device']} (and each further GPU like it)"
    return f"In {memory['dtype']}; {where} has {size(memory['available'])} free{' for all ranks' * memory['shared']}:"


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Columns of equal width, two spaces apart."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(line.rstrip() for line in lines)


def show(report: dict[str, Any], console: Console) -> None:
    """Print tables on a terminal, plain aligned text elsewhere."""
    singles, types, memory = facts(report), types_table(report), memory_table(report)
    if not console.is_terminal:
        plain = [aligned(singles), aligned(types), memory_title(report) + "\n" + aligned(memory)]
        print("\n\n".join(plain), file=console.file)
        return
    grid = Table.grid(padding=(0, 2))
    for name, text in singles:
        grid.add_row(f"[bold]{name}[/bold]", _literal(text))
    console.print(grid)
    console.print(_table(types))
    console.print(memory_title(report), highlight=False)
    console.print(_table(memory))


def _table(rows: Sequence[Sequence[str]]) -> Table:
    table = Table(*rows[0])
    for row in rows[1:]:
        table.add_row(*row)
    return table


def _literal(text: str) -> str:
    """`text` with nothing in it that rich takes for markup."""
    return text.replace("[", "\\[")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.inspect_checkpoint", description="Tell what a Llama checkpoint is and what it needs."
    )
    parser.add_argument("path", type=Path, help="a folder in Meta's or Hugging Face's format, or a GGUF file")
    parser.add_argument("--ranks", type=int, metavar="N", help="tell the memory for N ranks (default: 1, 2, 4, 8)")
    parser.add_argument("--dtype", default="auto", choices=("auto", *DTYPES), help="type to compute in")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--tokenizer", type=Path, metavar="PATH", help="the tokenizer, where it lies elsewhere")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    try:
        report = inspect(args.path, ranks=args.ranks, device=args.device, dtype=args.dtype, tokenizer=args.tokenizer)
    except CheckpointError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if args.json:
        print(json.dumps(report, ensure_ascii=False, indent=2))
    else:
        show(report, Console())
    return 0


if __name__ == "__main__":
    sys.exit(main())

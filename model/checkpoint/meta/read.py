"""Meta's own format: `params.json` and one pickled state dict per model-parallel shard, `consolidated.NN.pth`.

How Meta's model splits a parameter over its shards (fairscale's column- and row-parallel layers):

wq, wk, wv, w1, w3, output   dimension 0
wo, w2                       dimension 1
tok_embeddings               dimension 1 in Llama 2, 0 in Llama 3: told apart by the shapes
norms                        a copy in each
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import pickle
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from model.checkpoint.base import (
    Checkpoint,
    Shape,
    check_layers,
    check_parameters,
    copy_cast,
    describe_file,
    listing,
    load_tokenizer,
)
from model.config import CheckpointError, ModelConfig
from model.rope import llama3_factors

if TYPE_CHECKING:
    from model.tokenizer.tokenizer import Tokenizer

Shard = dict[str, torch.Tensor]

EMBEDDING, OUTPUT = "tok_embeddings.weight", "output.weight"
SPLIT_DIMS = {"wq": 0, "wk": 0, "wv": 0, "w1": 0, "w3": 0, "output": 0, "wo": 1, "w2": 1}
STORED_TYPES = (torch.float32, torch.float16, torch.bfloat16)
LEFT_OVER = re.compile(r"(^|\.)(rope\.freqs|rotary_emb\.inv_freq)$")
"""Buffers that follow from the configuration."""

USED_KEYS = frozenset(
    {"dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "norm_eps", "rope_theta", "max_seq_len"}
    | {"use_scaled_rope", "rope_scaling_factor"}
)
FRACTIONS = ("norm_eps", "rope_theta", "rope_scaling_factor")
SCALED_SEQ_LEN = 131072
"""Context of Llama 3.1 and 3.2, whose `params.json` doesn't say it."""
HARMLESS_KEYS = frozenset({"multiple_of", "ffn_dim_multiplier", "max_batch_size", "model_parallel_size"})
"""Known, and without effect here: w1's real shape says what the first two were for."""


class MetaCheckpoint(Checkpoint):
    """A directory with `params.json` and any number of shards, in bfloat16, float16 or float32."""

    format = "meta"

    def __init__(self, path: Path, tokenizer_path: Path | None = None, params_path: Path | None = None) -> None:
        params = _read_params(params_path or path / "params.json")
        files = find_shards(path)
        shards = [_load_shard(file) for file in files]
        _check_same_names(files, shards)
        dims = {name: _split_dim(name, [shard[name] for shard in shards], params["dim"]) for name in shards[0]}
        shapes = {name: _whole_shape(files, shards, name, dim) for name, dim in dims.items()}
        _check_shard_count(path, files, shapes.get("layers.0.attention.wq.weight", ()), params["dim"])
        config = _config(path, params, shapes)
        check_parameters(path, config, shapes)
        if params.get("use_scaled_rope"):  # only now is the head's size known to be that of the tensors
            factor = float(params.get("rope_scaling_factor", 8))
            factors = llama3_factors(config.head_dim, config.rope_theta, factor=factor)
            config = dataclasses.replace(config, rope_factors=factors)
        super().__init__(path, config, tokenizer_path)
        self._files, self._shards, self._dims = files, shards, dims

    def _read(self, name: str, dim: int, start: int, stop: int) -> torch.Tensor:
        shape = list(self._shapes[name])
        shape[dim] = stop - start
        out = torch.empty(shape, dtype=self._mapped(name)[0].dtype)
        self._read_into(out, name, dim, start, stop)
        return out

    def _read_into(self, out: torch.Tensor, name: str, dim: int, start: int, stop: int) -> None:
        split = self._dims[name]
        offset = 0  # of the current part along the dimension that is split
        for part in self._mapped(name):
            size = part.shape[split or 0]
            if split == dim:
                first, last = max(start, offset), min(stop, offset + size)
                if first < last:
                    copy_cast(
                        out.narrow(dim, first - start, last - first), part.narrow(dim, first - offset, last - first)
                    )
            elif split is None:
                copy_cast(out, part.narrow(dim, start, stop - start))
            else:
                copy_cast(out.narrow(split, offset, size), part.narrow(dim, start, stop - start))
            offset += size

    def _mapped(self, name: str) -> list[torch.Tensor]:
        if not self._shards:
            raise CheckpointError(f"checkpoint {self.path}: is closed, {name} can't be read any more")
        return [shard[name] for shard in (self._shards if self._dims[name] is not None else self._shards[:1])]

    def where(self, name: str) -> str:
        """The first of the shards whose part holds NaN or infinite numbers, else the directory."""
        parts = zip(self._files, self._mapped(name), strict=False)
        return str(next((file for file, part in parts if not bool(part.isfinite().all())), self.path))

    def tokenizer(self) -> Tokenizer:
        return load_tokenizer(self._tokenizer_path or self._own_tokenizer())

    def _own_tokenizer(self) -> Path:
        """`tokenizer.model`, as Meta has it; the directory, where a tokenizer in Hugging Face's form lies in it."""
        theirs = ("tokenizer.json", "tokenizer_config.json")
        return self.path if any((self.path / name).exists() for name in theirs) else self.path / "tokenizer.model"

    def close(self) -> None:
        self._shards = []


def find_shards(path: Path) -> list[Path]:
    """The shards in a directory, in their order.

    Raises:
        CheckpointError: There are none, or their numbers have a gap; names the shard that is missing.
    """
    files = {}
    for file in path.glob("consolidated.*.pth"):
        match = re.fullmatch(r"consolidated\.(\d+)\.pth", file.name)
        if match is None or int(match[1]) in files:
            raise CheckpointError(
                f"checkpoint {file}: expected shards named consolidated.00.pth, consolidated.01.pth, ..."
            )
        files[int(match[1])] = file
    if not files:
        raise CheckpointError(f"checkpoint {path}: no consolidated.*.pth files in this directory")
    missing = next(number for number in itertools.count() if number not in files)
    if missing < max(files):
        raise CheckpointError(
            f"checkpoint {path}: consolidated.{missing:02d}.pth is missing ({len(files)} shards found, "
            f"up to number {max(files):02d}); fetch it again"
        )
    return [files[number] for number in sorted(files)]


def _load_shard(file: Path) -> Shard:
    """The shard's tensors, memory-mapped; buffers that may be left over are dropped."""
    try:
        state = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # a broken pickle raises nearly anything
        raise CheckpointError(f"checkpoint {file}: {_why_not_loaded(file, error)}") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"checkpoint {file}: holds a {type(state).__name__}, expected a state dict")
    shard = {}
    for name, value in state.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            raise CheckpointError(
                f"checkpoint {file}: entry {name!r} is a {type(value).__name__}, expected names with tensors; "
                "save the plain state dict"
            )
        if LEFT_OVER.search(name):
            continue
        if value.dtype not in STORED_TYPES:
            raise CheckpointError(
                f"checkpoint {file}: {name} has type {value.dtype}, expected bfloat16, float16 or float32"
            )
        # a pickle can announce any shape, over one value repeated or over none
        n_bytes = value.numel() * value.element_size()
        plain = value.device.type == "cpu" and value.layout == torch.strided
        if not plain or value.untyped_storage().nbytes() < n_bytes:
            raise CheckpointError(
                f"checkpoint {file}: {name} of shape {tuple(value.shape)} needs {n_bytes} bytes, but the file doesn't "
                "hold them; it is broken, or no plain tensor"
            )
        shard[name] = value.detach()
    return shard


def _why_not_loaded(file: Path, error: Exception) -> str:
    """What is wrong with a file that torch refused. Its own advice, to load without `weights_only`, is left out."""
    reason = str(error).partition("\n")[0]
    with file.open("rb") as stream:
        head = stream.read(2)
    if zipfile.is_zipfile(file) and isinstance(error, pickle.UnpicklingError):
        names: list[str] = []
        with contextlib.suppress(Exception):  # of a broken pickle again
            names = torch.serialization.get_unsafe_globals_in_checkpoint(file)
        found = ", ".join(sorted(names)[:4])[:200]
        what = f" ({found}), which could run code; nothing of it was loaded" if found else ", or is broken"
        return f"holds other things than tensors{what}: fetch the original, or save the plain state dict"
    if head[:1] == b"\x80" and head[1:] <= b"\x05":
        return (
            "is a bare pickle, as PyTorch saved before version 1.6, which isn't read: fetch the original, or save the "
            "plain state dict with a newer torch.save"
        )
    return f"can't be read as a PyTorch file: {describe_file(file)} ({reason})"


def _check_same_names(files: list[Path], shards: list[Shard]) -> None:
    every = list(dict.fromkeys(name for shard in shards for name in shard))
    for file, shard in zip(files, shards, strict=True):
        missing = [name for name in every if name not in shard]
        if missing:
            raise CheckpointError(
                f"checkpoint {file}: {listing(missing)} missing, though another shard has its part; "
                "fetch this shard again"
            )
        for name in every:
            if shard[name].dtype != shards[0][name].dtype:
                raise CheckpointError(
                    f"checkpoint {file}: {name} has type {shard[name].dtype}, but {shards[0][name].dtype} in "
                    f"{files[0].name}; the shards belong to different models"
                )


def _split_dim(name: str, parts: list[torch.Tensor], dim: int) -> int | None:
    """The dimension that `parts` are put together along; None where each is a copy of the whole."""
    if parts[0].dim() < 2:
        return None
    if name == EMBEDDING:
        return 1 if sum(part.shape[1] for part in parts if part.dim() == 2) == dim else 0
    return SPLIT_DIMS.get(name.split(".")[-2] if "." in name else name, 0)


def _whole_shape(files: list[Path], shards: list[Shard], name: str, dim: int | None) -> Shape:
    first = tuple(shards[0][name].shape)
    total = 0
    for file, shard in zip(files, shards, strict=True):
        shape = tuple(shard[name].shape)
        same = shape == first if dim is None else len(shape) == 2 and shape[1 - dim] == first[1 - dim]
        if not same:
            raise CheckpointError(
                f"checkpoint {file}: {name} has shape {shape}, which doesn't go with {first} in {files[0].name}; "
                "the shards belong to different models"
            )
        total += shape[dim or 0] if shape else 0
    if dim is None:
        return first
    return (total, first[1]) if dim == 0 else (first[0], total)


def _check_shard_count(path: Path, files: list[Path], wq: Shape, dim: int) -> None:
    """Tell apart a missing last shard, which leaves no gap in the numbers, from a wrong configuration."""
    if wq and 0 < wq[0] < dim and dim * len(files) % wq[0] == 0:
        raise CheckpointError(
            f"checkpoint {path}: {len(files)} shards found, but layers.0.attention.wq.weight adds up to {wq[0]} rows "
            f"of {dim}, so there should be {dim * len(files) // wq[0]}; fetch the missing ones"
        )


def _read_params(file: Path) -> dict[str, Any]:
    """`params.json`, without null values; keys and types are checked."""
    try:
        params = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(
            f"checkpoint {file}: no such file; Meta's checkpoints have it beside the shards"
        ) from error
    except ValueError as error:
        raise CheckpointError(f"checkpoint {file}: isn't JSON ({error}); {describe_file(file)}") from error
    if not isinstance(params, dict):
        raise CheckpointError(f"checkpoint {file}: holds {params!r}, expected a JSON object")
    params = {k: v for k, v in params.items() if v is not None}
    for key, value in params.items():
        if key not in USED_KEYS | HARMLESS_KEYS:
            raise CheckpointError(
                f"checkpoint {file}: {key} = {value!r} isn't known here and may change what the model computes; "
                "only plain Llama models are served (take the key out if it has no effect)"
            )
        if key in USED_KEYS:
            _check_kind(file, key, value)
    for key in ("dim", "n_layers", "n_heads"):
        if params.get(key, 0) < 1:
            raise CheckpointError(f"checkpoint {file}: {key} is {params.get(key, 'missing')}, expected at least 1")
    return params


def _check_kind(file: Path, key: str, value: Any) -> None:
    if key == "use_scaled_rope":
        kind, right = "true or false", isinstance(value, bool)
    elif key in FRACTIONS:
        kind, right = "a number", isinstance(value, (int, float)) and not isinstance(value, bool)
    else:
        kind, right = "an integer", isinstance(value, int) and not isinstance(value, bool)
    if not right:
        raise CheckpointError(f"checkpoint {file}: {key} is {value!r}, expected {kind}")


def _config(path: Path, params: Mapping[str, Any], shapes: Mapping[str, Shape]) -> ModelConfig:
    """The configuration from `params.json`, with what only the tensors' shapes tell."""
    check_layers(path, "n_layers in params.json", params["n_layers"], shapes)
    rows = {}
    for name in (EMBEDDING, "layers.0.feed_forward.w1.weight"):
        if len(shapes.get(name, ())) != 2:
            raise CheckpointError(f"checkpoint {path}: {name} is {shapes.get(name, 'missing')}, expected a matrix")
        rows[name] = shapes[name][0]
    if params["dim"] % params["n_heads"]:
        raise CheckpointError(
            f"checkpoint {path / 'params.json'}: dim {params['dim']} is not a multiple of n_heads {params['n_heads']}"
        )
    vocab_size = params.get("vocab_size", -1)
    context = SCALED_SEQ_LEN if params.get("use_scaled_rope") else 4096
    return ModelConfig(
        dim=params["dim"],
        n_layers=params["n_layers"],
        n_heads=params["n_heads"],
        n_kv_heads=params.get("n_kv_heads", params["n_heads"]),
        head_dim=params["dim"] // params["n_heads"],
        hidden_dim=rows["layers.0.feed_forward.w1.weight"],
        vocab_size=rows[EMBEDDING] if vocab_size == -1 else vocab_size,
        max_seq_len=params.get("max_seq_len", context),
        norm_eps=float(params.get("norm_eps", 1e-5)),
        rope_theta=float(params.get("rope_theta", 10000.0)),
        tied_output=OUTPUT not in shapes,
    )

"""Hugging Face's format: `config.json` and tensors in one or several `*.safetensors` files, perhaps with an index.

Its names for Meta's, by layer N: self_attn.q/k/v/o_proj = wq/wk/wv/wo, mlp.gate/up/down_proj = w1/w3/w2. The rows of
q_proj and k_proj are in another order: of each head of D rows Meta has the two of a rotary pair side by side, Hugging
Face all first ones, then all second ones. Row 2j + b of a head in Meta's order is its row b * D/2 + j there.
"""

from __future__ import annotations

import dataclasses
import mmap
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from model.checkpoint.base import Checkpoint, TensorInfo, check_layers, copy_cast, listing, load_tokenizer, map_file
from model.checkpoint.huggingface.config import Values, model_config, read_config, read_json, rope_factors
from model.checkpoint.huggingface.safetensors_header import read_header
from model.config import CheckpointError, ModelConfig, parameter_shapes

if TYPE_CHECKING:
    from model.tokenizer.tokenizer import Tokenizer

LM_HEAD = "lm_head.weight"
NAMES = {
    "model.embed_tokens.weight": "tok_embeddings.weight",
    "model.norm.weight": "norm.weight",
    LM_HEAD: "output.weight",
}
LAYER_NAMES = {
    "input_layernorm": "attention_norm",
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
}
META_NAMES = {meta: name for name, meta in NAMES.items()}
META_LAYER_NAMES = {meta: name for name, meta in LAYER_NAMES.items()}
HALVED = (".wq.weight", ".wk.weight")
"""Ends of Meta's names of the parameters whose rows are in two halves."""
STORED_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
LEFT_OVER = re.compile(r"(^|\.)rotary_emb\.inv_freq$")
"""Buffers that follow from the configuration."""

SUFFIX, INDEX_SUFFIX = ".safetensors", ".safetensors.index.json"
SHARD = re.compile(r"(.+)-(\d{1,6})-of-(\d{1,6})\.safetensors")


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor and the mapped file it lies in."""

    file: Path
    data: mmap.mmap
    info: TensorInfo


class HuggingFaceCheckpoint(Checkpoint):
    """A directory with `config.json` and safetensors files, or one such file, in float32, float16 or bfloat16."""

    format = "huggingface"

    def __init__(self, path: Path, tokenizer_path: Path | None = None) -> None:
        self.directory = path if path.is_dir() else path.parent
        values = read_config(self.directory / "config.json")
        tensors = _open_tensors(path)
        if values.flag("tie_word_embeddings"):
            tensors.pop(LM_HEAD, None)  # a copy of the embedding that some files hold all the same
        config = _config(path, values, tensors)
        _check_tensors(path, config, tensors)
        config = dataclasses.replace(config, rope_factors=rope_factors(values, config))
        super().__init__(path, config, tokenizer_path)
        self._tensors = {meta_name(name): tensor for name, tensor in tensors.items()}

    def _read(self, name: str, dim: int, start: int, stop: int) -> torch.Tensor:
        values = self._values(name)
        if not name.endswith(HALVED):
            return values.narrow(dim, start, stop - start).clone(memory_format=torch.contiguous_format)
        if dim == 0:
            return values.index_select(0, _halved_rows(start, stop, self.config.head_dim))
        rows = _halved_rows(0, len(values), self.config.head_dim)
        return values.narrow(1, start, stop - start).index_select(0, rows)

    def _read_into(self, out: torch.Tensor, name: str, dim: int, start: int, stop: int) -> None:
        if name.endswith(HALVED):
            super()._read_into(out, name, dim, start, stop)
        else:
            copy_cast(out, self._values(name).narrow(dim, start, stop - start))

    def _mapped(self, name: str) -> list[torch.Tensor]:
        return [self._values(name)]

    def where(self, name: str) -> str:
        return str(self._tensors[name].file)

    def _values(self, name: str) -> torch.Tensor:
        """The tensor as it lies in the file; a view of the mapped memory."""
        if not self._tensors:
            raise CheckpointError(f"checkpoint {self.path}: is closed, {name} can't be read any more")
        tensor = self._tensors[name]
        info = tensor.info
        dtype = STORED_TYPES[info.kind]
        count = info.n_bytes // dtype.itemsize
        return torch.frombuffer(tensor.data, dtype=dtype, count=count, offset=info.offset).view(info.shape)

    def tokenizer(self) -> Tokenizer:
        if self._tokenizer_path is not None:
            return load_tokenizer(self._tokenizer_path)
        # imported here so that weights can be read without a tokenizer library
        from model.tokenizer.tokenizer import tokenizer_from_directory

        return tokenizer_from_directory(self.directory)

    def close(self) -> None:
        self._tensors = {}  # unmapped with the last tensor that looks into a file


def _halved_rows(start: int, stop: int, head_dim: int) -> torch.Tensor:
    """(stop - start,) int64: where the rows [start, stop) of Meta's order stand in Hugging Face's."""
    rows = torch.arange(start, stop)
    place = rows % head_dim
    return rows - place + place % 2 * (head_dim // 2) + place // 2


def to_halves(weight: torch.Tensor, head_dim: int) -> torch.Tensor:
    """A parameter whose rows are in Meta's order, (heads * D, dim), with its rows in Hugging Face's order."""
    return torch.empty_like(weight).index_copy_(0, _halved_rows(0, len(weight), head_dim), weight)


def meta_name(name: str) -> str:
    """Meta's name of a tensor; a name that isn't known stays, and is found as surplus."""
    match = re.fullmatch(r"model\.layers\.(0|[1-9][0-9]{0,8})\.([a-z_.]+)\.weight", name)
    if match and match[2] in LAYER_NAMES:
        return f"layers.{match[1]}.{LAYER_NAMES[match[2]]}.weight"
    return NAMES.get(name, name)


def huggingface_name(name: str) -> str:
    """The inverse of `meta_name`, for a parameter of the model."""
    if name in META_NAMES:
        return META_NAMES[name]
    _, layer, inner = name.removesuffix(".weight").split(".", 2)
    return f"model.layers.{layer}.{META_LAYER_NAMES[inner]}.weight"


def _config(path: Path, values: Values, tensors: Mapping[str, StoredTensor]) -> ModelConfig:
    """The configuration without rotary factors."""
    n_layers = values.integer("num_hidden_layers")
    check_layers(path, "num_hidden_layers in config.json", n_layers, map(meta_name, tensors))
    embedding = tensors.get("model.embed_tokens.weight")
    rows = embedding.info.shape[0] if embedding and embedding.info.shape else values.integer("vocab_size")
    return model_config(values, rows)


def _check_tensors(path: Path, config: ModelConfig, tensors: Mapping[str, StoredTensor]) -> None:
    """Check that the tensors are exactly those of the model, in types that are read here."""
    expected = {huggingface_name(name): shape for name, shape in parameter_shapes(config).items()}
    missing = [name for name in expected if name not in tensors]
    if missing:
        hint = "; a model whose output matrix is the embedding has tie_word_embeddings true in config.json"
        raise CheckpointError(
            f"checkpoint {path}: {listing(missing)} missing; the files aren't a whole model, fetch them again"
            f"{hint if missing == [LM_HEAD] else ''}"
        )
    for name, tensor in tensors.items():
        if name not in expected:
            raise CheckpointError(
                f"checkpoint {tensor.file}: {name} is not part of a Llama model with {config.n_layers} layers; "
                "this is another architecture, or config.json belongs to another model"
            )
        if tensor.info.shape != expected[name]:
            raise CheckpointError(
                f"checkpoint {tensor.file}: {name} has shape {tensor.info.shape}, but config.json says "
                f"{expected[name]}; weights and configuration belong to different models"
            )
        if tensor.info.kind not in STORED_TYPES:
            raise CheckpointError(
                f"checkpoint {tensor.file}: {name} has type {tensor.info.kind}, which isn't read here; "
                f"convert the model to one of {', '.join(STORED_TYPES)}"
            )


def _open_tensors(path: Path) -> dict[str, StoredTensor]:
    """Every tensor of the model by Hugging Face's name, without buffers that may be left over."""
    index = _find_index(path)
    weight_map = _read_index(index) if index else None
    files = _files_of_index(index, weight_map) if index and weight_map else _find_files(path)
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        data = map_file(file, "safetensors")
        for name, info in read_header(file, data).items():
            if LEFT_OVER.search(name):
                continue
            if name in tensors:
                raise CheckpointError(
                    f"checkpoint {file}: {name} is in {tensors[name].file.name} too; the files belong to different "
                    "models, or one is left over: fetch them again into an empty directory"
                )
            tensors[name] = StoredTensor(file, data, info)
    if index and weight_map:
        _check_index(index, weight_map, tensors)
    return tensors


def _find_index(path: Path) -> Path | None:
    """The index to go by; as in transformers a `model.safetensors` needs none."""
    if not path.is_dir():
        return path if path.name.endswith(INDEX_SUFFIX) else None
    if (path / "model.safetensors").exists():
        return None
    indexes = sorted(file for file in path.glob(f"*{INDEX_SUFFIX}") if not file.name.startswith("."))
    named = path / f"model{INDEX_SUFFIX}"
    if named in indexes or not indexes:
        return named if indexes else None
    if len(indexes) > 1:
        raise CheckpointError(
            f"checkpoint {path}: holds {len(indexes)} indexes ({', '.join(file.name for file in indexes[:8])}), "
            "give the path of one of them"
        )
    return indexes[0]


def _read_index(file: Path) -> dict[str, str]:
    """Which file each tensor lies in, by Hugging Face's name."""
    weight_map = read_json(file, "it should list the model's files").get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"checkpoint {file}: has no weight_map, which names each tensor's file; fetch it again")
    for name, value in weight_map.items():
        # a file elsewhere is never meant, and nobody else's index should make us read one
        if not isinstance(value, str) or not value.endswith(SUFFIX) or re.search(r"[/\\\0]", value):
            raise CheckpointError(
                f"checkpoint {file}: {name[:80]!r} is said to be in {repr(value)[:80]}, expected a *{SUFFIX} file of "
                "this directory (pickles, *.bin, aren't read)"
            )
    return weight_map


def _files_of_index(index: Path, weight_map: Mapping[str, str]) -> list[Path]:
    first: dict[str, str] = {}
    for name, value in weight_map.items():
        first.setdefault(value, name)
    files = [index.parent / value for value in sorted(first)]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise CheckpointError(
            f"checkpoint {index.parent}: {listing(missing)} missing, where {index.name} has {first[missing[0]]!r} "
            "and others; fetch it again"
        )
    return files


def _check_index(index: Path, weight_map: Mapping[str, str], tensors: Mapping[str, StoredTensor]) -> None:
    """Check that the tensors are those of the index, each in its file."""
    for name, value in weight_map.items():
        if LEFT_OVER.search(name) or (name in tensors and tensors[name].file.name == value):
            continue
        where = f"it is in {tensors[name].file.name}" if name in tensors else "it isn't there"
        raise CheckpointError(
            f"checkpoint {index.parent / value}: {index.name} says that {name[:80]!r} is in this file, but {where}; "
            "the index belongs to other files, fetch both again"
        )
    for name, tensor in tensors.items():
        if name not in weight_map:
            raise CheckpointError(
                f"checkpoint {tensor.file}: {name} isn't in {index.name}; "
                "the index belongs to other files, fetch both again"
            )


def _find_files(path: Path) -> list[Path]:
    """The safetensors files of a model without an index."""
    if not path.is_dir():
        match = SHARD.fullmatch(path.name)
        if match and int(match[3]) > 1:
            raise CheckpointError(
                f"checkpoint {path}: is one of {int(match[3])} files of a model, give its directory: {path.parent}"
            )
        return [path]
    whole = path / "model.safetensors"
    if whole.exists():
        return [whole]
    files = sorted(file for file in path.glob(f"*{SUFFIX}") if not file.name.startswith("."))
    matches = [SHARD.fullmatch(file.name) for file in files]
    if len(files) == 1 and (matches[0] is None or int(matches[0][3]) == 1):
        return files
    shards = {(match[1], int(match[3])): match for match in matches if match}
    if len(shards) != 1 or None in matches:
        names = ", ".join(file.name for file in files[:8])
        raise CheckpointError(
            f"checkpoint {path}: holds {len(files)} safetensors files and no index ({names}): give the path of the one "
            "that is the model, or fetch model.safetensors.index.json"
        )
    ((stem, count),) = shards
    found = {int(match[2]) for match in matches if match}
    lost = next((number for number in range(1, count + 1) if number not in found), None)
    if lost is not None:
        raise CheckpointError(
            f"checkpoint {path}: {stem}-{lost:05d}-of-{count:05d}{SUFFIX} is missing ({len(files)} files found); "
            "fetch it again"
        )
    return files

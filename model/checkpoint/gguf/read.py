"""GGUF, llama.cpp's format: one file with metadata, tokenizer and tensors, plain or quantized in blocks.

Its names for Meta's, by layer N: attn_q/k/v/output = wq/wk/wv/wo, ffn_gate/up/down = w1/w3/w2. For the
architecture "llama" the rows of wq and wk are in Meta's order (rotary pairs side by side): nothing is permuted.
"""

from __future__ import annotations

import dataclasses
import mmap
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch

from model.checkpoint.base import Checkpoint, TensorInfo, check_layers, check_parameters, load_tokenizer, map_file
from model.checkpoint.gguf.block_types import BLOCK_TYPES, decode_part
from model.checkpoint.gguf.header import read_header
from model.config import CheckpointError, ModelConfig
from model.rope import frequencies, linear_factors

if TYPE_CHECKING:
    from model.tokenizer.tokenizer import Tokenizer

NAMES = {
    "token_embd.weight": "tok_embeddings.weight",
    "output_norm.weight": "norm.weight",
    "output.weight": "output.weight",
}
LAYER_NAMES = {
    "attn_norm": "attention_norm",
    "attn_q": "attention.wq",
    "attn_k": "attention.wk",
    "attn_v": "attention.wv",
    "attn_output": "attention.wo",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
}
FLOAT32_MAX = float(np.finfo(np.float32).max)
BOS_ID = "tokenizer.ggml.bos_token_id"
NO_IDS = (None, -1, 0xFFFFFFFF)
"""What stands for "no such token": no key, or -1, also where it was written without a sign."""
ROPE_FREQS = "rope_freqs.weight"
LEFT_OVER = re.compile(r"(^|\.)(attn_rot_embd|rotary_emb\.inv_freq|rope\.freqs)(\.weight)?$")
"""Buffers that follow from the configuration."""


class GGUFCheckpoint(Checkpoint):
    """A GGUF file of the architecture "llama", its tensors in any mix of the types in `BLOCK_TYPES`."""

    format = "gguf"

    def __init__(self, path: Path, tokenizer_path: Path | None = None) -> None:
        self._data: mmap.mmap | None = map_file(path, "GGUF")
        header = read_header(path, self._data)
        self.metadata: dict[str, Any] = header.metadata
        """Every metadata key with its value as plain Python."""
        self._tensors = _by_meta_name(path, header.tensors)
        rope_freqs = self._tensors.pop(ROPE_FREQS, None)
        config = _config(path, header.metadata, self._tensors)
        check_parameters(path, config, {name: info.shape for name, info in self._tensors.items()})
        _check_types(path, self._tensors)
        # only now is the head's size known to be that of the tensors, and not a broken number to make a list of
        stretch = _stretch(_Keys(path, header.metadata))
        if stretch != 1:
            config = dataclasses.replace(config, rope_factors=linear_factors(config.head_dim, stretch))
        if rope_freqs is not None:
            config = _with_rope_freqs(path, config, rope_freqs, self._data)
        super().__init__(path, config, tokenizer_path)

    def _read(self, name: str, dim: int, start: int, stop: int) -> torch.Tensor:
        info = self._tensors[name]
        rows = self._rows(info)
        kind = BLOCK_TYPES[info.kind]
        if len(info.shape) == 1:
            return decode_part(rows, kind, start, stop)[0]
        if dim == 0:
            return decode_part(rows[start:stop], kind, 0, info.shape[1])
        return decode_part(rows, kind, start, stop)

    def _read_into(self, out: torch.Tensor, name: str, dim: int, start: int, stop: int) -> None:
        info = self._tensors[name]
        rows, kind = self._rows(info), BLOCK_TYPES[info.kind]
        if len(info.shape) == 1:
            decode_part(rows, kind, start, stop, out[None])
        elif dim == 0:
            decode_part(rows[start:stop], kind, 0, info.shape[1], out)
        else:
            decode_part(rows, kind, start, stop, out)

    def _mapped(self, name: str) -> list[torch.Tensor]:
        return [self._rows(self._tensors[name])]

    def stored_type(self, name: str) -> str:
        return self._tensors[name].kind

    def blocks(self, name: str) -> torch.Tensor:
        """The parameter's bytes as they lie in the file, (rows, bytes of a row); a view of the mapped memory."""
        return self._rows(self._tensors[name])

    def _rows(self, info: TensorInfo) -> torch.Tensor:
        """The tensor's bytes as they lie in the file, (rows, bytes of a row); a view of the mapped memory."""
        if self._data is None:
            raise CheckpointError(f"checkpoint {self.path}: is closed, {info.name} can't be read any more")
        raw = torch.frombuffer(self._data, dtype=torch.uint8, count=info.n_bytes, offset=info.offset)
        return raw.view(1 if len(info.shape) == 1 else info.shape[0], -1)

    def tokenizer(self) -> Tokenizer:
        if self._tokenizer_path is not None:
            return load_tokenizer(self._tokenizer_path)
        # imported here so that weights can be read without a tokenizer library
        from model.tokenizer.tokenizer import tokenizer_from_gguf

        return tokenizer_from_gguf(self.metadata)

    def close(self) -> None:
        self._data = None  # unmapped with the last tensor that looks into it


def _meta_name(name: str) -> str:
    """Meta's name of a tensor; a name that isn't known stays, and is found as surplus."""
    match = re.fullmatch(r"blk\.(0|[1-9]\d*)\.(\w+)\.weight", name)
    if match and match[2] in LAYER_NAMES:
        return f"layers.{match[1]}.{LAYER_NAMES[match[2]]}.weight"
    return NAMES.get(name, name)


def _by_meta_name(path: Path, tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    found: dict[str, TensorInfo] = {}
    for name, info in tensors.items():
        if LEFT_OVER.search(name):
            continue
        other = found.setdefault(_meta_name(name), info)
        if other is not info:
            raise CheckpointError(
                f"checkpoint {path}: tensors {other.name!r} and {name!r} are the same parameter; the file is broken"
            )
    return found


def _with_rope_freqs(path: Path, config: ModelConfig, info: TensorInfo, data: mmap.mmap) -> ModelConfig:
    """The configuration with what `rope_freqs.weight` says: a divisor for each pair (Llama 3.1), or nothing new.

    Raises:
        CheckpointError: Its type, shape or values can't be divisors.
    """
    half = config.head_dim // 2
    if info.kind != "F32" or info.shape != (half,):
        raise CheckpointError(
            f"checkpoint {path}: {ROPE_FREQS} has type {info.kind} and shape {info.shape}, expected F32 and ({half},): "
            "a factor for each rotary pair of a head"
        )
    values = np.frombuffer(data, np.float32, half, info.offset).astype(np.float64)
    if not (np.isfinite(values) & (values > 0)).all():
        raise CheckpointError(
            f"checkpoint {path}: {ROPE_FREQS} holds {values.min()}..{values.max()}, expected finite numbers above 0; "
            "the file is broken"
        )
    # some converters stored the plain frequencies themselves, which llama.cpp of that time ignored
    plain = frequencies(config.head_dim, config.rope_theta).numpy()
    if (values == 1).all() or (half > 1 and np.allclose(values, plain, rtol=1e-2, atol=0)):
        return config
    factors = values * (config.rope_factors or 1.0)
    return dataclasses.replace(config, rope_factors=tuple(factors.tolist()))


def _check_types(path: Path, tensors: Mapping[str, TensorInfo]) -> None:
    for info in tensors.values():
        if info.kind not in BLOCK_TYPES:
            raise CheckpointError(
                f"checkpoint {path}: tensor {info.name} has type {info.kind}, which isn't read here; "
                f"convert the model to one of {', '.join(BLOCK_TYPES)}"
            )


def _config(path: Path, metadata: dict[str, Any], tensors: Mapping[str, TensorInfo]) -> ModelConfig:
    keys = _Keys(path, metadata)
    _check_plain_llama(keys)
    n_layers, dim = keys.integer("llama.block_count"), keys.integer("llama.embedding_length")
    check_layers(path, "llama.block_count", n_layers, tensors)
    n_heads = keys.per_layer("llama.attention.head_count", n_layers)
    if n_heads < 1:
        keys.refuse("llama.attention.head_count", "at least 1")
    head_dim = keys.integer("llama.attention.key_length", dim // n_heads)
    for key in ("llama.attention.value_length", "llama.rope.dimension_count"):
        if keys.integer(key, head_dim) != head_dim:
            keys.refuse(key, f"{head_dim}, the size of a head")
    embedding = tensors.get("tok_embeddings.weight")
    vocab_size = embedding.shape[0] if embedding else keys.integer("llama.vocab_size")
    _check_ids(keys, vocab_size)
    return ModelConfig(
        dim=dim,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=keys.per_layer("llama.attention.head_count_kv", n_layers, n_heads),
        head_dim=head_dim,
        hidden_dim=keys.per_layer("llama.feed_forward_length", n_layers),
        vocab_size=vocab_size,
        max_seq_len=keys.integer("llama.context_length"),
        norm_eps=keys.number("llama.attention.layer_norm_rms_epsilon"),
        rope_theta=keys.number("llama.rope.freq_base", 10000.0),
        tied_output="output.weight" not in tensors,
        bos_id=keys.integer(BOS_ID) if metadata.get(BOS_ID) not in NO_IDS else None,
    )


def _check_ids(keys: _Keys, vocab_size: int) -> None:
    """Refuse a tokenizer that gives ids without a row in the embedding; rows without a token are only padding."""
    tokens = keys.values.get("tokenizer.ggml.tokens", [])
    if not isinstance(tokens, list) or len(tokens) > vocab_size:
        keys.refuse("tokenizer.ggml.tokens", f"a list of at most {vocab_size} tokens, the rows of token_embd.weight")
    if keys.values.get(BOS_ID) not in NO_IDS and not 0 <= keys.integer(BOS_ID) < vocab_size:
        keys.refuse(BOS_ID, f"an id below {vocab_size}, the rows of token_embd.weight")


def _check_plain_llama(keys: _Keys) -> None:
    """Refuse what the model here doesn't compute."""
    if keys.values.get("general.architecture") != "llama":
        keys.refuse("general.architecture", "'llama', the only architecture served")
    if keys.values.get("split.count", 1) not in (0, 1):
        keys.refuse("split.count", "a model in one file: join the parts with `llama-gguf-split --merge`")
    if keys.values.get("llama.expert_count", 0) != 0:
        keys.refuse("llama.expert_count", "a model without experts")


def _stretch(keys: _Keys) -> float:
    """The factor of linear rotary scaling, 1 where there is none. As in llama.cpp no type means linear, 0 means 1."""
    kind = keys.values.get("llama.rope.scaling.type", "linear")
    if kind not in ("none", "linear"):
        keys.refuse("llama.rope.scaling.type", "'none' or 'linear': other kinds of rotary scaling aren't supported")
    if keys.number("llama.rope.scaling.attn_factor", 1.0) != 1:
        keys.refuse("llama.rope.scaling.attn_factor", "1: scaled attention isn't supported")
    if kind == "none":
        return 1.0
    new, old = "llama.rope.scaling.factor", "llama.rope.scale_linear"
    key = new if new in keys.values else old
    factor = keys.number(key, 1.0)
    if factor < 0:
        keys.refuse(key, "a number above 0")
    return factor or 1.0


class _Keys:
    """Metadata by key, with types checked."""

    def __init__(self, path: Path, values: dict[str, Any]) -> None:
        self.path = path
        self.values = values

    def refuse(self, key: str, expected: str) -> NoReturn:
        value = self.values.get(key)
        if isinstance(value, list):
            shown = f"a list of {len(value)} values"
        else:
            shown = repr(value)[:80] if key in self.values else "missing"
        raise CheckpointError(f"checkpoint {self.path}: {key} is {shown}, expected {expected}")

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            self.refuse(key, "an integer")
        return value

    def per_layer(self, key: str, n_layers: int, default: int | None = None) -> int:
        """An integer, or a list of the same one for each layer."""
        value = self.values.get(key)
        if not isinstance(value, list):
            return self.integer(key, default)
        if len(value) != n_layers or any(type(item) is not int for item in value):
            self.refuse(key, f"an integer, or one for each of the {n_layers} layers")
        if len(set(value)) != 1:
            raise CheckpointError(
                f"checkpoint {self.path}: {key} is {min(value)} to {max(value)} depending on the layer, expected the "
                "same in all: layers of different sizes aren't supported"
            )
        first: int = value[0]
        return first

    def number(self, key: str, default: float | None = None) -> float:
        """A float32 gives the shortest decimal that means it, so that 1e-5 is 1e-5 as in other formats."""
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < FLOAT32_MAX:
            self.refuse(key, "a finite number")
        return float(str(np.float32(value)))

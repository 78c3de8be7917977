"""Writing GGUF: metadata and tensors of the architecture "llama" in one file, as llama.cpp's converter makes them.

Rows of wq and wk stay in Meta's order, as there. Format: ggml's docs/gguf.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.constants import GGMLQuantizationType

from model.checkpoint.gguf.read import LAYER_NAMES, NAMES, ROPE_FREQS
from model.checkpoint.rope_scaling import find_scaling
from model.checkpoint.writing import FLOATS, Weights

GGUF_NAMES = {meta: name for name, meta in NAMES.items()}
GGUF_LAYER_NAMES = {meta: name for name, meta in LAYER_NAMES.items()}
UNUSED = 5
PADDING_SCORE = -10000.0


def write_gguf(path: Path, weights: Weights, tokenizer: Mapping[str, Any], name: str) -> None:
    """Write the file `path`. Peak memory: one tensor, and a few times that while it is quantized.

    Args:
        tokenizer: the tokenizer's metadata, by its keys.
        name: the model's name, for people.
    """
    writer = gguf.GGUFWriter(path, arch="llama")
    try:
        for key, value in (_metadata(weights, name) | _padded(tokenizer, weights.config.vocab_size)).items():
            _add(writer, key, value)
        factors = _rope_factors(weights)
        if factors is not None:
            writer.add_tensor_info(ROPE_FREQS, factors.shape, factors.dtype, factors.nbytes)
        for parameter, shape in weights.shapes.items():
            _announce(writer, parameter, shape, weights.types[parameter])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        if factors is not None:
            writer.write_tensor_data(factors)
        for parameter in weights.shapes:
            data = weights.blocks(parameter)
            writer.write_tensor_data(data)
            weights.progress(data.nbytes)
    finally:
        writer.close()


def gguf_name(name: str) -> str:
    """GGUF's name of a parameter with Meta's name `name`."""
    if name in GGUF_NAMES:
        return GGUF_NAMES[name]
    _, layer, rest = name.removesuffix(".weight").split(".", 2)
    return f"blk.{layer}.{GGUF_LAYER_NAMES[rest]}.weight"


def _announce(writer: gguf.GGUFWriter, name: str, shape: tuple[int, ...], kind: str) -> None:
    number = GGMLQuantizationType[kind]
    in_bytes = gguf.quant_shape_to_byte_shape(shape, number)
    n_bytes = int(np.prod(in_bytes, dtype=np.int64))
    writer.add_tensor_info(gguf_name(name), in_bytes, np.dtype(np.uint8), n_bytes, raw_dtype=number)


def _metadata(weights: Weights, name: str) -> dict[str, Any]:
    config = weights.config
    metadata = {
        "general.name": name,
        "general.file_type": _file_type(weights),
        "llama.block_count": config.n_layers,
        "llama.context_length": config.max_seq_len,
        "llama.embedding_length": config.dim,
        "llama.feed_forward_length": config.hidden_dim,
        "llama.attention.head_count": config.n_heads,
        "llama.attention.head_count_kv": config.n_kv_heads,
        "llama.attention.key_length": config.head_dim,
        "llama.attention.value_length": config.head_dim,
        "llama.attention.layer_norm_rms_epsilon": config.norm_eps,
        "llama.rope.dimension_count": config.head_dim,
        "llama.rope.freq_base": config.rope_theta,
        "llama.vocab_size": config.vocab_size,
    }
    if any(kind not in FLOATS for kind in weights.types.values()):
        metadata["general.quantization_version"] = gguf.GGML_QUANT_VERSION
    scaling = find_scaling(config)
    if scaling is not None and scaling["rope_type"] == "linear":
        metadata |= {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": scaling["factor"]}
    return metadata


def _file_type(weights: Weights) -> int:
    """llama.cpp's number for files of mostly this type."""
    kinds = [weights.types[name] for name, shape in weights.shapes.items() if len(shape) > 1]
    kind = Counter(kinds).most_common(1)[0][0]
    known = gguf.LlamaFileType.__members__
    found = known.get("ALL_F32" if kind == "F32" else f"MOSTLY_{kind}") or known.get(f"MOSTLY_{kind}_M")
    return int(gguf.LlamaFileType.GUESSED if found is None else found)


def _rope_factors(weights: Weights) -> np.ndarray | None:
    """The factors as the tensor llama.cpp wants; a uniform one is metadata instead."""
    factors, scaling = weights.config.rope_factors, find_scaling(weights.config)
    if factors is None or (scaling is not None and scaling["rope_type"] == "linear"):
        return None
    return np.array(factors, dtype=np.float32)


def _padded(tokenizer: Mapping[str, Any], vocab_size: int) -> dict[str, Any]:
    """The metadata with unused tokens for rows of the embedding that have none: llama.cpp wants as many as rows."""
    metadata = dict(tokenizer)
    tokens = list(metadata["tokenizer.ggml.tokens"])
    missing = range(len(tokens), vocab_size)
    metadata["tokenizer.ggml.tokens"] = tokens + [f"[PAD{i}]" for i in missing]
    for key, filler in (("token_type", UNUSED), ("scores", PADDING_SCORE)):
        values = metadata.get(f"tokenizer.ggml.{key}")
        if values is not None:
            metadata[f"tokenizer.ggml.{key}"] = [*values, *[filler] * len(missing)]
    return metadata


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif value is not None:
        writer.add_array(key, value)

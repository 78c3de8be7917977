"""Tiny random models as files on disk: Meta and Hugging Face directories, GGUF files, SentencePiece models.

Everything is made when a test asks for it, from a seed; nothing here needs the network.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import safetensors.torch
import sentencepiece
import torch

from model.config import ModelConfig, parameter_shapes

TINY_VOCAB = 384
"""Vocabulary of `tiny_config` and of `train_sentencepiece`, by default."""

SHARD_DIMS = {"wq": 0, "wk": 0, "wv": 0, "wo": 1, "w1": 0, "w2": 1, "w3": 0, "output": 0}
"""Which dimension Meta splits over its shards; the embedding differs by generation, norms are copied."""

GGUF_LAYER_NAMES = {
    "attention_norm": "attn_norm",
    "attention.wq": "attn_q",
    "attention.wk": "attn_k",
    "attention.wv": "attn_v",
    "attention.wo": "attn_output",
    "ffn_norm": "ffn_norm",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w2": "ffn_down",
    "feed_forward.w3": "ffn_up",
}
HUGGINGFACE_LAYER_NAMES = {
    "attention_norm": "input_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
}
HUGGINGFACE_NAMES = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
GGUF_NAMES = {"tok_embeddings.weight": "token_embd.weight", "norm.weight": "output_norm.weight"}
GGUF_BLOCK_SCALES = {
    "Q8_0": (0,),
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}
"""At which bytes of a block its float16 scales lie, by GGML's name of the type."""


def tiny_config(**changes: Any) -> ModelConfig:
    """A small model's configuration; `dim` follows from the heads unless it is given."""
    values: dict[str, Any] = {
        "n_layers": 2,
        "n_heads": 4,
        "n_kv_heads": 2,
        "head_dim": 16,
        "hidden_dim": 96,
        "vocab_size": TINY_VOCAB,
        "max_seq_len": 256,
    }
    values.update(changes)
    values.setdefault("dim", values["n_heads"] * values["head_dim"])
    return ModelConfig(**values)


def random_weights(config: ModelConfig, seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Every parameter of the whole model by Meta's name: norms near 1, matrices scaled to keep activations near 1."""
    rng = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in parameter_shapes(config).items():
        value = torch.randn(shape, generator=rng)
        weights[name] = (1 + 0.1 * value if len(shape) == 1 else value * shape[1] ** -0.5).to(dtype)
    return weights


def save_meta(
    directory: Path,
    config: ModelConfig,
    weights: Mapping[str, torch.Tensor],
    shards: int = 1,
    *,
    embedding_dim: int = 1,
    params: Mapping[str, Any] | None = None,
    extra: Mapping[str, torch.Tensor] | None = None,
    tokenizer: bool = False,
) -> Path:
    """Write a Meta checkpoint directory and return it.

    Args:
        embedding_dim: The dimension the embedding is split along: 1 as in Llama 2, 0 as in Llama 3.
        params: Merged into `params.json`; a value of None takes its key out.
        extra: Tensors put into every shard as they are (`rope.freqs`, say).
        tokenizer: Also train a SentencePiece model of the configuration's vocabulary size.
    """
    directory.mkdir(parents=True, exist_ok=True)
    split_dims = {**SHARD_DIMS, "tok_embeddings": embedding_dim}
    for shard in range(shards):
        part = {}
        for name, weight in weights.items():
            dim = split_dims.get(name.split(".")[-2])
            # clone, so that a shard's file doesn't hold the whole tensor's storage
            part[name] = (weight if dim is None else weight.tensor_split(shards, dim)[shard]).clone()
        torch.save({**part, **(extra or {})}, directory / f"consolidated.{shard:02d}.pth")
    values = {
        "dim": config.dim,
        "multiple_of": 32,
        "n_heads": config.n_heads,
        "n_kv_heads": config.n_kv_heads,
        "n_layers": config.n_layers,
        "norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "vocab_size": -1,
        "max_seq_len": config.max_seq_len,
        **(params or {}),
    }
    values = {key: value for key, value in values.items() if value is not None}
    (directory / "params.json").write_text(json.dumps(values), encoding="utf-8")
    if tokenizer:
        train_sentencepiece(directory / "tokenizer.model", config.vocab_size)
    return directory


def huggingface_name(name: str) -> str:
    """Hugging Face's name of a parameter that has Meta's name `name`."""
    if not name.startswith("layers."):
        return HUGGINGFACE_NAMES[name]
    _, layer, rest = name.split(".", 2)
    return f"model.layers.{layer}.{HUGGINGFACE_LAYER_NAMES[rest.removesuffix('.weight')]}.weight"


def huggingface_tensors(config: ModelConfig, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights by Hugging Face's names, in its order of the rows."""
    tensors = {}
    for name, weight in weights.items():
        if name.endswith(("wq.weight", "wk.weight")):
            heads = weight.split(config.head_dim)
            weight = torch.cat([half for head in heads for half in (head[0::2], head[1::2])])
        tensors[huggingface_name(name)] = weight.contiguous()
    return tensors


def save_huggingface(
    directory: Path,
    config: ModelConfig,
    weights: Mapping[str, torch.Tensor],
    files: int = 1,
    *,
    values: Mapping[str, Any] | None = None,
    extra: Mapping[str, torch.Tensor] | None = None,
) -> Path:
    """Write a Hugging Face directory (one file, or several with an index) and return it.

    Args:
        values: Merged into `config.json`; a value of None takes its key out.
        extra: More tensors, under Hugging Face's own names; they lie in the last file.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {**huggingface_tensors(config, weights), **(extra or {})}
    names = list(tensors)
    where: dict[str, str] = {}
    for i in range(files):
        part = names[len(names) * i // files : len(names) * (i + 1) // files]
        file = "model.safetensors" if files == 1 else f"model-{i + 1:05d}-of-{files:05d}.safetensors"
        safetensors.torch.save_file({name: tensors[name] for name in part}, directory / file, {"format": "pt"})
        where |= dict.fromkeys(part, file)
    if files > 1:
        index = {"metadata": {}, "weight_map": where}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    merged = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": config.dim,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.hidden_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_seq_len,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tied_output,
        **(values or {}),
    }
    text = json.dumps({key: value for key, value in merged.items() if value is not None})
    (directory / "config.json").write_text(text, encoding="utf-8")
    return directory


def gguf_name(name: str) -> str:
    """GGUF's name of a parameter that has Meta's name `name`."""
    if not name.startswith("layers."):
        return GGUF_NAMES.get(name, name)
    _, layer, rest = name.split(".", 2)
    return f"blk.{layer}.{GGUF_LAYER_NAMES[rest.removesuffix('.weight')]}.weight"


def gguf_fields(config: ModelConfig) -> dict[str, Any]:
    """The metadata that describes `config` in a GGUF file."""
    fields = {
        "general.architecture": "llama",
        "llama.embedding_length": config.dim,
        "llama.block_count": config.n_layers,
        "llama.attention.head_count": config.n_heads,
        "llama.attention.head_count_kv": config.n_kv_heads,
        "llama.feed_forward_length": config.hidden_dim,
        "llama.context_length": config.max_seq_len,
        "llama.attention.layer_norm_rms_epsilon": config.norm_eps,
        "llama.rope.freq_base": config.rope_theta,
        "llama.rope.dimension_count": config.head_dim,
        "llama.vocab_size": config.vocab_size,
    }
    if config.head_dim * config.n_heads != config.dim:
        fields |= {"llama.attention.key_length": config.head_dim, "llama.attention.value_length": config.head_dim}
    if config.bos_id is not None:
        fields["tokenizer.ggml.bos_token_id"] = config.bos_id
    return fields


def sentencepiece_fields(model: Path) -> dict[str, Any]:
    """The metadata that describes a SentencePiece model in a GGUF file."""
    sp = sentencepiece.SentencePieceProcessor(model_file=str(model))
    ids = range(sp.get_piece_size())
    kinds = [2 if sp.is_unknown(i) else 3 if sp.is_control(i) else 6 if sp.is_byte(i) else 1 for i in ids]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [sp.id_to_piece(i) for i in ids],
        "tokenizer.ggml.scores": [float(sp.get_score(i)) for i in ids],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": sp.bos_id(),
        "tokenizer.ggml.eos_token_id": sp.eos_id(),
        "tokenizer.ggml.unknown_token_id": sp.unk_id(),
    }


def save_gguf(
    path: Path,
    config: ModelConfig,
    weights: Mapping[str, torch.Tensor],
    types: str | Mapping[str, str] = "F32",
    *,
    fields: Mapping[str, Any] | None = None,
    extra: Mapping[str, torch.Tensor] | None = None,
) -> Path:
    """Write a GGUF file and return its path.

    Args:
        types: GGML type of the matrices, or one by Meta's name (F32 where there is none); vectors are always F32.
            Those ending in _K, which the `gguf` package can't make, hold random numbers in place of the weights.
        fields: Metadata put over the configuration's own, the tokenizer's included; None takes a key out.
        extra: Tensors in float32 under GGUF's own names (`rope_freqs.weight`, say).
    """
    merged = {**gguf_fields(config), **(fields or {})}
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, arch=merged.pop("general.architecture"))
    for key, value in merged.items():
        _add_field(writer, key, value)
    for name, weight in weights.items():
        kind = types if isinstance(types, str) else types.get(name, "F32")
        _add_tensor(writer, gguf_name(name), weight, "F32" if weight.dim() == 1 else kind)
    for name, weight in (extra or {}).items():
        _add_tensor(writer, name, weight, "F32")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_field(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, bytes):  # a text, whether it is UTF-8 or not
        writer.add_key_value(key, value, gguf.GGUFValueType.STRING)
    elif value is not None:
        writer.add_array(key, value)


def _add_tensor(writer: gguf.GGUFWriter, name: str, weight: torch.Tensor, kind: str) -> None:
    ggml_type = gguf.GGMLQuantizationType[kind]
    if kind.endswith("_K"):
        writer.add_tensor(name, random_blocks(tuple(weight.shape), kind), raw_dtype=ggml_type)
        return
    data = gguf.quants.quantize(weight.float().contiguous().numpy(), ggml_type)
    writer.add_tensor(name, data, raw_dtype=ggml_type)


def random_blocks(shape: tuple[int, ...], kind: str, seed: int = 0) -> np.ndarray:
    """The bytes of a quantized tensor of (rows, columns) with any values, and scales that keep them below 2."""
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, (shape[0] * shape[1] // block, size), dtype=np.uint8)
    largest = 2.0**-12 if kind.endswith("_K") else 2.0**-7
    for place in GGUF_BLOCK_SCALES[kind]:
        scales = rng.uniform(-largest, largest, (len(data), 1)).astype("<f2")
        data[:, place : place + 2] = scales.view(np.uint8)
    return data.reshape(shape[0], -1)


def train_sentencepiece(path: Path, vocab_size: int = TINY_VOCAB) -> Path:
    """Train a BPE model with Llama 2's settings on a few sentences, write it to `path` and return that.

    Ids: unknown 0, BOS 1, EOS 2, then the 256 bytes, merged pieces and characters.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS.strip().splitlines()),
        model_writer=model,
        model_type="bpe",
        vocab_size=vocab_size,
        byte_fallback=True,
        character_coverage=1.0,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        add_dummy_prefix=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        unk_id=0,
        bos_id=1,
        eos_id=2,
        pad_id=-1,
        num_threads=1,
        minloglevel=2,
    )
    path.write_bytes(model.getvalue())
    return path


CORPUS = """
The capital of France is Paris, and the capital of Italy is Rome.
A small model answers small questions, one token after another.
Hello world! How are you today? I am fine, thank you very much.
The quick brown fox jumps over the lazy dog while the other dogs sleep.
Where does the river go when the rain has stopped and the sun comes out?
Numbers such as 1, 2, 3, 45, 678 and 90 are split into single digits.
She said that reading in the morning is better than reading at night.
They were walking along the street, talking about the weather and the news.
Give me three tips for healthy eating: fruit, vegetables and enough water.
It's not the size of the house that matters; it's who lives in it.
We will write the letter tomorrow, because today there is no more paper.
In winter the mountains are white, in summer they are green and full of people.
Every answer should be short, clear and honest (or say what is not known).
def add(a, b): return a + b
Some words return again and again: the, and, of, to, in, that, with, from, which.
Un café s'il vous plaît; eine Straße über den Fluß; mañana será otro día.
"""

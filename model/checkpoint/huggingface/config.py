"""`config.json` of a Hugging Face model: the values the model is built from, and refusal of what isn't computed here.

Values that are missing have the defaults of transformers' `LlamaConfig`. Rotary scaling stands under `rope_scaling`
(transformers 4, where `rope_theta` is beside it) or `rope_parameters` (transformers 5, where `rope_theta` is in it).
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from model.checkpoint.base import describe_file
from model.config import CheckpointError, ModelConfig, whole
from model.rope import linear_factors, llama3_factors

logger = logging.getLogger(__name__)

ARCHITECTURE, MODEL_TYPE = "LlamaForCausalLM", "llama"
MAX_JSON = 16 * 1024 * 1024
"""Longest JSON file that is parsed, in bytes."""
ROPE_TYPES = ("default", "linear", "llama3")


class Values:
    """Values of a JSON object by key, with types checked as they are asked for; null counts as missing."""

    def __init__(self, file: Path, values: dict[str, Any], prefix: str = "") -> None:
        self.file = file
        self.values = {key: value for key, value in values.items() if value is not None}
        self._prefix = prefix

    def refuse(self, key: str, expected: str) -> NoReturn:
        value = repr(self.values[key])[:80] if key in self.values else "missing"
        raise CheckpointError(f"checkpoint {self.file}: {self._prefix}{key} is {value}, expected {expected}")

    def integer(self, key: str, default: int | None = None) -> int:
        """A size: at least 1. Some programs write 512.0 for 512."""
        value = whole(self.values.get(key, default))
        if type(value) is not int or value < 1:
            self.refuse(key, "an integer of at least 1")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            self.refuse(key, "a finite number")
        try:
            finite = math.isfinite(value)
        except OverflowError:  # an integer beyond every float
            finite = False
        if not finite:
            self.refuse(key, "a finite number")
        return float(value)

    def flag(self, key: str) -> bool:
        """False where it is missing."""
        value = self.values.get(key, False)
        if not isinstance(value, bool):
            self.refuse(key, "true or false")
        return value


def read_json(file: Path, purpose: str) -> dict[str, Any]:
    """The JSON object in a file.

    Args:
        purpose: what to say where there is no such file.

    Raises:
        CheckpointError: There is none, or something else is in it.
    """
    try:
        if file.stat().st_size > MAX_JSON:
            raise CheckpointError(f"checkpoint {file}: has more than {MAX_JSON} bytes, so it can't be {file.name}")
        values = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"checkpoint {file}: no such file; {purpose}") from error
    except (ValueError, RecursionError) as error:
        reason = str(error)[:80]
        raise CheckpointError(f"checkpoint {file}: isn't JSON ({reason}); {describe_file(file)}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"checkpoint {file}: holds a {type(values).__name__}, expected a JSON object")
    return values


def read_config(file: Path) -> Values:
    """`config.json`, which is that of a plain Llama model.

    Raises:
        CheckpointError: There is none, or it asks for something that isn't computed here; names it.
    """
    purpose = "Hugging Face's checkpoints have it beside the weights"
    if (file.parent / "adapter_config.json").exists():
        purpose = "this is an adapter (LoRA): merge it into its base model and give the merged model's directory"
    values = Values(file, read_json(file, purpose))
    _check_plain_llama(values)
    rope = rope_values(values)
    kind = rope.values.get("rope_type", rope.values.get("type", "default"))
    if kind not in ROPE_TYPES:
        raise CheckpointError(
            f"checkpoint {file}: rotary scaling of the type {repr(kind)[:80]} isn't computed here, only "
            f"{', '.join(ROPE_TYPES)}; use a model without it"
        )
    return values


def _check_plain_llama(values: Values) -> None:
    named = values.values
    classes = named.get("architectures")
    if ("architectures" in named or "model_type" not in named) and classes != [ARCHITECTURE]:
        if not isinstance(classes, list) or ARCHITECTURE not in classes:
            values.refuse("architectures", f"['{ARCHITECTURE}'], the only architecture served")
        logger.warning("%s: architectures is %.80s; served as %s", values.file, classes, ARCHITECTURE)
    if named.get("model_type", MODEL_TYPE) != MODEL_TYPE:
        values.refuse("model_type", f"'{MODEL_TYPE}', the only architecture served")
    for key in ("quantization_config", "compression_config", "quantization"):
        if named.get(key):
            method = named[key].get("quant_method", "") if isinstance(named[key], dict) else ""
            raise CheckpointError(
                f"checkpoint {values.file}: {key} says that the weights are quantized ({method or named[key]}), which "
                "isn't read here; use the original weights, or a GGUF file of the model"
            )
    for key in ("attention_bias", "mlp_bias"):
        if values.flag(key):
            values.refuse(key, "false: a model without biases")
    if named.get("hidden_act", "silu") not in ("silu", "swish"):
        values.refuse("hidden_act", "'silu'")
    for where in (values, rope_values(values)):
        if where.number("partial_rotary_factor", 1.0) != 1:
            where.refuse("partial_rotary_factor", "1: heads that are rotated as a whole")


def rope_values(values: Values) -> Values:
    """What is said of the rotary embedding, in the form of transformers 4 or 5; nothing is an empty object."""
    found = [key for key in ("rope_scaling", "rope_parameters") if values.values.get(key)]
    for key in found:
        value = values.values[key]
        # transformers 5 has objects by kind of layer here, for other architectures
        if not isinstance(value, dict) or any(isinstance(inner, dict) for inner in value.values()):
            values.refuse(key, "an object of plain values")
    if len(found) == 2 and values.values[found[0]] != values.values[found[1]]:
        values.refuse(found[0], f"the same as {found[1]} ({values.values[found[1]]}), or only one of both")
    return Values(values.file, values.values[found[0]], found[0] + ".") if found else Values(values.file, {})


@contextlib.contextmanager
def _naming(file: Path) -> Iterator[None]:
    """Put the file into errors that don't name it yet."""
    try:
        yield
    except CheckpointError as error:
        if str(file) in str(error):
            raise
        raise CheckpointError(f"checkpoint {file}: {error}") from error


def model_config(values: Values, vocab_size: int) -> ModelConfig:
    """The configuration but for `rope_factors`: its sizes aren't checked against the weights yet.

    Raises:
        CheckpointError: naming the value that is missing or can't be meant.
    """
    dim, n_heads = values.integer("hidden_size"), values.integer("num_attention_heads")
    if "head_dim" not in values.values and dim % n_heads:
        values.refuse("hidden_size", f"a multiple of num_attention_heads ({n_heads}) where head_dim is missing")
    with _naming(values.file):
        return ModelConfig(
            dim=dim,
            n_layers=values.integer("num_hidden_layers"),
            n_heads=n_heads,
            n_kv_heads=values.integer("num_key_value_heads", n_heads),
            head_dim=values.integer("head_dim", dim // n_heads),
            hidden_dim=values.integer("intermediate_size"),
            vocab_size=vocab_size,
            max_seq_len=values.integer("max_position_embeddings", 2048),
            norm_eps=values.number("rms_norm_eps", 1e-6),
            rope_theta=rope_values(values).number("rope_theta", values.number("rope_theta", 10000.0)),
            tied_output=values.flag("tie_word_embeddings"),
        )


def rope_factors(values: Values, config: ModelConfig) -> tuple[float, ...] | None:
    """The rotary factors for `config`, whose head size is known to be true (as many are made)."""
    rope = rope_values(values)
    kind = rope.values.get("rope_type", rope.values.get("type", "default"))
    if kind == "default":
        return None
    with _naming(values.file):
        if kind == "linear":
            return linear_factors(config.head_dim, rope.number("factor"))
        # the order is transformers' own
        original = values if "original_max_position_embeddings" in values.values else rope
        return llama3_factors(
            config.head_dim,
            config.rope_theta,
            factor=rope.number("factor"),
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
            original_max_seq_len=original.integer("original_max_position_embeddings", config.max_seq_len),
        )

"""The `handler:` section of model-config.yaml as a typed object; every mistake in it is told at once."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError

from handler.requests.messages import limited, mistakes, shorten

# The keys of the reference example's configuration, and the names requests use.
ALIASES = {
    "converted_ckpt_dir": "checkpoint",
    "tokenizer_path": "tokenizer",
    "model_args_path": "model_args",
    "max_new_tokens": "max_gen_len",
    "max_batch_size": "max_seqs",
    "manual_seed": "seed",
    "model_name": "served_model_name",
}
FOREIGN = {"ckpt_dir": "checkpoint", "model_path": "checkpoint", "max_tokens": "max_gen_len"}
_UNITS = {"": 1, "B": 1} | {
    prefix + suffix: base**power
    for power, prefix in enumerate("KMGT", start=1)
    for suffix, base in (("B", 1000), ("iB", 1024))
}
_BOOL = "true or false"
_SECONDS = "a number of seconds"


class SettingsError(RuntimeError):
    """The configuration can't be used; one line per mistake: key, value, what is allowed.

    A RuntimeError because TorchServe reports only that and MemoryError while a model loads.
    """


def parse_bytes(value: Any) -> int:
    """A size like "2GiB", "512MB" or a number of bytes, in bytes.

    Raises:
        ValueError: with the value and the forms allowed.
    """
    match = re.fullmatch(r"(\d{1,18}(?:\.\d{1,18})?)\s*([A-Za-z]*)", value.strip()) if isinstance(value, str) else None
    if isinstance(value, int) and not isinstance(value, bool):
        size = value
    elif match and match[2] in _UNITS:
        size = int(float(match[1]) * _UNITS[match[2]])
    else:
        size = 0
    if size < 1:
        raise ValueError(f' is {shorten(value)}, expected a size like "2GiB" or "512MB", or a number of bytes above 0')
    return size


def _count(default: int | None, low: int = 1) -> Any:
    return limited(default, low, what="an integer")


class HandlerSettings(BaseModel):
    """What the handler needs to know to load a model and serve it. Made by `load_settings`."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True, protected_namespaces=())

    # ---- the model
    checkpoint: Path = Field(description="a checkpoint file or directory, absolute or inside the archive")
    tokenizer: Path | None = Field(None, description="a tokenizer file, absolute or inside the archive")
    model_args: Path | None = Field(None, description="a params.json, absolute or inside the archive")
    device: str = Field("auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$", description="'auto', 'cpu' or 'cuda'")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="'auto', 'float32', 'bfloat16' or 'float16'"
    )
    quantization: Literal["none", "int8", "int4"] = Field("none", description="'none', 'int8' or 'int4'")
    """What the matrices are kept and multiplied in; on a CPU only."""
    max_seq_len: int | None = _count(None, low=2)
    """Most tokens of prompt and answer together; the model's own limit where absent."""
    chat_format: Literal["auto", "llama2", "template"] = Field("auto", description="'auto', 'llama2' or 'template'")

    # ---- the engine
    kv_cache_memory: Annotated[int | None, PlainValidator(parse_bytes)] = None
    """Bytes, per rank."""
    kv_cache_tokens: int | None = _count(None)
    prefill_chunk: int = _count(512)
    """Most prompt tokens computed in one step."""
    prefix_cache: bool = Field(True, description=_BOOL)
    speculation: Literal["prompt_lookup", "none"] = Field("prompt_lookup", description="'prompt_lookup' or 'none'")
    """Whether answers that repeat themselves or the prompt are computed several tokens at a time, where that pays."""
    max_seqs: int = _count(256)
    """Most sequences in one step."""
    step_timeout: float = Field(120.0, gt=0, description=f"{_SECONDS} above 0")
    """Seconds without a finished step, while work is waiting, after which the worker is restarted."""

    # ---- requests: what holds where a request says nothing
    mode: Literal["text_completion", "chat"] = Field("text_completion", description="'text_completion' or 'chat'")
    """What a body means that is only a string."""
    max_gen_len: int | None = Field(256, ge=1, description="an integer of at least 1, or null for what fits")
    temperature: float = limited(0.6, 0, 2)
    top_p: float = limited(0.9, 0, 1)
    top_k: int = limited(0, 0, what="an integer")
    min_p: float = limited(0.0, 0, 1)
    repetition_penalty: float = Field(1.0, gt=0, le=2, description="a number above 0, at most 2")
    frequency_penalty: float = limited(0.0, -2, 2)
    presence_penalty: float = limited(0.0, -2, 2)
    seed: int | None = limited(None, -(2**63), 2**63 - 1, what="null or an integer")
    """Seed of every request that brings none: the same request then always gets the same answer."""

    # ---- requests: limits
    max_tokens_limit: int | None = _count(None)
    """Most new tokens of one choice: a larger `max_gen_len` is lowered to it, and the answer ends with "length"."""
    max_prompts: int = _count(64)
    """Most prompts times choices in one request."""
    max_waiting: int | None = _count(1024)
    """Where so many prompts and choices wait in the engine already, a further request is refused (429)."""
    request_timeout: float | None = Field(600.0, gt=0, description=f"{_SECONDS} above 0, or null for no limit")
    stream_interval: float = Field(0.05, ge=0, le=10, description=f"{_SECONDS} between 0 and 10")
    """Seconds for which new text is gathered before it is sent; 0 sends each token by itself."""
    max_reply_bytes: int = _count(6_500_000)
    """Most bytes of a reply that isn't streamed; one beyond the frontend's max_response_size would hang its client."""
    served_model_name: str | None = Field(None, min_length=1, description="a non-empty string")
    log_prompts: bool = Field(False, description=_BOOL)


def load_settings(model_yaml_config: dict[str, Any], model_dir: Path) -> HandlerSettings:
    """Check the whole model-config.yaml: the frontend's keys this handler depends on, then its own section.

    Raises:
        SettingsError: with one line for each mistake.
    """
    lines = _frontend_mistakes(model_yaml_config)
    section = model_yaml_config.get("handler")
    if not isinstance(section, dict):
        what = "is missing" if section is None else f"is {shorten(section)}"
        raise _failure([*lines, f"handler {what}, expected a section with at least the key checkpoint"])
    fields, names = _canonical(section, lines)
    for key in ("checkpoint", "tokenizer", "model_args"):
        if isinstance(fields.get(key), str) and fields[key]:
            fields[key] = model_dir / fields[key]  # an absolute path stays as it is
            if not fields[key].exists():
                lines.append(
                    f"handler.{names[key]} is {shorten(str(section[names[key]]), 200)}: {_no_file(fields[key])}"
                )
    if fields.get("kv_cache_memory") is not None and fields.get("kv_cache_tokens") is not None:
        lines.append("handler.kv_cache_memory and handler.kv_cache_tokens are both given, expected one of them")
    quantization, device = fields.get("quantization"), fields.get("device")
    if quantization in ("int8", "int4") and isinstance(device, str) and device.startswith("cuda"):
        lines.append(
            f"handler.quantization is '{quantization}', expected 'none' with device '{device}': "
            "quantized weights run on a CPU only"
        )
    try:
        settings = HandlerSettings.model_validate(fields)
    except ValidationError as error:
        found = mistakes(error, HandlerSettings, FOREIGN)
        raise _failure(lines + [f"handler.{names.get(key, key)}{text}" for key, text in found.items()]) from None
    if lines:
        raise _failure(lines)
    return settings


def _failure(lines: list[str]) -> SettingsError:
    return SettingsError("\n".join(f"model-config.yaml: {line}" for line in lines))


def _canonical(section: dict[Any, Any], lines: list[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """The section under our own names, and the name each key was written with."""
    fields: dict[str, Any] = {}
    names: dict[str, str] = {}
    for key, value in section.items():
        name = ALIASES.get(str(key), str(key))
        if name in names:
            lines.append(f"handler.{key} and handler.{names[name]} are the same key, expected one of them")
        elif value is None and name not in ("max_gen_len", "max_waiting", "request_timeout"):
            names[name] = str(key)  # `key:` with nothing after it is as good as absent
        else:
            fields[name], names[name] = value, str(key)
    for name in names.keys() - HandlerSettings.model_fields.keys():
        fields.setdefault(name, None)
    return fields, names


def _no_file(path: Path) -> str:
    parent = path.parent
    if parent.is_dir():
        return f"there is no {path.name} in {parent}, expected an existing file or directory"
    return f"there is no directory {parent}, expected an existing file or directory"


def _frontend_mistakes(config: dict[str, Any]) -> list[str]:
    """The keys TorchServe's frontend reads, as far as a wrong value would make this handler fail later."""
    lines = []
    batch = config.get("batchSize", 1)
    if not _at_least_one(batch):
        lines.append(f"batchSize is {shorten(batch)}, expected an integer of at least 1 (most requests in flight)")
    continuous = config.get("continuousBatching")
    if continuous is not True:
        found = "missing" if continuous is None else shorten(continuous)
        lines.append(f"continuousBatching is {found}, expected true: the handler is called again while it generates")
    parallel = config.get("parallelType")
    if parallel not in (None, "tp"):
        lines.append(f"parallelType is {shorten(parallel)}, expected 'tp'")
    torchrun = config.get("torchrun")
    ranks = torchrun.get("nproc-per-node", 1) if isinstance(torchrun, dict) else 1
    if torchrun is not None and not isinstance(torchrun, dict):
        lines.append(f"torchrun is {shorten(torchrun)}, expected a section with nproc-per-node")
    elif not _at_least_one(ranks):
        lines.append(f"torchrun.nproc-per-node is {shorten(ranks)}, expected an integer of at least 1 (ranks)")
    elif ranks > 1 and parallel is None:
        lines.append(f"torchrun.nproc-per-node is {ranks} but parallelType is missing, expected 'tp'")
    return lines


def _at_least_one(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1

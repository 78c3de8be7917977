"""What a serving process holds: the model, its engine's thread, and what the dialects need to know."""

from __future__ import annotations

import gc
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from generation.chat_format import chat_format_for
from generation.engine.engine import Engine, EngineSettings, agreed_cache_tokens
from generation.engine.thread import EngineThread
from generation.engine.timings import Meter
from generation.interface import Output, Request, SamplingParams
from generation.structured.grammar import Constraints
from handler.requests.encode import ServingContext
from handler.settings import HandlerSettings, load_settings
from model.kernels.linear import QUANTIZATIONS
from model.llama import Llama
from model.loader import load_model
from model.process import die_with_parent, own_cores
from model.progress import Progress, ProgressLines, loading_label

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Serving:
    """A loaded model that answers."""

    engine: Engine
    thread: EngineThread
    context: ServingContext
    started: float
    """When it was ready, by `time.monotonic()`."""


def start_serving(
    yaml_config: dict[str, Any], model_dir: Path, model_name: str, deliver: Callable[[list[Output]], None]
) -> Serving:
    """Load this rank's part of the model, compute one token to warm up, and start the engine's thread.

    Args:
        yaml_config: the whole of model-config.yaml.
        deliver: gets the engine's outputs, in the engine's thread.

    Raises:
        SettingsError, CheckpointError, CollectiveError: one line that says what to mend.
    """
    die_with_parent()  # TorchServe kills torchrun outright, which then can't end its ranks
    began = time.monotonic()
    settings = load_settings(yaml_config, model_dir)
    model, tokenizer = load_model(
        settings.checkpoint,
        device=settings.device,
        dtype=settings.dtype,
        quantization=settings.quantization,
        max_seq_len=settings.max_seq_len,
        tokenizer_path=settings.tokenizer,
        params_path=settings.model_args,
        kv_cache_tokens=settings.kv_cache_tokens,
        kv_cache_memory=settings.kv_cache_memory,
        progress=_log_progress(settings),
    )
    engine = _make_engine(model, settings)
    _warm_up(engine)
    context = ServingContext(
        tokenizer=tokenizer,
        chat_format=chat_format_for(tokenizer, settings.chat_format),
        settings=settings,
        vocab_size=model.config.vocab_size,
        max_seq_len=engine.max_seq_len,
        model_name=settings.served_model_name or model_name,
        aliases=frozenset({model_name}),
        constraints=Constraints(tokenizer, model.config.vocab_size, model.config.stop_ids),
    )
    thread = EngineThread(engine, deliver, step_timeout=settings.step_timeout, cores=_own_cores(model))
    gc.collect()
    gc.freeze()  # what is here now stays: Python needn't look through it again and again while it serves
    thread.start()
    _log_ready(engine, context.model_name, time.monotonic() - began)
    return Serving(engine, thread, context, time.monotonic())


def _make_engine(model: Llama, settings: HandlerSettings) -> Engine:
    tokens = agreed_cache_tokens(model, settings.kv_cache_tokens, settings.kv_cache_memory)
    return Engine(
        model,
        EngineSettings(
            tokens,
            max_seqs=settings.max_seqs,
            prefill_chunk=settings.prefill_chunk,
            prefix_cache=settings.prefix_cache,
            speculation=settings.speculation,
        ),
    )


def _own_cores(model: Llama) -> set[int] | None:
    """The cores of this rank's engine; None where the kernel may choose."""
    if model.device.type != "cpu":
        return None
    return own_cores(int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def _log_ready(engine: Engine, name: str, seconds: float) -> None:
    model = engine.model
    if model.comm.rank == 0:
        logger.info(
            "%s is ready after %.1f s: %s, %s, quantization %s, %d ranks over %s, context %d tokens, cache %d tokens",
            name,
            seconds,
            model.device,
            str(model.dtype).removeprefix("torch."),
            model.kind if model.kind in QUANTIZATIONS else "none",
            model.comm.world_size,
            model.comm.kind,
            engine.max_seq_len,
            engine.settings.kv_cache_tokens,
        )


def _warm_up(engine: Engine) -> None:
    """Two tokens through every rank: kernels and buffers are made now, not at the first request."""
    if engine.model.comm.rank != 0:
        engine.follow()
        return
    room = min(engine.max_seq_len - 2, 32)
    engine.submit(Request("warm-up", [0] * max(room, 1), SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)))
    while engine.busy:
        engine.step()
    engine.heartbeat(stop=True)
    engine.finished.clear()
    engine.meter = Meter()


def _log_progress(settings: HandlerSettings) -> Progress:
    """Lines in the log, from one of the ranks: they load alike."""
    shown = os.environ.get("RANK", "0") == "0"
    return ProgressLines(loading_label(settings.quantization), logger.info if shown else lambda line: None)

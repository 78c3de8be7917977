"""One measurement in a process of its own (started by `scripts.benchmark`, the engine's under torchrun).

Prints one JSON object, the last line of its output, on rank 0.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import time
from typing import Any

import torch

from generation.engine.engine import Engine, EngineSettings
from model.checkpoint import open_checkpoint
from model.config import parameter_shapes
from model.distributed.collectives import init_communicator
from model.kernels.linear import packed_kind
from model.llama import Llama
from model.loader import load_model, resolve_device, resolve_dtype
from model.memory import kv_bytes_per_token, weights_bytes
from model.process import cpu_threads, die_with_parent, own_cores
from scripts.benchmark.engine import cases_of, prompts, run_engine
from scripts.benchmark.lookup import lookup_rows
from scripts.benchmark.measure import Stream, gather_numbers, peak_rss_mb, summarize


def measure_engine(args: argparse.Namespace) -> dict[str, Any] | None:
    """The engine alone, on as many ranks as torchrun has started."""
    began = time.perf_counter()
    comm = init_communicator(resolve_device(args.device, 0))
    model, _ = load_model(
        args.checkpoint, device=args.device, dtype=args.dtype, quantization=args.quantization, comm=comm
    )
    load_s = time.perf_counter() - began
    _keep_to_own_cores(model.device)
    cases = cases_of(args.streams, args.contexts)
    tokens = max(n * (length + args.new_tokens + 16) for n, length in cases)
    engine = Engine(model, EngineSettings(kv_cache_tokens=tokens, prefix_cache=False))
    sizes = memory_sizes(model, args.quantization)
    if comm.rank != 0:
        engine.follow()
        gather_numbers(comm, [peak_rss_mb(), *sizes], model.device)
        return None
    run_engine(engine, prompts(1, cases[0][1], model.config.vocab_size), 4)
    rows = []
    for n, length in cases:
        streams = run_engine(engine, prompts(n, length, model.config.vocab_size), args.new_tokens)
        rows.append(summarize(streams, length))
    engine.heartbeat(stop=True)
    ranks = gather_numbers(comm, [peak_rss_mb(), *sizes], model.device) or []
    totals = [sum(column) for column in zip(*ranks, strict=True)]
    found = dict(zip(("peak_rss_mb", *SIZES), totals, strict=True))
    return {"rows": rows, "load_s": load_s, "dtype": str(model.dtype).removeprefix("torch."), **found}


SIZES = ("weight_bytes", "step_bytes", "kv_bytes_per_token")


def memory_sizes(model: Llama, quantization: str) -> list[float]:
    """In bytes, of this rank: its weights; what of them each step reads; the keys and values of a token."""
    place = (model.shard, model.dtype, model.device, quantization)
    # Rows of the embedding are looked up, it is not read as a whole
    step = weights_bytes(dataclasses.replace(model.config, tied_output=True), *place)
    if packed_kind(model.dtype, model.device, quantization) == "onednn":
        step -= len(model.shard.vocab) * model.config.dim * model.dtype.itemsize  # a copy to correct logits by
    return [weights_bytes(model.config, *place), step, kv_bytes_per_token(model.config, model.shard, model.dtype)]


def _keep_to_own_cores(device: torch.device) -> None:
    """As the server's engine thread does. Not earlier: a rank's threads are counted by the cores it may use."""
    if device.type == "cpu":
        cores = own_cores(int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        if cores is not None:
            os.sched_setaffinity(0, cores)


def measure_lookup(args: argparse.Namespace) -> dict[str, Any] | None:
    """Prompt lookup beside the plain engine, on as many ranks as torchrun has started."""
    comm = init_communicator(resolve_device(args.device, 0))
    model, tokenizer = load_model(
        args.checkpoint, device=args.device, dtype=args.dtype, quantization=args.quantization, comm=comm
    )
    _keep_to_own_cores(model.device)
    rows = lookup_rows(model, tokenizer, args.new_tokens)
    return {"rows": rows} if comm.rank == 0 else None


def measure_transformers(args: argparse.Namespace) -> dict[str, Any]:
    """transformers' `generate` on the whole batch at once."""
    device = resolve_device(args.device, 0)
    if device.type == "cpu":
        torch.set_num_threads(cpu_threads(1))
    from scripts.benchmark.peers.peer import transformers_model  # needs a package that the engine doesn't

    source = open_checkpoint(args.checkpoint)
    config = source.config
    model = transformers_model(config, {name: source.read(name) for name in parameter_shapes(config)})
    model = model.to(device, resolve_dtype(args.dtype, device))
    rows = []
    for n, length in cases_of(args.streams, args.contexts):
        ids = torch.tensor(prompts(n, length, config.vocab_size), device=device)
        _generate(model, ids[:1], 2)
        rows.append(summarize(_generate(model, ids, args.new_tokens), length))
    return {"rows": rows}


@torch.inference_mode()
def _generate(model: Any, ids: torch.Tensor, new_tokens: int) -> list[Stream]:
    """All prompts in one batch; a token of each comes with every step."""
    streams = [Stream(time.perf_counter()) for _ in ids]

    def note(sequences: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        """A stopping criterion, as such is called after every step; it never stops."""
        now = time.perf_counter()
        for stream in streams:
            stream.add(now, 1)
        return torch.zeros(len(sequences), dtype=torch.bool, device=sequences.device)

    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=False,
        pad_token_id=0,
        stopping_criteria=[note],
    )
    return streams


MEASURES = {"engine": measure_engine, "lookup": measure_lookup, "transformers": measure_transformers}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=list(MEASURES))
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--streams", type=int, nargs="+", required=True)
    parser.add_argument("--contexts", type=int, nargs="+", required=True, help="tokens of each prompt")
    parser.add_argument("--new-tokens", type=int, required=True)
    args = parser.parse_args()
    die_with_parent()
    result = MEASURES[args.what](args)
    if result is not None:
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()

"""One measurement in a process of its own (started by `scripts.benchmark`, the engine's under torchrun).

Prints one JSON object, the last line of its output, on rank 0.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from typing import Any

import torch

from generation.engine import Engine, EngineSettings
from generation.types import Request, SamplingParams
from model.checkpoint import open_checkpoint
from model.collectives import init_communicator
from model.config import parameter_shapes
from model.loader import load_model, resolve_device, resolve_dtype
from model.process import cpu_threads, die_with_parent

from .measure import Stream, gather_numbers, peak_rss_mb, summarize
from .peers import transformers_model


def prompts(streams: int, length: int, vocabulary: int) -> list[list[int]]:
    """Random ids, the same for every program that is measured; for each number of streams others."""
    rng = random.Random(streams)
    return [[rng.randrange(3, vocabulary) for _ in range(length)] for _ in range(streams)]


def measure_engine(args: argparse.Namespace) -> dict[str, Any] | None:
    """The engine alone, on as many ranks as torchrun has started."""
    began = time.perf_counter()
    comm = init_communicator(resolve_device(args.device, 0))
    model, _ = load_model(args.checkpoint, device=args.device, dtype=args.dtype, comm=comm)
    load_s = time.perf_counter() - began
    tokens = max(args.streams) * (args.prompt_tokens + args.new_tokens + 16)
    engine = Engine(model, EngineSettings(kv_cache_tokens=tokens, prefix_cache=False))
    if comm.rank != 0:
        engine.follow()
        gather_numbers(comm, [peak_rss_mb()], model.device)
        return None
    run_engine(engine, prompts(1, args.prompt_tokens, model.config.vocab_size), 4)
    rows = []
    for n in args.streams:
        streams = run_engine(engine, prompts(n, args.prompt_tokens, model.config.vocab_size), args.new_tokens)
        rows.append(summarize(streams, args.prompt_tokens))
    engine.heartbeat(stop=True)
    dtype = str(model.dtype).removeprefix("torch.")
    peaks = gather_numbers(comm, [peak_rss_mb()], model.device) or []
    return {"rows": rows, "load_s": load_s, "peak_rss_mb": sum(row[0] for row in peaks), "dtype": dtype}


def run_engine(engine: Engine, asked: list[list[int]], new_tokens: int) -> list[Stream]:
    params = SamplingParams(max_tokens=new_tokens, temperature=0, ignore_eos=True)
    start = time.perf_counter()
    streams = {str(i): Stream(start) for i in range(len(asked))}
    for i, prompt in enumerate(asked):
        engine.submit(Request(str(i), prompt, params))
    while engine.busy:
        outputs = engine.step()
        now = time.perf_counter()
        for output in outputs:
            streams[output.request_id].add(now, len(output.token_ids))
    return list(streams.values())


def measure_transformers(args: argparse.Namespace) -> dict[str, Any]:
    """transformers' `generate` on the whole batch at once."""
    device = resolve_device(args.device, 0)
    if device.type == "cpu":
        torch.set_num_threads(cpu_threads(1))
    source = open_checkpoint(args.checkpoint)
    config = source.config
    model = transformers_model(config, {name: source.read(name) for name in parameter_shapes(config)})
    model = model.to(device, resolve_dtype(args.dtype, device))
    rows = []
    for n in args.streams:
        ids = torch.tensor(prompts(n, args.prompt_tokens, config.vocab_size), device=device)
        _generate(model, ids[:1], 2)
        first = _generate(model, ids, 1)
        whole = _generate(model, ids, args.new_tokens)
        rate = n * (args.new_tokens - 1) / (whole - first)
        row = {"streams": n, "prompt_tokens": args.prompt_tokens, "decode_tok_s": rate}
        rows.append(row | {"prefill_tok_s": n * args.prompt_tokens / first})
    return {"rows": rows}


@torch.inference_mode()
def _generate(model: Any, ids: torch.Tensor, new_tokens: int) -> float:
    """Seconds that it took."""
    start = time.perf_counter()
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=False,
        pad_token_id=0,
    )
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["engine", "transformers"])
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--streams", type=int, nargs="+", required=True)
    parser.add_argument("--prompt-tokens", type=int, required=True)
    parser.add_argument("--new-tokens", type=int, required=True)
    args = parser.parse_args()
    die_with_parent()
    result = measure_engine(args) if args.what == "engine" else measure_transformers(args)
    if result is not None:
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()

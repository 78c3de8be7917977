"""Where the time of one engine step goes: linear layers, attention, norms, waiting for the other ranks, Python.

    python -m scripts.benchmark.profile_step --rows 1 8 32
    torchrun --nproc-per-node 2 -m scripts.benchmark.profile_step --rows 1 8 32

Every part is timed by itself on each rank, in milliseconds per step; the medians over the steps are printed. The timing
adds about a microsecond to every call.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import generation.engine
from generation.engine.engine import Engine, EngineSettings
from generation.interface import Request, SamplingParams
from model.distributed.collectives import init_communicator
from model.loader import load_model, resolve_device
from scripts.benchmark.engine import prompts
from scripts.fetch_demo_model import fetch

KERNELS = ("add_norm", "rotate_and_store", "decode", "prefill", "silu_multiply", "sharpen")
COLLECTIVES = ("all_reduce", "gather", "broadcast_array")


class Parts:
    """Seconds spent in each part of the current step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def time(self, owner: Any, name: str, label: str | None = None) -> None:
        """Count the time of `owner.name` from now on."""
        setattr(owner, name, self.timed(getattr(owner, name), label or name))

    def timed(self, function: Callable[..., Any], label: str) -> Callable[..., Any]:
        @functools.wraps(function, updated=())
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[label] += time.perf_counter() - began

        return wrapper


def watch(engine: Engine, parts: Parts) -> None:
    """Time the parts of `engine`'s steps."""
    model = engine.model
    for name in KERNELS:
        parts.time(model.kernels, name)
    for name in COLLECTIVES:
        parts.time(model.comm, name)
    for layer in model.layers:
        for owner, names in ((layer.attention, ("wqkv", "wo")), (layer.feed_forward, ("w13", "w2"))):
            for name in names:
                setattr(owner, name, parts.timed(getattr(owner, name), name))
    if model.native is not None:
        setattr(model, "native", parts.timed(model.native, "all layers, native"))  # noqa: B010
    setattr(model, "output", parts.timed(model.output, "output"))  # noqa: B010 - its type is another
    parts.time(model, "_embed", "embedding")
    parts.time(generation.engine.engine, "make_batch")
    parts.time(generation.engine.engine, "sample")
    parts.time(engine, "_commit", "commit, sampling in it")
    parts.time(engine.scheduler, "plan")


def profile(engine: Engine, rows: int, context: int, steps: int) -> None:
    """Decode `rows` sequences of `context` tokens for `steps` steps, on rank 0."""
    params = SamplingParams(max_tokens=steps + 1, temperature=0, ignore_eos=True)
    for i, prompt in enumerate(prompts(rows, context, engine.model.config.vocab_size)):
        engine.submit(Request(f"{rows}/{i}", prompt, params))
    while engine.busy:
        engine.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", help="a checkpoint; default: the demo model")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32], help="sequences that decode at a time")
    parser.add_argument("--context", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    comm = init_communicator(resolve_device("auto", 0))
    checkpoint = args.checkpoint or fetch()
    model, _ = load_model(checkpoint, dtype=args.dtype, quantization=args.quantization, comm=comm)
    tokens = max(args.rows) * (args.context + args.steps + 32)
    engine = Engine(model, EngineSettings(kv_cache_tokens=tokens, prefix_cache=False, max_seqs=max(args.rows)))
    parts, steps = Parts(), []
    watch(engine, parts)
    compute = engine._compute

    def step(plan: Any) -> Any:
        began = time.perf_counter()
        logits = compute(plan)
        steps.append((len(plan.tokens), time.perf_counter(), dict(parts.seconds), time.perf_counter() - began))
        parts.seconds.clear()
        return logits

    engine._compute = step  # type: ignore[method-assign]
    if comm.rank == 0:
        for rows in args.rows:
            profile(engine, rows, args.context, args.steps)
        engine.heartbeat(stop=True)
    else:
        engine.follow()
    for rows in args.rows:
        print(json.dumps({"rank": comm.rank, "rows": rows, "ms": summary(steps, rows)}), flush=True)


def summary(steps: list[tuple[int, float, dict[str, float], float]], rows: int) -> dict[str, float]:
    """Medians over the decode steps of `rows` rows, largest first; "step" is from one step's end to the next one's."""
    found = [
        {**parts, "forward": forward, "step": ended - steps[i][1]}
        for i, (count, ended, parts, forward) in enumerate(steps[1:])
        if count == rows == steps[i][0]
    ]
    names = {name for parts in found for name in parts}
    medians = {name: statistics.median(parts.get(name, 0.0) for parts in found) * 1000 for name in names}
    return {name: round(ms, 3) for name, ms in sorted(medians.items(), key=lambda item: -item[1])}


if __name__ == "__main__":
    main()

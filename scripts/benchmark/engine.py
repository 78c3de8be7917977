"""The engine with a clock, for the benchmark's parts and the profile."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable

from generation.engine.engine import Engine
from generation.interface import Request, SamplingParams
from scripts.benchmark.measure import Stream


def prompts(streams: int, length: int, vocabulary: int) -> list[list[int]]:
    """Random ids, the same for every program that is measured; for each number of streams others."""
    rng = random.Random(streams)
    return [[rng.randrange(3, vocabulary) for _ in range(length)] for _ in range(streams)]


def cases_of(streams: Iterable[int], contexts: Iterable[int]) -> list[tuple[int, int]]:
    """(streams, prompt tokens) of each measurement, in the order in which every program makes them."""
    return [(n, length) for length in contexts for n in streams]


def run_engine(engine: Engine, asked: list[list[int]], new_tokens: int, ids: list[int] | None = None) -> list[Stream]:
    """Greedy answers to all prompts at once; `ids` gets the first one's tokens."""
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
            if ids is not None and output.request_id == "0":
                ids += output.token_ids
    return list(streams.values())

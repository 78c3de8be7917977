"""Measures vLLM; run by the Python of its own environment, so it imports nothing of this project.

Input and output are those of `run_llama_cpp.py`, with "dtype" and "kv_bytes" (of all prompts and answers) in the job.
The engine's steps run in this process, one after the other, as this project's are measured: no server, no texts.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from typing import Any


def configure(job: dict[str, Any]) -> None:
    """vLLM reads these when it is imported."""
    cores = sorted(os.sched_getaffinity(0))[: job["threads"]]
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(str(core) for core in cores)
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(int(job["kv_bytes"] * 1.25) // 2**30 + 1)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    os.environ["HF_HUB_OFFLINE"] = "1"


def make_engine(job: dict[str, Any]) -> Any:
    vllm: Any = importlib.import_module("vllm")
    longest = max(len(prompt) for case in job["cases"] for prompt in case)
    model = vllm.LLM(
        job["model"],
        dtype=job["dtype"],
        max_model_len=longest + job["new_tokens"] + 16,
        max_num_seqs=max(len(case) for case in job["cases"]),
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        disable_log_stats=True,
    )
    return model.llm_engine


def run(engine: Any, prompts: list[list[int]], new_tokens: int, name: str) -> list[Any]:
    """All prompts at once; `name` tells their requests from those of other runs."""
    vllm: Any = importlib.import_module("vllm")
    kinds: Any = importlib.import_module("vllm.sampling_params").RequestOutputKind
    params = vllm.SamplingParams(
        temperature=0,
        max_tokens=new_tokens,
        ignore_eos=True,
        detokenize=False,
        output_kind=kinds.DELTA,
    )
    start = time.perf_counter()
    streams: dict[str, dict[str, Any]] = {f"{name}/{i}": {"start": start, "arrivals": []} for i in range(len(prompts))}
    for key, prompt in zip(streams, prompts, strict=True):
        engine.add_request(key, {"prompt_token_ids": prompt}, params)
    while engine.has_unfinished_requests():
        outputs = engine.step()
        now = time.perf_counter()
        for output in outputs:
            count = len(output.outputs[0].token_ids)
            if count:
                streams[output.request_id]["arrivals"].append([now, count])
    return list(streams.values())


def main() -> None:
    job = json.load(sys.stdin)
    configure(job)
    engine = make_engine(job)
    run(engine, job["cases"][0][:1], 4, "warm")
    cases = [run(engine, case, job["new_tokens"], str(i)) for i, case in enumerate(job["cases"])]
    print(json.dumps({"cases": cases}), flush=True)


if __name__ == "__main__":
    main()

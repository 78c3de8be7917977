"""Measures llama.cpp; run by the Python of its own environment, so it imports nothing of this project.

Reads one JSON object from standard input: {"model", "threads", "new_tokens", "cases": [[prompt ids, ...], ...]}. Prints
one as its last line: {"cases": [[{"start", "arrivals": [[time, tokens], ...]}, ...], ...]}, times in seconds.
The library runs llama.cpp's own server in this process: its slots, its continuous batching, without HTTP.
"""

from __future__ import annotations

import importlib
import json
import sys
import threading
import time
from typing import Any


def make_server(job: dict[str, Any]) -> Any:
    """A slot for each stream; nothing is kept from one prompt for the next."""
    xllamacpp: Any = importlib.import_module("xllamacpp")
    slots = max(len(case) for case in job["cases"])
    longest = max(len(prompt) for case in job["cases"] for prompt in case)
    params = xllamacpp.CommonParams()
    params.model.path = job["model"]
    params.n_parallel = slots
    params.n_ctx = slots * (longest + job["new_tokens"] + 16)
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = job["threads"]
    params.cont_batching = params.warmup = True
    params.cache_prompt = params.fit_params = False
    params.cache_ram_mib = params.n_ctx_checkpoints = 0
    params.verbosity = 1
    return xllamacpp.Server(params)


def follow(server: Any, prompt: list[int], new_tokens: int, stream: dict[str, Any]) -> None:
    """Fill `stream` with the arrivals of one answer."""
    events: list[Any] = []
    body = {"prompt": prompt, "max_tokens": new_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    body.update(cache_prompt=False, timings_per_token=True)
    server.handle_completions(body, lambda event: events.append((time.perf_counter(), event)))
    told = 0
    for now, event in events:
        if "error" in event:
            raise RuntimeError(event["error"].get("message", str(event["error"])))
        count = event.get("timings", {}).get("predicted_n", told)
        if count > told:
            stream["arrivals"].append([now, count - told])
            told = count
    if told != new_tokens:
        raise RuntimeError(f"asked for {new_tokens} tokens, got {told}")


def ask(server: Any, prompts: list[list[int]], new_tokens: int) -> list[Any]:
    """All prompts at once."""
    start = time.perf_counter()
    streams: list[dict[str, Any]] = [{"start": start, "arrivals": []} for _ in prompts]
    errors: list[Exception] = []

    def client(prompt: list[int], stream: dict[str, Any]) -> None:
        try:
            follow(server, prompt, new_tokens, stream)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=client, args=pair) for pair in zip(prompts, streams, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return streams


def main() -> None:
    job = json.load(sys.stdin)
    server = make_server(job)
    ask(server, job["cases"][0][:1], 4)
    print(json.dumps({"cases": [ask(server, case, job["new_tokens"]) for case in job["cases"]]}), flush=True)


if __name__ == "__main__":
    main()

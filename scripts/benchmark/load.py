"""How long a checkpoint takes from the start of loading to the first token, and in how much memory.

    python -m scripts.benchmark.load build/tinyllama
    torchrun --nproc-per-node 2 -m scripts.benchmark.load build/tinyllama

Prints one JSON object: seconds of each part on rank 0; the rates of loading and of only reading the files into memory,
by one rank; and per rank the memory, at its peak while weights were loaded, and what the weights need.
`memory_ratio` is the largest quotient of the two. Files are in the system's cache once they were read.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from generation.engine.engine import Engine, EngineSettings
from generation.interface import Request, SamplingParams
from model.checkpoint import Checkpoint, open_checkpoint
from model.distributed.collectives import init_communicator
from model.llama import Llama
from model.loader import load_weights, resolve_device, resolve_dtype
from model.memory import weights_bytes
from model.process import cpu_threads, die_with_parent
from scripts.benchmark.measure import gather_numbers

WEIGHT_FILES = (".pth", ".gguf", ".safetensors")
CHUNK = 64 << 20


def resident_bytes() -> int:
    """Memory of this process, pages of mapped files included."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("the kernel doesn't tell VmRSS")


class Peak:
    """The most of `resident_bytes`, looked at every few milliseconds while the block runs."""

    def __enter__(self) -> Peak:
        self.bytes = resident_bytes()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._done.wait(0.005):
            self.bytes = max(self.bytes, resident_bytes())

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()


def read_files(path: Path) -> tuple[int, float]:
    """(bytes, seconds) of reading all weights from one end to the other into memory that holds them all."""
    files = [path] if path.is_file() else sorted(file for file in path.iterdir() if file.suffix in WEIGHT_FILES)
    start = time.perf_counter()
    memory = memoryview(torch.empty(sum(file.stat().st_size for file in files), dtype=torch.uint8).numpy().data)
    done = 0
    for name in files:
        with name.open("rb", buffering=0) as file:
            while count := file.readinto(memory[done : done + CHUNK]):
                done += count
    return done, time.perf_counter() - start


def measure(path: Path, device: str, dtype: str) -> dict[str, Any] | None:
    """All figures, on rank 0."""
    seconds: dict[str, float] = {}

    @contextmanager
    def timed(name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        seconds[name] = round(time.perf_counter() - start, 3)

    comm = init_communicator(resolve_device(device, 0))
    chosen = resolve_device(device, comm.rank)
    chosen_dtype = resolve_dtype(dtype, chosen)
    if chosen.type == "cpu":
        torch.set_num_threads(cpu_threads(comm.world_size))
    n_bytes, reading = read_files(path) if comm.rank == 0 else (0, 0.0)
    comm.barrier()
    start = time.perf_counter()
    with timed("header"):
        source: Checkpoint = open_checkpoint(path)
    with timed("tokenizer"):
        source.tokenizer()
    before = resident_bytes()
    with timed("model"):
        model = Llama(source.config, comm, chosen_dtype, chosen, min(source.config.max_seq_len, 2048))
    with timed("weights"), Peak() as peak:
        load_weights(model, source)
    source.close()
    comm.barrier()
    with timed("first token"):
        _first_token(model)
    whole = time.perf_counter() - start
    needed = weights_bytes(model.config, model.shard, chosen_dtype, chosen)
    memory = gather_numbers(comm, [(peak.bytes - before) / 2**20, needed / 2**20], chosen)
    if memory is None:
        return None
    return {
        "checkpoint": str(path),
        "dtype": str(chosen_dtype).removeprefix("torch."),
        "ranks": comm.world_size,
        "seconds": seconds | {"all": round(whole, 3)},
        "file_bytes": n_bytes,
        "read_gb_s": round(n_bytes / reading / 1e9, 2),
        "load_gb_s": round(n_bytes / seconds["weights"] / 1e9, 2),
        "peak_mb": [round(row[0]) for row in memory],
        "needed_mb": [round(row[1]) for row in memory],
        "memory_ratio": round(max(row[0] / row[1] for row in memory), 3),
    }


def _first_token(model: Llama) -> None:
    engine = Engine(model, EngineSettings(kv_cache_tokens=1024))
    if model.comm.rank != 0:
        engine.follow()
        return
    engine.submit(Request("first", [5, 6, 7], SamplingParams(max_tokens=1, temperature=0)))
    while engine.busy:
        engine.step()
    engine.heartbeat(stop=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    args = parser.parse_args()
    die_with_parent()
    result = measure(args.checkpoint, args.device, args.dtype)
    if result is not None:
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()

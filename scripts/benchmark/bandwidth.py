"""How fast this machine reads memory: `python -m scripts.benchmark.bandwidth` prints GB/s.

Every thread reads memory of its own from one end to the other, far more than the caches hold. A decoded token needs all
weights once, so this bounds the tokens/s of one stream.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from model.process import usable_cores

BYTES = 256 << 20
"""Read by each thread in one pass."""
PASSES = 40
_SOURCE = r"""
#include <stddef.h>
#include <stdint.h>
uint64_t sum(const uint64_t *words, size_t count) {
    uint64_t total[32] = {0};
    for (size_t i = 0; i + 32 <= count; i += 32) {
        for (int line = 0; line < 4; line++)
            __builtin_prefetch(words + i + 256 + 8 * line);
        for (int lane = 0; lane < 32; lane++)
            total[lane] += words[i + lane];
    }
    for (int lane = 1; lane < 32; lane++)
        total[0] += total[lane];
    return total[0];
}
"""

Reader = Callable[[np.ndarray], int]
"""Reads all of (N,) uint64 and gives the sum."""


def compiled_reader() -> Reader | None:
    """A reader in C; None where no compiler makes one."""
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "read.so"
        command = [compiler, "-x", "c", "-O3", "-march=native", "-fPIC", "-shared", "-o", str(library), "-"]
        done = subprocess.run(command, input=_SOURCE, capture_output=True, text=True, check=False)
        if done.returncode:
            return None
        function = ctypes.CDLL(str(library)).sum
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    function.restype = ctypes.c_uint64
    return lambda words: int(function(words.ctypes.data, len(words)))


def numpy_reader(words: np.ndarray) -> int:
    return int(words.sum())


def read_gb_s(threads: int | None = None, n_bytes: int = BYTES, passes: int = PASSES) -> float:
    """The best of several passes, in GB/s (10^9 bytes), all threads together.

    Args:
        threads: how many read at once; None = one for each core.
        n_bytes: what each reads in a pass.
    """
    reader = compiled_reader() or numpy_reader
    threads = threads or usable_cores()
    words = n_bytes // 256 * 32
    parts = [np.full(words, i + 1, dtype=np.uint64) for i in range(threads)]
    best = float("inf")
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(passes):
            start = time.perf_counter()
            sums = list(pool.map(reader, parts))  # ctypes and numpy let go of Python's lock
            best = min(best, time.perf_counter() - start)
            if sums != [words * (i + 1) for i in range(threads)]:
                raise RuntimeError(f"memory reads back as other values: {sums}")
    return threads * words * 8 / best / 1e9


if __name__ == "__main__":
    print(f"{read_gb_s():.1f} GB/s")

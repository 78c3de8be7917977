"""A limit on memory, under which only what is really needed can be had."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator

import psutil


@contextlib.contextmanager
def little_memory(room: int = 256 << 20) -> Iterator[None]:
    """Let the process map `room` more bytes than now and no more: to ask for a bogus size is a `MemoryError`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + room, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))

"""Collectives between the ranks of one CPU host: a memory segment and the native code of `native/collectives.c`.

A call for a few kilobytes costs about a microsecond, where gloo takes hundreds (two calls per layer and token).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import torch

from model.distributed.collectives import CollectiveError, Communicator, check_array, check_gather, check_reducible
from model.kernels.build import NativeBuildError, load_library
from model.process import usable_cores

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_MOST_SEGMENT_BYTES = 32 << 20
_MOST_SLOT_BYTES, _LEAST_SLOT_BYTES = 1 << 20, 64 << 10
_SPIN_S = 30e-6
_SLICE_S = 0.25
"""An idle wait returns to Python this often, so that signal handlers can run."""
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_DIED, _CLOSED, _TIMED_OUT, _NOT_YET = 1, 2, 3, 4
"""Numbers of `enum dtype` and `enum failure` in collectives.c."""
_OPERATIONS: dict[str, tuple[Any, ...]] = {
    "coll_all_reduce": (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int),
    "coll_gather": (ctypes.c_void_p, ctypes.c_int64, ctypes.POINTER(ctypes.c_int64), ctypes.c_void_p),
    "coll_send": (ctypes.c_void_p, ctypes.c_int64),
    "coll_expect": (ctypes.c_int, ctypes.c_double, ctypes.POINTER(ctypes.c_int64)),
    "coll_receive": (ctypes.c_void_p, ctypes.c_int64),
    "coll_barrier": (),
}
"""Arguments of the functions that return 0 or a failure, after the communicator."""
T = TypeVar("T")


class SharedMemoryUnavailable(RuntimeError):
    """The ranks can't use shared memory; the message says why. Raised on every rank or on none."""


class SharedMemoryCommunicator(Communicator):
    """One rank's end of a segment that all ranks have opened. For one thread at a time, except `close`."""

    kind = "shared-memory"

    def __init__(self, library: ctypes.CDLL, file: int, rank: int, world_size: int, timeout_s: float) -> None:
        """Take over the open file `file` of a segment; no rank may communicate before all have come so far."""
        self.rank, self.world_size = rank, world_size
        self._timeout_s = timeout_s
        self._library = library
        self._closed = False
        # Unmapped when this object goes, not by close(): another thread may still be waiting in native code.
        self._memory = mmap.mmap(file, segment_bytes(library, world_size))
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        # With fewer cores than ranks, spinning only keeps the awaited rank from its core.
        spin_s = _SPIN_S if usable_cores() >= world_size else 0.0
        handle = library.coll_open(start, rank, world_size, slot_bytes(world_size), file, spin_s, timeout_s)
        if not handle:
            raise SharedMemoryUnavailable(f"rank {rank} can't lock its byte of the segment")
        self.handle = ctypes.c_void_p(handle)
        """The native communicator; gone with this object."""
        release = weakref.finalize(self, _release, library, self.handle, file, self._memory)
        release.atexit = False  # a daemon thread may still be waiting then; the kernel cleans up

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        check_reducible(x)
        if x.device.type != "cpu":
            raise ValueError(f"all_reduce over shared memory got a tensor on {x.device}, expected one on the CPU")
        self.check(self._call("coll_all_reduce", x.data_ptr(), x.numel(), _DTYPES[x.dtype]), "all_reduce")
        return x

    def gather(self, x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor | None:
        check_gather(x, sizes, self.rank, self.world_size)
        x = x.contiguous()
        row_bytes = (ctypes.c_int64 * self.world_size)(*(size * x.element_size() for size in sizes))
        out = x.new_empty(x.shape[0], sum(sizes)) if self.rank == 0 else None
        pointer = None if out is None else out.data_ptr()
        self.check(self._call("coll_gather", x.data_ptr(), x.shape[0], row_bytes, pointer), "gather")
        return out

    def broadcast_array(self, data: np.ndarray | None) -> np.ndarray:
        data = check_array(data, self.rank)
        if data is not None:
            self.check(self._call("coll_send", data.ctypes.data, data.nbytes), "broadcast_array")
            return data
        self._call("coll_arrive")
        size = ctypes.c_int64()
        result = self._call("coll_expect", 1, _SLICE_S, ctypes.byref(size))
        while result >> 8 == _NOT_YET:
            result = self._call("coll_expect", 0, _SLICE_S, ctypes.byref(size))
        self.check(result, "broadcast_array")
        data = np.empty(size.value // 4, dtype=np.int32)
        self.check(self._call("coll_receive", data.ctypes.data, data.nbytes), "broadcast_array")
        return data

    def barrier(self) -> None:
        self.check(self._call("coll_barrier"), "barrier")

    def close(self) -> None:
        self._closed = True
        self._library.coll_close(self.handle)

    def _call(self, name: str, *args: Any) -> int:
        if self._closed:
            raise CollectiveError(f"rank {self.rank}: this communicator is closed")
        result = getattr(self._library, name)(self.handle, *args)
        return 0 if result is None else int(result)

    def check(self, result: int, operation: str) -> None:
        """Close and raise CollectiveError where a native call returned a failure."""
        if result == 0:
            return
        self.close()  # the ranks are out of step now: nobody shall wait for this one
        reason, peer = result >> 8, result & 0xFF
        what = {
            _DIED: f"the process of rank {peer} died",
            _CLOSED: f"rank {peer} closed its communicator",
            _TIMED_OUT: f"rank {peer} did not come within {self._timeout_s:g} s",
        }[reason]
        raise CollectiveError(f"{operation} on rank {self.rank} of {self.world_size}: {what}")


def _release(library: ctypes.CDLL, handle: ctypes.c_void_p, file: int, _memory: mmap.mmap) -> None:
    """What goes with a communicator; the arguments, its memory too, are kept until now."""
    library.coll_close(handle)
    library.coll_free(handle)
    os.close(file)


def slot_bytes(world_size: int) -> int:
    """Size of one of a rank's two slots: the largest piece that travels in one turn."""
    fair = _MOST_SEGMENT_BYTES // (2 * world_size) // 4096 * 4096
    return max(_LEAST_SLOT_BYTES, min(_MOST_SLOT_BYTES, fair))


def segment_bytes(library: ctypes.CDLL, world_size: int) -> int:
    return int(library.coll_segment_bytes(world_size, slot_bytes(world_size)))


def connect(
    store: Store, rank: int, world_size: int, local_world_size: int, timeout_s: float
) -> SharedMemoryCommunicator:
    """Connect all ranks through a new segment. Whether it works is agreed through `store`.

    The segment's file has no name, so that none is left over, however a rank ends; the others open rank 0's descriptor.

    Raises:
        SharedMemoryUnavailable: on every rank, with the same reason, if any rank can't take part.
    """
    if rank > 0:
        store.wait(["library/0"], timedelta(seconds=timeout_s))  # rank 0 compiles, the others find it in the cache
    library = _agree(store, "library", rank, world_size, lambda: _library(world_size, local_world_size))
    size = segment_bytes(library, world_size)
    created = _agree(store, "created", rank, world_size, lambda: _create(store, rank, size))

    def enter() -> SharedMemoryCommunicator:
        file = created if rank == 0 else os.open(store.get("segment").decode(), os.O_RDWR | os.O_CLOEXEC)
        try:
            return SharedMemoryCommunicator(library, file, rank, world_size, timeout_s)
        except BaseException:
            os.close(file)
            raise

    return _agree(store, "entered", rank, world_size, enter)


def _library(world_size: int, local_world_size: int) -> ctypes.CDLL:
    if local_world_size != world_size:
        raise SharedMemoryUnavailable(
            f"the ranks are on several hosts (LOCAL_WORLD_SIZE {local_world_size}, WORLD_SIZE {world_size})"
        )
    if not hasattr(os, "memfd_create"):
        raise SharedMemoryUnavailable("this system has no memfd_create")
    library = load_library()
    integer, double, pointer = ctypes.c_int64, ctypes.c_double, ctypes.c_void_p
    library.coll_segment_bytes.argtypes, library.coll_segment_bytes.restype = (ctypes.c_int, integer), integer
    library.coll_open.argtypes = (pointer, ctypes.c_int, ctypes.c_int, integer, ctypes.c_int, double, double)
    library.coll_open.restype = pointer
    for name, argtypes in _OPERATIONS.items():
        function = getattr(library, name)
        function.argtypes, function.restype = (pointer, *argtypes), ctypes.c_int
    for name in ("coll_arrive", "coll_close", "coll_free"):
        function = getattr(library, name)
        function.argtypes, function.restype = (pointer,), None
    most = int(library.coll_max_ranks())
    if world_size > most:
        raise SharedMemoryUnavailable(f"WORLD_SIZE is {world_size}, shared memory is made for up to {most} ranks")
    return library


def _create(store: Store, rank: int, size: int) -> int:
    """On rank 0 a new segment's file, with memory behind every page, and its path in `store`; elsewhere -1."""
    if rank > 0:
        return -1
    file = os.memfd_create("torchserve-llama2", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(file, 0, size)
    except OSError as error:
        os.close(file)
        raise SharedMemoryUnavailable(f"no room for {size >> 20} MiB of shared memory ({error.strerror})") from None
    store.set("segment", f"/proc/{os.getpid()}/fd/{file}")
    return file


def _agree(store: Store, stage: str, rank: int, world_size: int, work: Callable[[], T]) -> T:
    """Do `work`, tell the other ranks how it went, and return its result if it went well on all of them."""
    result, reason = None, ""
    try:
        result = work()
    except (OSError, NativeBuildError, SharedMemoryUnavailable) as error:
        reason = str(error)
    store.set(f"{stage}/{rank}", f"-{reason}")
    for peer in range(world_size):
        answer = store.get(f"{stage}/{peer}").decode()[1:]
        if answer:
            raise SharedMemoryUnavailable(answer)
    return cast(T, result)

"""How tensor-parallel ranks talk: one interface, and the ways to carry it.

single         one rank, nothing to do
shared-memory  CPU ranks on one host, see shared_memory.py
gloo           CPU ranks anywhere, slow
nccl           GPUs

Sums are taken in float32 in rank order and rounded once, on every carrier and at every size, so that a token's
numbers depend neither on the rank that looks at them nor on what else is in the batch.
"""

from __future__ import annotations

import itertools
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

logger = logging.getLogger(__name__)

_SPLIT_BYTES = 256 << 10
"""From here on ranks share the work of summing, which moves fewer bytes but takes two exchanges instead of one."""
_IDLE = timedelta(days=365)
"""torch.distributed has no endless timeout; an idle server waits for its next plan for as long as it takes."""


class CollectiveError(RuntimeError):
    """The ranks can't talk (any more). Nothing more can be done with the communicator; the process should end."""


class Communicator(ABC):
    """One rank's end of a group of ranks. All ranks call the same operations in the same order."""

    rank: int
    world_size: int
    kind: Literal["single", "shared-memory", "gloo", "nccl"]

    @abstractmethod
    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum `x` (float32, bfloat16 or float16; contiguous; any shape) over the ranks, in place; returns it.

        Raises:
            CollectiveError: a rank died, closed, or didn't come in time.
            ValueError: `x` isn't such a tensor.
        """

    @abstractmethod
    def gather(self, x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor | None:
        """Put the ranks' columns side by side: (R, sizes[rank]) on each rank -> (R, sum(sizes)) on rank 0, else None.

        Raises:
            CollectiveError: as for `all_reduce`.
            ValueError: `x` and `sizes` don't agree.
        """

    @abstractmethod
    def broadcast_array(self, data: np.ndarray | None) -> np.ndarray:
        """Rank 0's int32 vector of any length, on all ranks; the others pass None. They may wait for it for hours.

        Raises:
            CollectiveError: a rank died or closed.
            ValueError: rank 0 has no int32 vector, or another rank has one.
        """

    @abstractmethod
    def barrier(self) -> None:
        """Return when all ranks have called it."""

    @abstractmethod
    def close(self) -> None:
        """Take part in nothing more. A rank that waits for this one gets a `CollectiveError` soon."""


def check_reducible(x: torch.Tensor) -> None:
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"all_reduce got {x.dtype}, expected float32, bfloat16 or float16")
    if not x.is_contiguous():
        raise ValueError(f"all_reduce got a tensor of shape {tuple(x.shape)} that isn't contiguous")


def check_gather(x: torch.Tensor, sizes: Sequence[int], rank: int, world_size: int) -> None:
    if len(sizes) != world_size:
        raise ValueError(f"gather got {len(sizes)} sizes for {world_size} ranks")
    if x.dim() != 2 or x.shape[1] != sizes[rank]:
        raise ValueError(f"gather on rank {rank} got shape {tuple(x.shape)}, expected (rows, {sizes[rank]})")


def check_array(data: np.ndarray | None, rank: int) -> np.ndarray | None:
    """Rank 0's array, contiguous; None on the others."""
    if (data is None) != (rank != 0):
        raise ValueError(f"broadcast_array on rank {rank} got {type(data).__name__}: rank 0 has the array, others None")
    if data is None:
        return None
    if data.dtype != np.int32 or data.ndim != 1:
        raise ValueError(f"broadcast_array got {data.dtype} of shape {data.shape}, expected an int32 vector")
    return np.ascontiguousarray(data)


class SingleCommunicator(Communicator):
    """A group of one rank."""

    rank, world_size, kind = 0, 1, "single"

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def gather(self, x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor | None:
        check_gather(x, sizes, 0, 1)
        return x

    def broadcast_array(self, data: np.ndarray | None) -> np.ndarray:
        array = check_array(data, 0)
        if array is None:
            raise ValueError("broadcast_array on rank 0 got None, expected an int32 vector")
        return array

    def barrier(self) -> None:
        pass

    def close(self) -> None:
        pass


class DistributedCommunicator(Communicator):
    """A group over torch.distributed: gloo, or NCCL with gloo for what lies in the CPU's memory."""

    def __init__(self, kind: Literal["gloo", "nccl"], device: torch.device) -> None:
        """The default process group must exist."""
        self.kind = kind
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._device = device
        self._closed = False
        self._control: dist.ProcessGroup | None = dist.new_group(backend="gloo", timeout=_IDLE)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        check_reducible(x)
        if x.numel() == 0:
            return x
        with self._failing("all_reduce"):
            # torch's own all_reduce picks the order of summation by size, and rounds at each hop.
            if x.nbytes < _SPLIT_BYTES or self.world_size == 2:
                parts = [torch.empty_like(x) for _ in range(self.world_size)]
                _all_gather(parts, x)
                return x.copy_(_ordered_sum(parts))
            flat = x.view(-1)
            padded = F.pad(flat, (0, -flat.numel() % self.world_size))
            own = torch.empty_like(padded)
            dist.all_to_all_single(own.view(torch.uint8), padded.view(torch.uint8))
            total = _ordered_sum(own.view(self.world_size, -1).unbind()).to(x.dtype)  # (padded / world_size,)
            _all_gather(list(padded.view(self.world_size, -1).unbind()), total)
            flat.copy_(padded[: flat.numel()])
            return x

    def gather(self, x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor | None:
        check_gather(x, sizes, self.rank, self.world_size)
        padded = F.pad(x, (0, max(sizes) - x.shape[1])).contiguous()  # (R, max(sizes)): all ranks send as much
        parts = [torch.empty_like(padded) for _ in sizes] if self.rank == 0 else None
        if padded.numel():
            with self._failing("gather"):
                dist.gather(padded.view(torch.uint8), parts and [part.view(torch.uint8) for part in parts])
        return torch.cat([part[:, :n] for part, n in zip(parts, sizes, strict=True)], dim=1) if parts else None

    def broadcast_array(self, data: np.ndarray | None) -> np.ndarray:
        data = check_array(data, self.rank)
        with self._failing("broadcast_array"):
            length = torch.tensor([0 if data is None else len(data)])
            dist.broadcast(length, 0, group=self._control)
            if data is None:
                data = np.empty(int(length), dtype=np.int32)
            if len(data):
                content = torch.from_numpy(data if data.flags.writeable else data.copy())
                dist.broadcast(content, 0, group=self._control)
        return data

    def barrier(self) -> None:
        with self._failing("barrier"):
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            _all_gather([torch.empty(1) for _ in range(self.world_size)], torch.zeros(1))

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._control = None  # gloo's connections end with the last reference, and only then do others notice
            dist.destroy_process_group()

    @contextmanager
    def _failing(self, operation: str) -> Iterator[None]:
        if self._closed:
            raise CollectiveError(f"rank {self.rank}: this communicator is closed")
        try:
            yield
        except RuntimeError as error:
            if self.kind == "gloo":  # the ranks are out of step now: nobody shall wait for this one
                self.close()
            text = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise CollectiveError(f"{operation} on rank {self.rank} of {self.world_size}: {text}") from error


def _all_gather(parts: list[torch.Tensor], x: torch.Tensor) -> None:
    """As bytes: nothing is calculated, and every backend can carry them."""
    dist.all_gather([part.view(-1).view(torch.uint8) for part in parts], x.view(-1).view(torch.uint8))


def _ordered_sum(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Sum in float32, part 0 first, not yet rounded."""
    total = parts[0].to(torch.float32, copy=True)
    for part in parts[1:]:
        total += part
    return total


@dataclass(frozen=True)
class Launch:
    """What torchrun tells a rank; a process that it didn't start is a group of one."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Launch:
        """Read RANK, LOCAL_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE.

        Raises:
            CollectiveError: naming the variable, its value and what is expected.
        """
        values = {}
        for name, default in (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_WORLD_SIZE", 1)):
            text = environment.get(name, str(default))
            if not (text.isascii() and text.isdigit()) or int(text) < default:
                raise CollectiveError(f"{name} is {text!r}, expected an integer of at least {default}")
            values[name.lower()] = int(text)
        launch = cls(**values)
        if launch.world_size > 1:
            for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
                if not environment.get(name):
                    raise CollectiveError(f"WORLD_SIZE is {launch.world_size} but {name} is not set; use torchrun")
        for name, size_name in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
            if values[name.lower()] >= values[size_name.lower()]:
                raise CollectiveError(
                    f"{name} is {values[name.lower()]}, expected less than {size_name}, {values[size_name.lower()]}"
                )
        return launch


_store: Store | None = None
_groups = itertools.count()
"""The ranks' meeting point, kept because one process can open its port only once; and how many groups met there."""


def init_communicator(
    device: torch.device, timeout_s: float = 600.0, *, kind: Literal["auto", "gloo", "shared-memory"] = "auto"
) -> Communicator:
    """Connect this rank with the others that torchrun started; without torchrun, a group of one.

    Args:
        device: where this rank computes. "cuda" without an index is the GPU of its local rank.
        timeout_s: how long to wait for a rank, here and in every operation but `broadcast_array`.
        kind: for CPU ranks. "auto" takes gloo, with a warning, where shared memory can't be had.

    Raises:
        CollectiveError: the environment is malformed, or the ranks can't be connected. What to do is in the message.
    """
    launch = Launch.from_environment(os.environ)
    if launch.world_size == 1:
        return SingleCommunicator()
    if device.type == "cuda":
        return _init_nccl(launch, device, timeout_s)
    try:
        store = _meet(timeout_s)
        if kind != "gloo":
            from model.distributed import shared_memory  # it needs this module

            try:
                return shared_memory.connect(store, launch.rank, launch.world_size, launch.local_world_size, timeout_s)
            except shared_memory.SharedMemoryUnavailable as error:
                if kind == "shared-memory":
                    raise CollectiveError(f"no shared memory for the ranks: {error}") from None
                if launch.rank == 0:
                    logger.warning("The ranks talk through gloo, which is slow, instead of shared memory: %s", error)
        _init_group("gloo", store, launch, timeout_s)
        return DistributedCommunicator("gloo", device)
    except dist.DistError as error:
        raise CollectiveError(_unreachable(launch, error)) from error


def _init_nccl(launch: Launch, device: torch.device, timeout_s: float) -> Communicator:
    index = launch.local_rank if device.index is None else device.index
    if index >= torch.cuda.device_count():
        raise CollectiveError(
            f"rank {launch.rank} needs GPU {index}, but {torch.cuda.device_count()} are visible; "
            "start no more ranks than GPUs (torchrun's nproc-per-node)"
        )
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    try:
        _init_group("cpu:gloo,cuda:nccl", _meet(timeout_s), launch, timeout_s, device)
        return DistributedCommunicator("nccl", device)
    except dist.DistError as error:
        raise CollectiveError(_unreachable(launch, error)) from error


def _meet(timeout_s: float) -> Store:
    """Keys of this group of ranks at their meeting point, which torchrun or rank 0 hosts."""
    # Imported here because builds of torch without torch.distributed lack them.
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    global _store
    if _store is None:
        _store, _, _ = next(iter(rendezvous("env://", timeout=timedelta(seconds=timeout_s))))
    store = PrefixStore(f"communicator/{next(_groups)}", _store)
    store.set_timeout(timedelta(seconds=timeout_s))
    return store


def _init_group(
    backend: str, store: Store, launch: Launch, timeout_s: float, device: torch.device | None = None
) -> None:
    if dist.is_initialized():
        raise CollectiveError(
            "this process has a group of torch.distributed already, another communicator's or its own; close it first"
        )
    dist.init_process_group(
        backend,
        store=store,
        rank=launch.rank,
        world_size=launch.world_size,
        timeout=timedelta(seconds=timeout_s),
        device_id=device,
    )


def _unreachable(launch: Launch, error: Exception) -> str:
    place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    return (
        f"rank {launch.rank} of {launch.world_size} can't meet the others at {place} (MASTER_ADDR, MASTER_PORT): "
        f"{error}; is the port in use, or did another rank fail to start?"
    )

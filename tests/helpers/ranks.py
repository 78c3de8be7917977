"""Several ranks in one process, for tests of what the ranks compute: each rank is a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import torch

from model.config import ModelConfig
from model.distributed.collectives import Communicator, init_communicator
from model.llama import Llama
from model.loader import load_weights

T = TypeVar("T")


class ThreadCommunicator(Communicator):
    """One of `world_size` threads that meet at a barrier."""

    kind = "gloo"

    def __init__(self, rank: int, barrier: threading.Barrier, board: list[Any]) -> None:
        self.rank, self.world_size = rank, barrier.parties
        self._barrier, self._board = barrier, board

    def _exchange(self, value: Any) -> list[Any]:
        self._board[self.rank] = value
        self._barrier.wait()
        values = list(self._board)
        self._barrier.wait()
        return values

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        parts = self._exchange(x.clone())
        return x.copy_(torch.stack([p.float() for p in parts]).sum(0))

    def gather(self, x: torch.Tensor, sizes: Any) -> torch.Tensor | None:
        parts = self._exchange(x)
        assert [p.shape[-1] for p in parts] == list(sizes)
        return torch.cat(parts, -1) if self.rank == 0 else None

    def broadcast_array(self, data: np.ndarray | None) -> np.ndarray:
        return self._exchange(data)[0]

    def barrier(self) -> None:
        self._exchange(None)

    def close(self) -> None:
        self._barrier.abort()


def on_ranks(world_size: int, function: Callable[[Communicator], T]) -> list[T]:
    """What `function` returns on each of `world_size` ranks."""
    if world_size == 1:
        return [function(init_communicator(torch.device("cpu")))]
    barrier, board = threading.Barrier(world_size, timeout=60), [None] * world_size

    def guarded(rank: int) -> T:
        comm = ThreadCommunicator(rank, barrier, board)
        try:
            return function(comm)
        except BaseException:
            comm.close()
            raise

    with ThreadPoolExecutor(world_size) as pool:
        futures = [pool.submit(guarded, rank) for rank in range(world_size)]
        errors = [e for f in futures if (e := f.exception()) is not None]
        if errors:
            raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
        return [f.result() for f in futures]


class Weights:
    """A checkpoint in memory, as far as `load_weights` needs one."""

    def __init__(self, weights: Mapping[str, torch.Tensor]) -> None:
        self.weights = weights

    def read(self, name: str, dim: int = 0, start: int = 0, stop: int | None = None) -> torch.Tensor:
        whole = self.weights[name]
        return whole if stop is None else whole.narrow(dim, start, stop - start).contiguous()

    def read_into(self, out: torch.Tensor, name: str, *part: int) -> None:
        out.copy_(self.read(name, *part))

    def stored_bytes(self, name: str) -> int:
        return self.weights[name].nbytes

    def where(self, name: str) -> str:
        return "memory"


def make_model(
    config: ModelConfig,
    weights: Mapping[str, torch.Tensor],
    comm: Communicator | None = None,
    dtype: torch.dtype = torch.float32,
) -> Llama:
    """This rank's part of a model with the given weights."""
    device = torch.device("cpu")
    model = Llama(config, comm or init_communicator(device), dtype, device, config.max_seq_len)
    load_weights(model, Weights(weights))  # type: ignore[arg-type]
    return model

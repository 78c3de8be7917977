"""Groups of real processes over gloo and shared memory. Each group runs all checks, then one way of ending."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]

from model.distributed import collectives
from model.distributed.collectives import CollectiveError, Launch, init_communicator
from model.distributed.shared_memory import SharedMemoryUnavailable, _create
from tests.helpers.report import report

RANK = Path(__file__).with_name("collectives_rank.py")
ROOT = Path(collectives.__file__).parents[2]
NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

Start = Callable[..., "list[subprocess.Popen[str]]"]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def start(cache: Path) -> Iterator[Start]:
    """Starts the ranks of a group as torchrun's agent does: the store is here, so no port has to be guessed."""
    ranks: list[subprocess.Popen[str]] = []
    stores = []

    def run(kind: str, world_size: int, *options: str, timeout_s: float = 60, **environment: str):  # type: ignore[no-untyped-def]
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        stores.append(store)
        shared = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "XDG_CACHE_HOME": str(cache),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
        }
        for rank in range(world_size):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), **environment}
            command = [sys.executable, str(RANK), kind, str(timeout_s), *options]
            pipe = subprocess.PIPE
            ranks.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=shared | own))
        return ranks[-world_size:]

    def kill() -> None:
        for rank in ranks:
            rank.kill()

    watchdog = threading.Timer(120, kill)  # a rank that hangs fails its test
    watchdog.start()
    yield run
    watchdog.cancel()
    kill()
    for rank in ranks:
        rank.communicate()


def tell(rank: subprocess.Popen[str], word: str) -> None:
    assert rank.stdin is not None
    rank.stdin.write(word + "\n")
    rank.stdin.flush()


def hear(rank: subprocess.Popen[str]) -> str:
    assert rank.stdout is not None
    line = rank.stdout.readline()
    if not line:
        rank.kill()
        raise AssertionError(f"the rank ended: {rank.communicate()[1]}")
    return line.strip()


@report("B230", "meta-pytorch/gpt-fast#64")
@pytest.mark.parametrize("kind", ["shared-memory", "gloo"])
def test_two_ranks_then_close(start: Start, kind: str) -> None:
    """B230: a rank that has closed leaves no other waiting."""
    first, second = start(kind, 2)
    assert [hear(first), hear(second)] == [f"READY {kind}"] * 2
    tell(second, "broadcast")
    tell(first, "close")
    assert hear(first) == "close done"
    answer = hear(second)
    assert answer.startswith("CollectiveError broadcast_array on rank 1 of 2: ")
    assert kind == "gloo" or answer.endswith("rank 0 closed its communicator")
    tell(first, "barrier")
    assert hear(first) == "CollectiveError rank 0: this communicator is closed"


@report("B229", "meta-pytorch/gpt-fast#55")
def test_three_ranks_then_one_dies_while_idle(start: Start) -> None:
    """B229: a rank that is gone is named, also to one that waits for another rank; it stays a zombie here."""
    ranks = start("shared-memory", 3)
    assert [hear(rank) for rank in ranks] == ["READY shared-memory"] * 3
    tell(ranks[1], "broadcast")
    os.kill(ranks[2].pid, signal.SIGKILL)
    assert hear(ranks[1]).endswith("on rank 1 of 3: the process of rank 2 died")
    tell(ranks[0], "broadcast")
    assert "on rank 0 of 3: " in hear(ranks[0])


def test_four_ranks_then_rank_0_dies_in_a_sum(start: Start) -> None:
    ranks = start("auto", 4)
    assert [hear(rank) for rank in ranks] == ["READY shared-memory"] * 4
    for rank in ranks[1:]:
        tell(rank, "all_reduce")
    os.kill(ranks[0].pid, signal.SIGKILL)
    for rank in ranks[1:]:
        assert hear(rank).startswith("CollectiveError all_reduce")


def test_gloo_ranks_then_rank_0_dies(start: Start) -> None:
    ranks = start("gloo", 3)
    assert [hear(rank) for rank in ranks] == ["READY gloo"] * 3
    for rank in ranks[1:]:
        tell(rank, "broadcast")
    os.kill(ranks[0].pid, signal.SIGKILL)
    for rank in ranks[1:]:  # one may hear it from the other, which closes
        assert hear(rank).startswith("CollectiveError broadcast_array")


@report("B131", "meta-llama/llama#722")
def test_no_compiler_falls_back_on_every_rank(start: Start, tmp_path: Path) -> None:
    """B131, B279: CPU ranks need neither NCCL nor anything else that may be missing; one warning says it is slow."""
    ranks = start("auto", 2, "--quick", PATH=str(tmp_path), XDG_CACHE_HOME=str(tmp_path))
    assert [hear(rank) for rank in ranks] == ["READY gloo"] * 2
    ends = [rank.communicate() for rank in ranks]
    assert "slow, instead of shared memory: no C compiler found" in ends[0][1]
    assert "shared memory" not in ends[1][1]


def test_timeout_and_own_close_end_a_wait(start: Start) -> None:
    first, second = start("shared-memory", 2, "--quick", timeout_s=1)
    assert [hear(first), hear(second)] == ["READY shared-memory"] * 2
    tell(second, "close-while-waiting")
    assert hear(second).endswith("rank 1 closed its communicator")
    first, second = start("shared-memory", 2, "--quick", timeout_s=1)
    assert [hear(first), hear(second)] == ["READY shared-memory"] * 2
    tell(first, "barrier")
    assert hear(first) == "CollectiveError barrier on rank 0 of 2: rank 1 did not come within 1 s"


def test_several_hosts_have_no_shared_memory(start: Start) -> None:
    ranks = start("shared-memory", 2, LOCAL_WORLD_SIZE="1", LOCAL_RANK="0")
    for rank in ranks:
        assert "several hosts (LOCAL_WORLD_SIZE 1, WORLD_SIZE 2)" in hear(rank)


def test_too_little_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(SharedMemoryUnavailable, match=r"no room for 8 MiB .*\(No space left"):
        _create(HashStore(), 0, 8 << 20)


def test_single_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """B011, B021: without torchrun there is one rank, and no process group."""
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    group = init_communicator(torch.device("cpu"))
    assert (group.kind, group.rank, group.world_size) == ("single", 0, 1)
    x = torch.randn(2, 3)
    assert group.all_reduce(x) is x
    assert group.gather(x, [3]) is x
    data = np.arange(3, dtype=np.int32)
    assert np.array_equal(group.broadcast_array(data), data)
    group.barrier()
    group.close()
    assert not torch.distributed.is_initialized()
    with pytest.raises(ValueError, match="rank 0 got None"):
        group.broadcast_array(None)


@report("B011", "meta-llama/llama#736")
@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two', expected an integer of at least 1"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE is '0', expected an integer of at least 1"),
        ({"RANK": "-1"}, "RANK is '-1', expected an integer of at least 0"),
        ({"RANK": "1"}, "RANK is 1, expected less than WORLD_SIZE, 1"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is 2 but RANK is not set; use torchrun"),
        ({"WORLD_SIZE": "2", "RANK": "0"}, "WORLD_SIZE is 2 but MASTER_ADDR is not set"),
        ({"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"}, "LOCAL_RANK is 2, expected less than LOCAL_WORLD_SIZE, 2"),
    ],
)
def test_malformed_environment(environment: dict[str, str], message: str) -> None:
    """B011: the environment is checked before anything is loaded."""
    with pytest.raises(CollectiveError) as error:
        Launch.from_environment(environment)
    assert message in str(error.value)


def test_more_ranks_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """B167: said before any CUDA call fails with an invalid device ordinal."""
    values = ("7", "7", "8", "8", "127.0.0.1", "1")
    for name, value in zip(NAMES, values, strict=True):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    with pytest.raises(CollectiveError, match="rank 7 needs GPU 7, but 4 are visible"):
        init_communicator(torch.device("cuda"))


def test_gpu_group_of_one(start: Start) -> None:
    """NCCL takes one rank per GPU, so this is all that a machine with one can try of it."""
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    (rank,) = start("nccl", 1)
    assert hear(rank) == "READY nccl"


@report("B130", "meta-llama/llama-cookbook#186")
def test_port_in_use_is_named(start: Start) -> None:
    """B130: the second group on one port."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = str(store.port)
    rank, _ = start("gloo", 2, TORCHELASTIC_USE_AGENT_STORE="False", MASTER_PORT=port, timeout_s=5)
    assert f"127.0.0.1:{port} (MASTER_ADDR, MASTER_PORT)" in hear(rank)

"""One rank of a group under test: started by test_collectives.py with torchrun's variables in its environment.

It runs every check, prints READY, obeys one word per line on its standard input and prints what came of it.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable

import numpy as np
import torch

from model.distributed.collectives import CollectiveError, Communicator, Launch, _init_nccl, init_communicator
from model.process import die_with_parent

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = (1, 576, 18432, 300_007)  # the last one needs several turns of a 1 MiB slot in float32


def part(rank: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """What a rank contributes; magnitudes differ so that the order of summation shows."""
    generator = torch.Generator().manual_seed(1000 * rank + size)
    scale = 10.0 ** torch.randint(-3, 3, (size,), generator=generator)
    return (torch.randn(size, generator=generator) * scale).to(dtype)


def reference(world_size: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    total = part(0, size, dtype).float()
    for rank in range(1, world_size):
        total = total + part(rank, size, dtype).float()
    return total.to(dtype)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(-1).view(torch.uint8)


def check_all_reduce(group: Communicator) -> None:
    for dtype in DTYPES:
        for size in SIZES:
            x = part(group.rank, size, dtype)
            assert group.all_reduce(x) is x
            assert torch.equal(bits(x), bits(reference(group.world_size, size, dtype))), (dtype, size)
        rows = part(group.rank, 18432, dtype).view(32, 576)
        alone = rows[3:4].clone()
        assert torch.equal(group.all_reduce(alone), group.all_reduce(rows)[3:4])  # whatever the batch
        assert group.all_reduce(torch.empty(0, 576, dtype=dtype)).shape == (0, 576)
    for value in (float("nan"), float("inf")):
        for dtype in DTYPES:
            x = group.all_reduce(torch.tensor([value if group.rank == 1 else 1.0], dtype=dtype))
            assert torch.equal(x, torch.tensor([value], dtype=dtype)) or (x.isnan().all() and value != value)
    check_every_half(group)


def check_every_half(group: Communicator) -> None:
    """Conversions against torch's, for every 16-bit number (subnormal, infinite, NaN) and for ties in rounding."""
    for dtype in (torch.bfloat16, torch.float16):
        every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)
        for other in (0.0, 1.0, 2.0**-25, 3.0):
            x = every.clone() if group.rank == 0 else torch.full_like(every, other if group.rank == 1 else 0.0)
            expected = (every.float() + torch.tensor(other, dtype=dtype).float()).to(dtype)
            group.all_reduce(x)
            assert torch.equal(x.isnan(), expected.isnan())
            assert torch.equal(bits(x[~x.isnan()]), bits(expected[~x.isnan()])), (dtype, other)


def check_gather(group: Communicator) -> None:
    generator = torch.Generator().manual_seed(7)
    shapes = [(0, [3, 2, 4, 1]), (1, [5, 4, 4, 4]), (7, [3, 0, 2, 1]), (33, [12289, 12288, 1, 700]), (2, [0, 0, 0, 0])]
    for dtype in DTYPES:
        for rows, all_sizes in shapes:
            sizes = all_sizes[: group.world_size]
            whole = torch.randn(rows, sum(sizes), generator=generator).to(dtype)
            result = group.gather(whole.split(sizes, dim=1)[group.rank].contiguous(), sizes)
            assert (result is None) == (group.rank != 0)
            assert result is None or (result.dtype == dtype and torch.equal(result, whole))


def check_broadcast(group: Communicator) -> None:
    for length in (0, 1, 7, 4096, 262_128, 262_129, 1_000_003):  # around a slot, beyond it
        expected = np.arange(length, dtype=np.int32) * 3 - 5
        received = group.broadcast_array(expected if group.rank == 0 else None)
        assert received.dtype == np.int32
        assert np.array_equal(received, expected)


def check_refusals(group: Communicator) -> None:
    """Mistakes that the communicator sees on the rank that makes them, before anybody waits."""
    calls: list[Callable[[], object]] = [
        lambda: group.all_reduce(torch.zeros(4, dtype=torch.int32)),
        lambda: group.all_reduce(torch.zeros(4, 4).t()),
        lambda: group.gather(torch.zeros(2, 3), [3]),
        lambda: group.gather(torch.zeros(2, 3), [4] * group.world_size),
        lambda: group.broadcast_array(None if group.rank == 0 else np.zeros(1, dtype=np.int32)),
        lambda: group.broadcast_array(np.zeros(1, dtype=np.int64)),
    ]
    for call in calls:
        try:
            call()
        except ValueError:
            continue
        raise AssertionError("accepted")


def obey(group: Communicator, word: str) -> str:
    actions: dict[str, Callable[[], object]] = {
        "broadcast": lambda: group.broadcast_array(np.zeros(1, dtype=np.int32) if group.rank == 0 else None),
        "all_reduce": lambda: group.all_reduce(torch.zeros(8)),
        "barrier": group.barrier,
        "close": group.close,
        "close-while-waiting": lambda: close_while_waiting(group),
    }
    try:
        actions[word]()
    except CollectiveError as error:
        return f"CollectiveError {error}"
    return f"{word} done"


def close_while_waiting(group: Communicator) -> None:
    threading.Timer(0.01, group.close).start()
    group.broadcast_array(None)


def run_nccl_alone() -> None:
    """Every operation of the NCCL group, for the one rank that init_communicator would give a single group."""
    device = torch.device("cuda", 0)
    group = _init_nccl(Launch.from_environment(os.environ), device, 60)
    for dtype in DTYPES:
        for size in SIZES:
            x = part(0, size, dtype).to(device)
            assert torch.equal(bits(group.all_reduce(x.clone())), bits(x))
            rows = x.view(1, size)
            gathered = group.gather(rows, [size])
            assert gathered is not None
            assert torch.equal(bits(gathered), bits(rows))
    check_broadcast(group)
    group.barrier()
    print(f"READY {group.kind}", flush=True)
    group.close()


def main() -> None:
    die_with_parent()
    kind = sys.argv[1]
    torch.set_num_threads(1)
    if kind == "nccl":
        run_nccl_alone()
        return
    try:
        group = init_communicator(torch.device("cpu"), float(sys.argv[2]), kind=kind)  # type: ignore[arg-type]
    except CollectiveError as error:
        print(f"CollectiveError {error}", flush=True)
        return
    launch = Launch.from_environment(os.environ)
    assert (group.rank, group.world_size) == (launch.rank, launch.world_size)
    if "--quick" not in sys.argv:
        check_all_reduce(group)
        check_gather(group)
        check_broadcast(group)
        check_refusals(group)
        group.barrier()
    print(f"READY {group.kind}", flush=True)
    for line in sys.stdin:
        print(obey(group, line.strip()), flush=True)


if __name__ == "__main__":
    main()

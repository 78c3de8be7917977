"""What a rank needs from its operating system: to end with its parent, its cores, its control groups, its memory."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def die_with_parent(expected_parent: int | None = None) -> None:
    """Let the kernel kill this process when its parent ends, however that happens. Does nothing outside Linux.

    TorchServe's frontend kills torchrun with SIGKILL, which leaves torchrun no chance to end its ranks. Strictly, the
    signal comes when the parent's thread that started this process ends; torchrun starts ranks from its main thread.

    Args:
        expected_parent: process id that the parent must have, where the caller knows it. If the parent is another one
            (it died before this call), this process is killed at once.
    """
    if sys.platform != "linux":
        return
    parent = os.getppid() if expected_parent is None else expected_parent
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl(PR_SET_PDEATHSIG): {os.strerror(code)}")
    # A parent that died before prctl sends no signal any more.
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def cpu_threads(local_world_size: int) -> int:
    """Threads for one of `local_world_size` ranks on this host: never more than cores in total, at least 1."""
    if local_world_size < 1:
        raise ValueError(f"local_world_size is {local_world_size}, expected at least 1")
    return max(1, usable_cores() // local_world_size)


def usable_cores() -> int:
    """Cores this process may use: its affinity mask, cut by the CPU quota of its control groups; at least 1."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else (os.cpu_count() or 1)
    quota = _cgroup_quota(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))
    return cores if quota is None else max(1, min(cores, int(quota)))


def own_cores(local_rank: int, local_world_size: int) -> set[int] | None:
    """The cores that one of `local_world_size` ranks may keep to itself; None where none can be told apart.

    Ranks that wait for each other many times a step lose most when the kernel puts two of them on one core for a
    while, as it does when other processes (the frontend) come and go.
    """
    if sys.platform != "linux":
        return None
    cores = sorted(os.sched_getaffinity(0))
    if usable_cores() < len(cores) or len(cores) < local_world_size:
        return None  # a quota counts time on any core; and sharing cores is better left to the kernel
    each = len(cores) // local_world_size
    return set(cores[local_rank * each : (local_rank + 1) * each])


def _cgroup_quota(membership: Path, root: Path) -> float | None:
    """The least quota, in cores, of all groups from the process's own to the root; None where nothing limits it.

    Files as described in the kernel's documentation, admin-guide/cgroup-v2 (`cpu.max`) and scheduler/sched-bwc
    (`cpu.cfs_quota_us`, `cpu.cfs_period_us`).
    """
    quotas = []
    for group in control_groups("cpu", membership, root):
        quotas.append(_quota(kernel_text(group / "cpu.max").split()))
        quotas.append(_quota([kernel_text(group / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]))
    return min((quota for quota in quotas if quota is not None), default=None)


def control_groups(
    controller: str, membership: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> Iterator[Path]:
    """The directories of the groups, of either version, that may limit what `controller` counts for this process."""
    for line in kernel_text(membership).splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            mounts = [root, root / "unified"]
        elif controller in controllers.split(","):
            mounts = [root / controller, root / controllers]
        else:
            continue
        for mount in mounts:
            yield from _upwards(mount, path)


def _upwards(mount: Path, path: str) -> Iterator[Path]:
    """The group and its parents. Inside a container `path` may lie outside the mount: then only the mount exists."""
    group = mount / path.lstrip("/")
    while group != mount and mount in group.parents:
        yield group
        group = group.parent
    yield mount


def _quota(fields: list[str]) -> float | None:
    try:
        quota, period = (float(field) for field in fields)
    except ValueError:  # "max", or no such file
        return None
    return quota / period if quota > 0 and period > 0 else None


def kernel_text(path: Path) -> str:
    """What a file of the kernel's says; nothing where there is no such file."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""

"""What a measurement was made on: processor, cores, memory, versions."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import torch

from model.process import kernel_text, usable_cores

FEATURES = (
    "avx2",
    "avx512f",
    "avx512_bf16",
    "avx512_vnni",
    "avx_vnni",
    "amx_bf16",
    "amx_int8",
    "asimd",
    "bf16",
    "i8mm",
)
"""Of a processor, those that kernels are chosen by."""


def hardware(cpuinfo: str | None = None) -> dict[str, Any]:
    """{"cpu", "features", "cores", "memory_gb", "gpus"}.

    Args:
        cpuinfo: what /proc/cpuinfo says.
    """
    fields: dict[str, str] = {}
    for line in (kernel_text(Path("/proc/cpuinfo")) if cpuinfo is None else cpuinfo).splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip().lower(), value.strip())
    flags = fields.get("flags", fields.get("features", "")).split()
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "cpu": fields.get("model name") or platform.processor() or platform.machine(),
        "features": [name for name in FEATURES if name in flags],
        "cores": usable_cores(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9),
        "gpus": gpus,
    }


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Of Python and of the packages that are installed."""
    found = {"python": platform.python_version()}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found

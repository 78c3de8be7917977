"""Compiles the project's native code, `model/csrc/*.c`, on first use and keeps the library in the user's cache.

The library has a plain C interface for ctypes, so any C compiler will do and it builds in a few seconds. A cached
library is found by what it was made from (sources, flags, compiler) and what it was made for (this CPU's features),
and its file name is the SHA-256 of its content, so that a torn file is seen and built again.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

_FOLDER = Path(__file__).parents[1] / "csrc"
SOURCES = ("collectives.c", "decode.c", "kernels.c", "layers.c", "linear.c", "prefill.c")
HEADERS = ("half.h", "layers.h", "vectors.h")
"""Files in `model/csrc` that make up the library."""
_FLAGS = ("-x", "c", "-std=c11", "-O3", "-ffp-contract=fast", "-fPIC", "-shared", "-fvisibility=default")
_FLAG_SETS = ((*_FLAGS, "-march=native", "-fopenmp"), (*_FLAGS, "-march=native"), _FLAGS)
"""Tried in this order: not every compiler knows the machine it runs on, or has OpenMP. With it, the library shares the
threads of torch's own libgomp.so.1, which is in the process already."""
_COMPILE_TIMEOUT_S = 120


class NativeBuildError(RuntimeError):
    """The native library can't be had; the message says why and what would help."""


def load_library(cache: Path | None = None) -> ctypes.CDLL:
    """The native library, compiled if the cache doesn't hold it yet. Several processes may call this at once.

    Args:
        cache: folder of cached libraries, by default `$XDG_CACHE_HOME/torchserve-llama2/native` (`~/.cache/...`).

    Raises:
        NativeBuildError: no compiler, or none that compiles the sources.
    """
    if os.name != "posix":
        raise NativeBuildError(f"native code isn't built on {platform.system()}, only on Linux and the like")
    sources = _sources()
    compilers = list(_compilers())
    if not compilers:
        raise NativeBuildError("no C compiler found (tried cc, gcc, clang, c++); install one, or `pip install ziglang`")
    problems = []
    for compiler in compilers:
        try:
            version = _run([*compiler, "--version"])
        except NativeBuildError as error:
            problems.append(str(error))
            continue
        for flags in _FLAG_SETS:
            key = _key(sources, [*compiler, version, *flags])
            try:
                return _load_cached(cache or _default_cache(), key, [*compiler, *flags])
            except NativeBuildError as error:
                problems.append(str(error))
    raise NativeBuildError("the C compiler fails: " + "; ".join(dict.fromkeys(problems)))


def _sources() -> dict[str, bytes]:
    try:
        return {name: (_FOLDER / name).read_bytes() for name in SOURCES + HEADERS}
    except OSError as error:
        raise NativeBuildError(f"source of the native library is missing: {error}; install the package again") from None


def _compilers() -> Iterator[list[str]]:
    """Command lines that call a C compiler, the likeliest first."""
    configured = shlex.split(sysconfig.get_config_var("CC") or "")[:1]
    for name in dict.fromkeys(["cc", "gcc", "clang", *configured, "c++"]):
        path = shutil.which(name)
        if path:
            yield [path]
    if importlib.util.find_spec("ziglang") is not None:
        yield [sys.executable, "-m", "ziglang", "cc"]


def _key(sources: dict[str, bytes], command: list[str]) -> str:
    digest = hashlib.sha256()
    for part in (*(f"{name}\0".encode() + text for name, text in sources.items()), *(c.encode() for c in command)):
        digest.update(len(part).to_bytes(8, "little") + part)
    digest.update(f"{platform.system()} {platform.machine()} {_cpu_features()}".encode())
    return digest.hexdigest()[:32]


def _cpu_features() -> str:
    """What the kernel says the CPU can do; the cache may lie in a home shared by different machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = ("flags", "Features", "isa", "model name")
    return "\n".join(sorted({line for line in lines if line.startswith(names)}))


def _default_cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or ""
    # A relative value is to be ignored (XDG base directory specification).
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "torchserve-llama2" / "native"


def _load_cached(cache: Path, key: str, command: list[str]) -> ctypes.CDLL:
    folder = cache / key
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        usable = _is_private(folder)
    except (OSError, RuntimeError):
        usable = False
    if not usable:
        # Nowhere to keep it: once it is loaded, the file isn't needed any more.
        with tempfile.TemporaryDirectory() as temporary:
            return ctypes.CDLL(str(_compile(Path(temporary), command)))
    for library in sorted(folder.glob("*.so")):
        if _is_private(library) and hashlib.sha256(library.read_bytes()).hexdigest() == library.stem:
            try:
                return ctypes.CDLL(str(library))
            except OSError:
                continue
    return _open(_compile(folder, command))


def _is_private(path: Path) -> bool:
    """Whether it is this user's and nobody else can write to it."""
    status = path.lstat()
    return status.st_uid == os.getuid() and not stat.S_ISLNK(status.st_mode) and not status.st_mode & 0o022


def _open(library: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise NativeBuildError(f"the compiled library can't be loaded: {error}") from None


def _compile(folder: Path, command: list[str]) -> Path:
    """Compile into `folder`; the library appears there whole or not at all."""
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        built = Path(temporary) / "library.so"
        _run([*command, "-o", str(built), *(str(_FOLDER / name) for name in SOURCES), "-lm"])
        built.chmod(0o700)
        final = folder / f"{hashlib.sha256(built.read_bytes()).hexdigest()}.so"
        os.replace(built, final)
    return final


def _run(command: list[str]) -> str:
    name = " ".join(Path(part).name if os.path.isabs(part) else part for part in command[:4])
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_COMPILE_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeBuildError(f"`{name} ...`: {error}") from None
    if done.returncode != 0:
        lines = (done.stderr or done.stdout).decode(errors="replace").strip().splitlines()
        wrong = next((line for line in lines if "error" in line), lines[-1] if lines else "no output")
        raise NativeBuildError(f"`{name} ...` exits with {done.returncode}: {wrong.strip()}")
    return done.stdout.decode(errors="replace")

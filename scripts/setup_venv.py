"""Make `.venv` and install the project with its pinned dependencies into it: `python3 -m scripts.setup_venv`.

Needs nothing but Python's standard library. A second run with nothing changed takes a fraction of a second.
"""

import argparse
import hashlib
import os
import subprocess
import sys
from pathlib import Path

OLDEST, NEWEST = (3, 10), (3, 13)
ROOT = Path(__file__).resolve().parent.parent
EXTRAS = "test,dev"


def check_python(version: "tuple[int, int]") -> None:
    """Raises SystemExit with one line where this Python can't run the project."""
    if not OLDEST <= version <= NEWEST:
        raise SystemExit(
            "error: this is Python {}.{}, the project needs 3.10 to 3.13: make PYTHON=/path/to/python3.12".format(
                *version
            )
        )


def fingerprint(venv: Path) -> str:
    """Changes when the installation has to be made again: other dependencies, another Python, a moved folder."""
    parts = ((ROOT / "pyproject.toml").read_bytes(), str(venv).encode(), sys.version.encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def _run(command: "list[str]", what: str) -> None:
    if subprocess.run(command, cwd=ROOT, check=False).returncode:
        raise SystemExit(f"error: {what} failed; what went wrong stands above")


def _pip(venv: Path, *packages: str) -> None:
    quiet = ["-qq", "--no-input", "--disable-pip-version-check"]
    _run([str(venv / "bin" / "python"), "-m", "pip", "install", *quiet, *packages], "pip install " + " ".join(packages))


def _install(venv: Path) -> None:
    print("Setting up .venv with the pinned dependencies (minutes the first time) ...", flush=True)
    if not (venv / "bin" / "python").exists() or not (venv / "stamp").exists():
        _run(
            [sys.executable, "-m", "venv", "--clear", str(venv)],
            f"{sys.executable} -m venv (is python3-venv installed?)",
        )
    _pip(venv, "--editable", f".[{EXTRAS}]")


def _ensure_java(venv: Path) -> None:
    """Install the `java` extra where the machine has no usable Java."""
    probe = [
        str(venv / "bin" / "python"),
        "-c",
        "from scripts.java import find_java; raise SystemExit(not find_java())",
    ]
    if subprocess.run(probe, cwd=ROOT, check=False).returncode:
        print("No Java 11 or newer in JAVA_HOME or PATH: installing one into .venv ...", flush=True)
        _pip(venv, "--editable", f".[java,{EXTRAS}]")


def setup(venv: Path) -> None:
    """Bring `venv` up to date. Two calls at once wait for each other."""
    import fcntl

    lock = ROOT / "build" / "setup.lock"
    lock.parent.mkdir(exist_ok=True)
    with lock.open("w", encoding="utf-8") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        stamp = venv / "stamp"
        wanted = fingerprint(venv)
        if not stamp.exists() or stamp.read_text(encoding="utf-8") != wanted:
            _install(venv)
            stamp.write_text(wanted, encoding="utf-8")
        _ensure_java(venv)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv")
    args = parser.parse_args()
    check_python((sys.version_info[0], sys.version_info[1]))
    os.environ.pop("PYTHONHOME", None)
    setup(args.venv.absolute())


if __name__ == "__main__":
    main()

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


def wanted_stamp(venv: Path) -> "list[str]":
    """What a finished installation notes: where it lies (its programs hold that path), and the dependencies."""
    return [str(venv), hashlib.sha256((ROOT / "pyproject.toml").read_bytes()).hexdigest()]


def _run(command: "list[str]", what: str) -> None:
    if subprocess.run(command, cwd=ROOT, check=False).returncode:
        raise SystemExit(f"error: {what} failed; what went wrong stands above")


def _pip(venv: Path, *packages: str) -> None:
    quiet = ["-qq", "--no-input", "--disable-pip-version-check"]
    _run([str(venv / "bin" / "python"), "-m", "pip", "install", *quiet, *packages], "pip install " + " ".join(packages))


def _install(venv: Path, stamp: Path) -> None:
    """Make the environment where there is no usable one, and install into it. PYTHON matters for a new one only."""
    wanted = wanted_stamp(venv)
    found = stamp.read_text(encoding="utf-8").splitlines() if stamp.exists() else wanted[:1]
    usable = (venv / "bin" / "python").exists() and found[:1] == wanted[:1]
    if usable and found == wanted:
        return
    if not usable:
        check_python((sys.version_info[0], sys.version_info[1]))
    print("Setting up .venv with the pinned dependencies (minutes the first time) ...", flush=True)
    if not usable:
        command = [sys.executable, "-m", "venv", "--clear", str(venv)]
        _run(command, f"{sys.executable} -m venv (is python3-venv installed?)")
    _pip(venv, "--editable", f".[{EXTRAS}]")
    stamp.write_text("\n".join(wanted), encoding="utf-8")


def _ensure_java(venv: Path) -> None:
    """Install the `java` extra where the machine has no usable Java."""
    program = "from scripts.serve.java import find_java; raise SystemExit(not find_java())"
    if subprocess.run([str(venv / "bin" / "python"), "-c", program], cwd=ROOT, check=False).returncode:
        print("No Java 11 or newer in JAVA_HOME or PATH: installing one into .venv ...", flush=True)
        _pip(venv, "--editable", f".[java,{EXTRAS}]")


def setup(venv: Path) -> None:
    """Bring `venv` up to date. Two calls at once wait for each other.

    A link is used as it is: what it leads to may be another checkout's.
    """
    import fcntl

    if venv.is_symlink() and (venv / "bin" / "python").exists():
        return

    lock = ROOT / "build" / "setup.lock"
    lock.parent.mkdir(exist_ok=True)
    with lock.open("w", encoding="utf-8") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        _install(venv, venv / "stamp")
        _ensure_java(venv)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv")
    args = parser.parse_args()
    os.environ.pop("PYTHONHOME", None)
    setup(args.venv.absolute())


if __name__ == "__main__":
    main()

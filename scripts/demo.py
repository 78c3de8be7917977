"""From a checkout to an answer: start a server on free ports, ask it two things, stop it. `python -m scripts.demo`."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from typing import Any

from scripts.package_archive import PackagingError, add_model_arguments, archive_options
from scripts.serve.run_dir import ServerError, free_port
from scripts.server import MODEL, exit_on_signals, start, stop_run
from scripts.smoke import Unexpected, post

REQUESTS: dict[str, dict[str, Any]] = {
    "Chat": {
        "dialog": [{"role": "user", "content": "What is the capital of France?"}],
        "max_gen_len": 32,
        "temperature": 0,
    },
    "Text completion": {"prompt": "The capital of France is", "max_gen_len": 16, "temperature": 0},
}


def ask(url: str) -> None:
    """Send each request and print it with its answer."""
    for title, body in REQUESTS.items():
        print(f"\n{title}: POST {url}\n{json.dumps(body, indent=2)}", flush=True)
        print(f"Answer:\n{json.dumps(post(url, body), indent=2, ensure_ascii=False)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=None, help="inference port (default: a free one)")
    add_model_arguments(parser)
    args = parser.parse_args()
    exit_on_signals()
    try:
        options = archive_options(args)
        port = args.port if args.port is not None else free_port()
        print(f"Starting TorchServe with {options.checkpoint.name} on {options.ranks} ranks ...", flush=True)
        run, _ = start(port, options)
        try:
            ask(f"{run.url}/predictions/{MODEL}")
        finally:
            stop_run(run)
        shutil.rmtree(run.path)  # after a failure the logs stay
        print("\nStopped.")
    except (ServerError, PackagingError, Unexpected) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()

"""How fast the engine and the server are, beside transformers in the same run.

    python -m scripts.benchmark --streams 1 8 32 --json build/benchmark.json

Each round measures every program once, one after the other, so that a machine that is slow for a while is slow
for all; the figures are medians over the rounds. Prompts are random ids, answers greedy and of full length.
"""

from __future__ import annotations

import argparse
import http.client
import json
import platform
import subprocess
import sys
import threading
import time
import urllib.parse
from pathlib import Path
from typing import Any

from model.process import usable_cores

from .benchmark_worker import prompts
from .measure import Stream, median_rows, summarize
from .package_archive import ArchiveOptions
from .run_dir import free_port
from .server import MODEL, start, stop_run

ROOT = Path(__file__).resolve().parent.parent


def worker(what: str, args: argparse.Namespace) -> dict[str, Any]:
    """Run `scripts.benchmark_worker` and return what it measured."""
    command = [sys.executable, "-m"]
    if what == "engine" and args.ranks > 1:
        command += ["torch.distributed.run", "--standalone", "--nproc-per-node", str(args.ranks), "-m"]
    command += ["scripts.benchmark_worker", what, "--checkpoint", str(args.checkpoint)]
    command += ["--device", args.device, "--dtype", args.dtype, "--streams", *map(str, args.streams)]
    command += ["--prompt-tokens", str(args.prompt_tokens), "--new-tokens", str(args.new_tokens)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"benchmark: measuring {what} failed with status {done.returncode}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def measure_server(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Start a server, let all streams ask at once, stop it."""
    options = ArchiveOptions(
        checkpoint=Path(args.checkpoint),
        ranks=args.ranks,
        device=args.device,
        handler={"dtype": args.dtype, "prefix_cache": False},
    )
    run, _ = start(free_port(), options)
    try:
        url = f"{run.url}/predictions/{MODEL}"
        ask(url, prompts(1, args.prompt_tokens, 256), 4)
        return [
            summarize(ask(url, prompts(n, args.prompt_tokens, args.vocabulary), args.new_tokens), args.prompt_tokens)
            for n in args.streams
        ]
    finally:
        stop_run(run)


def ask(url: str, asked: list[list[int]], new_tokens: int) -> list[Stream]:
    """One streaming client for each prompt, all at once."""
    start_at = time.perf_counter()
    streams = [Stream(start_at) for _ in asked]
    errors: list[Exception] = []

    def client(stream: Stream, prompt: list[int]) -> None:
        try:
            follow(url, prompt, new_tokens, stream)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=client, args=pair) for pair in zip(streams, asked, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise SystemExit(f"benchmark: a request failed: {errors[0]}")
    return streams


def follow(url: str, prompt: list[int], new_tokens: int, stream: Stream) -> None:
    """Read one stream to its end, with as little work as can be: the client runs on the server's cores."""
    body = {"prompt": prompt, "max_gen_len": new_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    parts = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(parts.netloc, timeout=600)
    try:
        connection.request("POST", parts.path, json.dumps(body), {"Content-Type": "application/json"})
        reply = connection.getresponse()
        if reply.status != 200:
            raise RuntimeError(f"status {reply.status}: {reply.read()[:500]!r}")
        events = [(time.perf_counter(), line) for line in reply if line.startswith(b"data: {")]
    finally:
        connection.close()
    for arrived, tokens in tokens_of([json.loads(line[len(b"data: ") :]) for _, line in events]):
        stream.add(events[arrived][0], tokens)


def tokens_of(events: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """(number of the event, tokens it brought). The first brings one, as it is sent at once.

    Later events may hold several: of the tokens in all, which the last event tells, each gets a part as its part of the
    text. To spread them evenly instead would credit too many to those that came while other prompts were read.
    """
    done = events[-1]["usage"]["completion_tokens"]
    lengths = [len(event.get("delta") or "") for event in events[1:]]
    total, seen, told = sum(lengths) or 1, 0, 0
    tokens = [(0, 1)]
    for i, length in enumerate(lengths, start=1):
        seen += length
        upto = round((done - 1) * seen / total)
        tokens.append((i, upto - told))
        told = upto
    return tokens


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All rounds."""
    rounds: dict[str, list[list[dict[str, Any]]]] = {"engine": [], "server": [], "transformers": []}
    engine: dict[str, Any] = {}
    for number in range(args.rounds):
        print(f"round {number + 1} of {args.rounds} ...", file=sys.stderr, flush=True)
        if "engine" in args.measure:
            engine = worker("engine", args)
            rounds["engine"].append(engine["rows"])
        if "server" in args.measure:
            rounds["server"].append(measure_server(args))
        if "transformers" in args.measure:
            rounds["transformers"].append(worker("transformers", args)["rows"])
    medians = {name: median_rows(rows) if rows else [] for name, rows in rounds.items()}
    return {
        "model": Path(args.checkpoint).name,
        "dtype": engine.get("dtype", args.dtype),
        "quantization": "none",
        "ranks": args.ranks,
        "machine": f"{platform.machine()}, {usable_cores()} cores, Python {platform.python_version()}",
        "engine": medians["engine"],
        "server": medians["server"],
        "peers": {"transformers": medians["transformers"]},
        "load_s": engine.get("load_s"),
        "peak_rss_mb": engine.get("peak_rss_mb"),
    }


def table(result: dict[str, Any]) -> str:
    """The figures for people."""
    lines = [f"{result['model']}, {result['dtype']}, {result['ranks']} ranks, {result['machine']}"]
    lines.append(
        f"{'':14}{'streams':>8}{'decode tok/s':>14}{'prefill tok/s':>15}{'first token ms':>16}{'gap p50/p99 ms':>18}"
    )
    sections = {"engine": result["engine"], "server": result["server"], **result["peers"]}
    for name, rows in sections.items():
        for row in rows:
            text = f"{name:14}{row['streams']:>8}{row['decode_tok_s']:>14.1f}{row['prefill_tok_s']:>15.0f}"
            if "ttft_ms" in row:
                gaps = row["inter_token_ms"]
                text += f"{row['ttft_ms']['p50']:>16.0f}{gaps['p50']:>11.1f}/{gaps['p99']:.1f}"
            lines.append(text)
    for n, row in enumerate(result["engine"]):
        for other, rows in sections.items():
            if other != "engine" and rows:
                ratio = rows[n]["decode_tok_s"] / row["decode_tok_s"]
                lines.append(f"{other} / engine at {row['streams']} streams: {ratio:.2f}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", help="a checkpoint; default: the demo model")
    parser.add_argument(
        "--measure",
        nargs="+",
        default=["engine", "server", "transformers"],
        choices=["engine", "server", "transformers"],
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    if args.checkpoint is None:
        from .fetch_demo_model import fetch

        args.checkpoint = fetch()
    from model.checkpoint import open_checkpoint

    source = open_checkpoint(args.checkpoint)
    args.vocabulary = source.config.vocab_size
    source.close()
    result = measure(args)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(table(result))


if __name__ == "__main__":
    main()

"""How fast the engine and the server are, beside other programs in the same run.

    python -m scripts.benchmark --streams 1 8 32 --json build/benchmark.json
    python -m scripts.benchmark --measure engine vllm llama.cpp --quantization none int8 --ranks 2 1

Each round measures every program once, one after the other, so that a machine that is slow for a while is slow
for all; the figures are medians over the rounds. Prompts are random ids, answers greedy and of full length.
The engine is measured with every number of ranks and every quantization that is named, the server with the first.
A program that can't be installed or run is told and left out.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from model.checkpoint import open_checkpoint
from model.checkpoint.writing import FLOATS, QUANTIZED
from model.config import parameter_shapes
from model.process import usable_cores
from scripts.benchmark.bandwidth import read_gb_s
from scripts.benchmark.engine import cases_of, prompts
from scripts.benchmark.hardware import hardware, versions
from scripts.benchmark.measure import median_rows, summarize
from scripts.benchmark.peers.compare import PEERS, PeerError, checkpoint_for, measure_peer, peer_python
from scripts.benchmark.report.targets import BUSY
from scripts.benchmark.server import RequestFailed, measure_server, options_for
from scripts.benchmark.worker import SIZES
from scripts.serve.run_dir import ServerError

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ("engine", "server", "lookup", "transformers", *PEERS)
Round = dict[str, list[dict[str, Any]]]
"""What one round measured: rows by program; of the server's open loop and of the memory too."""


class MeasureError(RuntimeError):
    """A program can't be measured; the message says why."""


def worker(what: str, args: argparse.Namespace, ranks: int = 1, quantization: str = "none") -> dict[str, Any]:
    """Run `scripts.benchmark.worker` and return what it measured."""
    command = [sys.executable, "-m"]
    if ranks > 1:
        command += ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"]
    command += ["scripts.benchmark.worker", what, "--checkpoint", str(args.checkpoint), "--quantization", quantization]
    command += ["--device", args.device, "--dtype", args.dtype, "--streams", *map(str, args.streams)]
    command += ["--contexts", *map(str, args.contexts), "--new-tokens", str(args.new_tokens)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise MeasureError(f"status {done.returncode}; what went wrong stands above")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


class Benchmark:
    """The rounds of one run. `failed` tells of each program that was left out why."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.cases = cases_of(args.streams, args.contexts)
        self.rounds: list[Round] = []
        self.failed: dict[str, str] = {}
        self.facts: dict[str, Any] = {}
        """Of the engine's first configuration: dtype, load_s, peak_rss_mb, weight_bytes, ..."""
        self.busy = os.getloadavg()[0]
        """Cores that others kept busy in the minute before; programs whose threads spin suffer most from them."""
        self._measure: dict[str, Callable[[Round], None]] = {
            "engine": self._engine,
            "server": self._server,
            "lookup": lambda found: found.update(
                lookup=worker("lookup", args, args.ranks[0], args.quantization[0])["rows"]
            ),
            "transformers": lambda found: found.update(transformers=worker("transformers", args)["rows"]),
            **{name: (lambda found, name=name: self._peer(name, found)) for name in PEERS},  # type: ignore[misc]
        }

    def run(self, after_round: Callable[[], None] = lambda: None) -> None:
        if self.busy > BUSY * usable_cores():
            print(f"benchmark: this machine isn't idle (load average {self.busy:.1f})", file=sys.stderr, flush=True)
        for number in range(self.args.rounds):
            found: Round = {"memory": [{"read_gb_s": read_gb_s()}]}
            for name in self.args.measure:
                if name in self.failed:
                    continue
                print(f"round {number + 1} of {self.args.rounds}: {name} ...", file=sys.stderr, flush=True)
                try:
                    self._measure[name](found)
                except (MeasureError, PeerError, RequestFailed, ServerError, ValueError) as error:
                    self._leave_out(name, str(error))
            self.rounds.append(found)
            after_round()

    def _leave_out(self, name: str, why: str) -> None:
        """A program that fails once is out of all rounds, or its median would be of fewer than the others'."""
        print(f"benchmark: {name} is left out: {why}", file=sys.stderr, flush=True)
        self.failed[name] = why
        for found in self.rounds:
            for key in (name, "open_loop") if name == "server" else (name,):
                found.pop(key, None)

    def _engine(self, found: Round) -> None:
        rows = []
        for ranks, quantization in itertools.product(self.args.ranks, self.args.quantization):
            measured = worker("engine", self.args, ranks, quantization)
            own = {"ranks": ranks, "quantization": quantization}
            own |= {name: round(measured[name]) for name in (*SIZES, "peak_rss_mb")}
            own["load_s"] = measured["load_s"]
            rows += [row | own for row in measured.pop("rows")]
            self.facts = self.facts or measured
        found["engine"] = rows

    def _server(self, found: Round) -> None:
        args = self.args
        options = options_for(args.checkpoint, args.ranks[0], args.device, args.dtype, args.quantization[0])
        measured = measure_server(
            options,
            cases=self.cases,
            new_tokens=args.new_tokens,
            vocabulary=args.vocabulary,
            rates=args.arrivals,
            requests=args.requests,
        )
        own = {"ranks": args.ranks[0], "quantization": args.quantization[0], "ready_s": measured["ready_s"]}
        found["server"] = [row | own for row in measured["rows"]]
        found["open_loop"] = measured["open_loop"]

    def _peer(self, name: str, found: Round) -> None:
        args, peer = self.args, PEERS[name]
        python = args.peer_python.get(name) or peer_python(name)
        # vLLM takes weights in the type that it computes with
        kind = args.llama_cpp_type if peer.checkpoint == "gguf" else self._compute_type()
        job = {
            "model": str(checkpoint_for(peer, args.checkpoint, ROOT / "build" / "benchmark", kind)),
            "dtype": {"F32": "float32", "BF16": "bfloat16"}[self._compute_type()],
            "threads": usable_cores(),
            "new_tokens": args.new_tokens,
            "cases": [prompts(n, length, args.vocabulary) for n, length in self.cases],
            "kv_bytes": args.kv_bytes * max(n * (length + args.new_tokens + 16) for n, length in self.cases),
        }
        streams = measure_peer(name, python, job)
        found[name] = [summarize(s, length) for s, (_, length) in zip(streams, self.cases, strict=True)]

    def _compute_type(self) -> str:
        return "F32" if (self.facts.get("dtype") or self.args.dtype) == "float32" else "BF16"

    def result(self) -> dict[str, Any]:
        """All that is written down, in the order of the documentation; medians, and each round beside them."""
        args = self.args
        medians = {name: median_rows([found[name] for found in self.rounds]) for name in self.rounds[0]}
        for i, row in enumerate(medians.get("open_loop", [])):
            # a request that failed counts, however rarely it does
            row |= {key: sum(found["open_loop"][i][key] for found in self.rounds) for key in ("requests", "failed")}
        return {
            "title": args.title,
            "model": args.checkpoint.name,
            "dtype": self.facts.get("dtype", args.dtype),
            "quantization": args.quantization[0],
            "ranks": args.ranks[0],
            "machine": f"{platform.machine()}, {usable_cores()} cores, Python {platform.python_version()}",
            "engine": medians.get("engine", []),
            "server": medians.get("server", []),
            "peers": {name: medians.get(name, []) for name in ("transformers", *PEERS)},
            "load_s": self.facts.get("load_s"),
            "peak_rss_mb": self.facts.get("peak_rss_mb"),
            "open_loop": medians.get("open_loop", []),
            "ready_s": next((row["ready_s"] for row in medians.get("server", [])), None),
            "read_gb_s": medians["memory"][0]["read_gb_s"],
            "lookup": medians.get("lookup", []),
            "failed": self.failed,
            "load_average": round(self.busy, 2),
            "parameters": args.parameters,
            "new_tokens": args.new_tokens,
            "llama_cpp_weights": args.llama_cpp_type,
            "date": time.strftime("%Y-%m-%d"),
            "hardware": hardware(),
            "versions": versions(("torch", "torchserve", "transformers")) | {n: p.version for n, p in PEERS.items()},
            "rounds": [{name: median_rows([rows]) for name, rows in found.items()} for found in self.rounds],
        }


def table(result: dict[str, Any]) -> str:
    """The figures for people."""
    lines = [f"{result['model']}, {result['dtype']}, {result['machine']}, memory {result['read_gb_s']:.1f} GB/s"]
    lines.append(
        f"{'':22}{'streams':>8}{'prompt':>8}{'decode tok/s':>14}{'prefill tok/s':>15}{'first token ms':>16}"
        f"{'gap p50/p99 ms':>18}"
    )
    sections = {"engine": result["engine"], "server": result["server"], **result["peers"]}
    first: dict[tuple[int, int], float] = {}
    """What the engine's first configuration decodes, by case."""
    for name, rows in sections.items():
        for row in rows:
            case = (row["streams"], row["prompt_tokens"])
            label = f"{name} {row['quantization']} x{row['ranks']}" if "ranks" in row else name
            text = f"{label:22}{case[0]:>8}{case[1]:>8}{row['decode_tok_s']:>14.1f}{row['prefill_tok_s']:>15.0f}"
            if "ttft_ms" in row:
                gaps = row["inter_token_ms"]
                text += f"{row['ttft_ms']['p50']:>16.0f}{gaps['p50']:>11.1f}/{gaps['p99']:.1f}"
            if name == "engine":
                first.setdefault(case, row["decode_tok_s"])
            if case in first:
                text += f"   {row['decode_tok_s'] / first[case]:.2f} of the engine"
            lines.append(text)
    for row in result["open_loop"]:
        waits, gaps = row["ttft_ms"], row["inter_token_ms"]
        lines.append(
            f"open loop, {row['rate']:g} requests/s: {row['failed']} of {row['requests']} failed, "
            f"first token ms p50/p99 {waits['p50']:.0f}/{waits['p99']:.0f}, gap ms {gaps['p50']:.1f}/{gaps['p99']:.1f}"
        )
    if result["ready_s"] is not None:
        lines.append(f"server: ready after {result['ready_s']:.1f} s")
    return "\n".join(lines + [f"left out: {name}: {why}" for name, why in result["failed"].items()])


def peer_argument(text: str) -> tuple[str, Path]:
    """`NAME=PATH` of a peer's Python."""
    name, _, path = text.partition("=")
    if name not in PEERS or not path:
        raise argparse.ArgumentTypeError(f"{text!r} isn't NAME=PATH with a name of {', '.join(PEERS)}")
    return name, Path(path).expanduser().absolute()


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, help="a checkpoint; default: the demo model")
    parser.add_argument("--measure", nargs="+", default=["engine", "server", "transformers"], choices=PROGRAMS)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", nargs="+", default=["none"], choices=["none", "int8", "int4"])
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--contexts", type=int, nargs="+", default=[128], help="tokens of each prompt")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument(
        "--arrivals", type=float, nargs="+", default=[], help="requests/s at the server, at random times"
    )
    parser.add_argument("--requests", type=int, default=64, help="how many of them")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--peer-python",
        type=peer_argument,
        action="append",
        default=[],
        metavar="NAME=PATH",
        help="the Python of an environment that has the peer (default: one in the user's cache, made if need be)",
    )
    kinds = (*FLOATS, *QUANTIZED)
    help_text = "type of llama.cpp's weights where the checkpoint is no GGUF (default: Q4_1)"
    parser.add_argument("--llama-cpp-type", default="Q4_1", choices=kinds, help=help_text)
    parser.add_argument("--title", default="", help="of this run in docs/performance.md")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args(arguments)
    args.peer_python = dict(args.peer_python)
    return args


def main() -> None:
    args = parse()
    if args.checkpoint is None:
        from scripts.fetch_demo_model import fetch

        args.checkpoint = fetch()
    args.checkpoint = args.checkpoint.expanduser().absolute()
    with open_checkpoint(args.checkpoint) as source:
        config = source.config
    args.vocabulary = config.vocab_size
    args.parameters = sum(map(math.prod, parameter_shapes(config).values()))
    args.kv_bytes = 2 * config.n_layers * config.n_kv_heads * config.head_dim * (4 if args.dtype == "float32" else 2)
    benchmark = Benchmark(args)

    def save() -> None:
        if args.json:
            args.json.parent.mkdir(parents=True, exist_ok=True)
            args.json.write_text(json.dumps(benchmark.result(), indent=1) + "\n", encoding="utf-8")

    benchmark.run(save)
    print(table(benchmark.result()))


if __name__ == "__main__":
    main()

